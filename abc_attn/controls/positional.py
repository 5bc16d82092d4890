"""Controls that decide by position alone: which slot token t enters is known before the text is.

Positions count real tokens: padding has none, and a later call goes on where the last one stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from abc_attn.checks import check_count
from abc_attn.controls.base import Control, InnerState, at_least, check_seed, register_control, whole
from abc_attn.core import Band, Write, has_values

STARTS = ("random", "identity")


def count_positions(count: Tensor, key_padding_mask: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's position `b t`, after `count` `b` earlier ones, and the new count; padding repeats the last."""
    if key_padding_mask is None:
        t = x.shape[1]
        return count[:, None] + torch.arange(t, device=count.device), count + t
    real = (~key_padding_mask).cumsum(1)
    return (count[:, None] + real - 1).clamp(min=0), count + real[:, -1]


def into_slot(slot: Tensor, slots: int, like: Tensor) -> Tensor:
    """e_slot for every token: `b t` -> `b 1 t n`, the same for all heads."""
    return (slot[:, None, :, None] == torch.arange(slots, device=slot.device)).to(like.dtype)


def emptied(where: Tensor) -> Tensor:
    """log_decay that empties the slots marked in `where` and keeps the others."""
    return torch.zeros_like(where).masked_fill(where != 0, -torch.inf)


class Positional(Control):
    """A control whose only state is the number of tokens so far."""

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        return (torch.zeros(batch, dtype=torch.int64, device=like.device),)

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        assert state is not None
        position, count = count_positions(state[0], key_padding_mask, x)
        return self.decide(position, count, k), (count,)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        check_count(inner[0], length, exact=not self.skips_held)  # else it may not have been given all of them

    def decide(self, position: Tensor, count: Tensor, like: Tensor) -> Write:
        """What tokens at `position` `b t` write; `count` `b` is the number of tokens after them."""
        raise NotImplementedError


@register_control("softmax")
class Softmax(Control):
    """Exact attention: phi_t = e_t with a slot for every token. The baseline; its memory grows."""

    paper = "2"
    composable = False
    grows = True

    def __init__(self, slots: int = 0, **sizes: Any) -> None:
        if slots:
            raise ValueError(f"control 'softmax' has a slot for every token; leave slots out, got slots={slots}")
        super().__init__(1, **sizes)
        self.slots = 0

    @classmethod
    def default_slots(cls, head_dim: int) -> int:
        return 0


@register_control("window")
class Window(Positional):
    """The last n tokens: a ring buffer whose slot t mod n is emptied as token t enters."""

    paper = "3.3"
    mask_empty = True
    skips_held = True

    def band(self) -> Band | None:
        return Band(window=self.slots) if type(self) is Window else None  # a subclass may decide otherwise

    def decide(self, position: Tensor, count: Tensor, like: Tensor) -> Write:
        # The read ignores the order of slots, so the ring is the paper's upper shift matrix U.
        phi = into_slot(position % self.slots, self.slots, like)
        return Write(phi, emptied(phi))


