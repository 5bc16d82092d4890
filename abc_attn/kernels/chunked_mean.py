"""Running means on the torch backend: sums over sums, as products of matrices over chunks of tokens.

With c the weights in one unit for each slot, A_t their running total, and K_t and V_t the running sums of the c_j k_j
and c_j v_j, query t reads

    s_t = scale q_t K_t / A_t,      p_t = softmax(s_t),      u_t = p_t / A_t,      o_t = u_t V_t

Both q_t K_t and u_t V_t are one form: x_t meets S_t, the sum of the products a_j b_j of the tokens up to t. With S what
there was before t's chunk,

    x_t S_t = x_t S + sum over the chunk's j <= t of (x_t . a_j) b_j

Means that forget are sums too, if those of each chunk are measured in the unit of its end. With f_j what token j keeps,
c_j is then what the chunk's tokens after j keep of its weight, and S is multiplied, before the chunk, by what all its
tokens keep (its `fade`); the unit is the same above and below the fraction.

The work is done in blocks of a few chunks, in the same few arrays, which stay in the processor's caches;
new arrays from malloc are several times slower. The gradient goes through the blocks from the last to the first and
computes each anew; autograd would keep ten arrays of t x n.

Axes: a row r is a head of a batch, whose keys g queries share; m chunks of c tokens; s chunks are worked on at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import (
    Mean,
    Memory,
    Reading,
    all_finite,
    decay_after,
    full_precision,
    group_heads,
    has_values,
    query_scale,
    read_memory,
    softmax_weights,
    transformed,
)
from abc_attn.kernels.chunked import cut
from abc_attn.kernels.door import Declined
from abc_attn.normaliser import log_in_unit, unit, weights_of

# A slot's total may be this many nats from its unit, to either side: the inverse of a total meets weights that may be
# as large as a later one, and exp(60) is well inside the range of fp32.
RANGE = 30.0

OUTPUTS = 5  # of _Mean, that have gradients
CHUNK, LEAST_CHUNK = 64, 8  # tokens; fewer than 64 where much is forgotten

# Chunks in a block, over all rows together: at 64, an array of 64 x 64 for each takes a megabyte. A dozen such arrays
# fit a CPU's caches, and each call of torch has enough to do. Other devices need more.
AT_A_TIME, AT_A_TIME_ELSEWHERE = 64, 1024


def mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor | None,
    log_keep: Tensor | None,
    memory: Memory,
    log_total: Tensor,
    reading: Reading,
    causal: bool,
) -> tuple[Tensor, Memory, Tensor] | Declined:
    """Attention over weighted means: of the tokens so far, or of all of them."""
    log_weights = weights_of(Mean(log_weights, log_keep))
    if not causal:
        memory, log_total = write_mean(k, v, log_weights, memory, log_total)
        return read_memory(q, memory, reading), memory, log_total
    if not has_values(log_weights):
        return Declined("the size of the weights must be known, which a traced graph does not tell")
    if q.shape[2] == 1:
        return Declined("of one token there is nothing to sum")
    if not all_finite(k, v) or (log_weights.numel() and not bool(log_weights.detach().amax() < torch.inf)):
        return Declined("a token is not finite, and no earlier output may depend on it")
    with torch.no_grad():  # a total only grows: what opens a slot is about its smallest
        opening = torch.maximum(log_weights[:, :, 0], log_total)
        always_open = bool((opening != -torch.inf).all())
        if not always_open:
            first = (log_weights != -torch.inf).byte().argmax(2, keepdim=True)
            opening = torch.where(opening == -torch.inf, log_weights.gather(2, first)[:, :, 0], opening)
        never = opening == -torch.inf
    how = _How(query_scale(q, reading.scale), always_open, reading.mask_empty, reading.dropout)
    given = (q, k, v, log_weights, memory, log_total)
    if log_keep is not None:
        return _forgetting(*given, log_keep, how)
    if bool(((opening.abs() <= RANGE) | never).all()):
        found = _in_unit(*given, None, how)  # ordinary weights need no unit
        if bool((found[2] <= RANGE).all()):
            return found
    top = unit(log_weights, log_total)
    if bool(((opening < top - RANGE) & ~never).any()):
        return Declined(f"a slot's total grows by more than exp({RANGE:.0f})")
    return _in_unit(*given, top, how)


def _forgetting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor,
    memory: Memory,
    log_total: Tensor,
    log_keep: Tensor,
    how: _How,
) -> tuple[Tensor, Memory, Tensor] | Declined:
    """`mean` whose sums forget."""
    with torch.no_grad():
        size = _chunk_size(log_keep.shape[2])
        while size > LEAST_CHUNK and cut(log_keep, size)[..., 1:, :].sum(-2).amin() < -RANGE:
            size //= 2
        top = unit(log_weights, log_total)
        silent = log_weights == -torch.inf
        # What a token enters with, measured at the end of its chunk, is the least that a total can be from there on.
        least = (log_weights - top[:, :, None]).masked_fill(silent, 0).amin() if log_weights.numel() else 0.0
        least = least + cut(log_keep, size)[..., 1:, :].sum(-2).amin()
        if bool((silent & (log_keep < 0)).any()) or bool(least < -2 * RANGE):
            return Declined(f"a slot's total shrinks by more than exp({2 * RANGE:.0f}), or is not written to")
        if bool((log_total > -torch.inf).logical_and(log_total < top - RANGE).any()):
            return Declined(f"a slot's total grows by more than exp({RANGE:.0f})")
    return _in_unit(q, k, v, log_weights, memory, log_total, top, how, log_keep, size)


def _chunk_size(tokens: int) -> int:
    return min(CHUNK, 1 << (tokens - 1).bit_length())


def _in_unit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor,
    memory: Memory,
    log_total: Tensor,
    top: Tensor | None,
    how: _How,
    log_keep: Tensor | None = None,
    size: int | None = None,
) -> tuple[Tensor, Memory, Tensor]:
    """`mean` with the weights of each slot measured in units of exp(top), b h n; None: as they are."""
    b, h, t, n = log_weights.shape
    size = _chunk_size(t) if size is None else size
    total = (log_total if top is None else log_total - top).exp()
    sums_k, sums_v = (x.to(v.dtype) * total[..., None].to(v.dtype) for x in (memory.k, memory.v))
    q = cut(group_heads(q, h).to(v.dtype), size)
    k, v, log_weights = (cut(x[:, :, None], size, fill) for x, fill in ((k, 0.0), (v, 0.0), (log_weights, -torch.inf)))
    fade = None
    if log_keep is not None:
        keep = cut(log_keep[:, :, None], size)
        log_weights, fade = log_weights + decay_after(keep), keep.sum(-2)[:, :, 0].flatten(0, 1).transpose(0, 1)
    noise = F.dropout(q.new_ones(*q.shape[:-1], n), how.dropout) if how.dropout else None
    tokens = [None if x is None else x.flatten(0, 1).permute(2, 0, 1, 3, 4) for x in (q, k, v, log_weights, noise)]
    state = [*(None if x is None else x.flatten(0, 1) for x in (sums_k.mT, sums_v, total, top)), fade]
    saves = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tokens, *state))
    if transformed():  # vmap and grad have rules for plain operations only
        run = _Mean.transformed
    else:
        run = (
            _Mean.apply if saves else _Mean.forward
        )  # for a short text, autograd's bookkeeping would take most of the time
    out, *last = run(*tokens, *state, how._replace(saves=saves))[:OUTPUTS]
    sums_k, sums_v, end, size_of_sums = (x.unflatten(0, (b, h)) for x in last)
    out = out.flatten(2, 3).unflatten(0, (b, h)).flatten(1, 2)[:, :, :t]
    after = log_in_unit(size_of_sums, torch.zeros_like(log_total) if top is None else top)
    kept = total if log_keep is None else total * log_keep.double().sum(2).exp()
    return out, _means(memory, sums_k.mT, sums_v, kept, end), after


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
    """The memory of means, from sums that grew to `end`, of which `total` is left of what was there (b h n, fp64)."""
    share = end.masked_fill(end == 0, 1).reciprocal()
    k, v = (x * share[..., None].to(x.dtype) for x in (sums_k, sums_v))
    # 1, but for a part of what was there before that is not a mean.
    mass = ((old.mass - 1) * total * share + 1).masked_fill(end == 0, 0)
    return Memory(k.to(old.k.dtype), v.to(old.v.dtype), mass.to(old.mass.dtype), old.used | (end != 0))


class _How(NamedTuple):
    scale: float
    always_open: bool  # no slot is empty at any token
    mask_empty: bool
    dropout: float
    saves: bool = False  # there will be a backward pass


class _Text(NamedTuple):
    """The inputs, with the axis of chunks first so that a block is a slice; and the sums before them."""

    q: Tensor  # m r g c d
    k: Tensor  # m r 1 c d
    v: Tensor  # m r 1 c e
    log_weights: Tensor  # m r 1 c n
    noise: Tensor | None  # m r g c n: what dropout multiplies p with
    sums_k: Tensor  # r d n
    sums_v: Tensor  # r n e
    total: Tensor  # r n, in fp64
    top: Tensor | None  # r n: the weights are measured in exp(top)
    fade: Tensor | None  # m r n, or m r 1: log of what each chunk keeps of the sums before it
    how: _How


class _Mean(torch.autograd.Function):
    """From a _Text: the outputs `r g m c e`, the last sums_k, sums_v and total; the total once more, for its logarithm;
    and, without gradients, the sums before each block.

    Twice, because the gradient of a fade needs to know what the logarithm's gradient is: the means do not change if all
    sums are scaled alike, and what their gradients say of that would be a difference of large numbers.
    """

    @staticmethod
    def forward(*text: Any) -> tuple[Tensor, ...]:
        return _forward(_Text(*text), _Scratch())

    @staticmethod
    def transformed(*text: Any) -> tuple[Tensor, ...]:
        return _forward(_Text(*text), _Scratch(reuse=False))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.how = inputs
        ctx.save_for_backward(*tensors, *output[OUTPUTS:])
        _, k, v, log_weights, _, *first, _, fade, _ = ctx.needs_input_grad
        log_weights = log_weights or fade
        of_state = zip((k, v, False, False), (*first, first[2]), output[1:OUTPUTS], strict=True)  # none depends on q
        ctx.mark_non_differentiable(*(x for a, b, x in of_state if not (a or b or log_weights)), *output[OUTPUTS:])

    @staticmethod
    def backward(ctx: Any, *d_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing refuses a second access
        inputs = len(_Text._fields) - 1
        text, d_output = _Text._make((*saved[:inputs], ctx.how)), d_output[:OUTPUTS]
        again = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in saved[:inputs])
        with full_precision(text.v):  # a backward pass may be called under autocast
            if again:
                return _gradient_of(text, *d_output)
            return _backward(text, saved[inputs:], *d_output[:-1], d_size=d_output[-1])


def _forward(text: _Text, scratch: _Scratch) -> tuple[Tensor, ...]:
    m, rows, groups, size, _ = text.q.shape
    out = text.v.new_empty(rows, groups, m, size, text.v.shape[4])  # in order of the tokens, as the caller wants it
    last = [torch.empty_like(x) for x in (text.sums_k, text.sums_v, text.total)]
    starts = []
    for block in _blocks(m, rows, out.device):
        if block.chunks.start == 0:
            now_k, now_v, now = (_own(x[block.rows]) for x in (text.sums_k, text.sums_v, text.total))
        if text.how.saves:
            starts += [now_k.clone(), now_v.clone(), now.clone()]
        kept = block.kept(text.fade)
        x, now = _find(block, text, now_k, now, kept, scratch)
        values = _meet("v", x.u, x.weights, block.take("v", text.v, scratch), now_v, _each(kept, -1), scratch)
        block.put(values.read("out", scratch), out.permute(2, 0, 1, 3, 4))
        now_k, now_v = x.keys.after(scratch), values.after(scratch)
        if block.chunks.stop >= m:
            for end, found in zip(last, (now_k, now_v, now), strict=True):
                end[block.rows] = found
    return out, *last, last[2].clone(), *starts


def _gradient_of(text: _Text, *d_output: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient by autograd, for callers that differentiate it again."""
    outputs = _forward(text, _Scratch(reuse=False))[:OUTPUTS]
    given = [(x, d) for x, d in zip(outputs, d_output, strict=True) if x.requires_grad]
    needed = {i: x for i, x in enumerate(text) if isinstance(x, Tensor) and x.requires_grad}
    outputs, d_output = zip(*given, strict=True)
    found = torch.autograd.grad(outputs, [*needed.values()], d_output, create_graph=True)
    return tuple(dict(zip(needed, found, strict=True)).get(i) for i in range(len(text)))


