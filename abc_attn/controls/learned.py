"""The paper's own control: what each token writes is learned from the token (section 4)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from abc_attn.checks import check_log_total
from abc_attn.controls.base import Control, InnerState, register_control
from abc_attn.controls.gates import Gate, SlotGate
from abc_attn.controls.positional import count_positions
from abc_attn.core import Mean, Write, memory_dtype
from abc_attn.normaliser import empty_total, log_sigmoid, running_mean

ACTIVATIONS = ("exp", "relu", "sigmoid", "softmax")
NORMALIZATIONS = ("mean", "write")
GATES = ("head", "slot")


def at_least_one(**option: float) -> float:
    """The option's value, if it is a number from 1."""
    ((name, value),) = option.items()
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value < float("inf"):
        raise ValueError(f"{name} must be a number from 1, got {value!r}")
    return float(value)


class Averaging(Control):
    """A control whose slots are weighted means of the tokens: its own state is the logarithm of the sum of weights."""

    gate: Gate | SlotGate | None

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        return (empty_total(batch, heads, self.slots, like),)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        check_log_total(inner[0], gated=self.gate is not None)

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        assert state is not None
        mean = self.mean(x, key_padding_mask)
        assert mean is not None
        write, log_total = running_mean(mean, state[0], key_padding_mask, causal=self.causal)
        return write, (log_total,)


