"""The torch backend: the recurrence of core.reference as products of matrices over chunks of tokens.

Query t reads slot i's key as the sum over tokens j <= t of  exp(log_decay_{j+1} + ... + log_decay_t) phi_ji k_j.
Tokens of earlier chunks come through the memory at the chunk's start; those of t's own chunk are handled by halves:

    a chunk's second half reads its first half across the boundary r between them, where the exponent splits into
    (what decays from j to r) + (what decays from r to t): a product of matrices in which no exponent is positive;
    then each half is a chunk of its own.

Nothing overflows or cancels whatever the decays are, -inf included, and nothing of size chunk x chunk x n is made. The
halving stops early where the decays inside a block are so mild that one split serves the whole block.

A running mean of ordinary weights needs no decays, it is a sum over a sum: with c the weights in one unit for each
slot, A_t their running total and S the sum of the c_j k_j before the chunk, query t reads

    (S + sum over the chunk's j <= t of c_j k_j) / A_t                                           (values alike)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import (
    Memory,
    Write,
    decay_after,
    divide,
    group_heads,
    has_values,
    query_scale,
    softmax_weights,
    used_at_each,
    used_at_end,
)
from abc_attn.normaliser import log_in_unit, unit

# A block that decays by less than this many nats is split once: exp(+-16) is far from overflow, and a rounded
# exponent of 16 is still good to 1e-6 in fp32.
MILD = 16.0

# A slot's total may grow by this many nats in a call and still be written in one unit: its gradient takes the square of
# the total's inverse, and exp(60) leaves fp32 room.
GROWTH = 30.0

# Chunks, of all rows together, that are worked on at a time: of 64 tokens and 64 slots each, 4 MB an array, so that a
# long sequence needs little beside its output where no gradient is asked for. Where it is, all is kept anyway, and the
# fewer parts its gradients come in, the less is copied.
AT_A_TIME, WITH_GRADIENTS = 256, 1024


class _Split(NamedTuple):
    """Some tokens of each block read others of it: token j weighs row_ti * column_ji in slot i for query t."""

    block: int  # tokens in a block
    reads: slice  # which of them read
    read: slice  # ... which others; the same slice: each token reads those up to itself
    row: Tensor | None  # ... n, None: nothing decays
    column: Tensor  # ... n


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Write,
    memory: Memory,
    *,
    linear: bool,
    floor: float,
    mask_empty: bool,
    scale: float | None,
    dropout: float,
) -> tuple[Tensor, Memory]:
    """Causal attention: arguments and results of core.reference, in O(t) time and memory."""
    t, n = write.phi.shape[2:]
    size = min(64 if n <= 64 else 128, 1 << (t - 1).bit_length())
    seen = used_at_each(write, memory.used) if mask_empty else None
    if write.readable is not None:
        seen = write.readable if seen is None else seen & write.readable

    q = _cut(group_heads(q, k.shape[1]).to(v.dtype), size)
    k, v, phi = (_cut(x[:, :, None], size) for x in (k, v, write.phi))
    log_decay = None if write.log_decay is None else _cut(write.log_decay[:, :, None], size)
    seen = None if seen is None else _cut(seen[:, :, None], size)
    splits = _splits(phi, log_decay)
    start = None if log_decay is None else log_decay.cumsum(-2).exp()  # what is left at t of the chunk's start
    stored_k, stored_v, stored_mass, last = _memories(k, v, phi, log_decay, memory)

    if linear:
        features = q if seen is None else q.masked_fill(~seen, 0)
        total = _through(features, torch.ones_like(v[..., :1]), stored_mass, start, splits)
        kept = F.dropout(features, dropout) if dropout else features
        out = divide(_through(kept, v, stored_v, start, splits), total, floor)
    else:
        scores = _against(q * query_scale(q, scale), k, stored_k, start, splits)
        out = _through(softmax_weights(scores, seen, dropout), v, stored_v, start, splits)
    return out.flatten(3, 4)[:, :, :, :t].flatten(1, 2), last._replace(used=used_at_end(write, memory.used))


def chunked_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor,
    memory: Memory,
    log_total: Tensor,
    *,
    mask_empty: bool,
    scale: float | None,
    dropout: float,
) -> tuple[Tensor, Memory, Tensor] | None:
    """Causal attention over running means: what native_mean gives. None where some slot's total grows too much."""
    if not has_values(log_weights):
        return None
    top = unit(log_weights, log_total)
    total = (log_total - top).exp()
    with torch.no_grad():  # a total only grows: what opens a slot is about its smallest
        opening = torch.maximum(log_weights[:, :, 0], log_total)
        always_open = bool((opening != -torch.inf).all())
        if not always_open:
            first = (log_weights != -torch.inf).byte().argmax(2, keepdim=True)
            opening = torch.where(opening == -torch.inf, log_weights.gather(2, first)[:, :, 0], opening)
        if bool(((opening < top - GROWTH) & (opening != -torch.inf)).any()):
            return None

    b, h, t, _ = log_weights.shape
    groups, size = q.shape[1] // h, min(64, 1 << (t - 1).bit_length())
    several = max(1, (WITH_GRADIENTS if torch.is_grad_enabled() else AT_A_TIME) // (b * h))

    def pieces(x: Tensor, fill: float = 0.0) -> tuple[Tensor, ...]:  # ... t _ -> (b h) ... several chunks c _
        return _cut(x.flatten(0, 1), size, fill).split(several, -3)

    tops, total = top.flatten(0, 1)[:, None, None], total.flatten(0, 1)
    sums_k, sums_v = ((x.flatten(0, 1) * total[..., None]).to(v.dtype) for x in (memory.k, memory.v))
    start, lower = total, v.new_ones(size, size).tril()
    read, factor = [], query_scale(q, scale)
    tokens = (pieces(group_heads(q, h).to(v.dtype)), pieces(k), pieces(v), pieces(log_weights, -torch.inf))
    for q_, k_, v_, log_weights_ in zip(*tokens, strict=True):
        many = k_.shape[1]
        weights = (log_weights_ - tops).exp_().flatten(0, 1)
        q_, k_, v_ = q_.transpose(1, 2).flatten(2, 3).flatten(0, 1), k_.flatten(0, 1), v_.flatten(0, 1)
        before_k, sums_k = _before(sums_k, weights.mT @ k_, many)
        before_v, sums_v = _before(sums_v, weights.mT @ v_, many)
        starts, start = _before(start, weights.sum(1).double(), many)
        running = torch.baddbmm(starts[:, None].to(v.dtype), lower.expand(len(weights), -1, -1), weights)
        empty = None if always_open else running == 0
        share = (running if empty is None else running.masked_fill(empty, 1)).reciprocal()[:, None]
        seen = ~empty[:, None] if mask_empty and empty is not None else None
        scores = q_ @ before_k.mT
        scores.baddbmm_(_up_to_self(q_ @ k_.mT, groups), weights, beta=factor, alpha=factor)
        p = softmax_weights(scores.unflatten(1, (groups, -1)) * share, seen, dropout) * share
        p = p.flatten(1, 2)
        out = (p @ before_v).baddbmm_(_up_to_self(p @ weights.mT, groups), v_)
        read.append(out.unflatten(1, (groups, -1)).unflatten(0, (-1, many)).transpose(1, 2))
    out = torch.cat(read, dim=2).flatten(2, 3)[:, :, :t].reshape(b, -1, t, v.shape[-1])
    sums_k, sums_v, total, end = (x.unflatten(0, (b, h)) for x in (sums_k, sums_v, total, start))
    return out, _means(memory, sums_k, sums_v, total, end), log_in_unit(end, top)


def _before(first: Tensor, added: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """What there was before each of `many` chunks, `(rows many) ...`, and after the last, `rows ...`."""
    every = [first]
    for new in added.unflatten(0, (-1, many)).unbind(1):  # not indexed: the gradient of a slice is as large as all
        every.append(every[-1] + new)
    return torch.stack(every[:-1], dim=1).flatten(0, 1), every[-1]


def write_mean(k: Tensor, v: Tensor, log_weights: Tensor, memory: Memory, log_total: Tensor) -> tuple[Memory, Tensor]:
    """The means after the last token, for any weights: the total then is no smaller than its largest term."""
    top = unit(log_weights, log_total)
    weights, total = (log_weights - top[:, :, None]).exp_(), (log_total - top).exp()
    end = total + weights.sum(2, dtype=torch.float64)
    sums_k, sums_v = (
        (old * total[..., None]).to(v.dtype) + weights.mT @ new for old, new in ((memory.k, k), (memory.v, v))
    )
    return _means(memory, sums_k, sums_v, total, end), log_in_unit(end, top)


def _means(old: Memory, sums_k: Tensor, sums_v: Tensor, total: Tensor, end: Tensor) -> Memory:
    """The memory of means, from sums that grew from `total` to `end` (b h n, fp64)."""
    share = end.masked_fill(end == 0, 1).reciprocal()
    k, v, mass = sums_k * share[..., None], sums_v * share[..., None], (old.mass * total + (end - total)) * share
    return Memory(k.to(old.k.dtype), v.to(old.v.dtype), mass.to(old.mass.dtype), old.used | (end != 0))


def _up_to_self(pairs: Tensor, groups: int) -> Tensor:
    """Each query, in every one of the groups, reads the tokens up to itself."""
    return pairs.tril_() if groups == 1 else pairs.unflatten(1, (groups, -1)).tril().flatten(1, 2)


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


def _cut(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
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
