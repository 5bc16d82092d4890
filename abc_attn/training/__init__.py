"""Training by recipe, and the paper's tables."""

from abc_attn.training.recipe import Recipe, load_recipe
from abc_attn.training.run import prepare, train

__all__ = ["Recipe", "load_recipe", "prepare", "train"]
