"""The cases of the contract, and the rule by which a backend is judged.

Cases: every registered control, options that change the maths, gates, and compositions.

The rule. fp64 must give what the reference gives in fp64, to 1e-10. fp32 is judged against the same fp64 reference, of
the same weights and inputs (all of them fp32 numbers), in outputs, gradients and states:

    max|fp32 - fp64| / max|fp64|  <=  1e-5 + SLACK * movement

The movement says how well-conditioned the case is. It is measured: how far the fp64 result moves when what the kernel
is given is off by one fp32 rounding, the most of a few seeded draws. Off are, each number by a factor of its own from
1 - 2^-24 to 1 + 2^-24,

    what goes into and comes out of each projection (q, k, v, logits, gates); the state that comes in; phi, weights and
    decays as the control gives them to the kernel; the memory that one token leaves to the next and that its query
    reads; the numerator and denominator of a linear read; the results; and on the way back the gradient of each.

SLACK, stated once below, is 8: a few draws are not the worst, and a kernel adds in another order than the loop. It is
chosen by trial, not derived; docs/numerics.md has the figures, and what it does not cover. Well-conditioned cases move
by 1e-7, so they are held to 1e-5; where a denominator comes near zero the movement is what that costs. Where the error
is below half of 1e-5 the movement is not measured: it could only allow more.

bf16 (autocast) is judged in the same way, with a rounding of 2^-8. Its memory is fp32 and does not round from token to
token, so the draws are all the rounding there is: 2e-2 is allowed, or twice the movement where that is more.
Assignments to a cluster are not continuous, nor is what `keydiff`, `knorm`, `leverage` and `tova` keep; keys, values
and queries are off before the control sees them, so a draw measures what another choice changes. docs/numerics.md says
why, and how to run one vector width.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from abc_attn import CONTROLS, BoundedAttention, Control, State, attention, core
from abc_attn.kernels import BACKENDS, describe_backends, native

SLOTS = (1, 5, 8, 64)
EMBED, HEADS, KV_HEADS = 16, 4, 2  # head_dim 4
SLACK = 8  # how many movements a backend may be off

# The example of docs/writing-a-control.md registers itself, and is then held to the contract like any other. It is a
# module, as a user's control is in one: torch.compile looks for the names that it uses there.
DOCS = Path(__file__).parents[1] / "docs" / "writing-a-control.md"
EXAMPLE = sys.modules["writing_a_control"] = ModuleType("writing_a_control")
exec(compile(re.search(r"```python\n(.*?)```", DOCS.read_text(), re.S).group(1), str(DOCS), "exec"), vars(EXAMPLE))


class Case(NamedTuple):
    control: str  # {n} stands for the number of slots
    options: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return self.control.replace(":{n}", "") + "".join(f",{name}={value}" for name, value in self.options.items())

    def __hash__(self) -> int:
        return hash(str(self))

    def parts(self) -> list[type[Control]]:
        return [CONTROLS[part.split(":")[0]] for part in self.control.split("+")]


VARIANTS = [
    Case("mlp:{n}", {"activation": "relu"}),
    Case("mlp:{n}", {"activation": "sigmoid"}),
    Case("mlp:{n}", {"activation": "softmax", "temperature": 0.3}),
    Case("mlp:{n}", {"normalization": "write"}),
    Case("mlp:{n}", {"normalization": "write", "gate": True}),
    Case("mlp:{n}", {"activation": "relu", "gate": True}),
    Case("mlp:{n}", {"gate": "slot"}),
    Case("mlp:{n}", {"gate": "slot", "activation": "sigmoid", "half_life": 8.0, "exponent": 2.0}),
    Case("slots:{n}", {"half_life": 4.0, "exponent": 1.0}),
    Case("placed:{n}", {"width": 2.0}),
    Case("landmarks:{n}", {"sharpness": 2.0}),
    Case("dilated:{n}", {"dilation": 3}),
    Case("global:{n}", {"every": 3}),
    Case("global:{n}", {"positions": (2,)}),
    Case("compressive:{n}", {"ratio": 3}),
    Case("rfa:{n}", {"floor": 3.0}),
    Case("keydiff:{n}", {"block": 3}),
    Case("knorm:{n}", {"block": 4}),
    Case("leverage:{n}", {"block": 3}),
    Case("tova:{n}", {"block": 3}),
]
COMPOSITIONS = [
    Case("window:{n}+mlp:{n}"),
    Case("window:{n}+mlp:{n}", {"gate": True}),
    Case("window:{n}+slots:{n}"),
    Case("placed:{n}+mlp:{n}"),
    Case("global:3+window:{n}"),
    Case("global:2+window:{n}+random:{n}"),
    Case("global:{n}+compressive:{n}", {"every": 4}),
    Case("dilated:3+linformer:{n}"),
    Case("elu+favor:{n}"),
    Case("window:{n}+keydiff:{n}", {"block": 4}),
    Case("global:3+window:5+keydiff:{n}", {"block": 3}),
    Case("global:2+window:{n}+knorm:3+random:{n}", {"block": 2}),
    Case("global:2+window:{n}+leverage:3+random:{n}", {"block": 2}),
    Case("window:{n}+tova:{n}", {"block": 4}),
    Case("global:3+window:5+tova:{n}", {"block": 3}),
    Case("global:2+window:{n}+tova:3+random:{n}", {"block": 2}),
]
NAMED = [Case(name if name in ("softmax", "elu") else f"{name}:{{n}}") for name in CONTROLS]
GATED = [
    Case(case.control, {"gate": True})
    for case, name in zip(NAMED, CONTROLS, strict=True)
    if "gate" in CONTROLS[name].options()
]
CASES = [*NAMED, *GATED, *VARIANTS, *COMPOSITIONS]
CAUSAL = [case for case in CASES if all(control.online for control in case.parts())]
ENCODING = [case for case in CASES if not any(control.sees_queries for control in case.parts())]


def build(
    case: Case, n: int, *, causal: bool = True, dtype: torch.dtype = torch.float64, **options: Any
) -> BoundedAttention:
    torch.default_generator.manual_seed(1)  # torch.manual_seed takes 3 ms: it writes down who called it, for CUDA
    control = case.control.format(n=n)
    options = {"num_kv_heads": KV_HEADS, "causal": causal} | options
    return BoundedAttention(EMBED, HEADS, control, **options, **case.options).to(dtype)


@lru_cache(maxsize=64)
def shared(
    case: Case, n: int, *, causal: bool = True, dtype: torch.dtype = torch.float64, backend: str = "auto"
) -> BoundedAttention:
    """As `build`, once for all who ask for the same and change nothing."""
    return build(case, n, causal=causal, dtype=dtype, backend=backend)


@cache
def accepted(case: Case) -> list[int]:
    """The numbers of slots that the control accepts; a control that accepts none is a failure."""
    found = []
    for n in SLOTS if "{n}" in case.control else (1,):
        try:
            build(case, n, causal=case not in ENCODING)
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
    """The same fp32 numbers in any dtype."""
    return torch.randn(b, t, EMBED, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
    mixture = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    wanted = [*inputs, *attention.parameters()]
    found = torch.autograd.grad((y * mixture).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


def gradient_error(found: list[Tensor], reference: list[Tensor]) -> float:
    """Relative to the largest of all gradients: a key's bias, say, has none in exact arithmetic."""
    size = max(float(g.abs().max()) for g in reference)
    return max(error(a, b, size) for a, b in zip(found, reference, strict=True))


