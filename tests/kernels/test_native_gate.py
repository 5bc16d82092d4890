"""log f of a gate in one pass (native_gate), against torch's operations in fp64; and chunks that forget much."""

from __future__ import annotations

import math

import pytest
import torch
from contract import WIDTHS, vector_width
from torch.nn import functional as F

from abc_attn import mlp_attention
from abc_attn.kernels import native, native_gate
from abc_attn.normaliser import log_sigmoid

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

SHAPE = (2, 3, 41, 19)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(native_gate, "LEAST", 1)


@pytest.fixture(params=["contiguous", "projected", "every second token", "expanded"])
def logit(request):
    x = 20 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    match request.param:
        case "projected":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "every second token":
            return x.repeat_interleave(2, 2)[:, :, ::2]
        case "expanded":
            return x[:, :1].expand(SHAPE)
    return x


def plain(logit, exponent):
    return F.logsigmoid(logit) / exponent


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("exponent", [1.0, 8.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_values_and_gradients(logit, exponent, width, threads):
    d_log_keep, before = torch.randn(SHAPE), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with vector_width(width):
            logit = logit.detach().requires_grad_()
            found = log_sigmoid(logit, exponent)
            (d_logit,) = torch.autograd.grad(found, logit, d_log_keep)
    finally:
        torch.set_num_threads(before)
    assert "_LogSigmoid" in found.grad_fn.name()
    assert found.is_contiguous()
    wide = logit.detach().double().requires_grad_()
    expected = plain(wide, exponent)
    (d_expected,) = torch.autograd.grad(expected, wide, d_log_keep.double())
    torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=0)
    torch.testing.assert_close(d_logit.double(), d_expected, rtol=1e-6, atol=0)


def test_a_gradient_lies_as_its_projection_wants_it():
    projected = torch.randn(2, 41, 3, 19).transpose(1, 2).requires_grad_()
    (d_logit,) = torch.autograd.grad(log_sigmoid(projected, 8.0).sum(), projected)
    assert d_logit.stride() == projected.stride()


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_not_finite(width):
    logit = torch.zeros(1, 1, 2, 19)
    logit[0, 0, :, :6] = torch.tensor([math.inf, -math.inf, math.nan, 1e4, -1e4, 90.0])
    logit.requires_grad_()
    with vector_width(width):
        found = log_sigmoid(logit, 8.0)
        (d_logit,) = torch.autograd.grad(found.sum(), logit)
    expected = plain(logit, 8.0)
    (d_expected,) = torch.autograd.grad(expected.sum(), logit)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-37, equal_nan=True)
    torch.testing.assert_close(d_logit, d_expected, rtol=1e-6, atol=1e-37, equal_nan=True)


def test_second_derivatives():
    logit = torch.randn(1, 2, 3, 19)
    found = []
    for run, dtype in ((log_sigmoid, torch.float32), (plain, torch.float64)):
        x = logit.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(run(x, 8.0).exp().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0].double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def test_what_it_leaves_to_torch():
    x = torch.randn(2, 2, 3, 19)
    for other in (x[0], x.double(), x[..., ::2], x[:, :, :0], x[..., :4], x.to("meta")):
        assert native_gate.log_sigmoid(other, 8.0) is None
    found = torch.func.vmap(log_sigmoid)(x[None])[0]
    torch.testing.assert_close(found, F.logsigmoid(x))
    compiled = torch.compile(lambda x: log_sigmoid(x, 8.0), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x, 8.0))


@pytest.mark.parametrize("rate", [0.7, 1.0, 1.5, 3.0, 20.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_slots_that_forget_much_in_a_chunk(width, rate):
    """Of a chunk of 32 tokens, 22 to 640 nats; beside slots that forget next to nothing."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 80, 16, generator=draw) for _ in range(3))
    logits = 3 * torch.randn(1, 2, 80, 16, generator=draw)
    log_keep = -rate * (0.5 + torch.rand(1, 2, 80, 16, generator=draw)) * torch.logspace(0, -3, 16)
    found = []
    for backend, dtype in (("native", torch.float32), ("reference", torch.float64)):
        given = [x.to(dtype).requires_grad_() for x in (q, k, v, logits, log_keep)]
        with vector_width(width):
            out, (memory, log_total) = mlp_attention(*given[:4], log_keep=given[4], backend=backend)
            loss = out.sin().sum() + memory.v.sin().sum() + log_total.sum()
            found.append(
                [x.detach().double() for x in (out, *memory[:3], log_total, *torch.autograd.grad(loss, given))]
            )
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-5
