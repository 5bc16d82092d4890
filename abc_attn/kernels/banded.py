"""Causal attention over a band: windows, dilated windows, and windows with attention sinks.

A control that keeps tokens as they are (core.Band) needs no scan over slots: each query reads a stretch of the tokens
themselves. Here is what all backends share: where tokens stand in the ring, and what the memory is afterwards.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from abc_attn.core import (
    Band,
    Memory,
    Reading,
    all_finite,
    cast,
    cast_memory,
    empty_memory,
    full_precision,
    has_values,
    infinite,
    working_dtype,
)
from abc_attn.kernels.door import Declined, call
from abc_attn.state import State


class Place(NamedTuple):
    """Where tokens stand in the text and in the memory; the same for all layers of a model."""

    before: Tensor  # b   tokens before them
    row: Tensor  # b 1 1 1   of the memory, that the first of them enters
    full: bool  # every row of the memory is known to be in use
    end: Tensor  # b   tokens after them
    inner: tuple[Tensor, ...]  # those that each part of the control has been given
    readable: Tensor | None  # b 1 n   the last token's queue


class Token(NamedTuple):
    """One token for each row of a batch: it replaces a row of the memory, which is then read as a whole."""

    q: Tensor  # b (h g) 1 d   all in the memory's dtype
    to_sinks: Tensor | None  # what reads the sinks in the place of q
    k: Tensor  # b h 1 d
    v: Tensor  # b h 1 e
    memory: Memory
    place: Place
    band: Band
    reading: Reading
    key_padding_mask: Tensor | None
    in_place: bool  # the memory may be written to


class Stretch(NamedTuple):
    """t queries in a row and the tokens that they may read.

    Query i reads the last `band.window` keys up to its own (every `band.dilation`-th), except the first `missing` of
    all; and those sinks that `before` tokens and i more have passed.
    """

    q: Tensor  # b (h g) t d   all in one dtype
    to_sinks: Tensor | None  # what reads the sinks in the place of q
    sink_k: Tensor  # b h s d
    sink_v: Tensor  # b h s e
    k: Tensor  # b h lead+t d   the ring's tokens, oldest first, then the new ones
    v: Tensor  # b h lead+t e
    missing: Tensor  # b
    before: Tensor  # b   tokens before them
    band: Band
    reading: Reading

    @property
    def lead(self) -> int:
        return self.k.shape[2] - self.q.shape[2]

    # Kernels multiply what a query does not see by zero, and 0 * inf is NaN. So tokens that are not finite are left out
    # of the products, and the outputs of the queries that do read them are NaN in the end.

    def finite(self) -> Stretch:
        """The same with zeros for whatever is not finite."""
        parts = {name: getattr(self, name) for name in ("sink_k", "sink_v", "k", "v")}
        return self._replace(**{name: x.where(x.isfinite(), 0) for name, x in parts.items()})

    def reads_infinity(self) -> Tensor:
        """Which queries, `b h t`, read a token that is not finite."""
        (window, dilation), t = self.band[1:], self.q.shape[2]
        bad, sink_bad = infinite(self.k, self.v), infinite(self.sink_k, self.sink_v)[:, :, None]
        query = torch.arange(t, device=bad.device)
        read = self.lead + query[:, None] - dilation * torch.arange(window, device=bad.device)  # t window
        passed = torch.arange(sink_bad.shape[-1], device=bad.device) <= (self.before[:, None] + query)[:, None, :, None]
        return (bad[:, :, read.clamp(min=0)] & (read >= 0)).any(-1) | (sink_bad & passed).any(-1)


def banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    state: State | None,
    reading: Reading = Reading(),  # noqa: B008 (immutable)
    *,
    control: str,
    key_padding_mask: Tensor | None = None,
    to_sinks: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, State] | Declined:
    """What the control, described by `control`, and `scan` would give: outputs and state.

    `to_sinks`, shaped as q, reads the sinks in the place of q. `in_place`: the memory of `state` may be written to,
    which saves a copy of it at each token.
    """
    t, memory = k.shape[2], None if state is None else state.memory
    count = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device) if state is None else state.length
    dtype = working_dtype(k, v, memory)
    in_place = in_place and t == 1 and not torch.is_grad_enabled()
    if memory is not None and memory.k.is_inference() and not torch.is_inference_mode_enabled():
        in_place = False  # torch would refuse
    if in_place and key_padding_mask is None and has_values(k):
        place = _known_place(band, tuple(count.tolist()), count.device)
    else:
        place = _place(band, count, count + (t if key_padding_mask is None else (~key_padding_mask).sum(1)))
    answer: tuple[Tensor, Memory] | Declined
    with full_precision(q):
        asked, q, k, v = q.dtype, cast(q, dtype), cast(k, dtype), cast(v, dtype)
        to_sinks = None if to_sinks is None else cast(to_sinks, dtype)
        memory = None if memory is None else cast_memory(memory, dtype)
        if t == 1:
            memory = empty_memory(k, v, band.rows) if memory is None else memory
            token = Token(q, to_sinks, k, v, memory, place, band, reading, key_padding_mask, in_place)
            answer = call("band_step", backend, token)
        elif key_padding_mask is None:
            answer = _stretch(q, to_sinks, k, v, band, memory, place, reading, backend)
        else:  # the real tokens to the front, in order, and their outputs back to where they were
            real = (~key_padding_mask).cumsum(1)
            order = key_padding_mask.sort(dim=1, stable=True).indices[:, None, :, None]
            past_end = (torch.arange(t, device=k.device) >= real[:, -1:])[:, None, :, None]
            q, k, v, *others = (
                x.take_along_dim(order, 2).masked_fill(past_end, 0) for x in (q, k, v, to_sinks) if x is not None
            )
            answer = _stretch(q, others[0] if others else None, k, v, band, memory, place, reading, backend)
            if not isinstance(answer, Declined):
                out, memory = answer
                answer = out.take_along_dim((real - 1).clamp(min=0)[:, None, :, None], 2), memory
    if isinstance(answer, Declined):
        return answer
    out, memory = answer
    if key_padding_mask is not None:
        out = out.masked_fill(key_padding_mask[:, None, :, None], 0)
    return cast(out, asked), State(memory, place.inner, place.end, control, place.readable)


def _place(band: Band, count: Tensor, end: Tensor, full: bool = False) -> Place:
    row = _ring_row(band, count - band.sinks)
    row = torch.where(count < band.sinks, count.clamp(min=0), row) if band.sinks else row
    inner = (end.clone(), (end - band.sinks).clamp(min=0))[: 2 if band.sinks else 1]
    readable = None
    if band.dilation > 1:
        queue = torch.arange(band.rows, device=end.device) // band.window
        readable = (queue == (end - 1).clamp(min=0)[:, None] % band.dilation)[:, None]
    return Place(count, row[:, None, None, None], full, end, inner, readable)


@lru_cache(maxsize=4)
def _known_place(band: Band, count: tuple[int, ...], device: torch.device) -> Place:
    """The place of one token; the layers of a model ask for the same, one after the other."""
    with torch.inference_mode(False):  # the next to ask may not be in that mode
        before = torch.tensor(count, device=device)
        return _place(band, before, before + 1, min(count) >= band.rows)


def _stretch(
    q: Tensor,
    to_sinks: Tensor | None,
    k: Tensor,
    v: Tensor,
    band: Band,
    memory: Memory | None,
    place: Place,
    reading: Reading,
    backend: str,
) -> tuple[Tensor, Memory] | Declined:
    """t tokens at `place`, of which those before its end are real: outputs and memory."""
    sinks, window, dilation = band
    before, end, ring = place.before, place.end, window * dilation
    begin = before - sinks  # the first new token's place among those that pass through the ring; negative for a sink
    sink_k, sink_v, lead = k[:, :, :0], v[:, :, :0], 0
    if sinks:
        sink_k, sink_v = _sinks(k, v, band, memory, before, end)
    if memory is not None:  # the new tokens go on from those in the ring, oldest first
        age = _ring_row(band, begin[:, None] + torch.arange(ring, device=k.device))[:, None, :, None]
        k = torch.cat([memory.k.take_along_dim(age, 2), k], dim=2)
        v = torch.cat([memory.v.take_along_dim(age, 2), v], dim=2)
        lead = ring

    stretch = Stretch(q, to_sinks, sink_k, sink_v, k, v, lead - begin, before, band, reading)
    finite = not has_values(k) or all_finite(sink_k, sink_v, k, v)
    out = call("band", backend, stretch if finite else stretch.finite())
    if isinstance(out, Declined):
        return out
    if not finite:
        poisoned = stretch.reads_infinity()[..., None].repeat_interleave(q.shape[1] // k.shape[1], 1)
        out = out.masked_fill(poisoned, torch.nan)

    # Row r of the ring holds the last token whose place, modulo the ring's size, is the row's.
    row = torch.arange(ring, device=k.device)
    own = row % window * dilation + row // window
    last = (end - sinks - 1)[:, None]
    entered = last - (last - own) % ring  # b ring
    at = (entered - begin[:, None] + lead).clamp(0, k.shape[2] - 1)[:, None, :, None]
    used = band.in_use(end)[:, None].expand(-1, k.shape[1], -1).contiguous()
    kept_k, kept_v = (
        torch.cat([sink, x.take_along_dim(at, 2)], dim=2).masked_fill(~used[..., None], 0)
        for sink, x in ((sink_k, k), (sink_v, v))
    )
    return out, Memory(kept_k, kept_v, used.to(k.dtype), used)


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


def _ring_row(band: Band, place: Tensor) -> Tensor:
    """The row of the memory that holds the `place`-th of the tokens that pass through the ring."""
    if band.dilation == 1:
        return place % band.window + band.sinks
    return place % band.dilation * band.window + place // band.dilation % band.window + band.sinks
