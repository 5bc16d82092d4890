"""Qwen3: Llama's attention with a norm of every query and key head, before the rotation."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from abc_attn.hf.families import llama
from abc_attn.hf.families.base import Family
from abc_attn.hf.positions import Rotation


class BoundedQwen3Attention(llama.BoundedLlamaAttention):
    q_norm: nn.Module
    k_norm: nn.Module

    def heads(
        self, x: Tensor, source: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        q, k, v, _ = super().heads(x, source, None)
        assert rotation is not None
        q, k, to_sinks = rotation.of(self.q_norm(q), self.k_norm(k))
        return q, k, v, to_sinks


FAMILY = Family(
    name="Qwen3",
    title="Qwen3",
    attention={Qwen3Attention: BoundedQwen3Attention},
    tiny={**llama.FAMILY.tiny, "head_dim": 8},
)
