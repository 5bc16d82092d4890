"""The reference backend: the loop over tokens of core.reference, slow and plain."""

from abc_attn.core import reference as scan

__all__ = ["describe", "scan"]


def describe() -> str:
    return "the loop over tokens that every other backend is tested against"
