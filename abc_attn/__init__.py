"""Attention with a memory that never grows: every bounded-memory control of the ABC paper behind one small API."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from abc_attn.attention import BoundedAttention
    from abc_attn.controls import CONTROLS, Control, make_control, register_control
    from abc_attn.core import Memory, Write
    from abc_attn.kernels import mlp_attention, read, scan, write
    from abc_attn.state import State

# Imported on first use, so that `abc-attn --help` need not wait for torch.
_HOME = {
    "BoundedAttention": "attention",
    "CONTROLS": "controls",
    "Control": "controls",
    "Memory": "core",
    "State": "state",
    "Write": "core",
    "make_control": "controls",
    "mlp_attention": "kernels",
    "read": "kernels",
    "register_control": "controls",
    "scan": "kernels",
    "write": "kernels",
}
__all__ = [
    "CONTROLS",
    "BoundedAttention",
    "Control",
    "Memory",
    "State",
    "Write",
    "make_control",
    "mlp_attention",
    "read",
    "register_control",
    "scan",
    "write",
]

try:
    __version__ = version("abc-attn")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'abc_attn' has no attribute {name!r}")
    return getattr(import_module(f"abc_attn.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