# The rule


class Precision(NamedTuple):
    floor: float  # what is allowed in any case
    unit: float = 0.0  # the largest relative error of one rounding
    draws: int = 0
    sums: bool = True  # whether the memory is rounded as well

    def allowed(self, movement: float) -> float:
        # Where the memory is not rounded, the draws are all the rounding there is.
        return self.floor + SLACK * movement if self.sums else max(self.floor, 2 * movement)


FP64 = Precision(1e-10)
FP32 = Precision(1e-5, 2**-24, draws=4)
BF16 = Precision(2e-2, 2**-8, draws=16, sums=False)

Results = dict[str, Tensor]  # fp64; each is judged relative to its largest number


def results(
    outputs: Tensor | None = None, gradients: list[Tensor] | None = None, state: State | None = None
) -> Results:
    """By name, for `compare`. All gradients are one: a key's bias, say, has none in exact arithmetic."""
    found = {} if outputs is None else {"outputs": outputs}
    found |= {} if gradients is None else {"gradients": torch.cat([x.flatten() for x in gradients])}
    found |= {} if state is None else {f"state.{name}": part for name, part in state._tensors().items()}
    return {name: x.detach().double() for name, x in found.items()}


def distance(found: Tensor, reference: Tensor, name: str) -> float:
    """max|found - reference| / max|reference|. A number that is -inf in one of them only counts as an error of 1: it
    is the logarithm of an empty sum. NaN is never allowed, nor is +inf.

    What a control keeps for itself are counts and logarithms of sums, whose unit is 1: a sum near 1 has a logarithm
    near 0, and an error of 1e-7 in it is one of 1e-7 in the sum.
    """
    assert found.shape == reference.shape
    if not found.numel():
        return 0.0
    differs, empty, others = 0.0, found == -torch.inf, reference == -torch.inf
    if empty.any() or others.any():
        differs = 0.0 if torch.equal(empty, others) else 1.0
        found, reference = (x.masked_fill(empty | others, 0) for x in (found, reference))
    size = float(reference.abs().max()) or 1.0
    size = max(size, 1.0) if name.startswith("state.inner") else size
    far = float((found - reference).abs().max()) / size
    return max(differs, far) if not math.isnan(far) else torch.inf


