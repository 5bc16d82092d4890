"""Models of our own, built on bounded attention from scratch."""

from abc_attn.models.adaptive_lm import AdaptiveLM, AdaptiveLMConfig

__all__ = ["AdaptiveLM", "AdaptiveLMConfig"]
