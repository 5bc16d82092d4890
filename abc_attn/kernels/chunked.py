"""The torch backend: the recurrence of core.reference as products of matrices over chunks of tokens.

Query t reads slot i's key as the sum over tokens j <= t of  exp(log_decay_{j+1} + ... + log_decay_t) phi_ji k_j.
Tokens of earlier chunks come through the memory at the chunk's start; those of t's own chunk are handled by halves:

    a chunk's second half reads its first half across the boundary r between them, where the exponent splits into
    (what decays from j to r) + (what decays from r to t): a product of matrices in which no exponent is positive;
    then each half is a chunk of its own.

Nothing overflows or cancels whatever the decays are, -inf included, and nothing of size chunk x chunk x n is made. The
halving stops early where the decays inside a block are so mild that one split serves the whole block.

A running mean of ordinary weights needs no decays: chunked_mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import (
    Memory,
    Reading,
    Write,
    all_finite,
    decay_after,
    divide,
    group_heads,
    has_values,
    query_scale,
    reference,
    softmax_weights,
    used_at_each,
    used_at_end,
)

# A block that decays by less than this many nats is split once: exp(+-16) is far from overflow, and a rounded
# exponent of 16 is still good to 1e-6 in fp32.
MILD = 16.0


class _Split(NamedTuple):
    """Some tokens of each block read others of it: token j weighs row_ti * column_ji in slot i for query t."""

    block: int  # tokens in a block
    reads: slice  # which of them read
    read: slice  # ... which others; the same slice: each token reads those up to itself
    row: Tensor | None  # ... n, None: nothing decays
    column: Tensor  # ... n


def scan(q: Tensor, k: Tensor, v: Tensor, write: Write, memory: Memory, reading: Reading) -> tuple[Tensor, Memory]:
    """Causal attention: arguments and results of core.reference, in O(t) time and memory."""
    # One token is one step of the loop. So is each of those that are not finite: a product of matrices multiplies later
    # tokens by zero, and 0 * inf is NaN.
    if q.shape[2] == 1 or (has_values(k) and not all_finite(k, v, write.phi)):
        return reference(q, k, v, write, memory, reading)
    t, n = write.phi.shape[2:]
    size = min(64 if n <= 64 else 128, 1 << (t - 1).bit_length())
    seen = used_at_each(write, memory.used) if reading.mask_empty else None
    if write.readable is not None:
        seen = write.readable if seen is None else seen & write.readable

    q = cut(group_heads(q, k.shape[1]).to(v.dtype), size)
    k, v, phi = (cut(x[:, :, None], size) for x in (k, v, write.phi))
    log_decay = None if write.log_decay is None else cut(write.log_decay[:, :, None], size)
    seen = None if seen is None else cut(seen[:, :, None], size)
    splits = _splits(phi, log_decay)
    start = None if log_decay is None else log_decay.cumsum(-2).exp()  # what is left at t of the chunk's start
    stored_k, stored_v, stored_mass, last = _memories(k, v, phi, log_decay, memory)

    if reading.linear:
        features = q if seen is None else q.masked_fill(~seen, 0)
        total = _through(features, torch.ones_like(v[..., :1]), stored_mass, start, splits)
        kept = F.dropout(features, reading.dropout) if reading.dropout else features
        out = divide(_through(kept, v, stored_v, start, splits), total, reading.floor)
    else:
        scores = _against(q * query_scale(q, reading.scale), k, stored_k, start, splits)
        out = _through(softmax_weights(scores, seen, reading.dropout), v, stored_v, start, splits)
    return out.flatten(3, 4)[:, :, :, :t].flatten(1, 2), last._replace(used=used_at_end(write, memory.used))


def _against(q: Tensor, k: Tensor, stored: Tensor, start: Tensor | None, splits: list[_Split]) -> Tensor:
    """q_t . K_t for every slot, where K_t is the memory of the keys k that started the chunk as `stored`."""
    scores = q @ stored.mT
    scores = scores if start is None else scores * start
    for split in splits:
        across = _pairs(_take(q, split.block, split.reads), _take(k, split.block, split.read), split)
        across = _product(across, split.column)
        across = across if split.row is None else across * split.row
        _take(scores, split.block, split.reads).add_(across)
    return scores


def _through(weights: Tensor, v: Tensor, stored: Tensor, start: Tensor | None, splits: list[_Split]) -> Tensor:
    """weights_t . V_t, where V_t is the memory of the values v that started the chunk as `stored`."""
    out = (weights if start is None else weights * start) @ stored
    for split in splits:
        rows = _take(weights, split.block, split.reads)
        rows = rows if split.row is None else rows * split.row
        across = _pairs(rows, split.column, split)
        _take(out, split.block, split.reads).add_(_product(across, _take(v, split.block, split.read)))
    return out


def _splits(phi: Tensor, log_decay: Tensor | None) -> list[_Split]:
    size, everything = phi.shape[-2], slice(None)
    if log_decay is None:
        return [_Split(size, everything, everything, None, _take(phi, size, everything))]
    splits, block = [], _mild_block(log_decay)
    half = size // 2
    while half >= block:
        first, second = slice(half), slice(half, None)
        row = _take(log_decay, 2 * half, second).cumsum(-2).exp()
        column = _take(phi, 2 * half, first) * decay_after(_take(log_decay, 2 * half, first)).exp()
        splits.append(_Split(2 * half, second, first, row, column))
        half //= 2
    if block == 1:
        return [*splits, _Split(1, everything, everything, None, _take(phi, 1, everything))]
    since = F.pad(_take(log_decay, block, slice(1, None)), (0, 0, 1, 0)).cumsum(
        -2
    )  # the block's start decays nobody in it
    column = _take(phi, block, everything) * (-since).exp()
    return [*splits, _Split(block, everything, everything, since.exp(), column)]


def _mild_block(log_decay: Tensor) -> int:
    """The largest block in which no slot decays by more than MILD after the block's first token."""
    block = log_decay.shape[-2]
    if not has_values(log_decay):
        return 1  # exact for any decay
    with torch.no_grad():
        while block > 1 and _take(log_decay, block, slice(1, None)).sum(-2).amin() < -MILD:
            block //= 2
    return block


