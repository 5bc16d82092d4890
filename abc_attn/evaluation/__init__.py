"""Scores of trained models."""

from abc_attn.evaluation.perplexity import Score, perplexity, streaming_perplexity

__all__ = ["Score", "perplexity", "streaming_perplexity"]
