"""Rotary positions, counted in the text or inside the memory.

positions="slot" counts them inside the memory, so that a stream may go on for ever. Query t sees window tokens at their
distance t - j, and sink i (the i-th of the first g tokens, which a `global` part holds) as if the text had just filled
the memory: the query at min(t, slots - 1), the sink at i. Scores depend on distances alone, so the window is served by
the ordinary rotation, with angles in fp64 to stay exact at positions of millions, and the sinks by a second rotation of
the query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from abc_attn.controls import Control
from abc_attn.core import Band
from abc_attn.kernels import rotate

POSITIONS = ("absolute", "slot")


class Angles(NamedTuple):
    """By how much vectors are rotated at each position: x -> x * cos + x.roll(d/2) * sin. Both `b 1 t d`."""

    cos: Tensor
    sin: Tensor  # its first half is negated: the two halves of x change places, one of them with its sign changed

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Angles:
        """From the cosine and the sine of each angle, `b t d`."""
        below, above = sin.chunk(2, dim=-1)
        return cls(cos[:, None], torch.cat([-below, above], dim=-1)[:, None])

    def rotate(self, x: Tensor) -> Tensor:
        """x `b h t d`, rotated."""
        return rotate(x, *self)


class Rotation(NamedTuple):
    """How the queries and keys of one forward pass are rotated, in all layers."""

    angles: Angles
    to_sinks: Angles | None = None  # of the queries as they read the sinks, if those are seen from another position

    def of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k rotated; and q as it reads the sinks, if that differs."""
        to_sinks = None if self.to_sinks is None else self.to_sinks.rotate(q)
        return self.angles.rotate(q), self.angles.rotate(k), to_sinks


def band_for_slots(control: Control) -> Band:
    """The tokens that a control keeps whole, whose positions can be counted inside the memory."""
    band = control.band()
    if band is None or not band.window or band.dilation > 1:
        raise ValueError(
            "positions='slot' is for tokens kept whole: 'window', or 'global' (the first tokens) with 'window', "
            f"ungated, not {control.title()}; use positions='absolute'"
        )
    return band


class SlotRotary(nn.Module):
    """Takes the place of a model's rotary embedding, whose frequencies it uses."""

    rotary: Any

    def __init__(self, rotary: nn.Module, control: Control) -> None:
        super().__init__()
        kind = getattr(rotary, "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"positions='slot' needs frequencies that do not change with the length, and this model has rope_type "
                f"{kind!r}; use positions='absolute'"
            )
        self.rotary, self.band = rotary, band_for_slots(control)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        slots = self.band.rows
        if not self.band.sinks or not bool((position_ids >= slots).any()):
            return Rotation(self._angles(x, position_ids))
        return Rotation(self._angles(x, position_ids), self._angles(x, position_ids.clamp(max=slots - 1)))

    def _angles(self, x: Tensor, position: Tensor) -> Angles:
        angle = position[..., None].double() * self.rotary.inv_freq.double()
        angle = torch.cat([angle, angle], dim=-1)
        scaling = self.rotary.attention_scaling
        return Angles.of((angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype))
