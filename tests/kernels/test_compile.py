"""torch.compile of whole attentions: outputs and gradients are those of eager mode, for every control."""

from __future__ import annotations

import pytest
import torch
from contract import CASES, CAUSAL, Expected, Form, build, few, gradients, judge, results, tokens

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # torch's own, as it imports inductor
]

# The second length is compiled for any; inductor takes seconds for each.
LENGTHS = {"aot_eager": (1, 70), "inductor": (24,)}


def check(case, backend, causal, lengths):
    """By the contract's rule, against the reference in fp64."""
    attention = build(case, few(case), causal=causal, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend=backend)
    for t in lengths:

        def scenario(kernels, t=t):
            exact, x = build(case, few(case), causal=causal, backend=kernels), tokens(2, t).requires_grad_()
            y = exact(x)
            return results(y, gradients(y, exact, x))

        expected, x = Expected(scenario), tokens(2, t, torch.float32).requires_grad_()
        y = compiled(x)
        judge(results(y, gradients(y, attention, x)), expected, Form(backend), f"{case} t={t}")
        with torch.no_grad():
            judge(results(compiled(x)), expected, Form(backend), f"{case} t={t} without gradients")


@pytest.mark.parametrize("backend", list(LENGTHS))
@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_causal(case, backend):
    check(case, backend, True, LENGTHS[backend])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_encoder(case):
    check(case, "aot_eager", False, LENGTHS["aot_eager"][-1:])


@pytest.mark.parametrize("case", [case for case in CASES if case not in CAUSAL] + CAUSAL[:2], ids=str)
def test_encoder_with_inductor(case):
    check(case, "inductor", False, LENGTHS["inductor"])
