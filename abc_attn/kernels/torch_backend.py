"""The torch backend: fp64, dropout and other devices too; matrix products over chunks of tokens."""

import torch
from torch import Tensor

from abc_attn.core import Memory, Reading, full_precision
from abc_attn.kernels.blocks import attention, band, band_step
from abc_attn.kernels.chunked import scan
from abc_attn.kernels.chunked_mean import mean

__all__ = ["band", "band_step", "describe", "exact", "mean", "rotate", "scan"]


def exact(q: Tensor, memory: Memory, seen: Tensor | None, reading: Reading) -> Tensor:
    """torch's own attention over the tokens in `seen`, `b 1 t n`; None: over those up to the query's own."""
    blind = None if seen is None else ~seen.any(-1, keepdim=True)
    with full_precision(q):
        out = attention(
            q.to(memory.k.dtype),
            memory.k,
            memory.v,
            attn_mask=None if seen is None or blind is None else seen | blind,  # a row of nothing would give NaN
            dropout_p=reading.dropout,
            is_causal=seen is None,
            scale=reading.scale,
            enable_gqa=q.shape[1] != memory.k.shape[1],
        )
    return (out if blind is None else out.masked_fill(blind, 0)).to(q.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + x.roll(d/2) * sin` of heads x `b h t d`, with cos and sin `b 1 t d`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def describe() -> str:
    return "matrix products over chunks, on any device"
