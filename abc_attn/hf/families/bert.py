"""BERT: an encoder, a decoder, or a decoder that reads an encoder. The output projection is a module of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bert.modeling_bert import BertCrossAttention, BertSelfAttention

from abc_attn.hf.attention import ConvertedAttention
from abc_attn.hf.families.base import Family


class BoundedBertAttention(ConvertedAttention):
    projections = ("query", "key", "value")

    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        heads = {"num_heads": original.num_attention_heads, "num_kv_heads": original.num_attention_heads}
        return heads | {"head_dim": original.attention_head_size, "dropout": original.dropout.p}

    @classmethod
    def site(cls, original: Any) -> str:
        return "self" if original.is_causal else "encoder"

    def output(self, merged: Tensor) -> Tensor:
        return merged


class BoundedBertCrossAttention(BoundedBertAttention):
    @classmethod
    def site(cls, original: Any) -> str:
        return "cross"


FAMILY = Family(
    name="Bert",
    title="BERT",
    attention={BertSelfAttention: BoundedBertAttention, BertCrossAttention: BoundedBertCrossAttention},
    class_names={"ForCausalLM": "BertLMHeadModel"},
    tiny={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
)