def _memories(
    k: Tensor, v: Tensor, phi: Tensor, log_decay: Tensor | None, memory: Memory
) -> tuple[Tensor, Tensor, Tensor, Memory]:
    """K, V and mass (as a column) at the start of every chunk: b h 1 m n _; and the memory after the last."""
    widths = [k.shape[-1], v.shape[-1], 1]
    written = torch.cat([k, v, torch.ones_like(v[..., :1])], dim=-1)
    stored = torch.cat([memory.k, memory.v, memory.mass[..., None]], dim=-1)[:, :, None]
    if log_decay is None:
        added = phi.mT @ written
        after = stored[:, :, :, None] + added.cumsum(3)
        starts = torch.cat([stored[:, :, :, None], after[:, :, :, :-1]], dim=3)
        stored = after[:, :, :, -1]
    else:
        added = (phi * decay_after(log_decay).exp()).mT @ written
        decay = log_decay.sum(-2).exp()[..., None]
        every = []
        for left, new in zip(
            decay.unbind(3), added.unbind(3), strict=True
        ):  # the gradient of a slice is as large as all
            every.append(stored)
            stored = left * stored + new
        starts = torch.stack(every, dim=3)
    last_k, last_v, last_mass = stored[:, :, 0].split(widths, dim=-1)
    starts_k, starts_v, starts_mass = starts.split(widths, dim=-1)
    # Clones: a state must not hold on to the buffer of a whole sequence.
    last_k, last_v, last_mass = (x.clone(memory_format=torch.contiguous_format) for x in (last_k, last_v, last_mass))
    last = Memory(last_k, last_v, last_mass[..., 0], memory.used)
    return starts_k, starts_v, starts_mass, last


def cut(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """`... t _` -> `... m c _`: m chunks of c = size tokens, the last filled up. A view where nothing is missing."""
    missing = -x.shape[-2] % size
    return (F.pad(x, (0, 0, 0, missing), value=fill) if missing else x).unflatten(-2, (-1, size))


def _take(x: Tensor, block: int, part: slice) -> Tensor:
    """`... c _` -> `... blocks part _`, a view."""
    return x.unflatten(-2, (-1, block))[..., part, :]


def _pairs(rows: Tensor, columns: Tensor, split: _Split) -> Tensor:
    """What every row has to do with every column it reads."""
    if rows.shape[-2] == 1:
        return (rows * columns).sum(-1, keepdim=True)
    pairs = rows @ columns.mT
    return pairs.tril() if split.reads == split.read else pairs


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a * b if a.shape[-1] == 1 else a @ b
