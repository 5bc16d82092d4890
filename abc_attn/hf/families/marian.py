"""Marian: BART's attention."""

from transformers.models.marian.modeling_marian import MarianAttention, MarianDecoder

from abc_attn.hf.families import bart
from abc_attn.hf.families.base import Family

FAMILY = Family(
    name="Marian",
    title="Marian",
    attention={MarianAttention: bart.BoundedBartAttention},
    class_names={"ForConditionalGeneration": "MarianMTModel"},
    tiny=bart.FAMILY.tiny,
    decoder=MarianDecoder,
)
