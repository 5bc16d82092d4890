"""OPT: BART's projections in a decoder alone, with a table of positions."""

from __future__ import annotations

from typing import Any

from transformers.models.opt.modeling_opt import OPTAttention

from abc_attn.hf.attention import ConvertedAttention
from abc_attn.hf.families.base import Family


class BoundedOPTAttention(ConvertedAttention):
    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        heads = {"num_heads": original.num_heads, "num_kv_heads": original.num_heads}
        return heads | {"head_dim": original.head_dim, "dropout": original.dropout}

    @classmethod
    def site(cls, original: Any) -> str:
        return "self"


FAMILY = Family(
    name="OPT",
    title="OPT",
    attention={OPTAttention: BoundedOPTAttention},
    tiny={
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
)
