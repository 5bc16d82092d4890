"""positions="slot": rotary positions counted inside the memory, so that a stream may go on for ever.

Query t sees window tokens at their distance t - j, and sink i (the i-th of the first g tokens, which a `global` part
holds) as if the text had just filled the memory: the query at min(t, slots - 1), the sink at i. A rotation depends on
distances alone, so the window is served by the ordinary absolute rotation, with angles in fp64 to stay exact at
positions of millions, and the sinks by a second rotation of the query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from abc_attn.controls import Control
from abc_attn.kernels import rotate

POSITIONS = ("absolute", "slot")


class Turn(NamedTuple):
    """A rotation of queries or keys: x * cos + x.roll(d/2) * sin. Both `b 1 t d`."""

    cos: Tensor
    sin: Tensor  # its first half is negative, as the halves of x change places with one sign

    @classmethod
    def by(cls, cos: Tensor, sin: Tensor) -> Turn:
        """From the cosine and the sine of the angles, `b t d`."""
        below, above = sin.chunk(2, dim=-1)
        return cls(cos[:, None], torch.cat([-below, above], dim=-1)[:, None])

    def of(self, x: Tensor) -> Tensor:
        return rotate(x, *self)


class Rotation(NamedTuple):
    """How the queries and keys of one forward pass are turned, in all layers."""

    turn: Turn
    to_sinks: Turn | None = None  # of the queries, as they read the sinks, if those are seen from another position


class SlotRotary(nn.Module):
    """Takes the place of a model's rotary embedding; its frequencies are those of `rotary`."""

    rotary: Any

    def __init__(self, rotary: nn.Module, control: Control) -> None:
        super().__init__()
        kind = getattr(rotary, "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"positions='slot' needs frequencies that do not change with the length, and this model has rope_type "
                f"{kind!r}; use positions='absolute'"
            )
        band = control.band()
        if band is None or not band.window or band.dilation > 1:
            raise ValueError(
                "positions='slot' is for tokens kept whole: 'window', or 'global' (the first tokens) with 'window', "
                f"ungated, not {control.title()}; use positions='absolute'"
            )
        self.rotary, self.band = rotary, band

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        slots = self.band.rows
        if not self.band.sinks or not bool((position_ids >= slots).any()):
            return Rotation(self._turn(x, position_ids))
        return Rotation(self._turn(x, position_ids), self._turn(x, position_ids.clamp(max=slots - 1)))

    def _turn(self, x: Tensor, position: Tensor) -> Turn:
        angle = position[..., None].double() * self.rotary.inv_freq.double()
        angle = torch.cat([angle, angle], dim=-1)
        scaling = self.rotary.attention_scaling
        return Turn.by((angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype))
