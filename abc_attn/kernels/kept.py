"""Causal attention over tokens that a control keeps as they are: the last ones, some sinks, and those it has chosen.

Between two decisions of the control (core.Keep) what is read changes by the new tokens alone. So each block of queries
reads a band (banded.py): the tokens that it has kept, then those that have not competed yet, in order. All blocks of a
piece are one batch of bands. Here is what all backends share: pieces of a long call, and what the memory is afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import (
    Band,
    Keep,
    Memory,
    Reading,
    Table,
    all_finite,
    cast,
    cast_memory,
    full_precision,
    has_values,
    scaled_queries,
    working_dtype,
)
from abc_attn.kernels.banded import Place, Stretch, Token, first_tokens
from abc_attn.kernels.door import Declined, call
from abc_attn.state import State

PIECE = 512  # tokens at once: each block has a copy of what it reads

Inner = tuple[Tensor, ...]
# stored keys, new keys, the first new token's place, the last one's, the control's state and queries -> rows, state
Choose = Callable[[Tensor, Tensor, Tensor, Tensor, Inner, Tensor | None], tuple[Table, Inner]]
# queries, keys of the rows, places of both and what the control notes of queries -> the same with these queries
Look = Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[Tensor]], Inner]


def kept_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Keep,
    choose: Choose,
    state: State,
    reading: Reading = Reading(),  # noqa: B008 (immutable)
    *,
    key_padding_mask: Tensor | None = None,
    to_sinks: Tensor | None = None,
    look: Look | None = None,
    by_values: bool = False,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, State] | Declined:
    """What the control, whose decisions `choose` gives, and `scan` would give: outputs and state.

    `to_sinks`, shaped as q, reads the sinks in the place of q. `look`, of a control that decides by queries, is told
    of each that reads a memory which nothing is decided about. `by_values`: `choose` takes values, not keys.
    `in_place`: the memory of `state` may be written to.
    """
    if not has_values(k):
        return Declined("where blocks begin is not known in a traced graph")
    if to_sinks is None and not all_finite(k, v, state.memory.k, state.memory.v):
        return Declined("a block shares its keys, and one that is not finite would reach queries that do not read it")
    t, dtype = k.shape[2], working_dtype(k, v, state.memory)
    in_place = in_place and not torch.is_grad_enabled()
    in_place = in_place and not (state.memory.k.is_inference() and not torch.is_inference_mode_enabled())
    before = state.length
    with full_precision(q):
        asked, q, k, v = q.dtype, cast(q, dtype), cast(k, dtype), cast(v, dtype)
        to_sinks = None if to_sinks is None else cast(to_sinks, dtype)
        state = state._replace(memory=cast_memory(state.memory, dtype))
        if t == 1 and key_padding_mask is None and not _decides(keep, before):
            answer = _step(q, to_sinks, k, v, keep, look, state, reading, in_place, backend)
            return answer if isinstance(answer, Declined) else (cast(answer[0], asked), answer[1])
        end, real = before + t, None
        if key_padding_mask is not None:  # the real tokens to the front, in order
            real = (~key_padding_mask).cumsum(1)
            end = before + real[:, -1]
            order = key_padding_mask.sort(dim=1, stable=True).indices[:, None, :, None]
            q, k, v, *others = (x.take_along_dim(order, 2) for x in (q, k, v, to_sinks) if x is not None)
            to_sinks = others[0] if others else None
        outs = []
        for start, stop in _pieces(t, keep.block, keep.sinks - int(before.min())):
            part = slice(start, stop)
            last = torch.minimum(end, before + stop)
            asks = None if to_sinks is None else to_sinks[:, :, part]
            piece = (q[:, :, part], asks, k[:, :, part], v[:, :, part])
            found = _piece(*piece, keep, choose, look is not None, by_values, state, last, reading, backend)
            if isinstance(found, Declined):
                return found
            out, state = found
            outs.append(out)
        out = torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]
        if real is not None:
            assert key_padding_mask is not None
            out = out.take_along_dim((real - 1).clamp(min=0)[:, None, :, None], 2)
            out = out.masked_fill(key_padding_mask[:, None, :, None], 0)
    return cast(out, asked), state


def _decides(keep: Keep, length: Tensor) -> bool:
    """Whether the control decides in some row as the next token comes."""
    return any(place > 0 and place % keep.block == 0 for place in (length - keep.sinks).tolist())


def _pieces(t: int, block: int, sinks: int) -> list[tuple[int, int]]:
    """The first and last tokens of pieces: of what is left of the sinks, if anything, then of whole blocks; none of
    these is shorter than a block unless the call is."""
    size, first = max(1, PIECE // block) * block, max(0, sinks)
    edges = [0] if 0 < first < t else []
    edges += [*range(first if edges else 0, max(1, t - block), size), t]
    return [*pairwise(edges)]


def _own(keep: Keep, inner: Inner) -> Inner:
    """The state of the control that keeps; that of the sinks beside it is a count."""
    return inner[1:] if keep.sinks else inner


def _step(
    q: Tensor,
    to_sinks: Tensor | None,
    k: Tensor,
    v: Tensor,
    keep: Keep,
    look: Look | None,
    state: State,
    reading: Reading,
    in_place: bool,
    backend: str,
) -> tuple[Tensor, State] | Declined:
    """One token, which enters the first free row; nothing is decided."""
    assert state.inner is not None
    before, sinks = state.length, keep.sinks
    _, places, *others = _own(keep, state.inner)
    row, place, end = places.argmin(-1, keepdim=True), (before - sinks)[:, None, None], before + 1
    if sinks and int(before.min()) < sinks:
        entered = torch.where(place < 0, places.take_along_dim(row, 2), place)
        row_of_memory = torch.where(place < 0, place + sinks, row + sinks)
    else:
        entered, row_of_memory = place.expand_as(row), row + sinks
    places = places.scatter_(2, row, entered) if in_place else places.scatter(2, row, entered)
    where = Place(before, row_of_memory[..., None], False, end, (), None)
    band = Band(sinks, keep.rows - sinks)
    token = Token(q, to_sinks, k, v, state.memory, where, band, reading, None, in_place)
    answer = call("band_step", backend, token)
    if isinstance(answer, Declined):
        return answer
    out, memory = answer
    if look is not None:
        asks = scaled_queries(q, k.shape[1], reading.scale)
        others = [*look(asks, memory.k[:, :, sinks:].detach(), places, place[:, 0], others)]
    inner = ((end - sinks).clamp(min=0), places, *others)
    inner = (end.clone(), *inner) if sinks else inner
    return out, state._replace(memory=memory, inner=inner, length=end)


def _piece(
    q: Tensor,
    to_sinks: Tensor | None,
    k: Tensor,
    v: Tensor,
    keep: Keep,
    choose: Choose,
    by_queries: bool,
    by_values: bool,
    state: State,
    end: Tensor,
    reading: Reading,
    backend: str,
) -> tuple[Tensor, State] | Declined:
    """Tokens of which those before `end` `b` are real: outputs and state."""
    assert state.inner is not None
    sinks, window, most, size = keep
    memory, before = state.memory, state.length
    # 1. The rows of each block, by the control's decisions
    place = before - sinks
    asks_of = scaled_queries(q, k.shape[1], reading.scale) if by_queries else None
    stored, judged = (memory.v, v) if by_values else (memory.k, k)
    inner = _own(keep, state.inner)
    table, own = choose(stored[:, :, sinks:].detach(), judged.detach(), place, end - sinks, inner, asks_of)
    blocks, heads = table.place.shape[2], k.shape[1]
    start = (place // size + torch.arange(blocks, device=k.device)[:, None]).mT * size  # b c   where each block begins
    is_kept = (table.place >= 0) & (table.place < (start - window)[:, None, :, None])
    kept = table.source.take_along_dim(is_kept.to(k.dtype).topk(most, dim=-1).indices.flip(-1), -1)  # b h c m
    # 2. What the queries read: a band for each block, of which the first rows may be empty
    sink_k, sink_v = k[:, :, :0], v[:, :, :0]
    if sinks:
        sink_k, sink_v = first_tokens(k, v, sinks, memory, before, end)
    all_k, all_v = (torch.cat([old[:, :, sinks:], x], dim=2) for old, x in ((memory.k, k), (memory.v, v)))
    local = table.line[..., size:].unfold(2, window + size, size)  # b h c w+B
    read = torch.cat([kept, local], dim=3).transpose(1, 2)  # b c h m+w+B
    read = read + torch.arange(len(k) * heads, device=k.device).view(-1, 1, heads, 1) * all_k.shape[2]
    band_k, band_v = (
        x.reshape(-1, x.shape[3]).index_select(0, read.flatten()).view(-1, heads, read.shape[3], x.shape[3])
        for x in (all_k, all_v)
    )
    sink_k_of, sink_v_of = (x[:, None].expand(-1, blocks, -1, -1, -1).flatten(0, 1) for x in (sink_k, sink_v))
    queries, asks = (
        None if x is None else _moved(x, place % size, blocks * size).unflatten(2, (blocks, size)).transpose(1, 2)
        for x in (q, to_sinks)
    )
    assert queries is not None
    stretch = Stretch(
        queries.flatten(0, 1),
        None if asks is None else asks.flatten(0, 1),
        sink_k_of,
        sink_v_of,
        band_k,
        band_v,
        missing=(most + window - start).clamp(min=0).flatten(),
        before=(start + sinks).flatten(),
        band=Band(sinks, most + window + size),
        reading=reading,
    )
    out = call("band", backend, stretch)
    if isinstance(out, Declined):
        return out
    out = out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)
    out = _moved(out, -(place % size), q.shape[2])
    # 3. The memory afterwards
    source, used = table.source[:, :, -1, :, None], table.place[:, :, -1] >= 0
    if sinks:
        passed = torch.arange(sinks, device=k.device) < end[:, None]
        used = torch.cat([passed[:, None].expand(-1, k.shape[1], -1), used], dim=2)
    kept_k, kept_v = (
        torch.cat([sink, x.take_along_dim(source, 2)], dim=2).masked_fill(~used[..., None], 0)
        for sink, x in ((sink_k, all_k), (sink_v, all_v))
    )
    inner = (end.clone(), *own) if sinks else own
    memory = Memory(kept_k, kept_v, used.to(k.dtype), used)
    return out, state._replace(memory=memory, inner=inner, length=end)


def _moved(x: Tensor, by: Tensor, length: int) -> Tensor:
    """x `b h t d` as the tokens `by` `b` to `by` + t of `length`, beside others that fill it up."""
    one, t = int(by[0]), x.shape[2]
    if bool((by == one).all()):
        return F.pad(x, (0, 0, one, length - one - t))  # negative: cut off
    at = (torch.arange(length, device=x.device) - by[:, None]).clamp(0, t - 1)
    return x.take_along_dim(at[:, None, :, None], 2)
