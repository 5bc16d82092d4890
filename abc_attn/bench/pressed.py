"""kvpress beside the bounded models of `bench recall`: the same budget of rows, after the whole prompt is there.

kvpress (PyPI) compresses the cache of each layer as the first call ends, so the prompt goes in at once. Its releases
ask for older versions of transformers than this package does; docs/huggingface.md says how to install it all the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

PRESSES = {"keydiff": "KeyDiffPress", "knorm": "KnormPress", "tova": "TOVAPress"}  # by the control of the same rule


def missing() -> str | None:
    """Why kvpress cannot be measured here."""
    if importlib.util.find_spec("kvpress") is None:
        return "kvpress is not installed (docs/huggingface.md says how)"
    try:
        import kvpress  # noqa: F401
    except Exception as error:  # it needs other packages, of versions of its own
        return f"kvpress cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
    return None


@torch.inference_mode()
def read_pressed(model: PreTrainedModel, rule: str, rows: int, tokens: Sequence[int]) -> DynamicCache:
    """The cache after reading a text, of which every layer has kept `rows` tokens."""
    import kvpress

    cache = DynamicCache()
    # Half a row more: kvpress rounds down, and the rounding of this fraction must not cost one.
    press = getattr(kvpress, PRESSES[rule])(compression_ratio=max(0.0, 1 - (rows + 0.5) / len(tokens)))
    with press(model):
        # transformers no longer gives attention the positions in the cache, by which kvpress knows a prompt.
        places: dict[str, Any] = {"cache_position": torch.arange(len(tokens))}
        model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1, **places)
    return cache
