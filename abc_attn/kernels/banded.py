"""Causal attention over a band: windows, dilated windows, and windows with attention sinks.

A control that keeps tokens as they are (core.Band) needs no scan over slots: each query reads a stretch of the tokens
themselves. Blocks of queries go to torch's attention with the keys they share, so time and memory are O(t n).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import (
    Band,
    Memory,
    State,
    cast,
    cast_memory,
    empty_memory,
    full_precision,
    has_values,
    query_scale,
    working_dtype,
)
from abc_attn.kernels.native import native_band, native_ring_step

# Queries that share their keys. More of them read more keys in vain; below 192 torch's kernel for the CPU takes 32 at a
# time instead of 64 and is slower again (measured with n from 16 to 508, d = 64, forward and backward).
BLOCK = 192


class Place(NamedTuple):
    """What tokens are to know of where they stand; the same for all layers."""

    row: Tensor  # b 1 1 1   of the memory, that the first of them enters
    full: bool  # every row of the memory is known to be in use
    end: Tensor  # b   tokens after them
    inner: tuple[Tensor, ...]  # those that each part of the control has been given
    readable: Tensor | None  # b 1 n   the last token's queue


def banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    state: State | None,
    *,
    control: str,
    scale: float | None,
    key_padding_mask: Tensor | None,
    dropout: float,
    to_sinks: Tensor | None = None,
    in_place: bool = False,
    native: bool = True,
) -> tuple[Tensor, State]:
    """What the control, described by `control`, and `scan` would give: outputs and state.

    `to_sinks`, shaped as q, is what the sinks are read by in the place of q. `in_place`: the memory of `state` may be
    written to, which spares a copy of it at each token. `native`: the compiled kernels may be used, where they apply.
    """
    t, memory = k.shape[2], None if state is None else state.memory
    count = torch.zeros(len(k), dtype=torch.int64, device=k.device) if state is None else state.length
    scale, dtype = query_scale(q, scale), working_dtype(k, v, memory)
    in_place = in_place and t == 1 and not torch.is_grad_enabled() and has_values(k)
    if memory is not None and memory.k.is_inference() and not torch.is_inference_mode_enabled():
        in_place = False  # torch would refuse
    if in_place and key_padding_mask is None:
        place = _known_place(band, tuple(count.tolist()), count.device)
    else:
        place = _place(band, count, count + (t if key_padding_mask is None else (~key_padding_mask).sum(1)))
    with full_precision(q):
        asked, q, k, v = q.dtype, cast(q, dtype), cast(k, dtype), cast(v, dtype)
        to_sinks = None if to_sinks is None else cast(to_sinks, dtype)
        memory = None if memory is None else cast_memory(memory, dtype)
        if t == 1:
            memory = empty_memory(k, v, band.rows) if memory is None else memory
            out, memory = _one_token(
                q, to_sinks, k, v, band, memory, count, place, scale, key_padding_mask, dropout, in_place, native
            )
        elif key_padding_mask is None:
            out, memory = _in_blocks(q, to_sinks, k, v, band, memory, count, place.end, scale, dropout, native)
        else:  # the real tokens to the front, in order, and their outputs back to where they were
            real = (~key_padding_mask).cumsum(1)
            order = key_padding_mask.sort(dim=1, stable=True).indices[:, None, :, None]
            past_end = (torch.arange(t, device=k.device) >= real[:, -1:])[:, None, :, None]
            q, k, v, *others = (
                x.take_along_dim(order, 2).masked_fill(past_end, 0) for x in (q, k, v, to_sinks) if x is not None
            )
            out, memory = _in_blocks(
                q, others[0] if others else None, k, v, band, memory, count, place.end, scale, dropout, native
            )
            out = out.take_along_dim((real - 1).clamp(min=0)[:, None, :, None], 2)
    if key_padding_mask is not None:
        out = out.masked_fill(key_padding_mask[:, None, :, None], 0)
    return cast(out, asked), State(memory, place.inner, place.end, control, place.readable)


def _place(band: Band, count: Tensor, end: Tensor, full: bool = False) -> Place:
    row = _ring_row(band, count - band.sinks)
    row = torch.where(count < band.sinks, count, row) if band.sinks else row
    inner = (end.clone(), (end - band.sinks).clamp(min=0))[: 2 if band.sinks else 1]
    readable = None
    if band.dilation > 1:
        queue = torch.arange(band.rows, device=end.device) // band.window
        readable = (queue == (end - 1).clamp(min=0)[:, None] % band.dilation)[:, None]
    return Place(row[:, None, None, None], full, end, inner, readable)


@lru_cache(maxsize=4)
def _known_place(band: Band, count: tuple[int, ...], device: torch.device) -> Place:
    """The place of one token; the layers of a model ask for the same, one after the other."""
    with torch.inference_mode(False):  # the next to ask may not be in that mode
        before = torch.tensor(count, device=device)
        return _place(band, before, before + 1, min(count) >= band.rows)


def _one_token(
    q: Tensor,
    to_sinks: Tensor | None,
    k: Tensor,
    v: Tensor,
    band: Band,
    memory: Memory,
    count: Tensor,
    place: Place,
    scale: float,
    key_padding_mask: Tensor | None,
    dropout: float,
    in_place: bool,
    native: bool,
) -> tuple[Tensor, Memory]:
    """One row of the memory is replaced, and the memory is read as it lies: a softmax knows no order."""
    if native and in_place and place.full and not dropout and key_padding_mask is None and band.dilation == 1:
        out = native_ring_step(q, to_sinks, k, v, memory, place.row, band.sinks, scale)
        if out is not None:
            return out, memory
    padding = None if key_padding_mask is None else key_padding_mask[:, None, :, None]

    def put(part: Tensor, new: Tensor) -> Tensor:
        new = new if padding is None else torch.where(padding, part.take_along_dim(place.row, 2), new)
        put = part.scatter_ if in_place else part.scatter
        return put(2, place.row.expand_as(new), new)

    k, v, used = put(memory.k, k), put(memory.v, v), memory.used
    if place.full:
        memory = Memory(k, v, memory.mass, used)
    else:
        used = put(used[..., None], used.new_ones(*k.shape[:2], 1, 1))[..., 0]
        memory = Memory(k, v, used.to(k.dtype), used)
    if band.dilation > 1:
        queue = (count[:, None] % band.dilation * band.window + torch.arange(band.window, device=k.device))[:, None]
        k, v = (part.take_along_dim(queue[..., None], 2) for part in (k, v))
        used = used.take_along_dim(queue, 2)

    # `b h g 1 d` as `(b h) g d`: what products of more axes cost beyond those of three is noticed here.
    keys, nothing = k.flatten(0, 1), k.new_empty(1)
    scores = torch.baddbmm(nothing, _by_group(q, k), keys.mT, beta=0, alpha=scale)
    if to_sinks is not None:
        some = keys[:, : band.sinks]
        scores[..., : band.sinks] = torch.baddbmm(nothing, _by_group(to_sinks, k), some.mT, beta=0, alpha=scale)
    if not place.full:
        if padding is not None:  # the output there is zeroed; of nothing it would be NaN
            used = used | padding[..., 0]
        scores = scores.masked_fill(~used.flatten(0, 1)[:, None], -torch.inf)
    weights = F.dropout(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).view(*q.shape[:3], -1), memory


def _in_blocks(
    q: Tensor,
    to_sinks: Tensor | None,
    k: Tensor,
    v: Tensor,
    band: Band,
    memory: Memory | None,
    count: Tensor,
    end: Tensor,
    scale: float,
    dropout: float,
    native: bool,
) -> tuple[Tensor, Memory]:
    """t tokens after the first `count` `b`, of which those before `end` `b` are real: outputs and memory."""
    sinks, window, dilation = band
    t, ring = k.shape[2], window * dilation
    begin = count - sinks  # the first new token's place among those that pass through the ring; negative for a sink
    sink_k, sink_v, lead = k[:, :, :0], v[:, :, :0], 0
    if sinks:
        sink_k, sink_v = _sinks(k, v, band, memory, count, end)
    if memory is not None:  # the new tokens go on from those in the ring, oldest first
        age = _ring_row(band, begin[:, None] + torch.arange(ring, device=k.device))[:, None, :, None]
        k = torch.cat([memory.k.take_along_dim(age, 2), k], dim=2)
        v = torch.cat([memory.v.take_along_dim(age, 2), v], dim=2)
        lead = ring

    out = None
    if native and dilation == 1 and not dropout and has_values(k):
        out = native_band(q, to_sinks, (sink_k, sink_v), k, v, window, lead - begin, count, scale)
    if out is None:
        read_k, read_v = (sink_k, k), (sink_v, v)
        if to_sinks is not None:
            q, read_k, read_v = _by_columns(q, to_sinks, read_k, read_v)
        # Every `dilation`-th token is a window of its own, in the batch beside the others.
        residue = torch.arange(dilation, device=k.device)
        out = _attend(
            _apart(q, dilation),
            (read_k[0], _apart(read_k[1], dilation)),
            (read_v[0], _apart(read_v[1], dilation)),
            window,
            lead // dilation,
            (-((begin[:, None] + residue - lead) // dilation)).flatten(),
            count,
            scale,
            dropout,
        )
        out = out.unflatten(0, (-1, dilation)).movedim(1, 3).flatten(2, 3)[:, :, :t, : v.shape[-1]]

    # Row r of the ring holds the last of the tokens whose turn it is.
    row = torch.arange(ring, device=k.device)
    turn = row % window * dilation + row // window
    last = (end - sinks - 1)[:, None]
    place = last - (last - turn) % ring  # b ring
    at = (place - begin[:, None] + lead).clamp(min=0)[:, None, :, None]
    used = torch.cat([torch.arange(sinks, device=k.device) < end[:, None], place >= 0], dim=1)[:, None]
    used = used.expand(-1, k.shape[1], -1).contiguous()
    kept_k, kept_v = (
        torch.cat([sink, x.take_along_dim(at, 2)], dim=2).masked_fill(~used[..., None], 0)
        for sink, x in ((sink_k, k), (sink_v, v))
    )
    return out, Memory(kept_k, kept_v, used.to(k.dtype), used)


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
        out.append(
            F.scaled_dot_product_attention(queries, keys, values, mask, dropout, scale=scale, enable_gqa=grouped)
        )
    return torch.cat(out, dim=2)


def _cut(sinks: Tensor, x: Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """For each span the sinks and its tokens."""
    # Slices would do, but the gradient of each is as large as the whole. Pieces between all edges are cut once.
    edges = sorted({0, x.shape[2], *(edge for span in spans for edge in span)}) if x.requires_grad else []
    pieces = x.split([after - edge for edge, after in pairwise(edges)], dim=2) if edges else ()
    index = {edge: i for i, edge in enumerate(edges)}
    for first, last in spans:
        parts = pieces[index[first] : index[last]] if edges else (x[:, :, first:last],)
        parts = (sinks, *parts) if sinks.shape[2] else parts
        yield torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def _sinks(
    k: Tensor, v: Tensor, band: Band, memory: Memory | None, count: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of the first tokens, from the memory and from the new ones; zeros for those yet to come."""
    sink = torch.arange(band.sinks, device=k.device)
    at = (sink - count[:, None]).clamp(0, k.shape[2] - 1)[:, None, :, None]
    come = (sink < end[:, None])[:, None, :, None]
    new_k, new_v = (x.take_along_dim(at, 2).masked_fill(~come, 0) for x in (k, v))
    if memory is None:
        return new_k, new_v
    held = (sink < count[:, None])[:, None, :, None]
    old_k, old_v = memory.k[:, :, : band.sinks], memory.v[:, :, : band.sinks]
    return torch.where(held, old_k, new_k), torch.where(held, old_v, new_v)


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    """`b (h g) t d` -> `(b h) (g t) d`: all that one head of k is read by."""
    return q.reshape(len(k) * k.shape[1], -1, q.shape[-1])


def _ring_row(band: Band, place: Tensor) -> Tensor:
    """The row of the memory that holds the `place`-th of the tokens that pass through the ring."""
    if band.dilation == 1:
        return place % band.window + band.sinks
    return place % band.dilation * band.window + place // band.dilation % band.window + band.sinks


def _apart(x: Tensor, dilation: int) -> Tensor:
    """`b h t d` -> `(b dilation) h t/dilation d`; tokens added at the end to fill up are read by no real one."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % dilation)) if dilation > 1 else x
    return x.unflatten(2, (-1, dilation)).movedim(3, 1).flatten(0, 1)
