"""Finds the compiled kernels (native.cpp) and says what they have."""

from __future__ import annotations

import ctypes
import importlib.util
import os


def load() -> ctypes.CDLL | str:
    """The compiled kernels, or why they cannot be used."""
    wanted = os.environ.get("ABC_ATTN_BACKEND") or "auto"
    if wanted not in ("auto", "torch"):
        raise ValueError(f"ABC_ATTN_BACKEND must be 'torch' (without the compiled kernels) or 'auto', got {wanted!r}")
    if wanted == "torch":
        return "ABC_ATTN_BACKEND=torch"
    spec = importlib.util.find_spec("abc_attn.kernels._native")
    if spec is None or spec.origin is None:
        return "the native kernels were not compiled when abc-attn was installed (no C++ compiler?)"
    try:
        found = ctypes.CDLL(spec.origin)
    except OSError as error:
        return f"the native kernels could not be loaded: {error}"
    found.abc_kind.restype = found.abc_kind_at.restype = ctypes.c_char_p
    wanted = os.environ.get("ABC_ATTN_SIMD") or ""
    if wanted and found.abc_use(wanted.encode()):
        has = ", ".join(map(repr, widths_of(found)))
        raise ValueError(f"ABC_ATTN_SIMD must be a vector width that this machine has, one of {has}, got {wanted!r}")
    found.abc_checkpoint_floats.restype = ctypes.c_int64
    found.abc_rotate.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 4
    return found


def widths_of(library: ctypes.CDLL) -> list[str]:
    """The vector widths that the kernels have on this machine, widest first."""
    found: list[str] = []
    while (name := library.abc_kind_at(len(found))) is not None:
        found.append(name.decode())
    return found
