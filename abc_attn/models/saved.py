"""Load a saved model and its tokenizer: ours, or one of transformers' that can be converted.

Whatever is wrong with their files is a ValueError or an OSError of one line that names the folder, the file or the key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from abc_attn.hf.loading import WEIGHTS, Weight, check_loaded, check_sizes, check_weights, read_header, some
from abc_attn.hf.models import BOUNDED, CLASSES, unsupported
from abc_attn.memory_limit import FLOAT, check_fits
from abc_attn.models.adaptive_lm import AdaptiveLM
from abc_attn.paths import saved_model

# Sizes that building a model takes time for, before its weights are compared: each layer has a weight at least.
_DEPTHS = ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers")
_POSITIONS = ("max_position_embeddings", "n_positions")  # tables, where positions do not rotate
_SIZES = ("vocab_size", "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "num_attention_heads", "n_head")
_WIDTHS = ("hidden_size", "n_embd", "d_model")


def load_model(folder: Path) -> PreTrainedModel:
    """The model in a folder, of the class it was saved as, with every one of its weights."""
    saved = saved_model(folder)
    cls = _class_of(folder, saved)
    check_weights(folder)
    weights = {name: weight for file in folder.glob(WEIGHTS) for name, weight in read_header(file).items()}
    _check_numbers(folder, saved, len(weights))
    make: Any = cls
    with damaged(f"{folder / 'config.json'} does not describe a {cls.__name__}"):
        config = make.config_class.from_pretrained(folder)
        with torch.device("meta"):
            empty = make(config)
    if weights:
        _check_header(folder, weights, empty)
    with damaged(f"{folder}: config.json and the weights do not make a {cls.__name__}"):
        model, info = make.from_pretrained(
            folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True
        )
        check_sizes(info, folder)
        check_loaded(model, info, folder)
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder. No code of the folder's is run."""
    with damaged(f"{folder} has no tokenizer that can be loaded"):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _class_of(folder: Path, saved: dict[str, Any]) -> type[PreTrainedModel]:
    names = saved.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder / 'config.json'}: architectures must be a list of names, got {names!r:.80}")
    known = {cls.__name__: cls for cls in BOUNDED} | {n: c for n, c in CLASSES.items() if not n.endswith("Config")}
    known |= {AdaptiveLM.__name__: AdaptiveLM}
    cls = next((known[name] for name in names if name in known), None)
    if cls is None:
        name = " and ".join(names) or "a model of no named architecture"
        raise ValueError(f"{folder}: {unsupported(name, saved.get('model_type'))}")
    return cls


def _check_numbers(folder: Path, saved: dict[str, Any], weights: int) -> None:
    """Refuse numbers of config.json that no model has, before it is built."""
    file = folder / "config.json"
    for name, value in saved.items():
        if isinstance(value, int) and abs(value) >= 2**31:
            raise ValueError(f"{file}: {name}={value!r:.40} is beyond any model")
        if name in (*_DEPTHS, *_WIDTHS, *_SIZES) and isinstance(value, int) and value < 1:
            raise ValueError(f"{file}: {name} must be a whole number from 1, got {value!r}")
        if name in _DEPTHS and isinstance(value, int) and weights and value > weights:
            raise ValueError(f"{file}: {name}={value}, and there are {weights} weights in all")
        if name in _POSITIONS and isinstance(value, int) and "rope_parameters" not in saved:
            check_fits(f"{file}: {name}={value}", value * max(_whole(saved.get(width)) for width in _WIDTHS) * FLOAT)


def _check_header(folder: Path, weights: dict[str, Weight], empty: PreTrainedModel) -> None:
    """Refuse weights that cannot be those of the model, before memory is taken for it."""
    prefix = f"{empty.base_model_prefix}."
    there = {name: weights.get(name) or weights.get(name.removeprefix(prefix)) for name in empty.state_dict()}
    found = sum(math.prod(weight.shape) for weight in weights.values())
    needed = {name: weight for name, weight in empty.named_parameters() if weight.requires_grad}
    asked = sum(weight.numel() for weight in needed.values())
    if asked > found:
        odd = [name for name, weight in needed.items() if not there[name] or there[name].shape != [*weight.shape]]  # type: ignore[union-attr]
        raise ValueError(
            f"{folder} has weights of {found:,} numbers, and its config.json asks for {asked:,}: look at {some(odd)}"
        )
    for name, asked_for in empty.state_dict().items():
        weight = there[name]
        if weight is not None and asked_for.is_floating_point() and not weight.dtype.startswith(("F", "BF")):
            raise ValueError(f"{folder}: weight {name} has type {weight.dtype}; floating-point numbers are needed")


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 1


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Whatever transformers or tokenizers raise at damaged files becomes a ValueError of one line."""
    try:
        yield
    except ImportError:  # a package that is missing: not the files' fault
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if isinstance(error, (ValueError, OSError)):
            named = what.partition(" ")[0].rstrip(":") in said
            raise ValueError(said if named else f"{what}: {said}") from error
        raise ValueError(f"{what}: {type(error).__name__}: {said}") from error
