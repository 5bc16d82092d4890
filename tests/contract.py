"""The cases of the contract: every registered control, options that change the maths, gates, and compositions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from abc_attn import CONTROLS, BoundedAttention

SLOTS = (1, 5, 8, 64)
EMBED, HEADS, KV_HEADS = 16, 4, 2  # head_dim 4

# The example of docs/writing-a-control.md registers itself, and is then held to the contract like any other.
DOCS = Path(__file__).parents[1] / "docs" / "writing-a-control.md"
exec(
    compile(re.search(r"```python\n(.*?)```", DOCS.read_text(), re.S).group(1), str(DOCS), "exec"), {"__name__": "docs"}
)


class Case(NamedTuple):
    control: str  # {n} stands for the number of slots
    options: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return self.control.replace(":{n}", "") + "".join(f",{name}={value}" for name, value in self.options.items())


VARIANTS = [
    Case("mlp:{n}", {"activation": "relu"}),
    Case("mlp:{n}", {"activation": "sigmoid"}),
    Case("mlp:{n}", {"activation": "softmax", "temperature": 0.3}),
    Case("mlp:{n}", {"normalization": "write"}),
    Case("mlp:{n}", {"normalization": "write", "gate": True}),
    Case("mlp:{n}", {"activation": "relu", "gate": True}),
    Case("dilated:{n}", {"dilation": 3}),
    Case("global:{n}", {"every": 3}),
    Case("global:{n}", {"positions": (2,)}),
    Case("compressive:{n}", {"ratio": 3}),
    Case("rfa:{n}", {"floor": 3.0}),
]
COMPOSITIONS = [
    Case("window:{n}+mlp:{n}"),
    Case("window:{n}+mlp:{n}", {"gate": True}),
    Case("global:3+window:{n}"),
    Case("global:2+window:{n}+random:{n}"),
    Case("global:{n}+compressive:{n}", {"every": 4}),
    Case("dilated:3+linformer:{n}"),
    Case("elu+favor:{n}"),
]
NAMED = [Case(name if name in ("softmax", "elu") else f"{name}:{{n}}") for name in CONTROLS]
GATED = [
    Case(case.control, {"gate": True})
    for case, name in zip(NAMED, CONTROLS, strict=True)
    if "gate" in CONTROLS[name].options()
]
CASES = [*NAMED, *GATED, *VARIANTS, *COMPOSITIONS]
CAUSAL = [case for case in CASES if all(CONTROLS[part.split(":")[0]].online for part in case.control.split("+"))]


def build(
    case: Case, n: int, *, causal: bool = True, dtype: torch.dtype = torch.float64, **options: Any
) -> BoundedAttention:
    torch.manual_seed(1)
    control = case.control.format(n=n)
    options = {"num_kv_heads": KV_HEADS, "causal": causal} | options
    return BoundedAttention(EMBED, HEADS, control, **options, **case.options).to(dtype)


def accepted(case: Case) -> list[int]:
    """The numbers of slots that the control accepts; a control that accepts none is a failure."""
    found = []
    for n in SLOTS if "{n}" in case.control else (1,):
        try:
            build(case, n, causal=False)
            found.append(n)
        except ValueError as refusal:
            if "slots" not in str(refusal):
                raise
    assert found, f"{case} accepts none of {SLOTS}"
    return found


def few(case: Case) -> int:
    """A number of slots smaller than the sequences of the tests."""
    return accepted(case)[-2] if len(accepted(case)) > 1 else accepted(case)[0]


def tokens(b: int, t: int, dtype: torch.dtype = torch.float64, seed: int = 2) -> Tensor:
    return torch.randn(b, t, EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(a: Tensor, reference: Tensor, size: float | None = None) -> float:
    """max|a - ref| / max|ref|; `size` stands in for max|ref| where the reference may be zero."""
    assert a.shape == reference.shape
    a, reference = a.detach(), reference.detach()
    assert torch.isfinite(a).all()
    if not a.numel():
        return 0.0
    size = float(reference.abs().max()) if size is None else size
    return float((a - reference).abs().max()) / (size or 1.0)


def gradients(y: Tensor, attention: BoundedAttention, *inputs: Tensor) -> list[Tensor]:
    """Of a fixed mixture of all outputs, with respect to the inputs and every parameter."""
    mixture = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    wanted = [*inputs, *attention.parameters()]
    found = torch.autograd.grad((y * mixture).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


def gradient_error(found: list[Tensor], reference: list[Tensor]) -> float:
    """Relative to the largest of all gradients: a key's bias, say, has none in exact arithmetic."""
    size = max(float(g.abs().max()) for g in reference)
    return max(error(a, b, size) for a, b in zip(found, reference, strict=True))
