"""Hugging Face models with bounded memory: `convert` one, load one with the Auto classes, `generate` as ever."""

from abc_attn.hf import models
from abc_attn.hf.cache import BoundedCache, load_state, save_state, state_bytes
from abc_attn.hf.convert import convert
from abc_attn.hf.models import CLASSES, BoundedConfig, BoundedModel

globals().update(CLASSES)

__all__ = [
    "BoundedCache",
    "BoundedConfig",
    "BoundedModel",
    "convert",
    "load_state",
    "models",
    "save_state",
    "state_bytes",
    *CLASSES,
]
