"""Qwen2: Llama's attention, with biases; some layers may be sliding windows."""

from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from abc_attn.hf.families import llama
from abc_attn.hf.families.base import Family

FAMILY = Family(
    name="Qwen2",
    title="Qwen2",
    attention={Qwen2Attention: llama.BoundedLlamaAttention},
    tiny=llama.FAMILY.tiny,
)
