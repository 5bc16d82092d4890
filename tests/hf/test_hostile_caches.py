"""A whole model's state from a file: layers, columns and sizes that are not those of a model are refused."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import source  # noqa: E402

from abc_attn.hf import convert, load_state, save_state  # noqa: E402
from fuzz import caches as fuzz_caches  # noqa: E402
from fuzz.states import written  # noqa: E402

LLAMA, GPT2 = transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel


def read(model, batch=1, tokens=5):
    with torch.no_grad():
        return model(torch.randint(3, 60, (batch, tokens)), use_cache=True).past_key_values


@pytest.fixture(scope="module")
def llama():
    model = convert(source(LLAMA), "mlp:4")
    return model, fuzz_caches.file_of(read(model))


def renamed(good, old, new):
    tensors = {name.replace(old, new, 1): part for name, part in good.tensors.items()}
    return written(tensors, {name.replace(old, new, 1): fact for name, fact in good.facts.items()})


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("self.20000000.", r"self.0. to self.1. without a gap, and it holds 'self.0.', 'self.20000000.'"),
        ("self.2.", "without a gap"),
        ("self.-1.", "without a gap"),
        ("self.01.", "without a gap"),
        ("self.1.1.", "without a gap"),
        ("zzz.1.", "names layers 'zzz.1.'; 'self.0.' and so on"),
        ("cross.1.", "cross.0. to cross.0. without a gap"),
    ],
)
def test_layers_that_no_model_has(llama, new, said, tmp_path):
    (tmp_path / "state").write_bytes(renamed(llama[1], "self.1.", new))
    with pytest.raises(ValueError, match=said):
        load_state(tmp_path / "state")


@pytest.mark.parametrize("columns", ["-5", "4", str(10**30), str(2**53), "x", "", "5.0", "\u0665"])
def test_columns_that_no_model_has_seen(llama, columns, tmp_path):
    good = llama[1]
    (tmp_path / "state").write_bytes(written(good.tensors, good.facts | {"self.1.columns": columns}))
    with pytest.raises(
        ValueError, match=r"columns must be a whole number from 5 \(the tokens read\) to 2\*\*53 - 1, got"
    ):
        load_state(tmp_path / "state")


def test_layers_that_have_read_different_texts(llama, tmp_path):
    good = llama[1]
    (tmp_path / "state").write_bytes(written(good.tensors, good.facts | {"self.1.columns": "6"}))
    with pytest.raises(ValueError, match="must have read the same tokens"):
        load_state(tmp_path / "state")


def test_a_state_of_another_model_says_both_numbers(llama, tmp_path):
    model, good = llama
    (tmp_path / "state").write_bytes(good.content)
    ids = torch.tensor([[5]])
    model(ids, past_key_values=load_state(tmp_path / "state"))
    deeper = convert(source(LLAMA, num_hidden_layers=4), "mlp:4")
    with pytest.raises(ValueError, match="holds the states of 2 layers, and this model has 4"):
        deeper(ids, past_key_values=load_state(tmp_path / "state"))
    save_state(read(deeper), tmp_path / "deeper")
    with pytest.raises(ValueError, match="holds the states of 4 layers, and this model has 2"):
        model(ids, past_key_values=load_state(tmp_path / "deeper"))
    with pytest.raises(ValueError, match=r"\(1, 2, 4, 8\).*\(3, 2, 4, 8\) is needed"):
        model(ids.expand(3, -1), past_key_values=load_state(tmp_path / "state"))
    with pytest.raises(ValueError, match=r"\(1, 2, 4, 8\).*\(1, 4, 4, 8\) is needed"):
        convert(source(LLAMA, num_key_value_heads=4), "mlp:4")(ids, past_key_values=load_state(tmp_path / "state"))
    with pytest.raises(ValueError, match="'mlp:4', this attention has 'window:4'"):
        convert(source(LLAMA), "window:4")(ids, past_key_values=load_state(tmp_path / "state"))


def test_columns_beyond_a_table_of_positions(tmp_path):
    model = convert(source(GPT2), "mlp:4")
    good = fuzz_caches.file_of(read(model))
    for columns, fits in (("127", True), ("128", False), (str(2**31), False)):
        facts = good.facts | {"self.0.columns": columns, "self.1.columns": columns}
        (tmp_path / "state").write_bytes(written(good.tensors, facts))
        cache = load_state(tmp_path / "state")
        if fits:
            model(torch.tensor([[5]]), past_key_values=cache)
        else:
            with pytest.raises(ValueError, match=f"seen {columns} columns .* has positions for 128"):
                model(torch.tensor([[5]]), past_key_values=cache)


def test_a_loaded_state_is_checked_once(llama, tmp_path):
    model, good = llama
    (tmp_path / "state").write_bytes(good.content)
    cache = load_state(tmp_path / "state")
    assert all(layer.state.loaded for layer in cache.layers)
    model(torch.tensor([[5]]), past_key_values=cache)
    assert not any(layer.state.loaded for layer in cache.layers)


def test_fuzzed_files(tmp_path):
    outcomes = {fuzz_caches.run(case, tmp_path) for case in range(100)}
    assert any("refused" in outcome for outcome in outcomes)
    assert any("went on" in outcome for outcome in outcomes)
