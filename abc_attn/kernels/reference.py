"""The reference backend: everything; a loop over tokens, slow and plain, that the others are tested against."""

import torch
from torch import Tensor

from abc_attn.core import Memory, Reading, read_memory
from abc_attn.core import reference as scan

__all__ = ["describe", "exact", "scan"]


def exact(q: Tensor, memory: Memory, seen: Tensor | None, reading: Reading) -> Tensor:
    """Softmax over the tokens in `seen`, `b 1 t n`; None: over those up to the query's own."""
    t, n = q.shape[2], memory.k.shape[2]
    seen = torch.ones(t, n, dtype=torch.bool, device=q.device).tril() if seen is None else seen
    seen = seen.expand(*memory.k.shape[:2], t, n)
    reading = reading._replace(mask_empty=True)
    each = [read_memory(q[:, :, i, None], memory._replace(used=seen[:, :, i]), reading) for i in range(t)]
    return torch.cat(each, dim=2)


def describe() -> str:
    return "the loop over tokens that every other backend is tested against"
