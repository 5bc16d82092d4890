"""Inputs that nobody sends on purpose: not finite, without rows, differentiated twice or mapped over."""

from __future__ import annotations

import pytest
import torch
from contract import CASES, CAUSAL, EMBED, ENCODING, build, few, tokens

from abc_attn import BoundedAttention, Write, read, scan
from abc_attn.kernels import describe_backends

BACKENDS = [name for name, available, _ in describe_backends() if available]
every_causal = pytest.mark.parametrize("case", CAUSAL, ids=str)
# "auto" takes the native kernels where they are; the loop of the reference sees no later token by itself.
every_backend = pytest.mark.parametrize("backend", ["auto", "torch"])


def made(case, backend, causal=True):
    """fp64 where the backend has it: what is not finite may take another path, which rounds otherwise."""
    dtype = torch.float32 if backend in ("auto", "native") else torch.float64
    return build(case, few(case), causal=causal, dtype=dtype, backend=backend), tokens(2, 12, dtype)


@every_backend
@every_causal
def test_the_future_does_not_matter_whatever_it_holds(case, backend):
    attention, x = made(case, backend)
    for followed in (False, True):  # a path without gradients may be another one
        with torch.set_grad_enabled(followed):
            expected = attention(x)
            for value in (torch.inf, -torch.inf, torch.nan):
                changed = x.clone()
                changed[0, 6] = value
                y = attention(changed)
                torch.testing.assert_close(y[0, :6], expected[0, :6])
                torch.testing.assert_close(y[1], expected[1])
                assert y[0, 6].isnan().all()


@every_backend
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_may_hold_anything(case, causal, backend):
    if case not in (CAUSAL if causal else ENCODING):
        pytest.skip("not an online control" if causal else "a control that needs queries")
    attention, x = made(case, backend, causal)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, :3] = padding[1, 7:] = True
    expected = attention(x, key_padding_mask=padding)
    for value in (torch.inf, torch.nan):
        torch.testing.assert_close(
            attention(x.masked_fill(padding[..., None], value), key_padding_mask=padding), expected
        )


@every_backend
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_batch_may_have_no_rows(case, causal, backend):
    if case not in (CAUSAL if causal else ENCODING):
        pytest.skip("not an online control" if causal else "a control that needs queries")
    attention = build(case, few(case), causal=causal, dtype=torch.float32, backend=backend)
    x = torch.randn(0, 5, EMBED, requires_grad=True)
    y, state = attention(x, key_padding_mask=torch.zeros(0, 5, dtype=torch.bool), return_state=True)
    assert y.shape == (0, 5, EMBED)
    y.sum().backward()
    for t in (1, 3) if causal else ():
        y, state = attention(torch.randn(0, t, EMBED), state=state, return_state=True)
        assert y.shape == (0, t, EMBED)
    assert state.length.shape == (0,)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("control", ["mlp:4", "elu", "random:4", "window:4", "global:2+window:3", "softmax"])
def test_transforms_of_functions(control):
    attention = BoundedAttention(16, 2, control, causal=True)
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(torch.vmap(attention)(x[:, None])[:, 0], attention(x))
    followed = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(attention(followed).sin().sum(), followed)
    torch.testing.assert_close(torch.func.grad(lambda x: attention(x).sin().sum())(x), expected)
    each = torch.vmap(torch.func.grad(lambda x: attention(x).sin().sum()))(x[:, None])[:, 0]
    torch.testing.assert_close(each, expected)


def second(control, backend, **options):
    attention = BoundedAttention(16, 2, control, causal=True, backend=backend, **options)
    x = torch.randn(1, 7, 16, requires_grad=True)
    (first,) = torch.autograd.grad(attention(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def test_second_derivatives_are_given_or_refused_with_a_reason():
    second("mlp:4", "torch")
    second("mlp:4", "torch", gate=True)
    if "native" in BACKENDS:
        with pytest.raises(NotImplementedError, match="no second derivatives: use backend='torch'"):
            second("mlp:4", "native")
    with pytest.raises(NotImplementedError, match=r"under torch\.func only"):
        second("mlp:4", "reference", gate=True)


@every_causal
def test_second_derivatives_are_never_an_error_of_torch(case):
    attention, x = made(case, "auto")
    x.requires_grad_()
    (first,) = torch.autograd.grad(attention(x).sin().sum(), x, create_graph=True)
    try:
        (found,) = torch.autograd.grad(first.sum(), x)
    except NotImplementedError as refusal:
        assert "second derivatives" in str(refusal)  # noqa: PT017
    else:
        assert found.isfinite().all()


@pytest.mark.parametrize("control", ["softmax", "window:4", "dilated:3", "global:2+window:3"])
def test_second_derivatives_where_torch_has_none(control):
    with pytest.raises(NotImplementedError, match="no second derivatives: use backend='reference'"):
        second(control, "torch")
    assert second(control, "reference").isfinite().all()


@pytest.mark.parametrize("value", ["x", True, float("nan"), float("inf")])
def test_a_scale_is_a_number(value):
    q, k, v, phi = torch.randn(4, 1, 1, 3, 4)
    _, memory = scan(q, k, v, Write(phi))
    calls = (
        lambda: BoundedAttention(16, 2, "mlp:4", scale=value),
        lambda: scan(q, k, v, Write(phi), scale=value),
        lambda: read(q, memory, scale=value),
    )
    for call in calls:
        with pytest.raises(TypeError, match="scale must be a number, or None"):
            call()


@every_backend
def test_the_gradient_of_a_decay_that_leaves_nothing_is_nothing(backend):
    q, k, v, phi = torch.randn(4, 1, 2, 70, 6)
    log_decay = -torch.rand(1, 2, 70, 6)
    gone = torch.rand(log_decay.shape) < 0.2
    log_decay = log_decay.masked_fill(gone, -200.0).requires_grad_()
    out, memory = scan(q, k, 1000 * v, Write(phi, log_decay), backend=backend)
    (found,) = torch.autograd.grad(out.sin().sum() + memory.v.sum(), log_decay)
    assert (found[gone] == 0).all()
    assert (found[~gone] != 0).any()
