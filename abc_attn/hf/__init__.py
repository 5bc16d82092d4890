"""Hugging Face models with bounded memory: `convert` one, load one with the Auto classes, `generate` as ever."""

from typing import Any

from abc_attn.hf import models
from abc_attn.hf.adaptive_lm import AdaptiveLM, AdaptiveLMConfig
from abc_attn.hf.cache import BoundedCache, load_state, save_state, state_bytes
from abc_attn.hf.convert import convert
from abc_attn.hf.models import CLASSES, BoundedConfig, BoundedModel

globals().update(CLASSES)
_TRAINERS = ("Seq2SeqTrainer", "Trainer")

__all__ = [
    "AdaptiveLM",
    "AdaptiveLMConfig",
    "BoundedCache",
    "BoundedConfig",
    "BoundedModel",
    "Seq2SeqTrainer",
    "Trainer",
    "convert",
    "load_state",
    "models",
    "save_state",
    "state_bytes",
    *CLASSES,
]


def __getattr__(name: str) -> Any:
    if name in _TRAINERS:  # they bring half of transformers with them
        from abc_attn.hf import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'abc_attn.hf' has no attribute {name!r}")