@register_control("mlp")
class MLP(Averaging):
    """ABC_MLP: alpha_t = act(W x_t / temperature); each slot is the alpha-weighted mean of the tokens so far.

    Not in the paper: `activation="softmax"` lets slots compete for a token; `gate="head"` or "slot" lets means forget.
    """

    paper = "4, B.1"

    def __init__(
        self,
        slots: int,
        *,
        activation: str = "exp",
        normalization: str = "mean",
        temperature: float = 1.0,
        gate: bool | str | None = False,
        half_life: float = 512.0,
        exponent: float = 8.0,
        **sizes: Any,
    ) -> None:
        super().__init__(slots, **sizes)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization must be one of {', '.join(NORMALIZATIONS)}, got {normalization!r}")
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature!r}")
        if isinstance(gate, bool) or gate is None:
            gate = "head" if gate else ""
        if gate not in (*GATES, ""):
            raise ValueError(f"gate must be one of {', '.join(GATES)} (True: head), or left out, got {gate!r}")
        if gate == "slot" and normalization != "mean":
            raise ValueError("gate='slot' is for slots that are means: leave normalization out")
        self.activation, self.normalization, self.temperature = activation, normalization, temperature
        self.half_life, self.exponent = at_least_one(half_life=half_life), at_least_one(exponent=exponent)
        self.mask_empty = activation == "relu"  # only there can a slot stay empty: all its alphas may be zero
        self.gate: Gate | SlotGate | None = None
        if gate == "head":
            self.gate, self.gating = Gate(self), "gate"
        elif gate == "slot":
            self.gate, self.gating = SlotGate(self, self.half_life, self.exponent), "gate=slot"
        self.proj = nn.Linear(self.embed_dim, self.num_heads * slots, bias=False)  # W_phi, D -> h n
        # Slots that start alike stay alike: for x of unit variance (a normed input) the logits have deviation 1.
        nn.init.normal_(self.proj.weight, std=self.embed_dim**-0.5)

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return sizes["embed_dim"] * sizes["num_heads"] * slots

    @property
    def causal_states_differ(self) -> bool:
        return self.normalization == "write"  # a sum of shares against a mean

    def logits(self, x: Tensor) -> Tensor:
        """W_phi x / temperature: b t D -> b h t n."""
        return self.proj(x / self.temperature).unflatten(-1, (self.num_heads, self.slots)).transpose(1, 2)

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        if self.normalization == "mean" or not self.causal:
            return super().forward(x, k, key_padding_mask, state)
        assert state is not None
        # The footnote of section 4: alpha_t is divided by the sum up to t as it is written, and stays as it is.
        write, log_total = running_mean(Mean(self.log_alpha(x)), state[0], key_padding_mask, causal=True)
        write = write._replace(log_decay=None)
        return self.gate.apply_to(write, x, causal=True) if isinstance(self.gate, Gate) else write, (log_total,)

    def mean(self, x: Tensor, key_padding_mask: Tensor | None) -> Mean | None:
        if self.normalization != "mean" and self.causal:
            return None
        return Mean(self.log_alpha(x), None if self.gate is None else self.gate.log_keep(x))

    def log_alpha(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        logits = logits.to(memory_dtype(logits))
        if self.activation == "sigmoid":
            return log_sigmoid(logits)
        if self.activation == "softmax":
            return logits.log_softmax(-1)
        if self.activation == "relu":
            positive = logits > 0
            return torch.where(positive, logits, 1).log().masked_fill(~positive, -torch.inf)
        return logits


@register_control("slots")
class Slots(Averaging):
    """Learned slots that forget, each at its own rate: f_t = sigmoid(W x_t + b)^(1/exponent), and 1 - f_t enters.

    memory_t = f_t memory_{t-1} + (1 - f_t) [k_t, v_t], divided by the same sum of ones: `mlp` with gate="slot" and all
    alphas equal. Half-lives start at 1 token to `half_life` (SlotGate). Not in the paper.
    """

    gate: SlotGate

    def __init__(self, slots: int, *, half_life: float = 512.0, exponent: float = 8.0, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.half_life, self.exponent = at_least_one(half_life=half_life), at_least_one(exponent=exponent)
        self.gate = SlotGate(self, self.half_life, self.exponent)

    @classmethod
    def options(cls) -> dict[str, Any]:
        return cls.declared()  # it is a gate

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return (sizes["embed_dim"] + 1) * sizes["num_heads"] * slots

    def mean(self, x: Tensor, key_padding_mask: Tensor | None) -> Mean:
        return Mean(None, self.gate.log_keep(x))


@register_control("placed")
class Placed(Averaging):
    """ABC_MLP whose slots have places, spread evenly over the text: alpha_t = exp(W x_t - (p_t - i)^2 / 2 width^2).

    Token t stands at p_t: tokens are spread evenly over the n slots, or have one each where they are fewer. Widths, one
    a head, start at `width` (1: the distance between two slots) and are learned. Not in the paper.
    """

    online = False  # where a token stands depends on how many there are
    mask_empty = True

    def __init__(self, slots: int, *, width: float = 0.4, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        if not isinstance(width, int | float) or not 0 < width < float("inf"):
            raise ValueError(f"width must be a number above 0, got {width!r}")
        self.width, self.gate = float(width), None
        self.log_width = nn.Parameter(torch.full((self.num_heads,), math.log(width)))
        self.proj = nn.Linear(self.embed_dim, self.num_heads * slots, bias=False)
        # Slots differ by their places: what they look for may start small, so that a text is spread over them evenly.
        nn.init.normal_(self.proj.weight, std=0.1 * self.embed_dim**-0.5)

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return sizes["embed_dim"] * sizes["num_heads"] * slots

    @property
    def appends(self) -> bool:
        return False

    def mean(self, x: Tensor, key_padding_mask: Tensor | None) -> Mean:
        logits = self.proj(x).unflatten(-1, (self.num_heads, self.slots)).transpose(1, 2)
        logits = logits.to(memory_dtype(logits))
        position, count = count_positions(torch.zeros(len(x), dtype=torch.int64, device=x.device), key_padding_mask, x)
        count = count.where(count > 0, 1)[:, None]  # of a row of padding nothing is read
        taken = count.where(count < self.slots, self.slots)
        slot = torch.arange(self.slots, device=x.device)
        # Token t is (t + 1/2) / count of the way through the text, and slot i (i + 1/2) / taken: p_t = t if all fit.
        place = (position.double() + 0.5) * taken / count - 0.5
        narrow = (-self.log_width).to(logits.dtype).exp()[:, None, None]
        away = (place[..., None] - slot)[:, None].to(logits.dtype) * narrow
        return Mean((logits - away.square() / 2).masked_fill((slot >= taken)[:, None, None], -torch.inf))
