"""Whole encoders for `abc-attn bench encode-model`: a RoBERTa with random weights, or saved models, and what they are
compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, RobertaConfig, RobertaModel
from transformers.masking_utils import sdpa_mask

from abc_attn.bench.measure import error
from abc_attn.hf.convert import convert
from abc_attn.hf.models import BoundedModel, most_tokens
from abc_attn.memory_limit import FLOAT
from abc_attn.models.saved import load_model

CHECKED = 128  # tokens, at most, over which a model is compared with itself in fp64
NONE = "none"  # attention that computes nothing
ATTENTIONS = ("sdpa", "eager", NONE)  # of an exact model


@dataclass(frozen=True)
class Shape:
    """The sizes of a RoBERTa."""

    layers: int
    width: int
    heads: int
    words: int
    longest: int

    @property
    def nbytes(self) -> int:
        """Of the weights; a layer has four matrices for attention and eight for the rest."""
        return FLOAT * self.width * (self.words + self.longest + 12 * self.layers * self.width)


def _values(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Each token gets its own value: all of a layer except attention between tokens, whatever it reads."""
    return value.transpose(1, 2), None


AttentionInterface.register(NONE, _values)
AttentionMaskInterface.register(NONE, sdpa_mask)


def make_roberta(shape: Shape) -> RobertaModel:
    """Random weights from one seed; positions for the longest text."""
    config = RobertaConfig(
        vocab_size=shape.words,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=shape.longest + 2,  # RoBERTa's first two are for padding
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RobertaModel(config, add_pooling_layer=False).eval()


def prepare(original: PreTrainedModel, method: str, slots: int | None) -> PreTrainedModel:
    """The model that a method encodes with; it consumes `original`."""
    if slots is None:
        original.set_attn_implementation(method)
        return original
    options: dict[str, Any] = {"max_length": most_tokens(original)} if method == "linformer" else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of the control
        return convert(original, method, slots, **options)


def load_encoder(folder: Path, tokens: int) -> PreTrainedModel:
    """The encoder saved in a folder, in fp32, perhaps with a head; it has positions for so many tokens."""
    model: Any = load_model(folder)
    if model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"{folder} holds a {type(model).__name__}, which generates; an encoder is needed")
    if (most := most_tokens(model)) is not None and tokens > most:
        raise ValueError(f"{folder} has positions for {most} tokens, --tokens asks for {tokens}")
    return model.float()


def load_encoders(folders: Sequence[Path], tokens: int) -> dict[str, PreTrainedModel]:
    """The encoders saved in these folders, by the names of the folders; the first is exact."""
    found: dict[str, PreTrainedModel] = {}
    for folder in folders:
        name, model = folder.resolve().name, load_encoder(folder, tokens)
        if not found and isinstance(model, BoundedModel):
            raise ValueError(
                f"{folder} holds a {type(model).__name__}; name the original first: the others are measured against it"
            )
        if name in found:
            raise ValueError(f"two of the folders are called {name!r}, which is what their rows would be called")
        found[name] = model
    return found


def encode(model: Any, batch: int, tokens: int) -> Callable[[], Tensor]:
    """A call that encodes random words, without a head if there is one."""
    words = torch.randint(4, model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def run() -> Tensor:
        return model.base_model(words).last_hidden_state

    return run


def check(model: PreTrainedModel, tokens: int) -> float:
    """The error of an encoder's output against the same encoder in fp64."""
    tokens = min(tokens, CHECKED)
    return error(encode(model, 1, tokens)(), encode(copy.deepcopy(model).double(), 1, tokens)())


def ready(given: Shape | Path, method: str, slots: int | None, batch: int, tokens: int) -> Callable[[], object]:
    """For a process that measures memory: the model has run once; the call encodes."""
    if isinstance(given, Shape):
        model = prepare(make_roberta(given), method, slots)
    else:
        model = load_encoder(given, tokens)
        if method in ATTENTIONS:
            model.set_attn_implementation(method)
    encode(model, 1, 8)()
    return encode(model, batch, tokens)
