"""Tokens kept whole for as long as each of them is worth: what is learned is how long."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from abc_attn.checks import check_count
from abc_attn.controls.base import Control, InnerState, register_control
from abc_attn.controls.learned import at_least_one
from abc_attn.controls.positional import count_positions, emptied
from abc_attn.core import Write, full_precision


@register_control("keep")
class Keep(Control):
    """A window whose tokens may stay longer: each enters in the place of the lowest priority, its position + life_t.

    life_t = longest sigmoid(w x_t + b). At first all lives are equal, and it is a window. No token stays longer than
    `longest` and the window together. Which tokens stay is not differentiable: the weights learn by attention transfer
    (`chosen`, abc-attn distill). Not in the paper.
    """

    mask_empty = True
    skips_held = True
    learns_by_transfer = True

    def __init__(self, slots: int, *, longest: float = 4096.0, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.longest = at_least_one(longest=longest)
        self.proj = nn.Linear(self.embed_dim, self.num_heads)
        nn.init.zeros_(self.proj.weight)
        share = min(slots / self.longest, 0.5)
        nn.init.constant_(self.proj.bias, math.log(share / (1 - share)))  # a life of as many tokens as there are rows

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return (sizes["embed_dim"] + 1) * sizes["num_heads"]

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        # Priorities are 0 or more; rows that are empty have lower ones, so that they are taken first, in order.
        empty = torch.arange(-self.slots, 0, dtype=torch.float64, device=like.device)
        return empty.repeat(batch, heads, 1), torch.zeros(batch, dtype=torch.int64, device=like.device)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        priority, count = inner
        check_count(count, length, exact=False)  # tokens that another part holds are not given to this one
        if not bool((priority < (count + self.longest)[:, None, None]).all()):
            raise ValueError(f"a priority of {self.title()} must be below the tokens so far and longest={self.longest}")

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        assert state is not None
        priority, count = state
        position, count = count_positions(count, key_padding_mask, x)
        with torch.no_grad():
            asked = position[:, None] + self.life(x)
            slot, _, priority = _in_order(asked, priority, key_padding_mask)
            phi = (slot[..., None] == torch.arange(self.slots, device=x.device)).to(k.dtype)
        return Write(phi, emptied(phi)), (priority, count)

    def life(self, x: Tensor) -> Tensor:
        """How many tokens longer than it would in a window each token stays, `b h t`, in fp64."""
        with full_precision(x):
            logit = nn.functional.linear(x.to(self.proj.weight.dtype), self.proj.weight, self.proj.bias).mT
            return self.longest * logit.double().sigmoid()

    def chosen(self, x: Tensor, query: Tensor, softness: float = 0.5) -> Tensor:
        position, life = torch.arange(x.shape[1], device=x.device), self.life(x)
        priority = position + life
        with torch.no_grad():
            nothing, _ = self.begin(len(x), self.num_heads, x)  # type: ignore[misc]
            _, removed, _ = _in_order(priority, nothing, None)
            bar = removed.cummax(2).values[:, :, query, None]  # b h q 1: what stays is above it
            earlier = position < query[:, None]
            kept = (priority[:, :, None] > bar) & earlier | (position == query[:, None])
        # Straight through: forward what is kept, backward a step as soft as a share of the life, or of a token where
        # that is short. As many stay as there are rows, so the bar rises with the priorities that are near it.
        per_life = (1 / (softness * (life.detach() + 1)))[:, :, None]
        near = ((priority.detach()[:, :, None] - bar) * per_life).float()
        slope = torch.where(earlier & (bar >= 0), near.sigmoid() * near.neg().sigmoid(), 0) * per_life.float()
        move = (priority - priority.detach()).float()[:, :, None]  # 0, with a gradient
        near_bar = slope.sum(-1, keepdim=True)
        rise = (slope * move).sum(-1, keepdim=True) / torch.where(near_bar > 0, near_bar, 1)
        return kept + slope * (move - rise)


def _in_order(asked: Tensor, priority: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The row that each token enters and the priority that it removes there, `b h t`; and the priorities after them,
    `b h n`."""
    priority, rows, removed = priority.clone(), [], []
    for t in range(asked.shape[2]):
        lowest, row = priority.min(-1, keepdim=True)
        new = asked[:, :, t, None]
        if key_padding_mask is not None:
            new = torch.where(key_padding_mask[:, t, None, None], lowest, new)
        priority.scatter_(-1, row, new)
        rows.append(row)
        removed.append(lowest)
    return torch.cat(rows, dim=-1), torch.cat(removed, dim=-1), priority
