"""Refuses inputs that do not fit together; every error says what was given and what is accepted."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from abc_attn.core import Memory, Reading, Write

_WRITTEN = tuple(f"write.{field}" for field in Write._fields)


def check_keys(k: Tensor, v: Tensor, write: Write, memory: Memory | None, key_padding_mask: Tensor | None) -> None:
    """Refuse what does not fit together, saying what was given and what is accepted."""
    if not isinstance(write, Write):
        raise TypeError(f"write must be a Write (phi, log_decay, readable), got {type(write).__name__}")
    for name, tensor in zip(("k", "v", *_WRITTEN), (k, v, *write), strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 axes (batch, heads, tokens, width), got shape {tuple(tensor.shape)}")
    b, h, t, d = k.shape
    if t < 1:
        raise ValueError(f"at least one token is needed, got k of shape {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k and v must share batch, heads and tokens, got {tuple(k.shape)} and {tuple(v.shape)}")
    if not (k.is_floating_point() and v.is_floating_point() and write.phi.is_floating_point()):
        raise TypeError(f"k, v and phi must be floating point, got {k.dtype}, {v.dtype} and {write.phi.dtype}")
    if write.log_decay is not None and not write.log_decay.is_floating_point():
        raise TypeError(f"write.log_decay must be floating point, got {write.log_decay.dtype}")
    if write.readable is not None and write.readable.dtype != torch.bool:
        raise TypeError(f"write.readable must be bool, got {write.readable.dtype}")
    n = write.phi.shape[-1]
    if n < 1:
        raise ValueError(f"at least one slot is needed, got write.phi of shape {tuple(write.phi.shape)}")
    for name, part in zip(_WRITTEN, write, strict=True):
        if part is None:
            continue
        if part.shape[0] not in (1, b) or part.shape[1] not in (1, h) or part.shape[2:] != (t, n):
            raise ValueError(
                f"{name} must have shape ({b} or 1, {h} or 1, {t}, {n}) beside k {tuple(k.shape)}, "
                f"got {tuple(part.shape)}"
            )
    if memory is not None:
        check_memory(memory)
        expected = ((b, h, n, d), (b, h, n, v.shape[-1]), (b, h, n), (b, h, n))
        for field, part, shape in zip(Memory._fields, memory, expected, strict=True):
            if part.shape != shape:
                raise ValueError(f"memory.{field} must have shape {shape} for these inputs, got {tuple(part.shape)}")
    check_padding(key_padding_mask, b, t)


def check_memory(memory: Memory) -> None:
    if not isinstance(memory, Memory):
        raise TypeError(f"memory must be a Memory, as write and scan return it, got {type(memory).__name__}")
    for field, part in zip(Memory._fields, memory, strict=True):
        fits = isinstance(part, Tensor) and (part.dtype == torch.bool if field == "used" else part.is_floating_point())
        if not fits:
            accepted = "bool" if field == "used" else "floating point"
            given = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"memory.{field} must be a {accepted} Tensor, got {given}")


def check_padding(key_padding_mask: Tensor | None, b: int, t: int) -> None:
    if key_padding_mask is None:
        return
    if not isinstance(key_padding_mask, Tensor):
        raise TypeError(f"key_padding_mask must be a bool Tensor, got {type(key_padding_mask).__name__}")
    if key_padding_mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool with True at padding, got {key_padding_mask.dtype}")
    if key_padding_mask.shape != (b, t):
        raise ValueError(f"key_padding_mask must have shape ({b}, {t}), got {tuple(key_padding_mask.shape)}")


def check_number(name: str, value: object, accepted: str, fine: bool = False) -> None:
    """Refuse an option that is no number, or not finite."""
    if not fine and (isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value)):
        raise TypeError(f"{name} must be {accepted}, got {value!r}")


def check_inner_like(inner: tuple[Tensor, ...], begun: tuple[Tensor, ...]) -> None:
    """Refuse a control's own state whose dtypes are not those that it begins with, or wider; or that holds +inf.

    NaN is refused where a file is read. -inf is the logarithm of an empty sum.
    """
    for i, (part, first) in enumerate(zip(inner, begun, strict=True)):
        wider = part.is_floating_point() and first.is_floating_point()
        if part.dtype != first.dtype and not (wider and torch.promote_types(part.dtype, first.dtype) == part.dtype):
            raise ValueError(f"tensor {i} of the control's state has dtype {part.dtype}, {first.dtype} is accepted")
        if part.is_floating_point() and bool((part == torch.inf).any()):
            raise ValueError(f"tensor {i} of the control's state contains inf")


def check_count(count: Tensor, length: Tensor, exact: bool) -> None:
    """Refuse a control's count of tokens `b` that is not (`exact`: exactly) what a state of this length can have."""
    if bool(((count != length) if exact else (count < 0) | (count > length)).any()):
        accepted = "as many" if exact else "0 to as many"
        raise ValueError(
            f"this state's control has counted {count.tolist()[:8]} tokens, {accepted} as the state's length "
            f"{length.tolist()[:8]} are accepted"
        )


def check_log_total(log_total: Tensor, gated: bool = False) -> None:
    """Refuse a normaliser (the logarithm of a sum, -inf of an empty one) that no weights can have added up to.

    The kernels split it into an fp32 number and the rest, of which they take the exponential: at 2**27 that is e^8 at
    most. With a gate they do not, and a slot that nothing enters any more becomes smaller with every token.
    """
    largest, lowest = 2.0**27, -torch.finfo(torch.float32).max if gated else -(2.0**27)
    if bool(((log_total > largest) | ((log_total < lowest) & (log_total != -torch.inf))).any()):
        raise ValueError(f"this state's normaliser must be -inf or a logarithm in {lowest:g} to {largest:g}")


def check_queries(q: Tensor, k: Tensor, v: Tensor, slots: int, reading: Reading) -> None:
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a Tensor, got {type(q).__name__}")
    if not q.is_floating_point():
        raise TypeError(f"q must be floating point, got {q.dtype}")
    if q.dim() != 4:
        raise ValueError(f"q must have 4 axes (batch, heads, tokens, width), got shape {tuple(q.shape)}")
    if q.shape[0] != v.shape[0] or q.shape[1] % v.shape[1]:
        raise ValueError(
            f"q must have batch {v.shape[0]} and a multiple of {v.shape[1]} heads, as the keys and values have, "
            f"got q of shape {tuple(q.shape)}"
        )
    check_number("scale", reading.scale, "a number, or None for d^-1/2", reading.scale is None)
    check_number("dropout", reading.dropout, "a number from 0 to 1")
    width = slots if reading.linear else k.shape[-1]
    if q.shape[-1] != width:
        what = "the number of slots (a linear read takes f(q))" if reading.linear else "the width of the keys"
        raise ValueError(f"q must have width {width}, {what}, got q of shape {tuple(q.shape)}")
    if not reading.floor >= 0 or (reading.floor and not reading.linear):
        raise ValueError(
            "floor must be 0 or more, and 0 unless the read is linear, "
            f"got {reading.floor!r} with linear={reading.linear}"
        )
