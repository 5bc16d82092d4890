"""Phi-3: q, k and v from one projection, side by side; in some models every layer is a sliding window."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.phi3.modeling_phi3 import Phi3Attention

from abc_attn.hf.families import llama, mistral
from abc_attn.hf.families.base import Family
from abc_attn.hf.positions import Rotation


class BoundedPhi3Attention(mistral.BoundedMistralAttention):
    qkv_proj: nn.Module

    @classmethod
    def width(cls, original: Any) -> int:
        return original.qkv_proj.in_features

    def heads(
        self, x: Tensor, source: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        widths = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (self.split(part) for part in self.qkv_proj(x).split(widths, dim=-1))
        assert rotation is not None
        q, k, to_sinks = rotation.of(q, k)
        return q, k, v, to_sinks


FAMILY = Family(
    name="Phi3",
    title="Phi-3",
    attention={Phi3Attention: BoundedPhi3Attention},
    tiny=llama.FAMILY.tiny,
)
