"""Families: sliding windows of the source, norms of heads; and the seam, with a family that is not supported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import ALIKE, BODIES, SPECS, batch, body, inputs, outputs, rows, source  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention  # noqa: E402

import abc_attn.hf as hf  # noqa: E402
from abc_attn.hf.families import FAMILIES, Family  # noqa: E402
from abc_attn.hf.families import llama as llama_family  # noqa: E402
from abc_attn.hf.models import AUTO, BOUNDED, CLASSES, has_bounded_state, register_family  # noqa: E402


class BoundedOlmo2Attention(llama_family.BoundedLlamaAttention):
    """Norms of all heads together, before they are split and rotated."""

    def heads(self, x, source, rotation):
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, to_sinks = rotation.of(self.split(q), self.split(k))
        return q, k, self.split(v), to_sinks


OLMO2 = Family(
    name="Olmo2",
    title="OLMo 2",
    attention={Olmo2Attention: BoundedOlmo2Attention},
    tiny=llama_family.FAMILY.tiny,
)


@pytest.fixture
def olmo2():
    """The one line; every registry is as it was afterwards."""
    registries = [CLASSES, BOUNDED, CONFIG_MAPPING._extra_content]
    registries += [auto._model_mapping._extra_content for auto in AUTO.values()]
    before = [dict(registry) for registry in registries]
    register_family(OLMO2)
    yield OLMO2
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)


def randomised(cls, **changed):
    """A source whose norms have random weights: with ones, a norm could change places with a rotation unseen."""
    model = source(cls, **changed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 2)
    return model


def same_as_the_source(cls, cases, **changed):
    """With memories that are large enough for what the source sees."""
    for control, options in cases:
        original = randomised(cls, **changed)
        given = inputs(original, left=True)
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = outputs(original, given)
            found = outputs(hf.convert(original, control, **options), given)
        assert expected.abs().max() > 0.1
        assert (found - expected).abs().max() < 1e-4


def test_another_family_takes_a_record_and_an_adapter(olmo2, tmp_path):
    cls, slot = body(olmo2), {"positions": "slot"}
    same_as_the_source(cls, [("softmax", {}), ("window:16", {}), ("global:4+window:12", slot)])
    for control, options in (("window:3+mlp:4", {}), ("global:2+window:4", slot)):
        model = hf.convert(randomised(cls), control, **options)
        for beams in (1, 4):
            cached = model.generate(**batch(left=True), num_beams=beams)
            assert torch.equal(cached, model.generate(**batch(left=True), num_beams=beams, use_cache=False))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "BoundedOlmo2ForCausalLM"
    assert type(loaded) is getattr(hf, type(loaded).__name__)
    assert torch.equal(outputs(loaded, inputs(loaded)), outputs(model, inputs(model)))


def test_without_it_the_family_is_not_supported():
    model = transformers.Olmo2Model(transformers.Olmo2Config(**OLMO2.tiny, vocab_size=61))
    titles = ", ".join(family.title for family in FAMILIES)
    with pytest.raises(ValueError) as error:
        hf.convert(model)
    said = str(error.value)
    assert said.startswith(f"Olmo2Model is not supported; the supported families are {titles}. How to add one: docs/")
    assert not hasattr(hf, "BoundedOlmo2Model")


def test_every_file_is_registered():
    """And every family has all that its record promises."""
    folder = Path(hf.models.__file__).parent / "families"
    files = {file.stem for file in folder.glob("*.py")} - {"__init__", "base"}
    assert len(files) == len(FAMILIES)
    for family in FAMILIES:
        config = getattr(transformers, family.class_name("Config"))
        assert config.model_type in files
        assert f"Bounded{family.name}Config" in hf.__all__
        assert all(hasattr(transformers, name) for name in family.class_names.values())
        assert family.title in (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()


# What makes families differ

ROTARY = [cls for cls in BODIES if hasattr(getattr(source(cls), "base_model", None), "rotary_emb")]
MISTRAL, GEMMA, QWEN2 = transformers.MistralForCausalLM, transformers.Gemma3ForCausalLM, transformers.Qwen2ForCausalLM
MIXED = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
SLIDING = [
    pytest.param(MISTRAL, {"sliding_window": 3}, {0: 3, 1: 3}, id="Mistral"),
    pytest.param(transformers.Phi3ForCausalLM, {"sliding_window": 3}, {0: 3, 1: 3}, id="Phi3"),
    pytest.param(QWEN2, MIXED, {1: 3}, id="Qwen2"),
    pytest.param(transformers.Qwen3ForCausalLM, MIXED, {1: 3}, id="Qwen3"),
    pytest.param(GEMMA, {}, {0: 5}, id="Gemma3"),
]


@pytest.mark.parametrize("cls", ROTARY, ids=lambda cls: cls.__name__)
def test_norms_rotations_and_positions_in_slots(cls):
    same_as_the_source(cls, [("softmax", {}), ("window:16", {}), ("global:4+window:12", {"positions": "slot"})])
    model = hf.convert(randomised(cls), "global:2+window:4", positions="slot")
    cached = model.generate(**batch(left=True), num_beams=4)
    assert torch.equal(cached, model.generate(**batch(left=True), num_beams=4, use_cache=False))


@pytest.mark.filterwarnings("ignore:every layer of this")
@pytest.mark.parametrize(("cls", "changed", "windows"), SLIDING)
def test_sliding_windows_of_the_source_are_kept(cls, changed, windows, tmp_path):
    slot = {"positions": "slot"}
    same_as_the_source(cls, [("softmax", {}), ("window:16", {}), ("global:4+window:12", slot)], **changed)
    model = hf.convert(source(cls, **changed), "global:2+window:4", **slot)
    assert model.own_windows() == windows
    assert has_bounded_state(model)
    given = batch(left=True)
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert f"kept in {len(windows)} of 2 layers: {next(iter(windows.values()))} tokens" in card
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(outputs(loaded, given), outputs(model, given))
    # Named, they are replaced.
    replaced = hf.convert(source(cls, **changed), "window:16", layers="all")
    assert replaced.own_windows() == {}
    wide = source(cls, **changed | {"sliding_window": 100})
    with torch.no_grad():
        assert (outputs(replaced, given) - outputs(wide, given)).abs().max() < 1e-4
    named = hf.convert(source(cls, **changed), "window:16", layers=[1])
    assert named.own_windows() == {layer: width for layer, width in windows.items() if layer != 1}


def test_a_control_that_no_layer_uses_is_a_warning():
    with pytest.warns(UserWarning, match="control 'mlp:4' is used nowhere. layers='all' replaces the windows"):
        hf.convert(source(MISTRAL, sliding_window=3), "mlp:4")
    endless = hf.convert(source(MISTRAL, sliding_window=128), "mlp:4")  # as long as the model has positions
    assert endless.own_windows() == {}
    assert set(endless.controls) == {"self"}
    with pytest.raises(ValueError, match="layers must be numbers of layers, or 'all', got 'every'"):
        hf.convert(source(MISTRAL), "mlp:4", layers="every")
    with pytest.raises(ValueError, match="use_bidirectional_attention=True"):
        hf.convert(source(GEMMA, use_bidirectional_attention=True), "mlp:4")
    model = hf.convert(source(GEMMA), "mlp:4")
    with pytest.raises(ValueError, match="packed"):
        model(torch.ones(1, 4, dtype=torch.int64), position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=False)


@pytest.mark.parametrize(
    "cls", [body(family) for family in FAMILIES if family.name in ALIKE], ids=lambda cls: cls.__name__
)
def test_a_step_of_the_trainer(cls, tmp_path):
    """The long form, of every family and control, is in test_hf_models.py."""
    model = hf.convert(source(cls), *SPECS[-3][:2], **SPECS[-3][2])
    before = [parameter.clone() for parameter in model.controls.parameters()]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", learning_rate=0.1,
    )  # fmt: skip
    hf.Trainer(model, arguments, train_dataset=rows(model, 4)).train()
    assert before
    for old, new in zip(before, model.controls.parameters(), strict=True):
        assert not torch.equal(old, new)
