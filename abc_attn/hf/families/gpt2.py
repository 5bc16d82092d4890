"""GPT-2: q, k and v of a self-attention come from one projection; of a cross-attention, k and v do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from abc_attn.hf.attention import ConvertedAttention
from abc_attn.hf.families.base import Family
from abc_attn.hf.positions import Rotation


class BoundedGPT2Attention(ConvertedAttention):
    c_attn: nn.Module
    q_attn: nn.Module  # of a cross-attention
    c_proj: nn.Module
    resid_dropout: nn.Module

    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        heads = {"num_heads": original.num_heads, "num_kv_heads": original.num_heads}
        return heads | {"head_dim": original.head_dim, "dropout": original.attn_dropout.p}

    @classmethod
    def site(cls, original: Any) -> str:
        return "cross" if original.is_cross_attention else "self"

    @classmethod
    def width(cls, original: Any) -> int:
        return original.embed_dim

    def heads(
        self, x: Tensor, source: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        if self.causal:
            q, k, v = self.c_attn(x).chunk(3, dim=-1)
            return self.split(q), self.split(k), self.split(v), None
        q = self.split(self.q_attn(x))
        if source is None:
            return q, None, None, None
        k, v = self.c_attn(source).chunk(2, dim=-1)
        return q, self.split(k), self.split(v), None

    def output(self, merged: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(merged))

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        if given.get("encoder_hidden_states") is not None:
            given["attention_mask"] = given.get("encoder_attention_mask")
        return super().forward(hidden_states, **given)


FAMILY = Family(
    name="GPT2",
    title="GPT-2",
    attention={GPT2Attention: BoundedGPT2Attention},
    class_names={"ForCausalLM": "GPT2LMHeadModel"},
    tiny={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
)
