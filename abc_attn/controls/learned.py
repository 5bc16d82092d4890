"""The paper's own control: what each token writes is learned from the token (section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from abc_attn.checks import check_log_total
from abc_attn.controls.base import Control, Gate, InnerState, register_control
from abc_attn.core import Write, memory_dtype
from abc_attn.normaliser import empty_total, running_mean

ACTIVATIONS = ("exp", "relu", "sigmoid", "softmax")
NORMALIZATIONS = ("mean", "write")


@register_control("mlp")
class MLP(Control):
    """ABC_MLP: alpha_t = act(W x_t / temperature); each slot is the alpha-weighted mean of the tokens so far.

    Not in the paper: `activation="softmax"` lets slots compete for a token.
    """

    paper = "4, B.1"

    def __init__(
        self,
        slots: int,
        *,
        activation: str = "exp",
        normalization: str = "mean",
        temperature: float = 1.0,
        gate: bool = False,
        **sizes: Any,
    ) -> None:
        super().__init__(slots, **sizes)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}")
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature!r}")
        self.activation, self.normalization, self.temperature = activation, normalization, temperature
        self.mask_empty = activation == "relu"  # only there can a slot stay empty: all its alphas may be zero
        self.gate = Gate(self) if gate else None
        self.proj = nn.Linear(self.embed_dim, self.num_heads * slots, bias=False)  # W_phi, D -> h n
        # Slots that start alike stay alike: for x of unit variance (a normed input) the logits have deviation 1.
        nn.init.normal_(self.proj.weight, std=self.embed_dim**-0.5)

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return sizes["embed_dim"] * sizes["num_heads"] * slots

    @property
    def causal_states_differ(self) -> bool:
        return self.normalization == "write"  # a sum of shares against a mean

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        return (empty_total(batch, heads, self.slots, like),)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        check_log_total(inner[0], gated=self.gate is not None)

    def logits(self, x: Tensor) -> Tensor:
        """W_phi x / temperature: b t D -> b h t n."""
        return self.proj(x / self.temperature).unflatten(-1, (self.num_heads, self.slots)).transpose(1, 2)

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        log_alpha = self.log_alpha(x)
        assert state is not None
        gate = None if self.gate is None else self.gate(x)
        if self.normalization == "mean" or not self.causal:
            write, log_total = running_mean(log_alpha, state[0], key_padding_mask, gate, causal=self.causal)
            return write, (log_total,)
        # The footnote of section 4: alpha_t is divided by the sum up to t as it is written, and stays as it is.
        write, log_total = running_mean(log_alpha, state[0], key_padding_mask, causal=True)
        write = write._replace(log_decay=None)
        return write if gate is None else Gate.apply_to(write, gate), (log_total,)

    def log_weights(self, x: Tensor) -> Tensor | None:
        return self.log_alpha(x) if self.normalization == "mean" and self.gate is None else None

    def log_alpha(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        logits = logits.to(memory_dtype(logits))
        if self.activation == "sigmoid":
            return F.logsigmoid(logits)
        if self.activation == "softmax":
            return logits.log_softmax(-1)
        if self.activation == "relu":
            positive = logits > 0
            return torch.where(positive, logits, 1).log().masked_fill(~positive, -torch.inf)
        return logits
