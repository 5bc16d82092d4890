"""Kernel methods: phi_t = f(k_t) and a linear read, o_t = f(q_t) V_t / (f(q_t) . mass_t). `slots` is the width of f.

q is not scaled before f; where a method scales its input, f does it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from abc_attn.controls.base import Control, InnerState, at_least, check_seed, register_control
from abc_attn.core import Write, full_precision, memory_dtype


class FeatureMap(Control):
    """A control that is its feature map."""

    linear = True

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        with full_precision(k):  # numerator and denominator amplify what f loses
            return Write(self.features(k.to(memory_dtype(k)))), state


@register_control("elu")
class Elu(FeatureMap):
    """f(x) = elu(x) + 1 (Katharopoulos et al. 2020); as many slots as the head is wide."""

    paper = "4, 5.1"

    def __init__(self, slots: int, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        if slots != self.head_dim:
            raise ValueError(
                f"control 'elu' has as many slots as the head is wide, {self.head_dim}, got {slots}; leave slots out"
            )

    @classmethod
    def default_slots(cls, head_dim: int) -> int:
        return head_dim

    def features(self, q: Tensor) -> Tensor:
        # Contiguous, as the gradient of torch's elu always is: a compiled graph expects the strides of its input.
        return F.elu(q.contiguous()) + 1


@register_control("rfa")
class RFA(FeatureMap):
    """Random Fourier features of the normed input, [sin, cos](w x) (Peng et al. 2021). Weights may be negative.

    So their sum may come near zero, above all after a few tokens, which training did not survive without a `floor` for
    what is divided by. A token weighs 1 at most; public code of RFA has floors up to 200 / slots. With a gate all
    tokens together weigh 1 at most, and so should the floor.
    """

    paper = "4, 5.1"

    def __init__(self, slots: int, *, seed: int = 0, floor: float = 0.0, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        if isinstance(floor, bool) or not isinstance(floor, (int, float)) or not 0 <= floor < math.inf:
            raise ValueError(f"control 'rfa' needs a floor of at least 0 (which is none), got {floor!r}")
        self.floor = float(floor)
        if slots % 2:
            raise ValueError(f"control 'rfa' needs an even number of slots (a sine and a cosine each), got {slots}")
        self.seed = check_seed(seed)
        directions = torch.randn(slots // 2, self.head_dim, generator=torch.Generator().manual_seed(seed))
        self.directions: Tensor
        self.register_buffer("directions", directions)
        self.sigma = nn.Parameter(torch.ones(self.num_heads, 1, self.head_dim))  # the bandwidth is learned, as in RFA

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return slots // 2 * sizes["head_dim"]

    def features(self, q: Tensor) -> Tensor:
        angles = (F.normalize(q, dim=-1) * self.sigma) @ self.directions.to(q.dtype).mT
        return torch.cat([angles.sin(), angles.cos()], dim=-1) * (self.slots / 2) ** -0.5


@register_control("t2r")
class T2R(FeatureMap):
    """f(x) = relu(W x + b), learned per head (Kasai et al. 2021); meant to start from a trained softmax model."""

    paper = "4, 5.1"

    def __init__(self, slots: int, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.weight = nn.Parameter(torch.randn(self.num_heads, self.head_dim, slots) * self.head_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(self.num_heads, 1, slots))

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return sizes["num_heads"] * (sizes["head_dim"] + 1) * slots

    def features(self, q: Tensor) -> Tensor:
        return F.relu(q @ self.weight.to(q.dtype) + self.bias)


@register_control("favor")
class Favor(FeatureMap):
    """Positive orthogonal random features of the softmax kernel (Choromanski et al. 2021)."""

    paper = "4"

    def __init__(self, slots: int, *, seed: int = 0, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.seed = check_seed(seed)
        self.directions: Tensor
        self.register_buffer("directions", _orthogonal(slots, self.head_dim, torch.Generator().manual_seed(seed)))

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return slots * sizes["head_dim"]

    def features(self, q: Tensor) -> Tensor:
        # exp(w x - |x|^2 / 2) <= exp(|w|^2 / 2), about exp(d / 2): no stabiliser, which a causal f could not have.
        x = q * self.head_dim**-0.25
        return (x @ self.directions.to(q.dtype).mT - x.square().sum(-1, keepdim=True) / 2).exp() * self.slots**-0.5


@register_control("dpfp")
class DPFP(FeatureMap):
    """Deterministic parameter-free projection (Schlag et al. 2021): products of rectified entries `order` apart."""

    paper = "4"

    def __init__(self, slots: int, *, order: int | None = None, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        width = 2 * self.head_dim
        self.order = slots // width if order is None else at_least(1, order=order)
        if slots != width * self.order:
            raise ValueError(
                f"control 'dpfp' has 2 * head_dim * order slots, a multiple of {width}"
                + ("" if order is None else f" and {width * order} with order={order}")
                + f", got {slots}"
            )

    @classmethod
    def default_slots(cls, head_dim: int) -> int:
        return 2 * head_dim

    def features(self, q: Tensor) -> Tensor:
        x = torch.cat([q, -q], dim=-1).relu()
        return torch.cat([x * x.roll(i, -1) for i in range(1, self.order + 1)], dim=-1)


def _orthogonal(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Gaussian rows, orthogonal within blocks of `width`, with the lengths of independent Gaussian vectors."""
    blocks = []
    for _ in range(-(-rows // width)):
        q, r = torch.linalg.qr(torch.randn(width, width, generator=generator))
        blocks.append(q * r.diagonal().sign())  # LAPACK fixes the signs of q: without this its directions lean one way
    lengths = torch.randn(rows, width, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:rows] * lengths
