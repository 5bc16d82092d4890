"""What a gate keeps, log f of f = sigmoid(logit)^(1/exponent), in one pass over memory each way (native_gate.h).

torch takes five, and as many new arrays of b h t n; and one more to lay out what comes from a projection, `b t h n`, as
the kernels want it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from abc_attn.core import has_values, transformed
from abc_attn.kernels.native import LIBRARY, finish, struct

LEAST, NARROWEST = 1 << 15, 16  # numbers, slots: of fewer, torch's own operations are as fast or faster

_Gate = struct(
    ("rows", "heads", "t", "n", "batch", "head", "token", "threads"),
    ("logit", "log_keep", "d_log_keep", "d_logit"),
    ("exponent",),
)


def log_sigmoid(logit: Tensor, exponent: float) -> Tensor | None:
    """normaliser.log_sigmoid of fp32 on the CPU, `b h t n`, contiguous; None of what is not ordinary."""
    if logit.dim() != 4 or logit.numel() < LEAST or logit.shape[3] < NARROWEST or logit.stride(3) != 1:
        return None
    if logit.dtype != torch.float32 or logit.device.type != "cpu" or transformed() or not has_values(logit):
        return None
    return _LogSigmoid.apply(logit, exponent)


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logit: Tensor, exponent: float) -> Tensor:
        log_keep = logit.new_empty(logit.shape)
        _run(logit, exponent, logit=logit, log_keep=log_keep)
        ctx.save_for_backward(log_keep)
        ctx.exponent, ctx.strides = exponent, torch.empty_like(logit, device="meta").stride()
        return log_keep

    @staticmethod
    def backward(ctx: Any, d_log_keep: Tensor) -> tuple[Tensor, None]:
        (log_keep,), exponent = ctx.saved_tensors, ctx.exponent
        again = torch.is_grad_enabled() and (d_log_keep.requires_grad or log_keep.requires_grad)
        if again:  # what will be differentiated itself
            return d_log_keep * (log_keep * exponent).expm1() / -exponent, None
        d_logit = log_keep.new_empty_strided(log_keep.shape, ctx.strides)
        _run(d_logit, exponent, log_keep=log_keep, d_log_keep=d_log_keep.contiguous(), d_logit=d_logit)
        return d_logit, None


def _run(strided: Tensor, exponent: float, **tensors: Tensor) -> None:
    (b, h, t, n), strides = strided.shape, strided.stride()[:3]
    pointers = {name: x.data_ptr() for name, x in tensors.items()}
    sizes = (b * h, h, t, n, *strides, torch.get_num_threads())
    assert isinstance(LIBRARY, ctypes.CDLL)
    finish(LIBRARY.abc_gate(ctypes.byref(_Gate(*sizes, exponent, **pointers))))