def assert_same_state(a: State, b: State, tolerance: float) -> None:
    assert a.control == b.control
    found, expected = results(state=a), results(state=b)
    assert found.keys() == expected.keys()
    for name, part in found.items():
        assert distance(part, expected[name], name) <= tolerance, name


class Expected:
    """What `scenario(backend)`, run in fp64, gives with the reference, and how far that moves."""

    def __init__(self, scenario: Callable[[str], Results], precision: Precision = FP32) -> None:
        self.scenario, self.precision = scenario, precision
        self.results = scenario("reference")

    @cached_property
    def movement(self) -> dict[str, float]:
        most = dict.fromkeys(self.results, 0.0)
        for seed in range(self.precision.draws):
            with rounded(self.precision, seed):
                moved = self.scenario("reference")
            for name, result in self.results.items():
                most[name] = max(most[name], distance(moved[name], result, name))
        assert all(map(math.isfinite, most.values())), "a draw is not finite, and would allow anything"
        return most


class Comparison(NamedTuple):
    name: str
    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.error / self.allowed


def compare(found: Results, expected: Expected, precision: Precision | None = None) -> list[Comparison]:
    precision = precision or expected.precision
    comparisons = []
    for name, result in found.items():
        error, allowed = distance(result, expected.results[name], name), precision.floor
        if precision.draws and error > precision.floor / 2:
            allowed = precision.allowed(expected.movement[name])
        comparisons.append(Comparison(name, error, allowed))
    return comparisons


class Tally:
    """How many comparisons were made for each form, and the one that came closest to what is allowed."""

    def __init__(self) -> None:
        self.forms: dict[str, tuple[int, float, str]] = {}

    def add(self, form: str, number: int, ratio: float, where: str) -> None:
        before, *largest = self.forms.get(form, (0, -1.0, ""))
        self.forms[form] = (before + number, *max(largest, [ratio, where]))

    def lines(self) -> list[str]:
        return [
            f"{form}: {number:,} comparisons, largest error/allowed {ratio:.2f} ({where})"
            for form, (number, ratio, where) in sorted(self.forms.items())
        ]


TALLY = Tally()


def judge(found: Results, expected: Expected, form: Form, where: str) -> None:
    """Assert that all that was found is within what is allowed."""
    for each in compare(found, expected, form.precision):
        TALLY.add(str(form), 1, each.ratio, f"{where} {each.name}")
        assert each.error <= each.allowed, f"{where} {each.name}: error {each.error:.3g}, allowed {each.allowed:.3g}"


