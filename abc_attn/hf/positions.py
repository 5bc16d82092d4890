"""positions="slot": rotary positions counted inside the memory, so that a stream may go on for ever.

Query t sees window tokens at their distance t - j, and sink i (the i-th of the first g tokens, which a `global` part
holds) as if the text had just filled the memory: the query at min(t, slots - 1), the sink at i. A rotation depends on
distances alone, so the window is served by the ordinary absolute rotation, with angles in fp64 to stay exact at
positions of millions, and the sinks by a second rotation of the query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from abc_attn.controls import Control
from abc_attn.controls.base import Composition
from abc_attn.controls.positional import Global, Window
from abc_attn.core import State

if TYPE_CHECKING:
    from abc_attn.attention import MemoryAttention

POSITIONS = ("absolute", "slot")


class Sinks(NamedTuple):
    """How sinks are read once the text is longer than the memory."""

    rows: Tensor  # of the memory, that hold them
    cos: Tensor  # b t d   at the position from which each query sees them
    sin: Tensor
    held: Tensor  # b t   the tokens that become sinks


class Rotation(NamedTuple):
    """The position embeddings of one forward pass, the same for all layers."""

    cos: Tensor  # b t d   at the position of each token
    sin: Tensor
    sinks: Sinks | None = None  # None as long as every distance is the true one


class SlotRotary(nn.Module):
    """Takes the place of a model's rotary embedding; its frequencies are those of `rotary`."""

    def __init__(self, rotary: nn.Module, control: Control) -> None:
        super().__init__()
        kind = getattr(rotary, "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"positions='slot' needs frequencies that do not change with the length, and this model has rope_type "
                f"{kind!r}; use positions='absolute'"
            )
        self.rotary = rotary
        self.slots, self.sinks = control.slots, sink_rows(control)

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        cos, sin = self._turn(x, position_ids)
        if not len(self.sinks) or not bool((position_ids >= self.slots).any()):
            return Rotation(cos, sin)
        turned = self._turn(x, position_ids.clamp(max=self.slots - 1))
        return Rotation(cos, sin, Sinks(self.sinks.to(x.device), *turned, position_ids < len(self.sinks)))

    def _turn(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        angle = position[..., None].double() * self.rotary.inv_freq.double()
        angle = torch.cat([angle, angle], dim=-1)
        scaling = self.rotary.attention_scaling
        return (angle.cos() * scaling).to(x.dtype), (angle.sin() * scaling).to(x.dtype)


def sink_rows(control: Control) -> Tensor:
    """The rows of the memory that hold the first tokens; an error if positions="slot" means nothing for a control."""
    rows, start = [], 0
    for part in control.parts if isinstance(control, Composition) else [control]:
        if isinstance(part, Global) and part.positions is None and part.every is None:
            rows += range(start, start + part.rows)
        elif not isinstance(part, Window):
            raise ValueError(
                f"positions='slot' is for tokens kept whole: 'window' and 'global' (the first tokens) and their sum, "
                f"not {part.title()}, whose slots mix tokens of many positions; use positions='absolute'"
            )
        start += part.rows
    return torch.tensor(rows, dtype=torch.int64)


def attend_with_sinks(
    attention: MemoryAttention,
    sinks: Sinks,
    source: Tensor,
    q: Tensor,
    rotated: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    state: State | None,
) -> tuple[Tensor, State]:
    """attention.attend, where the sinks are read by q as turned to its place in the memory, not in the text.

    For this call [q at t, q at its slot] meets [k, 0] in the window and [0, k] in the sinks: one softmax over both,
    exact for every query of the chunk. The state keeps its width.
    """
    d, cos, sin = k.shape[-1], sinks.cos[:, None], sinks.sin[:, None]
    q = torch.cat([rotated, q * cos + rotate_half(q) * sin], dim=-1)
    held = sinks.held[:, None, :, None]
    k = torch.cat([k.masked_fill(held, 0), k.masked_fill(~held, 0)], dim=-1)
    if state is not None:
        wide = torch.cat([state.memory.k, torch.zeros_like(state.memory.k)], dim=-1)
        wide[:, :, sinks.rows] = wide[:, :, sinks.rows].roll(d, dims=-1)
        state = state._replace(memory=state.memory._replace(k=wide))
    options: dict[str, Any] = {"key_padding_mask": key_padding_mask, "state": state}
    out, state = attention.attend(source, q, k, v, **options)
    narrow = state.memory.k[..., :d] + state.memory.k[..., d:]  # of which one is zero
    return out, state._replace(memory=state.memory._replace(k=narrow))
