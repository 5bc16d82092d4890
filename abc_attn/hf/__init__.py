"""Hugging Face models with bounded memory: `convert` one, load one with the Auto classes, `generate` as usual."""

from typing import Any

# Users load an AdaptiveLM with the Auto classes after this one import, so it registers that model too. It is the only
# import of a room further out. A plain `import`, and the names by __getattr__: abc_attn.models imports this package,
# and may be half imported when it gets here.
import abc_attn.models.adaptive_lm
from abc_attn.hf import models
from abc_attn.hf.cache import BoundedCache, load_state, save_state, state_bytes
from abc_attn.hf.compiled import NotCompiled, compile_decoding
from abc_attn.hf.convert import convert
from abc_attn.hf.models import CLASSES, BoundedConfig, BoundedModel

_ADAPTIVE_LM = ("AdaptiveLM", "AdaptiveLMConfig")
_TRAINERS = ("Seq2SeqTrainer", "Trainer")

__all__ = [
    "AdaptiveLM",
    "AdaptiveLMConfig",
    "BoundedCache",
    "BoundedConfig",
    "BoundedModel",
    "NotCompiled",
    "Seq2SeqTrainer",
    "Trainer",
    "compile_decoding",
    "convert",
    "load_state",
    "models",
    "save_state",
    "state_bytes",
    *CLASSES,
]


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    if name in _ADAPTIVE_LM:
        return getattr(abc_attn.models.adaptive_lm, name)
    if name in _TRAINERS:  # they import half of transformers
        from abc_attn.hf import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'abc_attn.hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
