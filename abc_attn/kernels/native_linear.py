"""A linear layer for few rows, as in a decoding step, in one pass over the weights (native_linear.h): fp32 or int8.

What takes the time of a step is reading the weights. torch's product reads them at a third of the speed of the memory
on some processors, and has none for weights in int8 and activations in fp32.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import transformed
from abc_attn.kernels.native import LIBRARY, finish, struct, unavailable

MOST_ROWS = 128  # beyond, a product in blocks of a cache's size is faster

_Linear = struct(
    ("blocks", "rows", "outputs", "inputs", "threads"), ("x", "weight", "whole", "scale", "bias", "y"), floats=()
)
_LIBRARY = torch.library.Library("abc_attn", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor")


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor | None:
    """(x W^T) scale + bias of x `... i`, W `o i` in fp32 or int8, scale and bias `o`; None of what is not ordinary.

    No gradients. In a graph that is traced, one operator, whatever the number of rows.
    """
    if unavailable() or x.dtype != torch.float32 or x.device.type != "cpu" or transformed():
        return None
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, weight, scale, bias)):
        return None
    if weight.dtype not in (torch.float32, torch.int8) or not weight.is_contiguous():
        return None
    if any(part is not None and part.dtype != torch.float32 for part in (scale, bias)):
        return None
    if not torch.compiler.is_compiling() and math.prod(x.shape[:-1]) > MOST_ROWS:
        return None
    return torch.ops.abc_attn.linear(x, weight, scale, bias)


def _linear_now(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    width, outputs = x.shape[-1], weight.shape[0]
    rows = math.prod(x.shape[:-1])
    if rows > MOST_ROWS:
        y = F.linear(x, weight.to(x.dtype))
        y = y if scale is None else y * scale
        return y if bias is None else y + bias
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    for part, count in ((x, rows * width), (weight, outputs * width), (scale, outputs), (bias, outputs)):
        known = (torch.float32, torch.int8) if part is weight else (torch.float32,)
        if part is not None and (part.numel() != count or part.dtype not in known or not part.is_contiguous()):
            raise ValueError(
                f"the native linear layer needs {count} contiguous numbers of {' or '.join(map(str, known))}, "
                f"got {tuple(part.shape)} of {part.dtype}"
            )
    args = _Linear((outputs + 3) // 4, rows, outputs, width, torch.get_num_threads(), x=x.data_ptr(), y=y.data_ptr())
    if weight.dtype == torch.int8:
        args.whole = weight.data_ptr()
    else:
        args.weight = weight.data_ptr()
    if scale is not None:
        args.scale = scale.data_ptr()
    if bias is not None:
        args.bias = bias.data_ptr()
    assert isinstance(LIBRARY, ctypes.CDLL)
    finish(LIBRARY.abc_linear(ctypes.byref(args)))
    return y


_LIBRARY.impl("linear", _linear_now, "CPU")


@torch.library.register_fake("abc_attn::linear", lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
