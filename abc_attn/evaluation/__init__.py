"""Scores of trained models."""

from abc_attn.evaluation.scoring import perplexity, token_nll

__all__ = ["perplexity", "token_nll"]
