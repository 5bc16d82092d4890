"""Weights in int8: what is computed, and models that are converted, saved and loaded with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from hf_sources import BODIES, batch, inputs, source  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

from abc_attn.hf import convert  # noqa: E402
from abc_attn.hf.int8 import Int8Embedding, Int8Linear  # noqa: E402

LLAMA, MARIAN = transformers.LlamaForCausalLM, transformers.MarianMTModel


def linear_layers(model):
    return [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "made_of", [lambda: nn.Linear(40, 24), lambda: nn.Linear(40, 24, bias=False), lambda: Conv1D(24, 40)]
)
def test_a_layer_computes_what_its_whole_numbers_say(made_of, dtype):
    torch.manual_seed(0)
    layer = made_of().to(dtype)
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    with torch.no_grad():
        weight[3] = 0  # a row without a scale
        weight[5] *= 1000
    ours, x = Int8Linear(layer), torch.randn(2, 3, 40).to(dtype)
    assert ours.weight.dtype == torch.int8
    rounded = ours.weight.double() * ours.scale.double()[:, None]
    assert (
        (rounded - weight.double()).abs() <= 0.5001 * ours.scale.double()[:, None]
    ).all()  # the nearest whole number
    expected = x.double() @ rounded.T + (0 if layer.bias is None else layer.bias.double())
    error = (ours(x).double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("cls", BODIES, ids=lambda cls: cls.__name__)
def test_every_family_is_saved_and_loaded(cls, tmp_path):
    original = source(cls)
    layers = len(linear_layers(original))
    floats = convert(source(cls), "window:4").eval()
    model = convert(original, "window:4", weights="int8").eval()
    assert not linear_layers(model)
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == layers
    given = inputs(model)
    with torch.no_grad():
        expected, found = floats(**given).logits, model(**given).logits
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()
    model.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert torch.equal(again(**given).logits, found)
    for name, tensor in model.state_dict().items():
        assert again.state_dict()[name].dtype == tensor.dtype, name


@pytest.mark.parametrize("cls", [LLAMA, MARIAN], ids=lambda cls: cls.__name__)
def test_a_head_is_tied_to_its_embedding_in_int8(cls, tmp_path):
    original = source(cls)
    original.config.tie_word_embeddings = True
    original.tie_weights()
    model = convert(original, "mlp:4", weights="int8").eval()
    model.save_pretrained(tmp_path / "model")
    for one in (model, type(model).from_pretrained(tmp_path / "model").eval()):
        head, embedding = one.get_output_embeddings(), one.get_input_embeddings()
        assert isinstance(embedding, Int8Embedding)
        assert head.weight is embedding.weight
        assert head.scale is embedding.scale
    expected = model.generate(**batch(left=cls is LLAMA), num_beams=3)
    assert torch.equal(one.generate(**batch(left=cls is LLAMA), num_beams=3), expected)
    control = next(iter(model.controls.parameters()))
    assert control.dtype == torch.float32  # controls stay as they are


def test_other_weights_are_refused():
    with pytest.raises(ValueError, match="weights must be 'int8', or None for floats, got 'int4'"):
        convert(source(LLAMA), "window:4", weights="int4")
    with pytest.raises(ValueError, match="already"):
        convert(convert(source(LLAMA), "window:4", weights="int8"), "window:4")
