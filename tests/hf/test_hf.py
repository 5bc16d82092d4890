"""Converted models: the same logits and tokens where the memory is large enough, and generation in every mode."""

from __future__ import annotations

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import (  # noqa: E402
    BODIES_AND_SPECS,
    CLASSES,
    GENERATING,
    ONLINE,
    SLOTS,
    SPECS,
    batch,
    bounded,
    counted,
    inputs,
    outputs,
    source,
)

from abc_attn import CONTROLS  # noqa: E402
from abc_attn.hf import convert  # noqa: E402

every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
every_generator = pytest.mark.parametrize("cls", GENERATING, ids=lambda cls: cls.__name__)


def kinds_of_attention(model):
    """The classes of a model that attend, by name: those that hold no other (BertAttention holds BertSelfAttention)."""
    named = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    return {type(module) for module in named if not any(other in named for other in [*module.modules()][1:])}


@every_class
@pytest.mark.parametrize("control", ["softmax", "window:16", "global:4+window:12"])
def test_a_large_enough_memory_reproduces_the_logits(cls, control):
    original = source(cls)
    kinds = kinds_of_attention(original)
    assert kinds
    with torch.no_grad():
        expected = [outputs(original, counted(original, inputs(original, left))) for left in (False, True)]
        model = convert(original, control)
        found = [outputs(model, inputs(model, left)) for left in (False, True)]
    assert not kinds & {type(module) for module in model.modules()}
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4
        assert theirs.abs().max() > 0.1


@every_generator
@pytest.mark.parametrize("control", ["softmax", "window:32"])
@pytest.mark.parametrize("beams", [1, 4])
def test_a_large_enough_memory_generates_the_same(cls, control, beams):
    found = convert(source(cls), control).generate(**batch(left=True), num_beams=beams)
    assert torch.equal(found, written_by_source(cls, beams))


@functools.cache
def written_by_source(cls, beams):
    return source(cls).generate(**batch(left=True), num_beams=beams)


READING = [transformers.GPT2LMHeadModel, transformers.BertLMHeadModel, transformers.RobertaForCausalLM]


@pytest.mark.parametrize("cls", READING, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("control", ["softmax", "mlp:4"])
def test_a_decoder_that_reads_an_encoder(cls, control):
    """add_cross_attention: BERT, RoBERTa and GPT-2 as the second half of an encoder-decoder."""
    original = source(cls, add_cross_attention=True)
    original.generation_config.update(max_new_tokens=3, min_new_tokens=3)
    given = batch(left=True) | {"encoder_hidden_states": torch.randn(3, 9, 32)}
    given["encoder_attention_mask"] = (torch.arange(9) < torch.tensor([[9], [5], [2]])).long()
    # Without a cache: in transformers BERT's and RoBERTa's own generate() cannot keep one beside an encoder.
    expected, written = outputs(original, counted(original, given)), original.generate(**given, use_cache=False)
    model = convert(original, control)
    assert set(model.controls) == {"self", "cross"}
    if control == "softmax":
        assert (outputs(model, given) - expected).abs().max() < 1e-4
        assert torch.equal(model.generate(**given), written)
    beams = model.generate(**given, num_beams=4, use_cache=False)
    assert torch.equal(model.generate(**given, num_beams=4), beams)


@every_generator
def test_every_control_is_used(cls):
    model = convert(source(cls), "mlp:4", tie_control=False).train()
    given = inputs(model)
    model(**given, labels=given.get("decoder_input_ids", given["input_ids"])).loss.backward()
    learned = dict(model.controls.named_parameters())
    assert learned
    for name, parameter in learned.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


every_body_and_control = pytest.mark.parametrize(("cls", "control", "slots", "options"), BODIES_AND_SPECS)


@every_body_and_control
def test_cached_is_uncached_and_a_padded_batch_is_its_rows(cls, control, slots, options):
    model = bounded(cls, control, slots, **options)
    given = batch(left=not model.config.is_encoder_decoder)  # Marian's encoder counts padding on the left as positions
    size = {"max_new_tokens": 5, "min_new_tokens": 5}
    greedy = model.generate(**given, **size)
    assert torch.equal(greedy, model.generate(**given, **size, use_cache=False))
    beams = model.generate(**given, **size, num_beams=4)
    assert torch.equal(beams, model.generate(**given, **size, num_beams=4, use_cache=False))
    for row in range(3):
        real = given["attention_mask"][row].bool()
        alone = model.generate(given["input_ids"][row][None, real], **size)
        assert torch.equal(alone[0, -5:], greedy[row, -5:])


@every_body_and_control
def test_saved_and_loaded_and_every_parameter_is_trained(cls, control, slots, options, tmp_path):
    model = bounded(cls, control, slots, **options)
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert f"| control | `{control}` |" in card
    assert f"| slots | {'as the control says (64 if it does not)' if slots is None else f'`{slots}`'} |" in card
    auto = transformers.AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else transformers.AutoModelForCausalLM
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(report.values())
    given = inputs(model)
    assert torch.equal(outputs(loaded, given), outputs(model, given))
    labels = given.get("decoder_input_ids", given["input_ids"])
    loaded.train()(**given, labels=labels).loss.backward()
    check_gradients(loaded, control)


def check_gradients(model, control):
    """Every weight of the control has learned something, unless it learns by attention transfer alone."""
    by_transfer = control in CONTROLS and CONTROLS[control].learns_by_transfer
    for name, parameter in model.controls.named_parameters():
        assert (parameter.grad is None) is by_transfer, name
        assert by_transfer or parameter.grad.abs().max() > 0, name


# Encoders: all that is learned or fixed, causal or not, and compositions.
ENCODING = [
    (name, SLOTS.get(name, 5), {})
    for name, control in CONTROLS.items()
    if control.__module__.startswith("abc_attn") and not control.sees_queries
]
ENCODING += SPECS[len(ONLINE) :]


@pytest.mark.parametrize(
    "cls", [transformers.BertForMaskedLM, transformers.RobertaForMaskedLM], ids=lambda cls: cls.__name__
)
@pytest.mark.parametrize(("control", "slots", "options"), ENCODING, ids=lambda x: x if x is str(x) else "")
def test_an_encoder_of_every_control(cls, control, slots, options, tmp_path):
    """A padded batch is its rows, what was saved is loaded, and every new parameter is trained."""
    model = convert(source(cls), control, slots, **options)
    given = inputs(model)
    with torch.no_grad():
        together = model(**given).logits
        for row, real in enumerate(given["attention_mask"].bool()):
            alone = model(given["input_ids"][row][None, real]).logits[0]
            assert (together[row][real] - alone).abs().max() < 1e-4
    model.save_pretrained(tmp_path)
    loaded, report = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(report.values())
    assert torch.equal(outputs(loaded, given), outputs(model, given))
    model.train()(**given, labels=given["input_ids"]).loss.backward()
    check_gradients(model, control)
