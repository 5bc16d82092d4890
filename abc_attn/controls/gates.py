"""How fast a memory forgets: a gate for each head, or for each slot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from abc_attn.core import Write, memory_dtype
from abc_attn.normaliser import log_sigmoid

if TYPE_CHECKING:
    from abc_attn.controls.base import Control


class Gate(nn.Linear):
    """The logit of g_t = sigmoid(w x_t + bias), one per head and token: how much of the memory is kept (section 4)."""

    def __init__(self, control: Control) -> None:
        super().__init__(control.embed_dim, control.num_heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.bias.copy_(starting_biases(self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mT[..., None]  # b h t 1

    def log_keep(self, x: Tensor) -> Tensor:
        """log g, `b h t 1`."""
        logit = self(x)
        return log_sigmoid(logit.to(memory_dtype(logit)))

    def apply_to(self, write: Write, x: Tensor, causal: bool) -> Write:
        """phi -> (1 - g) phi, and g decays what was there; a memory that is read as a whole has no order to forget."""
        log_keep = self.log_keep(x)
        phi = -log_keep.expm1() * write.phi
        if not causal:
            return write._replace(phi=phi)
        log_keep = log_keep.expand(-1, -1, -1, write.phi.shape[-1])
        log_decay = log_keep if write.log_decay is None else log_keep + write.log_decay
        return Write(phi, log_decay, write.readable)


class SlotGate(nn.Linear):
    """How much of each slot token t keeps: f_t = sigmoid(W x_t + b)^(1/exponent).

    b is such that the slots of a head start with half-lives from 1 token to `half_life`, evenly on a logarithmic scale.
    The exponent makes one step of training change long half-lives as much as short ones.
    """

    def __init__(self, control: Control, half_life: float, exponent: float) -> None:
        self.slots, self.half_life, self.exponent = control.slots, half_life, exponent
        super().__init__(control.embed_dim, control.num_heads * control.slots)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        start = starting_logits(self.slots, self.half_life, self.exponent)
        with torch.no_grad():
            self.bias.copy_(start.repeat(self.out_features // self.slots))

    def log_keep(self, x: Tensor) -> Tensor:
        """log f, `b h t n`."""
        logit = self(x).unflatten(-1, (-1, self.slots)).transpose(1, 2)
        return log_sigmoid(logit.to(memory_dtype(logit)), self.exponent)


def starting_biases(heads: int) -> Tensor:
    """The logits of g, `h`: heads that forget over about 8 to 400 tokens. At sigmoid(0) all would forget over two."""
    return torch.linspace(2.0, 6.0, heads)


def starting_logits(slots: int, half_life: float, exponent: float) -> Tensor:
    """The logits of f^exponent for half-lives from 1 token to `half_life`, evenly on a logarithmic scale: `n`."""
    lives = torch.logspace(0, math.log2(half_life), slots, base=2, dtype=torch.float64)
    return torch.logit(2 ** (-exponent / lives))
