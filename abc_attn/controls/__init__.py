"""Every control, by name in CONTROLS."""

from abc_attn.controls import positional, learned, keeping, lifetimes, offline, features  # noqa: I001 (the order they are listed in)
from abc_attn.controls.base import CONTROLS, Composition, Control, Gated, make_control, register_control

__all__ = [
    "CONTROLS",
    "Composition",
    "Control",
    "Gated",
    "features",
    "keeping",
    "learned",
    "lifetimes",
    "make_control",
    "offline",
    "positional",
    "register_control",
]
