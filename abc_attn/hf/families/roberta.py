"""RoBERTa: BERT's attention, and positions that are counted from its padding token's number on."""

from transformers.models.roberta.modeling_roberta import RobertaCrossAttention, RobertaSelfAttention

from abc_attn.hf.families import bert
from abc_attn.hf.families.base import Family

FAMILY = Family(
    name="Roberta",
    title="RoBERTa",
    attention={
        RobertaSelfAttention: bert.BoundedBertAttention,
        RobertaCrossAttention: bert.BoundedBertCrossAttention,
    },
    tiny=bert.FAMILY.tiny,
    positions_without_token=lambda config: config.pad_token_id + 1,
)
