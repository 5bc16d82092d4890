"""BART: an encoder, a decoder that reads it, or the decoder alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bart.modeling_bart import BartAttention

from abc_attn.hf.attention import ConvertedAttention
from abc_attn.hf.families.base import Family


class BoundedBartAttention(ConvertedAttention):
    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        heads = {"num_heads": original.num_heads, "num_kv_heads": original.num_heads}
        return heads | {"head_dim": original.head_dim, "dropout": original.dropout}

    @classmethod
    def site(cls, original: Any) -> str:
        if original.is_causal:
            return "self"
        return "cross" if original.is_decoder else "encoder"

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, None]:
        return super().forward(hidden_states, encoder_hidden_states=key_value_states, **given)


FAMILY = Family(
    name="Bart",
    title="BART",
    attention={BartAttention: BoundedBartAttention},
    tiny={
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 128,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    },
)
