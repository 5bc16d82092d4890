"""Mistral: Llama's attention; in some models every layer is a sliding window."""

from __future__ import annotations

from typing import Any

from transformers.models.mistral.modeling_mistral import MistralAttention

from abc_attn.hf.families import llama
from abc_attn.hf.families.base import Family


class BoundedMistralAttention(llama.BoundedLlamaAttention):
    @classmethod
    def window(cls, original: Any) -> int | None:
        return original.config.sliding_window


FAMILY = Family(
    name="Mistral",
    title="Mistral",
    attention={MistralAttention: BoundedMistralAttention},
    tiny={**llama.FAMILY.tiny, "sliding_window": None},
)
