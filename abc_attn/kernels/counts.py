"""Slots that count for what they hold: softmax(K q + log m) reads a mean of m like tokens as exact attention the m.

Scores are products of queries and keys, so log m is one more column of the keys, and the query has a constant there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import Memory


def counted(q: Tensor, memory: Memory, log_mass: Tensor) -> tuple[Tensor, Memory]:
    """What is read in the place of q, which is scaled already, and the memory; log_mass: `b h n`, log m."""
    column = log_mass.to(memory.k.dtype).masked_fill(
        ~memory.used, 0
    )  # not read there; -inf times a zero gradient is NaN
    wide = F.pad(q.to(memory.k.dtype), (0, 1), value=1.0)
    return wide, memory._replace(k=torch.cat([memory.k, column[..., None]], dim=-1))
