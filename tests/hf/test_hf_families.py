"""A family is one file and one line: two that are not supported are added here, as a file of hf/families would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import batch, body, inputs, outputs, source  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.phi3.modeling_phi3 import Phi3Attention  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention  # noqa: E402

import abc_attn.hf as hf  # noqa: E402
from abc_attn.hf.families import FAMILIES, Family  # noqa: E402
from abc_attn.hf.families import llama as llama_family  # noqa: E402
from abc_attn.hf.models import AUTO, BOUNDED, CLASSES, register_family  # noqa: E402


class BoundedQwen3Attention(llama_family.BoundedLlamaAttention):
    """Norms of single heads, before the rotation."""

    def heads(self, x, source, rotation):
        q, k, v, _ = super().heads(x, source, None)
        q, k, to_sinks = rotation.of(self.q_norm(q), self.k_norm(k))
        return q, k, v, to_sinks


QWEN3 = Family(
    name="Qwen3",
    title="Qwen3",
    attention={Qwen3Attention: BoundedQwen3Attention},
    tiny={**llama_family.FAMILY.tiny, "head_dim": 8},
)


class BoundedPhi3Attention(llama_family.BoundedLlamaAttention):
    """q, k and v from one projection."""

    @classmethod
    def width(cls, original):
        return original.qkv_proj.in_features

    def heads(self, x, source, rotation):
        shares = [self.num_heads * self.head_dim, *[self.num_kv_heads * self.head_dim] * 2]
        q, k, v = (self.split(part) for part in self.qkv_proj(x).split(shares, dim=-1))
        q, k, to_sinks = rotation.of(q, k)
        return q, k, v, to_sinks


PHI3 = Family(
    name="Phi3",
    title="Phi-3",
    attention={Phi3Attention: BoundedPhi3Attention},
    tiny=llama_family.FAMILY.tiny,
)


@pytest.fixture(params=[QWEN3, PHI3], ids=lambda family: family.name)
def family(request):
    """The one line; every registry is as it was afterwards."""
    registries = [CLASSES, BOUNDED, CONFIG_MAPPING._extra_content]
    registries += [auto._model_mapping._extra_content for auto in AUTO.values()]
    before = [dict(registry) for registry in registries]
    register_family(request.param)
    yield request.param
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)


def randomised(cls):
    """A source whose norms have random weights: with ones, a norm could change places with a rotation unseen."""
    model = source(cls)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 2)
    return model


def test_another_family_takes_a_record_and_an_adapter(family, tmp_path):
    cls = body(family)
    for control, options in (("softmax", {}), ("window:16", {}), ("global:4+window:12", {"positions": "slot"})):
        original = randomised(cls)
        given = inputs(original, left=True)
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = outputs(original, given)
            found = outputs(hf.convert(original, control, **options), given)
        assert expected.abs().max() > 0.1
        assert (found - expected).abs().max() < 1e-4
    for control, options in (("window:3+mlp:4", {}), ("global:2+window:4", {"positions": "slot"})):
        model = hf.convert(randomised(cls), control, **options)
        for beams in (1, 4):
            cached = model.generate(**batch(left=True), num_beams=beams)
            assert torch.equal(cached, model.generate(**batch(left=True), num_beams=beams, use_cache=False))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == f"Bounded{family.name}ForCausalLM"
    assert type(loaded) is getattr(hf, type(loaded).__name__)
    assert torch.equal(outputs(loaded, inputs(loaded)), outputs(model, inputs(model)))


def test_without_it_the_family_is_not_supported():
    model = transformers.Qwen3Model(transformers.Qwen3Config(**QWEN3.tiny, vocab_size=61))
    with pytest.raises(ValueError, match="Qwen3Model is not supported; the supported families are Llama, GPT-2"):
        hf.convert(model)
    assert not hasattr(hf, "BoundedQwen3Model")


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
