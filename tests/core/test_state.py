"""State: reordered, moved, counted, saved and loaded; never changed under a caller's feet."""

from __future__ import annotations

import pytest
import torch
from contract import CASES, CAUSAL, ENCODING, assert_same_state, build, error, few, tokens

from abc_attn import CONTROLS, BoundedAttention, State, make_control
from abc_attn.controls.learned import MLP
from abc_attn.controls.positional import Compressive

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_causal = pytest.mark.parametrize("case", CAUSAL, ids=str)


@every_causal
def test_save_and_load_resume(case, tmp_path):
    attention = build(case, few(case), dtype=torch.float32)
    x = tokens(2, 20, torch.float32)
    _, state = attention(x[:, :13], return_state=True)
    state.save(tmp_path / "state.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]  # no temporary file stays
    loaded = State.load(tmp_path / "state.safetensors")
    assert_same_state(loaded, state, 0.0)
    assert torch.equal(attention(x[:, 13:], state=loaded), attention(x[:, 13:], state=state))


@pytest.mark.parametrize("case", ENCODING, ids=str)
def test_reorder_picks_rows(case):
    attention = build(case, few(case), causal=False, context_dim=16)
    x, context, index = tokens(3, 4), tokens(3, 15, seed=4), torch.tensor([2, 0, 0, 1])
    y, state = attention(x, context, return_state=True)
    assert error(attention(x[index], state=state.reorder(index)), y[index]) <= 1e-12


@every_causal
def test_state_is_not_changed_by_use(case):
    attention = build(case, few(case))
    _, state = attention(tokens(2, 9), return_state=True)
    before = {name: part.clone() for name, part in state._tensors().items()}
    for t in (1, 12):
        attention(tokens(2, t, seed=7), state=state, return_state=True)
    assert all(torch.equal(part, before[name]) for name, part in state._tensors().items())


@every_causal
def test_nbytes_is_all_the_storage_and_never_grows(case):
    if case.control == "softmax":
        pytest.skip("its memory grows")
    attention = build(case, few(case))
    with torch.no_grad():
        _, short = attention(tokens(2, 1), return_state=True)
        _, long = attention(tokens(2, 300), return_state=True)
    assert short.nbytes == long.nbytes == sum(part.numel() * part.element_size() for part in long._tensors().values())


def test_to_widens_and_never_narrows():
    attention = build(CASES[0]._replace(control="mlp:8"), 8, dtype=torch.float32)
    _, state = attention(tokens(1, 3, torch.float32), return_state=True)
    assert state.to(torch.bfloat16).memory.k.dtype == torch.float32
    assert state.to(torch.float64).memory.k.dtype == torch.float64
    assert state.to("cpu", dtype=torch.float64).length.dtype == torch.int64
    assert state.to("meta").memory.k.device.type == "meta"


@every_case
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
def test_shapes_without_values(case, causal):
    """On the meta device: nothing may be decided by what a tensor holds."""
    if case not in (CAUSAL if causal else ENCODING):
        pytest.skip("not an online control" if causal else "a control that needs queries")
    attention = build(case, few(case), causal=causal, dtype=torch.float32).to("meta")
    y, state = attention(tokens(2, 7, torch.float32).to("meta"), return_state=True)
    assert y.shape == (2, 7, attention.embed_dim)
    if attention.control.appends:
        attention(tokens(2, 1, torch.float32).to("meta"), state=state)


def test_a_subclass_keeps_the_options_it_passes_on():
    class Half(Compressive):
        def __init__(self, slots, *, half=True, **rest):
            super().__init__(slots, **rest)
            self.half = half

    class Named(Half):
        pass

    class Alone(Half):
        def __init__(self, slots, *, embed_dim, num_heads, head_dim, causal):
            sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": head_dim, "causal": causal}
            super().__init__(slots, ratio=2, **sizes)

    class GatedMean(MLP):
        def __init__(self, slots, *, extra=1, **rest):
            super().__init__(slots, **rest)
            self.extra = extra

    assert Half.options() == Named.options() == {"ratio": None, "half": True, "gate": False}
    assert Alone.options() == {"gate": False}
    assert GatedMean.options() == {**MLP.options(), "extra": 1}
    sizes = {"embed_dim": 8, "num_heads": 2, "head_dim": 4}
    assert Named(3, ratio=2, half=False, **sizes).describe() == "Named:3(ratio=2, half=False)"  # not its parent's name
    CONTROLS["gated-mean"] = GatedMean
    try:
        made = make_control("gated-mean:4", gate=True, causal=True, embed_dim=8, num_heads=2)
    finally:
        del CONTROLS["gated-mean"]
    assert isinstance(made, GatedMean)  # the gate is inside, as in its parent
    assert made.gate is not None


def test_a_control_is_tied_by_passing_it():
    shared = make_control("mlp:8", embed_dim=16, num_heads=4, causal=True)
    layers = [BoundedAttention(16, 4, shared, causal=True) for _ in range(3)]
    parameters = {id(p) for layer in layers for p in layer.control.parameters()}
    assert len(parameters) == len(list(shared.parameters()))
    states = [None] * 3
    x = tokens(2, 6, torch.float32)
    for _ in range(2):  # tied layers share parameters, not memories
        for i, layer in enumerate(layers):
            _, states[i] = layer(x, state=states[i], return_state=True)
    assert not torch.equal(states[0].memory.k, states[1].memory.k)
