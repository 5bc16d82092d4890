"""The torch backend: matrix products over chunks of tokens. Any device and dtype, differentiable, compilable."""

import torch
from torch import Tensor

from abc_attn.kernels.blocks import band, band_step
from abc_attn.kernels.chunked import scan
from abc_attn.kernels.chunked_mean import mean

__all__ = ["band", "band_step", "describe", "mean", "rotate", "scan"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + x.roll(d/2) * sin` of heads x `b h t d`, with cos and sin `b 1 t d`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def describe() -> str:
    return "matrix products over chunks, on any device"
