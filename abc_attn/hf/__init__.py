"""Hugging Face models with bounded memory."""

from abc_attn.hf.adaptive_lm import AdaptiveLM, AdaptiveLMConfig

__all__ = ["AdaptiveLM", "AdaptiveLMConfig"]