def _backward(
    text: _Text, starts: Sequence[Tensor], d_out: Tensor, *d_last: Tensor, d_size: Tensor
) -> tuple[Tensor | None, ...]:
    d_out = d_out.permute(2, 0, 1, 3, 4)
    m, rows, groups, size, _ = text.q.shape
    d_q, d_k, d_v, d_log_weights = (torch.empty_like(x) for x in text[:4])
    d_first = [torch.empty_like(x) for x in d_last]
    scratch = _Scratch()
    upper = d_out.new_ones(size, size).triu()
    d_scale = torch.empty_like(d_size)  # of the logarithm of all sums alike, after the last token
    for i, block in reversed(list(enumerate(_blocks(m, rows, d_out.device)))):
        if block.chunks.stop >= m:
            d_now_k, d_now_v, d_now = (_own(x[block.rows]) for x in d_last)
            d_now += d_size[block.rows]
        first_k, first_v, first = starts[3 * i : 3 * i + 3]
        kept = block.kept(text.fade)
        x, after = _find(block, text, first_k, first, kept, scratch)
        if block.chunks.stop >= m:
            d_scale[block.rows] = d_size[block.rows] * after

        # o = u V,  u = p / A
        values = _meet("v", x.u, x.weights, block.take("v", text.v, scratch), first_v, _each(kept, -1), scratch)
        d_read = block.take("d_out", d_out, scratch)
        d_u, d_weights, d_values, d_now_v = values.backward("v", d_read, d_now_v, scratch)
        block.put(d_values, d_v)
        d_u = d_u.view_as(x.p)
        d_s = torch.div(d_u, x.running, out=scratch.like("d_s", d_u))
        if text.noise is not None:
            d_s *= block.take("noise", text.noise, scratch).view_as(d_s)
        d_log_total = d_u.mul_(x.u.view_as(d_u))

        # p = softmax(s),  s = scale q K / A
        d_s *= x.p
        d_s.addcmul_(x.p, d_s.sum(-1, keepdim=True), value=-1)
        d_log_total.addcmul_(d_s, x.scores)
        d_read = d_s.div_(x.running).mul_(text.how.scale).view_as(x.u)
        d_queries, d_keys, d_weights_k, d_now_k = x.keys.backward("k", d_read, d_now_k, scratch)
        block.put(d_queries, d_q)
        block.put(d_keys, d_k)

        # A is the running sum of the weights, and these are exponentials.
        d_log_total = d_log_total if groups == 1 else d_log_total.sum(1, keepdim=True)
        d_total = d_log_total.div_(x.running).neg_()[:, 0]
        behind, d_now = _totals(d_now, d_total.sum(1), kept, reverse=True)
        d_weights.add_(d_weights_k).add_(behind[:, None])
        d_weights.baddbmm_(upper.expand(len(d_total), -1, -1), d_total).mul_(x.weights)
        block.put(d_weights, d_log_weights)
        if block.chunks.start == 0:
            for end, found in zip(d_first, (d_now_k, d_now_v, d_now), strict=True):
                end[block.rows] = found
    d_fade = None
    if text.fade is not None:
        # A fade adds to the logarithms of all earlier weights and of the sums that were there first: what those of all
        # weights do together, less what the later ones do.
        later = d_log_weights.sum((2, 3), dtype=torch.float64).flip(0).cumsum(0).flip(0)  # m r n
        d_fade = (d_scale - later).to(text.fade.dtype)
        d_fade = d_fade.sum(-1, keepdim=True) if text.fade.shape[-1] < d_fade.shape[-1] else d_fade
    return d_q, d_k, d_v, d_log_weights, None, *d_first, None, d_fade, None


