"""Tiny Hugging Face models to convert, one of every supported class, and batches for them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from abc_attn import CONTROLS
from abc_attn.hf import convert
from abc_attn.hf.families import FAMILIES, Family
from abc_attn.hf.models import BOUNDED

VOCABULARY, PAD, END = 61, 1, 2
CLASSES = sorted(BOUNDED, key=lambda cls: cls.__name__)
GENERATING = [cls for cls in CLASSES if cls.can_generate()]


def body(family: Family) -> type:
    """The family's class that generates: an encoder-decoder if it has one, else a decoder (BERT and RoBERTa too)."""
    kinds = (family.class_name(kind) for kind in ("ForConditionalGeneration", "ForCausalLM"))
    return next(getattr(transformers, name) for name in kinds if hasattr(transformers, name))


BODIES = [body(family) for family in FAMILIES]
# Every control that can decode, by name, slots and options.
SLOTS = {"elu": None, "dpfp": None, "dilated": 4, "linformer": 6, "rfa": 6, "softmax": None}
ONLINE = [name for name, control in CONTROLS.items() if control.online and control.__module__.startswith("abc_attn")]
SPECS = [(name, SLOTS.get(name, 5), {}) for name in ONLINE]
SPECS += [("window:3+mlp:4", None, {"gate": True}), ("global:2+window:4", None, {}), ("mlp", 4, {"activation": "relu"})]
Spec = tuple[str, int | None, dict[str, Any]]


def specs_of(cls: type) -> list[Spec]:
    """SPECS as they suit a class: a control that decides by queries is for causal self-attention alone."""
    where = {"where": "self"} if cls.config_class.is_encoder_decoder else {}
    by_queries = {name for name in ONLINE if CONTROLS[name].sees_queries}
    return [
        (name, slots, options | where if name in by_queries else options)
        for name, slots, options in SPECS
        if cls in BODIES or name not in by_queries
    ]


# Families whose attention takes the way of Llama's or BART's through our code: `make test` runs some controls on them,
# and `make test-nightly` all.
ALIKE = ("Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma3Text", "GPTNeoX", "OPT")
SOME = ("softmax", "elu", "window:3+mlp:4")
BODIES_AND_SPECS = [
    pytest.param(
        cls, *spec, marks=pytest.mark.nightly if BOUNDED[cls].family.name in ALIKE and spec[0] not in SOME else (),
        id=f"{cls.__name__}-{spec[0]}-{'-'.join(spec[2])}",
    )
    for cls in BODIES
    for spec in specs_of(cls)
]  # fmt: skip
# Of those that are trained: encoders too, one that fills in words and one that classifies.
TRAINED = [*BODIES, transformers.BertForMaskedLM, transformers.RobertaForSequenceClassification]
KINDS_OF_DROPOUT = """dropout attention_dropout activation_dropout hidden_dropout_prob attention_probs_dropout_prob
    resid_pdrop embd_pdrop attn_pdrop hidden_dropout"""
NO_DROPOUT = dict.fromkeys(KINDS_OF_DROPOUT.split(), 0.0)


def source(cls: type, **changed: Any) -> Any:
    """A model of `cls` with random weights, large enough for its logits to be far from uniform."""
    model = copy.deepcopy(_source(cls, **changed))
    torch.manual_seed(7)  # what is drawn next does not depend on whether the model was made before
    return model


@functools.cache
def _source(cls: type, **changed: Any) -> Any:
    torch.manual_seed(7)
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": 0}
    sizes = {**BOUNDED[cls].family.tiny, **tokens}
    if BOUNDED[cls].__name__.endswith("ForCausalLM"):
        sizes |= {"is_decoder": True}
    model = cls(cls.config_class(**(sizes | changed))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:  # not the table of sinusoids
                parameter.mul_(4)
    if model.can_generate():
        model.generation_config.update(max_new_tokens=8, min_new_tokens=8, pad_token_id=PAD, eos_token_id=END)
    return model


def talkative() -> Any:
    """A Llama whose texts never end by themselves."""
    model = source(transformers.LlamaForCausalLM)
    model.lm_head.weight.data[:3] = 0  # below the best of the others
    return model


def bounded(cls: type, control: str, slots: int | None = None, **options: Any) -> Any:
    """source(cls), converted: one for all tests that ask for it. They must leave it as it is."""
    return _bounded(cls, control, slots, tuple(options.items()))


@functools.cache
def _bounded(cls: type, control: str, slots: int | None, options: tuple[tuple[str, Any], ...]) -> Any:
    return convert(source(cls), control, slots, **dict(options))


def batch(left: bool, seed: int = 3) -> dict[str, Tensor]:
    """Three rows of 12, 7 and 3 tokens, padded to 12 on one side."""
    ids = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(seed))
    lengths, place = torch.tensor([[12], [7], [3]]), torch.arange(12)
    mask = place >= 12 - lengths if left else place < lengths
    return {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long()}


def inputs(model: Any, left: bool = False) -> dict[str, Tensor]:
    """A padded batch for one forward pass; of two texts for an encoder-decoder."""
    given = batch(left)
    if model.config.is_encoder_decoder and "SequenceClassification" not in type(model).__name__:
        target = batch(left=False, seed=4)
        given |= {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}
    if "SequenceClassification" in type(model).__name__ and model.config.is_encoder_decoder:
        ends = given["attention_mask"].long().cumsum(1).argmax(1)  # BART reads its class from the last token, an END
        given["input_ids"][torch.arange(3), ends] = END
    return given


def counted(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with positions that count real tokens, which a source needs under padding on the left."""
    if model.config.model_type in ("gpt2", "bert"):
        position = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return given | {"position_ids": position}
    return given


def outputs(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The logits (of a base model, the last states), as one row of numbers: those of real tokens."""
    result = model(**given)
    found = result.logits if hasattr(result, "logits") else result.last_hidden_state
    mask = given.get("decoder_attention_mask", given["attention_mask"])
    return found[mask.bool()] if found.shape[:2] == mask.shape else found


def rows(model: Any, count: int) -> list[dict[str, Tensor]]:
    """Rows to train on, of 4 to 10 tokens, padded to 10.

    Where the loss is divided by the labels of all processes (`accepts_loss_kwargs`), every token is a label. Elsewhere
    transformers takes the mean of each process's mean, which is the mean of one process only if all have as many
    labels: four in a row, or one class.
    """
    ids = torch.randint(3, 60, (count, 10), generator=torch.Generator().manual_seed(0))
    place, lengths = torch.arange(10), 4 + torch.arange(count)[:, None] % 7
    labels = ids.where(place < (lengths if model.accepts_loss_kwargs else 4), -100)
    if "SequenceClassification" in type(model).__name__:
        labels = torch.arange(count) % 2
    columns = {"input_ids": ids.where(place < lengths, PAD), "attention_mask": (place < lengths).long()}
    columns["labels"] = labels
    return [{name: column[row] for name, column in columns.items()} for row in range(count)]


# For the commands: a model with a tokenizer of words beside it

WORDS = ["<s>", "<pad>", "</s>", *(f"w{i}" for i in range(3, 61))]
TEXT = " ".join(WORDS[3 + i * i % 58] for i in range(90))


def save(model: Any, folder: Any) -> Any:
    """A model and a tokenizer of words beside it."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "mask_token": "w60"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