@register_control("dilated")
class Dilated(Positional):
    """The last n tokens at distances 0, dilation, 2 dilation, ...: one window per residue of the position."""

    paper = "A.4"
    mask_empty = True

    def __init__(self, slots: int, *, dilation: int = 2, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.dilation = at_least(1, dilation=dilation)

    @classmethod
    def rows_of(cls, slots: int, options: dict[str, Any]) -> int:
        return slots * whole(options.get("dilation", 2))

    @property
    def rows(self) -> int:
        return self.slots * self.dilation

    def band(self) -> Band | None:
        if type(self) is not Dilated or self.dilation == 1:  # then `window` is the control to ask for
            return None
        return Band(window=self.slots, dilation=self.dilation)

    def decide(self, position: Tensor, count: Tensor, like: Tensor) -> Write:
        residue = position % self.dilation
        slot = position // self.dilation % self.slots
        phi = into_slot(residue * self.slots + slot, self.rows, like)
        # Without causality there is one read, of the queue that the last token entered.
        reads = residue if self.causal else ((count - 1) % self.dilation)[:, None].expand_as(residue)
        queue = torch.arange(self.rows, device=position.device) // self.slots
        return Write(phi, emptied(phi), (queue == reads[..., None])[:, None])


@register_control("global")
class Global(Positional):
    """Local-to-global attention: the first n tokens, or those at `positions`, or every `every`-th until n are held."""

    paper = "3.3, A.1"
    mask_empty = True
    holds_tokens = True

    def __init__(
        self, slots: int, *, positions: Sequence[int] | None = None, every: int | None = None, **sizes: Any
    ) -> None:
        super().__init__(slots, **sizes)
        if positions is not None and every is not None:
            raise ValueError(f"control 'global' takes positions or every, got both: {positions!r} and {every!r}")
        if positions is not None:
            listed = isinstance(positions, Iterable) and all(isinstance(position, int) for position in positions)
            held = sorted({*positions}) if listed else []
            if not 1 <= len(held) <= slots or held[0] < 0:
                raise ValueError(f"positions must be 1 to {slots} (the slots) whole numbers from 0, got {positions!r}")
            positions = tuple(held)
        self.positions = positions
        self.every = None if every is None else at_least(1, every=every)

    def band(self) -> Band | None:
        first = self.positions is None and self.every is None
        return Band(sinks=self.slots) if first and type(self) is Global else None

    def decide(self, position: Tensor, count: Tensor, like: Tensor) -> Write:
        if self.positions is not None:
            held = torch.tensor(self.positions, device=position.device)
            slot = torch.searchsorted(held, position.contiguous()).clamp(max=len(held) - 1)
            is_held = held[slot] == position
        else:
            every = self.every or 1
            slot = position // every
            is_held = (position % every == 0) & (slot < self.slots)
        phi = into_slot(torch.where(is_held, slot, 0), self.slots, like)
        return Write(phi * is_held[:, None, :, None])


@register_control("random")
class Random(Positional):
    """ABC_RD: every token is added to a slot drawn uniformly, a fixed function of (seed, position)."""

    paper = "A.2"
    mask_empty = True
    skips_held = True

    def __init__(self, slots: int, *, seed: int = 0, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.seed = check_seed(seed)

    def decide(self, position: Tensor, count: Tensor, like: Tensor) -> Write:
        return Write(into_slot(_hash(position, self.seed) % self.slots, self.slots, like))


@register_control("compressive")
class Compressive(Positional):
    """Mean pooling over groups of `ratio` tokens, the last n groups (ratio: 4 if causal, else ceil(length / n))."""

    paper = "A.3"
    mask_empty = True
    skips_held = True

    def __init__(self, slots: int, *, ratio: int | None = None, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.ratio = None if ratio is None else at_least(1, ratio=ratio)

    @property
    def appends(self) -> bool:
        return self.causal or self.ratio is not None  # else the ratio is that of the whole

    @property
    def causal_states_differ(self) -> bool:
        return self.ratio is None

    def decide(self, position: Tensor, count: Tensor, like: Tensor) -> Write:
        if self.ratio is not None or self.causal:
            ratio = torch.full_like(count, self.ratio or 4)
        else:
            ratio = ((count + self.slots - 1) // self.slots).clamp(min=1)
        ratio = ratio[:, None]
        chosen = into_slot(position // ratio % self.slots, self.slots, like)
        starts = (position % ratio == 0)[:, None, :, None]
        return Write(chosen / ratio[:, None, :, None], emptied(chosen * starts))


@register_control("linformer")
class Linformer(Positional):
    """A learned control vector per position, W[:, t]; it ends at `max_length` tokens.

    W starts at random, so that every slot is a mixture of all tokens; or, with `start="identity"`, with one token in a
    slot and the (n + 1)-th in the first again, from where a short training learns more.
    """

    paper = "3.1"

    def __init__(self, slots: int, *, max_length: int = 512, start: str = "random", **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.max_length = at_least(1, max_length=max_length)
        if start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {start!r}")
        self.start = start
        weight = torch.randn(slots, max_length) * max_length**-0.5  # W^LF of section 3.1
        if start == "identity":
            weight = torch.eye(slots)[:, torch.arange(max_length) % slots]
        self.weight = nn.Parameter(weight)

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return slots * whole(options.get("max_length", 512))

    def decide(self, position: Tensor, count: Tensor, like: Tensor) -> Write:
        if has_values(count) and bool((count > self.max_length).any()):
            raise ValueError(
                f"control 'linformer' has learned {self.max_length} positions and was given {int(count.max())} tokens; "
                "build it with a larger max_length, or use a control without an end"
            )
        return Write(self.weight.mT[position][:, None])


def _hash(position: Tensor, seed: int) -> Tensor:
    """Well-mixed non-negative int64 from (seed, position), the same on every device: the finaliser of splitmix64."""
    return _hash_opaque(position, seed) if torch.compiler.is_compiling() else _mix(position, seed)


def _mix(position: Tensor, seed: int) -> Tensor:
    # int64 arithmetic wraps, as it should.
    x = (position + 1) * -7046029254386353131 + seed * 1442695040888963407 % 2**63
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return (x ^ (x >> 31 & (1 << 33) - 1)) & (2**63 - 1)


# Not for inductor to see into: of positions that it knows it computes the products as whole numbers without an end.
_hash_opaque = torch.library.custom_op("abc_attn::hash_positions", _mix, mutates_args=())
_hash_opaque.register_fake(lambda position, seed: torch.empty_like(position))
