"""Causal attention over a band in torch: blocks of queries with the keys that they share, by torch's own attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import Memory, query_scale, transformed
from abc_attn.kernels.banded import Stretch, Token

# Queries that share their keys. More of them read more keys in vain; below 192 torch's kernel for the CPU takes 32 at a
# time instead of 64 and is slower again (measured with n from 16 to 508, d = 64, forward and backward).
BLOCK = 192


def band(stretch: Stretch) -> Tensor:
    """What the queries of a stretch read: time and memory O(t n)."""
    q, window, dilation = stretch.q, stretch.band.window, stretch.band.dilation
    t, lead, width = q.shape[2], stretch.lead, stretch.v.shape[3]
    read_k, read_v = (stretch.sink_k, stretch.k), (stretch.sink_v, stretch.v)
    if stretch.to_sinks is not None:
        q, read_k, read_v = _by_columns(q, stretch.to_sinks, read_k, read_v)
    # Every `dilation`-th token is a window of its own, in the batch beside the others.
    residue = torch.arange(dilation, device=q.device)
    out = _attend(
        _apart(q, dilation),
        (read_k[0], _apart(read_k[1], dilation)),
        (read_v[0], _apart(read_v[1], dilation)),
        window,
        lead // dilation,
        (-((residue - stretch.missing[:, None]) // dilation)).flatten(),
        stretch.before,
        query_scale(stretch.q, stretch.reading.scale),
        stretch.reading.dropout,
    )
    return out.unflatten(0, (-1, dilation)).movedim(1, 3).flatten(2, 3)[:, :, :t, :width]


def band_step(token: Token) -> tuple[Tensor, Memory]:
    """One row of the memory is replaced, and the memory is read as it lies: a softmax knows no order."""
    q, band, place, memory = token.q, token.band, token.place, token.memory
    scale, dropout = query_scale(q, token.reading.scale), token.reading.dropout
    padding = None if token.key_padding_mask is None else token.key_padding_mask[:, None, :, None]

    def put(part: Tensor, new: Tensor) -> Tensor:
        new = new if padding is None else torch.where(padding, part.take_along_dim(place.row, 2), new)
        if token.in_place and torch.compiler.is_compiling():  # inductor copies the whole of it for a scatter
            part[torch.arange(part.shape[0], device=part.device), :, place.row.flatten()] = new[:, :, 0]
            return part
        put = part.scatter_ if token.in_place else part.scatter
        return put(2, place.row.expand_as(new), new)

    k, v, used = put(memory.k, token.k), put(memory.v, token.v), memory.used
    if place.full:
        memory = Memory(k, v, memory.mass, used)
    else:
        if torch.compiler.is_compiling():  # a graph writes keys and values in place; which rows are in use it counts
            used = band.in_use(place.end)[:, None].expand(-1, k.shape[1], -1).contiguous()
        else:  # any row may be written, not only the next of a ring
            used = put(used[..., None], used.new_ones(*k.shape[:2], 1, 1))[..., 0]
        memory = Memory(k, v, used.to(k.dtype), used)
    if band.dilation > 1:
        queue = place.before[:, None] % band.dilation * band.window + torch.arange(band.window, device=k.device)
        k, v = (part.take_along_dim(queue[:, None, :, None], 2) for part in (k, v))
        used = used.take_along_dim(queue[:, None], 2)

    # `b h g 1 d` as `(b h) g d`: what products of more axes cost beyond those of three is noticed here.
    keys, nothing = k.flatten(0, 1), k.new_empty(1)
    scores = torch.baddbmm(nothing, _by_group(q, k), keys.mT, beta=0, alpha=scale)
    if token.to_sinks is not None:
        some = keys[:, : band.sinks]
        scores[..., : band.sinks] = torch.baddbmm(nothing, _by_group(token.to_sinks, k), some.mT, beta=0, alpha=scale)
    if not place.full:
        if padding is not None:  # the output there is zeroed; of nothing it would be NaN
            used = used | padding[..., 0]
        scores = scores.masked_fill(~used.flatten(0, 1)[:, None], -torch.inf)
    weights = F.dropout(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).view(*q.shape[:3], -1), memory


def _by_columns(
    q: Tensor, to_sinks: Tensor, k: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """q, k and v for torch's attention, which reads all keys by one query: wider by a column for each sink.

    There q has the sink's score by `to_sinks`, its key, else zeros, has a 1, and all other keys have zeros.
    """
    sink_k, rest_k = k
    sinks = sink_k.shape[2]
    scores = (_by_group(to_sinks, sink_k) @ sink_k.flatten(0, 1).mT).view(*q.shape[:3], sinks)
    pick = F.pad(torch.eye(sinks, dtype=q.dtype, device=q.device), (sink_k.shape[3], 0))
    wide_k, *wide_v = (F.pad(x, (0, sinks)) for x in (rest_k, *v))
    return torch.cat([q, scores], dim=-1), (pick.expand(*sink_k.shape[:2], -1, -1), wide_k), (wide_v[0], wide_v[1])


def _attend(
    q: Tensor,
    k: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
    window: int,
    lead: int,
    missing: Tensor,
    count: Tensor,
    scale: float,
    dropout: float,
) -> Tensor:
    """Query i reads the keys lead + i - window + 1 to lead + i, but not the first `missing` `b` of all; and the sinks.

    k and v are the sinks and the rest. Sinks are read from their own position on.
    """
    t, sinks, device = q.shape[2], k[0].shape[2], q.device
    starts = range(0, t, BLOCK)
    spans = [(max(0, lead + start - window + 1), min(lead + start + BLOCK, lead + t)) for start in starts]
    index = torch.arange(1 - window, min(BLOCK, t), device=device)
    behind = index[window - 1 :, None] - index  # how far a key is behind a query, in the first block and in all
    inside = torch.zeros_like(behind, dtype=q.dtype).masked_fill((behind < 0) | (behind >= window), -torch.inf)
    blocks = zip(starts, spans, q.split(BLOCK, dim=2), _cut(*k, spans), _cut(*v, spans), strict=True)
    out = []
    for start, (first, last), queries, keys, values in blocks:
        rows = queries.shape[2]
        mask = inside[:rows, rows + window - 1 - (last - first) : rows + window - 1]
        if first < lead + sinks:  # as far as rows of the ring may be empty, or a token be a sink
            mask = mask.masked_fill(torch.arange(first, last, device=device) < missing[:, None, None, None], -torch.inf)
        if sinks:
            mask = F.pad(mask, (sinks, 0))
        if start < sinks:
            position = count[:, None] + torch.arange(start, start + rows, device=device)
            later = torch.arange(sinks, device=device) > position[:, None, :, None]
            mask = mask.masked_fill(F.pad(later, (0, last - first)), -torch.inf)
        grouped = q.shape[1] != keys.shape[1]
        out.append(attention(queries, keys, values, mask, dropout, scale=scale, enable_gqa=grouped))
    return torch.cat(out, dim=2)


def attention(*given: Any, **options: Any) -> Tensor:
    """torch's scaled_dot_product_attention; where it has no second derivatives, the error says what to use."""
    out = F.scaled_dot_product_attention(*given, **options)
    if torch.compiler.is_compiling() or transformed():
        return out
    if out.grad_fn is not None and out.grad_fn.name().startswith("ScaledDotProduct"):
        out.grad_fn.register_hook(_refuse_the_next)
    return out


