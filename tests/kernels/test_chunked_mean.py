"""The torch backend's running means, which work on some chunks of some rows at a time and differentiate themselves."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.utils.checkpoint
from contract import error
from torch import Tensor

from abc_attn import mlp_attention

MODULE = importlib.import_module("abc_attn.kernels.chunked_mean")  # the package has a function of this name

# batch, heads, queries to a key, tokens: with chunks of 8 tokens, 6 at a time
LAYOUTS = {
    "some chunks of one row": (1, 1, 1, 100),
    "some chunks of some rows": (1, 3, 1, 61),
    "all chunks of all rows": (1, 2, 1, 17),
    "a chunk of all rows": (2, 3, 1, 40),
    "a chunk of some rows": (3, 5, 1, 27),
    "grouped queries, some chunks": (1, 2, 3, 45),
    "grouped queries, a chunk": (2, 3, 2, 45),
    "less than a chunk": (2, 2, 1, 5),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(MODULE, "CHUNK", 8)
    monkeypatch.setattr(MODULE, "AT_A_TIME", 6)


def tokens(layout: str, t: int | None = None) -> list[Tensor]:
    """q, k, v and logits in fp64, of widths that cannot be taken for one another."""
    b, h, groups, length = LAYOUTS[layout]
    sizes = ((h * groups, 3), (h, 3), (h, 4), (h, 5))
    return [torch.randn(b, heads, t or length, width, dtype=torch.float64) for heads, width in sizes]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_state_and_gradients_are_those_of_the_loop(layout, padded):
    torch.manual_seed(0)
    inputs = tokens(layout)
    with torch.no_grad():
        _, (memory, log_total) = mlp_attention(*tokens(layout, t=3), backend="reference")
    wanted = [x.requires_grad_() for x in (*inputs, memory.k, memory.v, memory.mass, log_total)]
    b, t = inputs[0].shape[0], inputs[0].shape[2]
    padding = torch.arange(t) < torch.arange(b)[:, None] + 2 if padded else None
    found = []
    for backend in ("torch", "reference"):
        out, state = mlp_attention(*inputs, (memory, log_total), key_padding_mask=padding, backend=backend)
        results = (out, state[0].k, state[0].v, state[0].mass, state[1])
        loss = sum((part.sin() * part.detach().cos()).sum() for part in results)
        found.append((*results, *torch.autograd.grad(loss, wanted)))
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) <= 1e-12


# What is added to the logits of the first half and of the second, and in which units the sums are tried: the weights as
# they are, the largest of each slot. Where neither serves, decays take their place.
HEIGHTS = {
    "ordinary": (0.0, 0.0, [None]),
    "high and low": (500.0, -500.0, ["largest"]),
    "low, then a little higher": (-500.0, -480.0, ["largest"]),
    "in range at first": (20.0, 40.0, [None, "largest"]),
    "on both sides of 1": (-20.0, 20.0, [None]),
    "more than any unit serves": (-25.0, 40.0, [None]),
    "more than any unit serves, and high": (50.0, 90.0, []),
}


@pytest.mark.parametrize("height", HEIGHTS)
def test_the_unit_is_looked_for_where_weights_are_not_ordinary(height, monkeypatch):
    torch.manual_seed(5)
    *inputs, logits = tokens("some chunks of some rows")
    *heights, units = HEIGHTS[height]
    half = logits.shape[2] // 2
    logits = logits + torch.tensor(heights, dtype=logits.dtype).repeat_interleave(half + 1)[: logits.shape[2], None]
    inputs = [x.requires_grad_() for x in (*inputs, logits)]
    tried: list[str | None] = []
    in_unit = MODULE._in_unit

    def spy(*given):
        tried.append(None if given[6] is None else "largest")
        return in_unit(*given)

    monkeypatch.setattr(MODULE, "_in_unit", spy)
    found = []
    for backend in ("torch", "reference"):
        out, (memory, log_total) = mlp_attention(*inputs, backend=backend)
        loss = out.sin().sum() + memory.k.sin().sum() + memory.v.sin().sum() + log_total.sin().sum()
        found.append((out, memory.k, memory.v, memory.mass, log_total, *torch.autograd.grad(loss, inputs)))
    assert tried == units
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) <= 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_changes_where_no_gradient_is_asked(layout):
    """The arrays are shared out differently then."""
    torch.manual_seed(1)
    inputs = tokens(layout)
    with torch.no_grad():
        alone, state = mlp_attention(*inputs, backend="torch")
    out, with_gradients = mlp_attention(*(x.requires_grad_() for x in inputs), backend="torch")
    for a, b in zip((alone, *state[0], state[1]), (out, *with_gradients[0], with_gradients[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layout", ["some chunks of some rows", "a chunk of some rows", "grouped queries, some chunks"])
def test_gradients_are_those_of_finite_differences(layout, dropout):
    def read(*inputs):
        torch.manual_seed(3)  # the same weights are dropped every time
        out, (memory, log_total) = mlp_attention(*inputs, dropout=dropout, backend="torch")
        return out, memory.k, memory.v, log_total

    torch.manual_seed(2)
    assert torch.autograd.gradcheck(read, [x.requires_grad_() for x in tokens(layout, t=20)], fast_mode=True)


@pytest.mark.parametrize("layout", ["some chunks of some rows", "a chunk of some rows", "grouped queries, some chunks"])
def test_gradients_have_gradients(layout):
    def read(*inputs):
        return mlp_attention(*inputs, backend="torch")[0]

    torch.manual_seed(4)
    inputs = [x.requires_grad_() for x in tokens(layout, t=20)]
    assert torch.autograd.gradgradcheck(read, inputs, fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in jacfwd
def test_transforms_of_functions():
    def read(*inputs):
        return mlp_attention(*inputs, backend="torch")[0]

    torch.manual_seed(8)
    inputs = tokens("grouped queries, some chunks", t=20)
    expected = torch.autograd.functional.jacobian(read, tuple(inputs))
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        found = transform(read, argnums=(0, 1, 2, 3))(*inputs)
        assert all(error(a, b) <= 1e-12 for a, b in zip(found, expected, strict=True))


def test_what_training_keeps():
    """Its inputs (copies of them, where they are filled up to whole chunks), and the sums before each part of the text;
    autograd would keep ten arrays as large as the logits."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    b, h, t, d, n = 1, 2, 800, 8, 8
    inputs = [torch.randn(b, h, t, width, requires_grad=True) for width in (d, d, d, n)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out, _ = mlp_attention(*inputs, backend="torch")
    given = sum(x.nbytes for x in inputs)
    parts = -(-t // (8 * 3))  # three chunks of both rows at a time
    assert given < sum(kept.values()) <= given + (parts + 4) * b * h * (2 * n * d + 2 * n) * 4
    out.sum().backward()


# What a gradient of one's own has to mind, and autograd does by itself


def test_checkpointing():
    torch.manual_seed(6)
    inputs = [x.requires_grad_() for x in tokens("some chunks of some rows")]
    found = []
    for run in (lambda f: f(*inputs), lambda f: torch.utils.checkpoint.checkpoint(f, *inputs, use_reentrant=False)):
        out = run(lambda *given: mlp_attention(*given, backend="torch")[0])
        found.append(torch.autograd.grad(out.sin().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_backward_pass_under_autocast_is_as_exact():
    torch.manual_seed(7)
    inputs = [x.float().requires_grad_() for x in tokens("some chunks of some rows")]
    found = []
    for enabled in (False, True):
        out, _ = mlp_attention(*inputs, backend="torch")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(out, inputs, torch.ones_like(out)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("sizes", [(0, 2, 0, 3), (2, 2, 0, 3), (2, 2, 3, 0)], ids=["no rows", "no keys", "no values"])
def test_nothing_to_read(sizes):
    b, h, d, e = sizes
    inputs = [torch.randn(b, h, 50, width, requires_grad=True) for width in (d, d, e, 4)]
    found = []
    for backend in ("torch", "reference"):
        out, _ = mlp_attention(*inputs, scale=1.0, backend=backend)
        found.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_output_may_be_changed_in_place():
    inputs = [x.requires_grad_() for x in tokens("some chunks of some rows")]
    out, _ = mlp_attention(*inputs, backend="torch")
    (expected,) = torch.autograd.grad(2 * out.sum(), inputs[:1], retain_graph=True)
    out *= 2
    assert torch.equal(torch.autograd.grad(out.sum(), inputs[:1])[0], expected)


def test_only_what_depends_on_a_gradient_asks_for_one():
    """A state that is carried on would otherwise keep the graph of all its text."""
    for part, expected in enumerate(((), ("k",), ("v",), ("k", "v", "mass", "log_total"))):
        inputs = tokens("some chunks of some rows")
        inputs[part].requires_grad_()
        out, (memory, log_total) = mlp_attention(*inputs, backend="torch")
        state = {**memory._asdict(), "log_total": log_total}
        assert out.requires_grad
        assert tuple(name for name, x in state.items() if x.requires_grad) == expected


def test_what_is_not_finite_reaches_no_earlier_chunk():
    for part in range(3):
        inputs = tokens("some chunks of one row")
        inputs[part][:, :, 50] = torch.nan
        out, _ = mlp_attention(*inputs, backend="torch")
        assert bool(out[:, :, :48].isfinite().all())
        assert bool(out[:, :, 50].isnan().all())
