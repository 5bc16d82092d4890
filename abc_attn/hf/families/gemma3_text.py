"""Gemma 3, text only: Qwen3's attention; most layers are sliding windows, and those have rotary bases of their own."""

from __future__ import annotations

from typing import Any

from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention

from abc_attn.hf.families import qwen3
from abc_attn.hf.families.base import Family


class BoundedGemma3Attention(qwen3.BoundedQwen3Attention):
    @classmethod
    def site(cls, original: Any) -> str:
        if not original.is_causal:
            raise ValueError(
                "use_bidirectional_attention=True: a Gemma 3 whose tokens see what follows them is not supported"
            )
        return "self"


FAMILY = Family(
    name="Gemma3Text",
    title="Gemma 3 (text)",
    attention={Gemma3Attention: BoundedGemma3Attention},
    class_names={"ForCausalLM": "Gemma3ForCausalLM"},
    tiny={
        **qwen3.FAMILY.tiny,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