class _Found(NamedTuple):
    """The read weights of a block, and what they were computed from; the first axis is (s r)."""

    keys: _Meeting  # of q, k and weights
    weights: Tensor  # c n
    running: Tensor  # 1 c n: A
    scores: Tensor  # g c n
    p: Tensor  # g c n, before dropout
    u: Tensor  # (g c) n


def _find(
    block: _Block, text: _Text, sums_k: Tensor, total: Tensor, kept: Tensor | None, scratch: _Scratch
) -> tuple[_Found, Tensor]:
    """The read weights of a block, from the sums before it; and the total after it."""
    how, log_weights = text.how, block.of(text.log_weights)
    weights = scratch.like("weights", log_weights)
    if text.top is None:
        weights = torch.exp(log_weights, out=weights)
    else:
        weights = torch.sub(log_weights, text.top[block.rows, None, None], out=weights).exp_()
    weights = weights.reshape(-1, *weights.shape[3:])
    running = torch.cumsum(weights, 1, out=scratch.like("running", weights))
    before, after = _totals(total, running[:, -1], kept)
    running += before[:, None]
    seen = None
    if not how.always_open:
        empty = running == 0
        running = running.masked_fill(empty, 1)
        seen = ~empty[:, None] if how.mask_empty else None
    running = running[:, None]

    pair = block.take("q", text.q, scratch), block.take("k", text.k, scratch)
    keys = _meet("k", *pair, weights, sums_k, _each(kept, -2), scratch)
    scores = keys.read("scores", scratch, how.scale).view(len(weights), -1, *weights.shape[1:]).div_(running)
    if seen is None:
        p = torch.softmax(scores, -1, out=scratch.like("p", scores))
    else:
        p = softmax_weights(scores, seen, 0.0)
    u = torch.div(p, running, out=scratch.like("u", p) if how.saves or not scratch.reuse else p)
    if text.noise is not None:
        u = u.mul_(block.take("noise", text.noise, scratch).view_as(u))
    return _Found(keys, weights, running, scores, p, u.flatten(1, 2)), after


