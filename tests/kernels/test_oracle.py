"""An outside oracle, the token loop of flash-linear-attention: `pytest -m oracle`, which needs fla-core."""

from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from contract import each_backend, error

from abc_attn import Memory, Write, mlp_attention, scan

pytestmark = pytest.mark.oracle
B, HEADS, GROUPS, T, N, D, E = 2, 3, 2, 70, 5, 8, 6


@pytest.fixture(scope="module")
def naive():
    """fla.ops.abc.naive from its file: importing the package around it needs triton."""
    spec = spec_from_file_location("naive", distribution("fla-core").locate_file("fla/ops/abc/naive.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(*widths: int) -> list[torch.Tensor]:
    """k, v and the like; the oracle works in fp32 whatever it is given."""
    return [torch.randn(B, HEADS, T, width).requires_grad_() for width in widths]


def gradients(out, wrt):
    return torch.autograd.grad((out * torch.linspace(-1, 1, E)).sum(), wrt)


@pytest.mark.parametrize("backend", each_backend())
@pytest.mark.parametrize("scale", [None, 0.7])
def test_mlp_attention_is_naive_recurrent_abc(naive, backend, scale):
    q, k, v, logits = inputs(D, D, E, N)
    expected, states = naive.naive_recurrent_abc(q, k, v, logits, scale=scale, output_final_state=True)
    out, (memory, _) = mlp_attention(q, k, v, logits, scale=scale, backend=backend)
    assert error(out, expected) < 1e-5
    assert error(memory.k.mT, states[0]) < 1e-5
    assert error(memory.v, states[1]) < 1e-5
    for ours, theirs in zip(gradients(out, [q, k, v, logits]), gradients(expected, [q, k, v, logits]), strict=True):
        assert error(ours, theirs) < 1e-4


def test_mlp_attention_is_naive_cumsum_abc(naive):
    q, k, v, logits = inputs(D, D, E, N)
    assert error(mlp_attention(q, k, v, logits)[0], naive.naive_cumsum_abc(q, k, v, logits)[0]) < 1e-5


@pytest.mark.parametrize("backend", each_backend())
def test_scan_is_the_same_recurrence_with_given_gates_from_a_given_state(naive, backend):
    """Grouped heads too: every key head serves GROUPS query heads."""
    k, v, phi, gate = inputs(D, E, N, N)
    q = torch.randn(B, HEADS * GROUPS, T, D)
    write = Write(phi.sigmoid(), torch.nn.functional.logsigmoid(gate))
    keys, values = torch.randn(B, HEADS, N, D), torch.randn(B, HEADS, N, E)
    expected, states = naive.naive_recurrent_abc(
        q, k, v, write.phi, write.log_decay, initial_state=(keys.mT, values), output_final_state=True
    )
    memory = Memory(keys, values, torch.zeros(B, HEADS, N), torch.ones(B, HEADS, N, dtype=torch.bool))
    out, memory = scan(q, k, v, write, memory, backend=backend)
    assert error(out, expected) < 1e-5
    assert error(memory.k.mT, states[0]) < 1e-5
    assert error(memory.v, states[1]) < 1e-5
