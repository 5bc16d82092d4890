"""Llama: grouped key and value heads, rotary positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from abc_attn.hf.attention import ConvertedAttention
from abc_attn.hf.families.base import Family


class BoundedLlamaAttention(ConvertedAttention):
    o_proj: nn.Module

    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        config = original.config
        heads = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
        return heads | {"head_dim": original.head_dim, "dropout": original.attention_dropout}

    @classmethod
    def site(cls, original: Any) -> str:
        return "self"

    def output(self, merged: Tensor) -> Tensor:
        return self.o_proj(merged)


FAMILY = Family(
    name="Llama",
    title="Llama",
    attention={LlamaAttention: BoundedLlamaAttention},
    tiny={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
)
