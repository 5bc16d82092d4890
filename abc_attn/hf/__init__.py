"""Hugging Face models with bounded memory."""