def _refuse_the_next(d_inputs: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    """A hook of the first derivative: where a graph is kept (create_graph), it ends here."""
    if not torch.is_grad_enabled():
        return d_inputs
    return tuple(None if d_x is None else _Last.apply(d_x) for d_x in d_inputs)


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, d_x: Tensor) -> Tensor:
        return d_x.view_as(d_x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("torch's own attention has no second derivatives: use backend='reference'")


def _cut(sinks: Tensor, x: Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """For each span the sinks and its tokens."""
    # The gradient of a slice is as large as the whole tensor, so x is split once, at the edges of all spans.
    edges = sorted({0, x.shape[2], *(edge for span in spans for edge in span)}) if x.requires_grad else []
    between = x.split([after - edge for edge, after in pairwise(edges)], dim=2) if edges else ()
    index = {edge: i for i, edge in enumerate(edges)}
    for first, last in spans:
        parts = between[index[first] : index[last]] if edges else (x[:, :, first:last],)
        parts = (sinks, *parts) if sinks.shape[2] else parts
        yield torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    """`b (h g) t d` -> `(b h) (g t) d`: all that one head of k is read by."""
    return q.reshape(k.shape[0] * k.shape[1], -1, q.shape[-1])


def _apart(x: Tensor, dilation: int) -> Tensor:
    """`b h t d` -> `(b dilation) h t/dilation d`; tokens added at the end to fill up are read by no real one."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % dilation)) if dilation > 1 else x
    return x.unflatten(2, (-1, dilation)).movedim(3, 1).flatten(0, 1)
