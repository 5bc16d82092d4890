"""Positions: rotary ones, counted in the text or inside the memory; and those of a decoder that is padded on the left.

positions="slot" counts them inside the memory, so that a stream may go on for ever. Query t sees window tokens at their
distance t - j, and sink i (the i-th of the first g tokens, which a `global` part holds) as if the text had just filled
the memory: the query at min(t, slots - 1), the sink at i. Scores depend on distances alone, so the window is served by
the ordinary rotation, with angles in fp64 to stay exact at positions of millions, and the sinks by a second rotation of
the query. What other controls hold beside the sinks is seen as it was written: tokens at their true distance, as in a
window, and means of keys that were rotated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from abc_attn.controls import Control
from abc_attn.core import has_values
from abc_attn.kernels import rotate

POSITIONS = ("absolute", "slot")


class Angles(NamedTuple):
    """By how much vectors are rotated at each position: x -> x * cos + x.roll(d/2) * sin. Both `b 1 t d`.

    Where d is less than the width of a head, its first d numbers are rotated and the others stay as they are.
    """

    cos: Tensor
    sin: Tensor  # its first half is negated: the two halves of x change places, one of them with its sign changed

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Angles:
        """From the cosine and the sine of each angle, `b t d`."""
        below, above = sin.chunk(2, dim=-1)
        return cls(cos[:, None], torch.cat([-below, above], dim=-1)[:, None])

    def rotate(self, x: Tensor) -> Tensor:
        """x `b h t d`, rotated."""
        d = self.cos.shape[-1]
        return rotate(x, *self) if d == x.shape[-1] else torch.cat([rotate(x[..., :d], *self), x[..., d:]], dim=-1)


class Rotation(NamedTuple):
    """How the queries and keys of one forward pass are rotated, in all layers, or in those of one type."""

    angles: Angles
    to_sinks: Angles | None = None  # of the queries as they read the sinks, if those are seen from another position

    def of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k rotated; and q as it reads the sinks, if that differs."""
        to_sinks = None if self.to_sinks is None else self.to_sinks.rotate(q)
        return self.angles.rotate(q), self.angles.rotate(k), to_sinks


def check_slots(control: Control) -> None:
    """Refuse a control whose positions cannot be counted inside the memory."""
    band = control.band()
    window = band is not None and band.window and band.dilation == 1
    if not (window or control.keep() or (control.sinks() and control.rows > control.sinks())):
        raise ValueError(
            "positions='slot' is for tokens kept whole: 'window', ungated, 'keydiff', 'knorm', 'leverage', 'tova'; or "
            f"the first tokens ('global') beside any other; not {control.title()}; use positions='absolute'"
        )


class SlotRotary(nn.Module):
    """Takes the place of a model's rotary embedding, whose frequencies it uses."""

    rotary: Any

    def __init__(self, rotary: nn.Module, control: Control) -> None:
        super().__init__()
        kinds = getattr(rotary, "rope_type", "default")
        kinds = {*kinds.values()} if isinstance(kinds, dict) else {kinds}  # by type of layer, or one for all
        if changing := sorted(kinds & {"dynamic", "longrope"}):
            raise ValueError(
                f"positions='slot' needs frequencies that do not change with the length, and this model has rope_type "
                f"{changing[0]!r}; use positions='absolute'"
            )
        check_slots(control)
        self.rotary, self.sinks, self.slots = rotary, control.sinks(), control.rows

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotation:
        below = has_values(position_ids) and not bool((position_ids >= self.slots).any())
        if not self.sinks or below:
            return Rotation(self._angles(x, position_ids, layer_type))
        to_sinks = self._angles(x, position_ids.clamp(max=self.slots - 1), layer_type)
        return Rotation(self._angles(x, position_ids, layer_type), to_sinks)

    def _angles(self, x: Tensor, position: Tensor, layer_type: str | None) -> Angles:
        of_type = "" if layer_type is None else f"{layer_type}_"  # Gemma's frequencies, of each type of layer
        angle = position[..., None].double() * getattr(self.rotary, f"{of_type}inv_freq").double()
        angle = torch.cat([angle, angle], dim=-1)
        scaling = getattr(self.rotary, f"{of_type}attention_scaling")
        return Angles.of((angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype))


class DecoderPositions:
    """Lets a decoder count real tokens where its rows are padded on the left; transformers' own counts columns.

    The decoder has a module `embed_positions` that takes position_ids `b t`.
    """

    def __init__(self, decoder: Any) -> None:
        self.counted: Tensor | None = None  # the positions of the call that is under way, if they are not the columns
        decoder.register_forward_pre_hook(self._count, with_kwargs=True)
        decoder.embed_positions.register_forward_pre_hook(self._give, with_kwargs=True)

    def _count(self, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        mask, tokens = given.get("attention_mask"), given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        self.counted = None
        if mask is None or mask.dim() != 2 or tokens is None or torch.compiler.is_compiling() or bool(mask.all()):
            return
        self.counted = ((mask != 0).cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]

    def _give(self, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any]:
        return arguments, given if self.counted is None else given | {"position_ids": self.counted}
