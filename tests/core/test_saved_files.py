"""Models and states that version 0.1 wrote still load, and give what it recorded (tests/files/v0.1)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from abc_attn import BoundedAttention, State

FOLDER = Path(__file__).parents[1] / "files" / "v0.1"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def recorded():
    return load_file(FOLDER / "expected.safetensors")


def error(found, expected):
    """The largest error, relative to the largest value. Both are fp64: no CPU's order of summation matters."""
    assert found.dtype == expected.dtype == torch.float64
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", ["llama", "bert", "adaptive_lm"])
def test_a_saved_model(name, recorded):
    transformers = pytest.importorskip("transformers")
    import abc_attn.hf  # noqa: F401

    auto = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(FOLDER / name, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        assert error(model.double()(recorded["ids"][:, :15]).logits, recorded[name]) < TOLERANCE


def test_a_saved_generation_state(recorded):
    """15 tokens were read by version 0.1, the rest is read here."""
    pytest.importorskip("transformers")
    import abc_attn.hf as hf

    model = hf.BoundedLlamaForCausalLM.from_pretrained(FOLDER / "llama").double()
    cache = hf.load_state(FOLDER / "llama-state.safetensors")
    assert cache.get_seq_length() == 15
    for layer in cache.layers:
        layer.state = layer.state.to(torch.float64)
    with torch.no_grad():
        found = model(recorded["ids"][:, 15:], past_key_values=cache).logits
        assert error(found, recorded["llama-state"]) < TOLERANCE
        # A state that was not read would not have passed.
        assert error(model(recorded["ids"][:, 15:]).logits, recorded["llama-state"]) > 0.01


@pytest.mark.parametrize("control", ["mlp:4", "global:2+window:4", "cluster:4", "window:3+mlp:3"])
def test_a_saved_state_of_one_attention(control, recorded):
    options = {"gate": True} if control == "window:3+mlp:3" else {}
    attention = BoundedAttention(8, 2, control, causal=True, **options)
    prefix = f"{control}/"
    weights = {name.removeprefix(prefix): part for name, part in recorded.items() if name.startswith(prefix)}
    expected = weights.pop("output")
    attention.load_state_dict(weights)
    attention.double()
    state = State.load(FOLDER / f"attention-{control.replace(':', '')}.safetensors")
    assert state.length.tolist() == [15, 15]
    more = recorded["x"][:, 15:].double()
    with torch.no_grad():
        assert error(attention(more, state=state.to(torch.float64)), expected) < TOLERANCE
        assert error(attention(more), expected) > 0.01
