"""Scores of trained models."""

from abc_attn.evaluation.scoring import answer_accuracy, perplexity, token_nll

__all__ = ["answer_accuracy", "perplexity", "token_nll"]
