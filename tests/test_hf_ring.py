"""Rings are a faster way to the same: outputs, states and gradients of `scan` with the control's own writes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from abc_attn.attention import MemoryAttention
from abc_attn.controls import make_control
from abc_attn.hf import ring as ring_module
from abc_attn.hf.ring import Ring

HEADS, KV, D = 4, 2, 8


def plain(control):
    """The reference loop over the control's own writes."""
    shape = {"num_heads": HEADS, "num_kv_heads": KV, "head_dim": D, "causal": True}
    attention = MemoryAttention(**shape, scale=0.3, backend="reference")
    attention.control = make_control(control, embed_dim=6, num_heads=KV, head_dim=D, causal=True)
    attention.describe_states()
    return attention


def same(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert torch.allclose(a.double(), b.double(), atol=1e-6)


@pytest.mark.parametrize(
    "control", ["window:5", "global:2+window:5", "window:3+global:4", "window:1", "global:1+window:1"]
)
@pytest.mark.parametrize("pieces", [[20], [3, 1, 1, 9, 6], [1] * 20, [7, 13]])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_the_reference(control, pieces, padded, monkeypatch):
    monkeypatch.setattr(ring_module, "BLOCK", 6)
    attention = plain(control)
    ring = Ring.of(attention.control)
    q, k, v = (torch.randn(3, heads, 20, D) for heads in (HEADS, KV, KV))
    mask = torch.zeros(3, 20, dtype=torch.bool)
    if padded:
        mask[1, :8] = mask[2, 5:11] = mask[2, 14:] = True
    states = None, None
    with torch.no_grad():
        for piece in torch.arange(20).split(pieces):
            part = [x[:, :, piece] for x in (q, k, v)]
            hidden = mask[:, piece] if padded else None
            expected, old = attention.attend(
                torch.zeros(3, len(piece), 6), *part, key_padding_mask=hidden, state=states[0]
            )
            found, new = ring.attend(*part, hidden, states[1], attention._described, 0.3)
            same(found, expected)
            states = old, new
            attention.check_state(new, 3, False)
            for a, b in zip(new._tensors().values(), old._tensors().values(), strict=True):
                same(a, b)


def test_gradients_are_those_of_the_reference(monkeypatch):
    monkeypatch.setattr(ring_module, "BLOCK", 6)
    attention = plain("global:2+window:5")
    inputs = [torch.randn(2, heads, 15, D, requires_grad=True) for heads in (HEADS, KV, KV)]
    mixture, memory = torch.randn(2, HEADS, 15, D), torch.randn(2, KV, 7, D)

    def gradients(out, state):
        return torch.autograd.grad((out * mixture).sum() + (state.memory.v * memory).sum(), inputs)

    expected = gradients(*attention.attend(torch.zeros(2, 15, 6), *inputs))
    ring = Ring.of(attention.control)
    for a, b in zip(gradients(*ring.attend(*inputs, None, None, "", 0.3)), expected, strict=True):
        same(a, b)


def test_other_controls_are_no_rings():
    shape = {"embed_dim": 6, "num_heads": KV, "head_dim": D, "causal": True}
    for control in ("mlp:4", "global:4", "window:3+mlp:4", "random:4", "dilated:3", "global:2+window:3+random:4"):
        assert Ring.of(make_control(control, **shape)) is None
    assert Ring.of(make_control("window:4", **shape, gate=True)) is None
    assert Ring.of(make_control("global:4+window:4", **shape, every=2)) is None
