"""Controls that keep tokens whole: `window`, and `global` (the first tokens) beside it, where they are causal.

Their memory is a few sinks and a ring of the last tokens, so its queries can attend to the tokens of a block directly,
and a step of decoding writes one row in place. Outputs and states are those of `scan` with the control's own writes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.controls import Control
from abc_attn.controls.base import Composition
from abc_attn.controls.positional import Global, Window, count_positions
from abc_attn.core import (
    Memory,
    State,
    empty_memory,
    full_precision,
    group_heads,
    memory_dtype,
    softmax_weights,
)

BLOCK = 256  # queries that attend at once to the memory before them and to each other


class Step(NamedTuple):
    """What a step of decoding has to know, the same for all layers."""

    row: int | Tensor  # where the new token goes: the same row of every memory of the batch, or one for each
    full: bool  # every row has been used before
    length: Tensor  # b   after the step
    inner: tuple[Tensor, ...]


class Ring:
    """Where tokens lie in the memory: the first in `sinks` rows, the others in turn in `window` rows."""

    def __init__(self, sinks: int, window: int, sinks_first: bool) -> None:
        self.sinks, self.window, self.sinks_first = sinks, window, sinks_first
        self._last: tuple[Tensor, Step] | None = None  # the layer before has most often asked for the same step

    @classmethod
    def of(cls, control: Control) -> Ring | None:
        """The ring that a control is, the same at every call; None if it is another control."""
        if isinstance(found := control.__dict__.get("ring"), Ring):
            return found
        parts = list(control.parts) if isinstance(control, Composition) else [control]
        kinds = [type(part) for part in parts]
        if any(isinstance(part, Global) and (part.positions, part.every) != (None, None) for part in parts):
            return None
        if kinds == [Window]:
            control.__dict__["ring"] = cls(0, parts[0].slots, True)
        if kinds in ([Global, Window], [Window, Global]):
            sinks, window = (parts[kinds.index(kind)].slots for kind in (Global, Window))
            control.__dict__["ring"] = cls(sinks, window, kinds[0] is Global)
        return control.__dict__.get("ring")

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        state: State | None,
        control: str,
        scale: float,
        dropout: float = 0.0,
        to_sinks: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """As MemoryAttention.attend. `to_sinks`, if given, is what the sinks are read by in the place of q."""
        dtype = memory_dtype(k)
        with full_precision(q):
            if state is None:
                memory = empty_memory(k, v, self.sinks + self.window)
                length = torch.zeros(len(k), dtype=torch.int64, device=k.device)
            else:
                memory, length = state.memory, state.length
            queries = [group_heads(x, k.shape[1]).to(dtype) * scale for x in (q, to_sinks) if x is not None]
            k, v = k.to(dtype), v.to(dtype)
            alone = k.shape[2] == 1 and key_padding_mask is None and state is not None
            if alone and not dropout and not torch.is_grad_enabled():
                step = self._next(length)
                out, length, inner = self._step(queries, k, v, memory, step), step.length, step.inner
            else:
                out, memory, length = self._blocks(queries, k, v, key_padding_mask, memory, length, dropout)
                inner = self._counts(length)
        return out.view(*q.shape[:3], v.shape[-1]).to(q.dtype), State(memory, inner, length, control)

    def _counts(self, length: Tensor) -> tuple[Tensor, ...]:
        """The states of the controls: sinks count all tokens, the ring those that are no sinks."""
        counts = (length, (length - self.sinks).clamp(min=0))[0 if self.sinks else 1 :]
        return counts if self.sinks_first else counts[::-1]

    def _next(self, length: Tensor) -> Step:
        if self._last is None or not (self._last[0] is length or torch.equal(self._last[0], length)):
            after = length + 1
            row = self._row_of(length)
            same = int(row[0]) if bool((row == row[0]).all()) else row
            full = int(length.min()) >= self.sinks + self.window
            self._last = length, Step(same, full, after, self._counts(after))
        return self._last[1]

    def _step(self, queries: list[Tensor], k: Tensor, v: Tensor, memory: Memory, step: Step) -> Tensor:
        """One token a row, written into the memory in place: the state belongs to the cache that it came from."""
        _put(memory.k, step.row, k[:, :, 0])
        _put(memory.v, step.row, v[:, :, 0])
        if not step.full:
            _put(memory.mass, step.row, 1.0)
            _put(memory.used, step.row, True)
        # Products of three axes: `b h g 1 d` as `(b h) g d`. What four axes cost more is noticed here.
        first, *others = (x.flatten(0, 1).flatten(1, 2) for x in queries)
        keys = memory.k.flatten(0, 1)
        scores = torch.bmm(first, keys.mT)
        for to_sinks in others:
            sinks = self._sink_rows()
            scores[..., sinks] = torch.bmm(to_sinks, keys[:, sinks].mT)
        weights = scores.softmax(-1) if step.full else softmax_weights(scores, memory.used.flatten(0, 1)[:, None], 0.0)
        return torch.bmm(weights, memory.v.flatten(0, 1))

    def _blocks(
        self,
        queries: list[Tensor],
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        memory: Memory,
        length: Tensor,
        dropout: float,
    ) -> tuple[Tensor, Memory, Tensor]:
        out = []
        for start in range(0, k.shape[2], BLOCK):
            some = slice(start, start + BLOCK)
            padding = None if key_padding_mask is None else key_padding_mask[:, some]
            position, after = count_positions(length, padding, k[:, 0, some])  # b t, b
            real = torch.ones_like(position, dtype=torch.bool) if padding is None else ~padding
            # Which of the memory's rows, and of the block's own tokens, each query sees: b t (n + t).
            held = self._positions(length)
            at = torch.cat([held, position], dim=1)
            near = position[..., None] - at[:, None] < self.window
            seen = near | (at < self.sinks)[:, None]
            earlier = torch.ones(2 * real.shape[1:], dtype=torch.bool, device=k.device).tril()
            there = torch.cat([(held >= 0)[:, None].expand(-1, len(earlier), -1), real[:, None] & earlier], dim=-1)
            seen = (seen & there & real[..., None])[:, None, None]
            keys = torch.cat([memory.k, k[:, :, some]], dim=2)
            values = torch.cat([memory.v, v[:, :, some]], dim=2)
            scores = _scores(queries[0][:, :, :, some], keys)
            if len(queries) > 1:
                sinks, tokens = self._sink_rows(), slice(held.shape[1], None)
                scores[..., sinks] = _scores(queries[1][:, :, :, some], keys[:, :, sinks])
                if bool((position < self.sinks).any()):  # sinks of which this block is the first to know
                    to_sinks = _scores(queries[1][:, :, :, some], keys[:, :, tokens])
                    first = (position < self.sinks)[:, None, None]
                    scores[..., tokens] = torch.where(first, to_sinks, scores[..., tokens])
            scores = scores.unflatten(2, (-1, len(earlier)))
            if padding is None:  # then each token sees itself at least, which spares a look for those that see none
                weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
                weights = F.dropout(weights, dropout) if dropout else weights
            else:
                weights = softmax_weights(scores, seen, dropout)
            out.append((weights.flatten(2, 3) @ values).unflatten(2, (-1, len(earlier))))
            memory = self._write(memory, k[:, :, some], v[:, :, some], position, real, after)
            length = after
        return torch.cat(out, dim=3), memory, length

    def _write(self, memory: Memory, k: Tensor, v: Tensor, position: Tensor, real: Tensor, length: Tensor) -> Memory:
        """The memory after the tokens of a block: each row is written by the last token that falls on it."""
        rows = memory.k.shape[2]
        stays = real & ((position < self.sinks) | (position >= length[:, None] - self.window))
        row = torch.where(stays, self._row_of(position), rows)[:, None]  # those that do not stay fall off the end

        def written(old: Tensor, new: Tensor) -> Tensor:
            at = row.view(len(row), 1, -1, *[1] * (old.dim() - 3)).expand(new.shape)
            end = old.new_zeros(*old.shape[:2], 1, *old.shape[3:])
            return torch.cat([old, end], dim=2).scatter(2, at, new)[:, :, :rows].clone()

        ones = k.new_ones(k.shape[:3])
        return Memory(
            written(memory.k, k), written(memory.v, v), written(memory.mass, ones), written(memory.used, ones.bool())
        )

    def _sink_rows(self) -> slice:
        start = 0 if self.sinks_first else self.window
        return slice(start, start + self.sinks)

    def _row_of(self, position: Tensor) -> Tensor:
        """The row that the token at a position is written to."""
        first = self.sinks if self.sinks_first else 0  # of the ring
        ring = first + (position - self.sinks) % self.window
        return torch.where(position < self.sinks, position + self._sink_rows().start, ring) if self.sinks else ring

    def _positions(self, length: Tensor) -> Tensor:
        """b n: the position of the token in each row after `length` tokens; -1 in an empty row."""
        count, slot = length[:, None] - self.sinks, torch.arange(self.window, device=length.device)
        newest = count - 1 - (count - 1 - slot) % self.window  # the last of those that fall on a slot
        ring = torch.where((newest >= 0) & (count > 0), newest + self.sinks, -1)
        sink = torch.arange(self.sinks, device=length.device).expand(len(length), -1)
        sink = torch.where(sink < length[:, None], sink, -1)
        return torch.cat([sink, ring] if self.sinks_first else [ring, sink], dim=1)


def _put(memory: Tensor, row: int | Tensor, new: Tensor | float) -> None:
    """memory `b h n ...` at `row` of n, which may differ along b."""
    if isinstance(row, int):
        memory[:, :, row] = new
    else:
        memory[torch.arange(len(memory), device=memory.device), :, row] = new


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """`b h g t d` against `b h n d`, as `b h (g t) n`: the queries of a group in one product."""
    return queries.flatten(2, 3) @ keys.mT