# One rounding of what the kernel is given

KERNELS = (
    "scan",
    "mean_attention",
    "write",
    "read",
    "banded",
    "kept_attention",
)  # by which abc_attn.attention reaches the kernels
STEPS = ("write_token", "read_memory", "divide")  # of which core.reference is made


class _Rounded(torch.autograd.Function):
    """x times 1 + unit * u, u uniform in [-1, 1], and its gradient likewise: rounding has the derivative 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: float, draw: torch.Generator) -> Tensor:
        ctx.unit, ctx.draw = unit, draw
        return x * (1 + unit * (2 * torch.rand(x.shape, generator=draw, dtype=x.dtype) - 1))

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Rounded.forward(ctx, d_x, ctx.unit, ctx.draw), None, None


@contextmanager
def rounded(precision: Precision, seed: int) -> Iterator[None]:
    """What an attention gives to its projections, to the kernels and, with `sums`, to the steps of the reference is off
    by one rounding; so is what they return."""
    draw = torch.Generator().manual_seed(seed)

    def off(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Rounded.apply(value, precision.unit, draw) if value.is_floating_point() else value
        if isinstance(value, tuple):
            parts = map(off, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def inexact(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: off(function(*map(off, args), **{k: off(x) for k, x in options.items()}))

    linear, forward = nn.Linear.forward, BoundedAttention.forward

    def continued(self: BoundedAttention, *args: Any, state: State | None = None, **options: Any) -> Any:
        return forward(self, *args, state=off(state), **options)

    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((attention, KERNELS), (core, STEPS if precision.sums else ())):
            for name in names:
                patch.setattr(module, name, inexact(getattr(module, name)))
        patch.setattr(nn.Linear, "forward", lambda self, x: off(linear(self, off(x))))
        patch.setattr(BoundedAttention, "forward", continued)
        yield


# The forms that the contract holds: a backend is tested by being registered


WIDTHS = native.widths()


@contextmanager
def vector_width(name: str | None) -> Iterator[None]:
    """The native kernels in this width; None changes nothing."""
    if name is None:
        yield
        return
    before = native.width()
    native.use_width(name)
    try:
        yield
    finally:
        native.use_width(before)


class Form(NamedTuple):
    backend: str
    dtype: torch.dtype = torch.float32
    width: str | None = None  # of the native kernels

    @property
    def precision(self) -> Precision:
        return FP64 if self.dtype == torch.float64 else FP32

    def __str__(self) -> str:
        return f"{self.backend}-{self.width or ('fp64' if self.dtype == torch.float64 else 'fp32')}"


def forms() -> list[Form]:
    """fp64 in torch; and each registered backend in fp32, the native one in each of its vector widths."""
    found = [Form("torch", torch.float64)]
    for name in BACKENDS:
        if name != "reference":  # with which the others are compared
            found += [Form(name, width=width) for width in WIDTHS if name == "native"] or [Form(name)]
    return found


FORMS = forms()
_QUICK = [Form("torch", torch.float64), *(Form("native", width=width) for width in WIDTHS[:1])]


def skipped_if_unavailable(backend: str) -> list[pytest.MarkDecorator]:
    """The marks of a test that needs this backend."""
    reasons = {name: text for name, available, text in describe_backends() if not available}
    return [pytest.mark.skip(reason=reasons[backend])] if backend in reasons else []


def each_backend(*names: str) -> list[Any]:
    """For pytest: the backends of the registry, or these; those that cannot be used here are skipped."""
    return [pytest.param(name, id=name, marks=skipped_if_unavailable(name)) for name in names or BACKENDS]


def as_parameters(forms: list[Form]) -> list[Any]:
    """For pytest: `make test-quick` takes two of them."""
    return [
        pytest.param(
            form,
            id=str(form),
            marks=[
                *([] if form in _QUICK else [pytest.mark.thorough]),
                *skipped_if_unavailable(form.backend),
            ],
        )
        for form in forms
    ]
