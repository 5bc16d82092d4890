"""The first tokens of a text, read from another position than the rest, for any control that keeps them.

Scores are products of queries and keys, so a sink's own score needs a column of its own: there the query has that
score, the sink's key, else zeros, has a 1, and all other keys have zeros. Bands have kernels that need no such columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import Memory, group_heads, working_dtype


class Widened(NamedTuple):
    """What is written and read in the place of q, k and the memory: wider by a column for each sink."""

    q: Tensor  # b (h g) t d+s
    k: Tensor  # b h t d+s
    memory: Memory | None
    sinks: Tensor  # b h s d   their keys; of those that have not come yet, zeros

    def narrowed(self, memory: Memory) -> Memory:
        """The memory after the call, as it is without the columns."""
        count, width = self.sinks.shape[2:]
        return memory._replace(k=torch.cat([self.sinks, memory.k[:, :, count:, :width]], dim=2))


def widen(
    q: Tensor,
    to_sinks: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory | None,
    sinks: int,
    before: Tensor,
    key_padding_mask: Tensor | None,
) -> Widened:
    """`to_sinks`, shaped as q, reads the first `sinks` tokens of the text, which are the memory's first rows.

    before: tokens of the text before this call, `b`.
    """
    b, t, d = k.shape[0], k.shape[2], k.shape[3]
    dtype = working_dtype(k, v, memory)
    real = k.new_ones(b, t, dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
    place = (before[:, None] + real.cumsum(1) - 1)[..., None]  # b t 1
    sink = torch.arange(sinks, device=k.device)
    comes = (place == sink) & real[..., None]  # b t s
    found = k.to(dtype).take_along_dim(comes.int().argmax(1)[:, None, :, None], 2)
    held = k.new_zeros(*k.shape[:2], sinks, d, dtype=dtype) if memory is None else memory.k[:, :, :sinks]
    keys = torch.where(comes.any(1)[:, None, :, None], found, held.to(dtype))
    scores = (group_heads(to_sinks, k.shape[1]).to(dtype) @ keys.mT[:, :, None]).flatten(1, 2)
    scores = scores.masked_fill((sink > place)[:, None], 0)  # not there yet, whatever it will be
    columns = comes[:, None].expand(-1, k.shape[1], -1, -1).to(dtype)
    wide_k = torch.cat([k.to(dtype).masked_fill(comes.any(-1)[:, None, :, None], 0), columns], dim=-1)
    if memory is not None:
        column = torch.eye(sinks, dtype=dtype, device=k.device) * memory.used[:, :, :sinks, None]
        rest = F.pad(memory.k[:, :, sinks:], (0, sinks))
        memory = memory._replace(k=torch.cat([F.pad(column, (d, 0)), rest.to(dtype)], dim=2))
    return Widened(torch.cat([q.to(dtype), scores], dim=-1), wide_k, memory, keys)
