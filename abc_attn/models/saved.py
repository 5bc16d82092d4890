"""Load a saved model and its tokenizer: ours, or one of transformers' that can be converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from abc_attn.hf.models import BOUNDED, CLASSES, unsupported
from abc_attn.models.adaptive_lm import AdaptiveLM
from abc_attn.paths import saved_model


def load_model(folder: Path) -> PreTrainedModel:
    """The model in a folder, of the class it was saved as."""
    saved = saved_model(folder)
    names = saved.get("architectures") or []
    known = {cls.__name__: cls for cls in BOUNDED} | {n: c for n, c in CLASSES.items() if not n.endswith("Config")}
    known |= {AdaptiveLM.__name__: AdaptiveLM}
    cls = next((known[name] for name in names if name in known), None)
    if cls is not None:
        return cls.from_pretrained(folder).eval()
    name = " and ".join(names) or "a model of no named architecture"
    raise ValueError(f"{folder}: {unsupported(name, saved.get('model_type'))}")


def load_tokenizer(folder: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from None