class _Meeting(NamedTuple):
    """x_t against the sums S_t of a_j b_j; the first axis is (s r)."""

    x: Tensor  # (g c) _
    a: Tensor  # c _
    b: Tensor  # c _
    first: Tensor  # S before the block, without s
    before: Tensor  # S before each chunk
    last: Tensor | None  # S after the block, without s, if it is there already
    pairs: Tensor  # (g c) c: x_t . a_j, j <= t
    kept: Tensor | None  # s r _ _: the factor of S before each chunk

    def read(self, name: str, scratch: _Scratch, scale: float = 1.0) -> Tensor:
        """x_t S_t."""
        return scratch.product(name, self.x, self.before).baddbmm_(self.pairs, self.b, beta=scale, alpha=scale)

    def after(self, scratch: _Scratch) -> Tensor:
        """S after the block. A block of a single chunk overwrites `first`, which has been read by then."""
        if self.last is not None:
            return self.last
        return (self.first.baddbmm_ if scratch.reuse else self.first.baddbmm)(self.a.mT, self.b)

    def backward(
        self, name: str, d_read: Tensor, d_after: Tensor, scratch: _Scratch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of x, a, b and `first`, from those of the x_t S_t and of the S after the block."""
        d_pairs = _up_to_self(scratch.product("d_pairs", d_read, self.b.mT))
        d_x = scratch.product(f"d_x of {name}", d_read, self.before.mT).baddbmm_(d_pairs, self.a)
        behind, d_first = _sums(f"d_{name}", self.x, d_read, d_after, self.kept, scratch, reverse=True)
        d_a = scratch.product(f"d_a of {name}", self.b, behind.mT).baddbmm_(d_pairs.mT, self.x)
        d_b = scratch.product(f"d_b of {name}", self.a, behind).baddbmm_(self.pairs.mT, d_read)
        if d_first is None:
            d_first = d_after.baddbmm_(self.x.mT, d_read)
            d_first = d_first if self.kept is None else d_first.mul_(self.kept[0])
        return d_x, d_a, d_b, d_first


def _meet(
    name: str, x: Tensor, a: Tensor, b: Tensor, first: Tensor, kept: Tensor | None, scratch: _Scratch
) -> _Meeting:
    if kept is not None and a.shape[0] == first.shape[0]:
        first = first * kept[0]
    before, last = _sums(name, a, b, first, kept, scratch)
    return _Meeting(x, a, b, first, before, last, _up_to_self(scratch.product(f"pairs of {name}", x, a.mT)), kept)


def _each(kept: Tensor | None, axis: int) -> Tensor | None:
    """`s r n` as a factor of sums `s r _ n`, or with axis -1 `s r n _`."""
    return None if kept is None else kept.unsqueeze(axis)


def _up_to_self(pairs: Tensor) -> Tensor:
    """Zero the pairs of a query with later tokens, for every group of queries."""
    size = pairs.shape[2]
    pairs.view(-1, pairs.shape[1] // size, size, size).tril_()
    return pairs


def _sums(
    name: str, a: Tensor, b: Tensor, first: Tensor, kept: Tensor | None, scratch: _Scratch, *, reverse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """S before each chunk, as it keeps it, and after the last one (None if there is a single chunk), from `first`, S
    before all.

    In reverse S after each chunk and before the first, from that after the last: what later queries ask of it.
    """
    rows, chunks = first.shape[0], a.shape[0]
    if chunks == rows:
        return first, None
    step = -1 if reverse else 1
    added = scratch.product("added", a.mT, b).view(chunks // rows, *first.shape).unbind()[::step]
    sums = scratch.array(f"sums of {name}", first, rows + chunks, *first.shape[1:])
    if sums is None:
        sums = torch.cat(_chain(first, added, kept, reverse)[::step])
    else:  # one by one: with a product of a triangle of ones, 0 * inf would reach earlier chunks
        places, factors = sums.view(chunks // rows + 1, *first.shape).unbind()[::step], _factors(kept, reverse)
        places[0].copy_(first)
        if kept is not None:
            places[0].mul_(next(factors))
        for place, new, following in zip(places, added, places[1:], strict=False):
            torch.add(place, new, out=following)
            if kept is not None:
                following.mul_(next(factors))
    return (sums[rows:], sums[:rows]) if reverse else (sums[:-rows], sums[-rows:])


def _totals(first: Tensor, added: Tensor, kept: Tensor | None, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """As _sums, from what each chunk adds, `(s r) n`; the last is always given, and is fp64 as the first is."""
    rows, n = first.shape
    each = added.reshape(-1, rows, n)
    if kept is not None:
        sums = torch.stack(_chain(first, each.unbind()[:: -1 if reverse else 1], kept, reverse))
    elif len(each) == 1:
        return first.to(added.dtype), first + added
    else:
        sums = torch.cat((first[None], each.flip(0) if reverse else each)).cumsum(0)
    before = sums[:-1].flip(0) if reverse else sums[:-1]
    return before.reshape(added.shape).to(added.dtype), sums[-1]


def _chain(first: Tensor, added: Sequence[Tensor], kept: Tensor | None, reverse: bool) -> list[Tensor]:
    """What the sums are before each chunk and after the last; in reverse after each, and before the first."""
    if kept is None:
        return [*accumulate(added, initial=first)]
    factors = _factors(kept, reverse)
    sums = [first * next(factors)]
    for new in added:
        sums.append((sums[-1] + new) * next(factors))
    return sums


def _factors(kept: Tensor | None, reverse: bool) -> Iterator[Tensor | float]:
    """What the sums are multiplied with at the start, and after each chunk has been added: what the next chunk keeps of
    them; in reverse what the chunk itself keeps of those before it."""
    each = () if kept is None else kept.unbind()
    return chain([1.0], each[::-1]) if reverse else chain(each, [1.0])


def _own(x: Tensor) -> Tensor:
    """A copy that may be changed in place."""
    return x.clone(memory_format=torch.contiguous_format)


class _Block(NamedTuple):
    """Some chunks of some rows, computed together."""

    chunks: slice
    rows: slice

    def of(self, x: Tensor) -> Tensor:
        """`m r g c _` -> `s r g c _` of this block, a view."""
        return x[self.chunks, self.rows]

    def kept(self, fade: Tensor | None) -> Tensor | None:
        """What each chunk keeps of the sums before it: s r n, or s r 1."""
        return None if fade is None else fade[self.chunks, self.rows].exp()

    def take(self, name: str, x: Tensor, scratch: _Scratch) -> Tensor:
        """`m r g c _` -> `(s r) (g c) _`, a copy unless it is simply a view."""
        mine = self.of(x)
        if mine.shape[0] == mine.shape[2] == 1:
            return mine[0, :, 0]
        out = scratch.like(name, mine)
        mine = mine.contiguous() if out is None else out.copy_(mine)
        s, rows, groups, size, width = mine.shape
        return mine.view(s * rows, groups * size, width)

    def put(self, found: Tensor, into: Tensor) -> None:
        place = self.of(into)
        place.copy_(found.view(place.shape))


def _blocks(chunks: int, rows: int, device: torch.device) -> list[_Block]:
    at_a_time = AT_A_TIME if device.type == "cpu" else AT_A_TIME_ELSEWHERE
    several = math.ceil(rows / max(1, math.ceil(rows / at_a_time))) or 1  # a batch may be empty
    many = max(1, at_a_time // several)
    return [
        _Block(slice(first, first + many), slice(row, row + several))
        for row in range(0, rows, several)
        for first in range(0, chunks, many)
    ]


class _Scratch:
    """Arrays by name that every block overwrites; with reuse=False none, for passes that autograd follows."""

    def __init__(self, reuse: bool = True) -> None:
        self.reuse = reuse
        self._arrays: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}

    def array(self, name: str, like: Tensor, *shape: int) -> Tensor | None:
        if not self.reuse:
            return None
        key = (name, like.dtype, shape)
        if key not in self._arrays:
            self._arrays[key] = like.new_empty(shape)
        return self._arrays[key]

    def like(self, name: str, x: Tensor) -> Tensor | None:
        return self.array(name, x, *x.shape)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b, out=self.array(name, a, a.shape[0], a.shape[1], b.shape[2]))
