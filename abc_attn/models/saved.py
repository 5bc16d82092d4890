"""Load a saved model and its tokenizer: ours, or one of transformers' that can be converted.

Whatever is wrong with their files is a ValueError or an OSError of one line that names the folder, the file or the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from abc_attn.hf.loading import WEIGHTS, check_loaded, check_sizes, check_weights, weight_types
from abc_attn.hf.models import BOUNDED, CLASSES, unsupported
from abc_attn.models.adaptive_lm import AdaptiveLM
from abc_attn.paths import saved_model

# Sizes that building a model takes time for, before its weights are compared: each layer has a weight at least.
_DEPTHS = ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers")


def load_model(folder: Path) -> PreTrainedModel:
    """The model in a folder, of the class it was saved as, with every one of its weights."""
    saved = saved_model(folder)
    cls = _class_of(folder, saved)
    check_weights(folder)
    _check_depth(folder, saved)
    make: Any = cls
    with damaged(f"{folder / 'config.json'} does not describe a {cls.__name__}"):
        config = make.config_class.from_pretrained(folder)
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


def _check_depth(folder: Path, saved: dict[str, Any]) -> None:
    files = [*folder.glob(WEIGHTS)]
    count = sum(len(weight_types(file)) for file in files)
    for name in _DEPTHS:
        depth = saved.get(name, 1)
        if isinstance(depth, int) and depth < 1:
            raise ValueError(f"{folder / 'config.json'}: {name} must be a whole number from 1, got {depth!r}")
        if files and isinstance(depth, int) and depth > count:
            raise ValueError(f"{folder / 'config.json'}: {name}={depth}, and there are {count} weights in all")


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
            raise ValueError(said if what.partition(" ")[0] in said else f"{what}: {said}") from error
        raise ValueError(f"{what}: {type(error).__name__}: {said}") from error
