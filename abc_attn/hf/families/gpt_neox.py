"""GPT-NeoX: q, k and v of each head from one projection; only the first part of a head is rotated."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

from abc_attn.hf.attention import ConvertedAttention
from abc_attn.hf.families.base import Family
from abc_attn.hf.positions import Rotation


class BoundedGPTNeoXAttention(ConvertedAttention):
    query_key_value: nn.Module
    dense: nn.Module

    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        count = original.config.num_attention_heads
        heads = {"num_heads": count, "num_kv_heads": count}
        return heads | {"head_dim": original.head_size, "dropout": original.attention_dropout}

    @classmethod
    def site(cls, original: Any) -> str:
        return "self"

    @classmethod
    def width(cls, original: Any) -> int:
        return original.query_key_value.in_features

    def heads(
        self, x: Tensor, source: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        by_head = self.query_key_value(x).unflatten(-1, (self.num_heads, 3, self.head_dim))  # b t h 3 d
        q, k, v = by_head.permute(3, 0, 2, 1, 4)
        assert rotation is not None
        q, k, to_sinks = rotation.of(q, k)
        return q, k, v, to_sinks

    def output(self, merged: Tensor) -> Tensor:
        return self.dense(merged)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, layer_past: Cache | None = None, **given: Any
    ) -> tuple[Tensor, None]:
        return super().forward(hidden_states, past_key_values=layer_past, **given)


FAMILY = Family(
    name="GPTNeoX",
    title="GPT-NeoX",
    attention={GPTNeoXAttention: BoundedGPTNeoXAttention},
    tiny={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rotary_pct": 0.5,
    },
)
