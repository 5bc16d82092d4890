"""Attention over a bounded memory, behind functions that check their inputs and leave the work to a backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from abc_attn import normaliser
from abc_attn.checks import check_keys, check_memory, check_queries
from abc_attn.core import (
    Mean,
    Memory,
    Reading,
    Write,
    all_finite,
    cast,
    full_precision,
    has_values,
    infinite,
    memory_dtype,
    prepare,
    read_memory,
    write_all,
)
from abc_attn.kernels import native, native_gate, reference, torch_backend
from abc_attn.kernels.door import BACKENDS, Declined, call, check_backend, describe_backend, describe_backends, refused
from abc_attn.normaliser import empty_total, running_mean, weights_of

__all__ = [
    "BACKENDS",
    "check_backend",
    "describe_backend",
    "describe_backends",
    "exact_attention",
    "mean_attention",
    "mlp_attention",
    "read",
    "rotate",
    "scan",
    "write",
]

# The registry. "auto" tries the backends in this order.
BACKENDS |= {"native": native, "torch": torch_backend, "reference": reference}
if native.unavailable() is None:
    normaliser.fused_log_sigmoid = native_gate.log_sigmoid


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Write,
    memory: Memory | None = None,
    *,
    linear: bool = False,
    floor: float = 0.0,
    mask_empty: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Memory]:
    """Causal bounded-memory attention: o_t reads the memory of the tokens up to t. Returns the outputs and the memory.

    q `b h t d` (with `linear`, f(q) `b h t n`), k `b h t d`, v `b h t e`; `memory` continues an earlier call, of any
    length. q may have a multiple of k's heads. key_padding_mask `b t`: True marks padding, which neither writes nor
    decays; the output there is zero. `mask_empty` leaves unused slots unread. Where f may be negative, a `floor` is the
    least that a linear read divides by. Dropout falls on the read weights.
    """
    reading = Reading(linear, floor, mask_empty, scale, dropout)
    check_keys(k, v, write, memory, key_padding_mask)
    check_queries(q, k, v, write.phi.shape[-1], reading)
    _check_causal(q, k)
    check_backend(backend)
    with full_precision(q):
        answer = call("scan", backend, q, *prepare(k, v, write, memory, key_padding_mask), reading)
    if isinstance(answer, Declined):
        raise refused(backend, answer)
    out, memory = answer
    if key_padding_mask is not None:
        out = out.masked_fill(key_padding_mask[:, None, :, None], 0)
    return cast(out, q.dtype), memory


def write(
    k: Tensor,
    v: Tensor,
    write: Write,
    memory: Memory | None = None,
    *,
    key_padding_mask: Tensor | None = None,
) -> Memory:
    """Write all t tokens at once: the memory after the last of them (encoder self-attention, cross-attention).

    k `b h t d`, v `b h t e`, key_padding_mask `b t` with True where a token is padding.
    """
    check_keys(k, v, write, memory, key_padding_mask)
    with full_precision(k):
        return write_all(*prepare(k, v, write, memory, key_padding_mask))


def read(
    q: Tensor,
    memory: Memory,
    *,
    linear: bool = False,
    floor: float = 0.0,
    mask_empty: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Read one memory with many queries: q `b h t d`, or f(q) `b h t n` with `linear`; returns `b h t e`.

    `mask_empty` leaves out the slots that are not `used`; a query that may read no slot gets zeros. q is scaled by
    d^-1/2 unless `scale` says otherwise (a linear read takes f(q) as it is). Where f may be negative, a `floor` is the
    least that a linear read divides by. Dropout falls on the read weights.
    """
    reading = Reading(linear, floor, mask_empty, scale, dropout)
    check_memory(memory)
    check_queries(q, memory.k, memory.v, memory.k.shape[2], reading)
    return read_memory(q, memory, reading)


def mlp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logits: Tensor | None,
    state: tuple[Memory, Tensor] | None = None,
    *,
    log_keep: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Memory, Tensor]]:
    """ABC_MLP (section 4, appendix B.1) from its logits W x, `b h t n`: phi_i = exp(logits_i) / sum_j exp(logits_j).

    The sum runs over the prefix if `causal` (each slot is a running mean), over all tokens if not (then q may have any
    number of tokens). The state is opaque: pass it back to continue.

    log_keep = log f, `b h t n` or `b h t 1`, lets the means forget: A_t = f_t A_{t-1} + (1 - f_t) exp(logits_t), and
    the sums of keys and values likewise. Without `causal` nothing is forgotten: 1 - f only weighs. With log_keep the
    logits may be None, for zeros.

    in_place: for decoding. A step of one token may write into `state`, and does so where it is faster; then only the
    state that is returned may be used. While gradients are recorded nothing is overwritten.
    """
    match state:
        case None | (Memory(), Tensor()):
            pass
        case _:
            parts = f" of {', '.join(type(part).__name__ for part in state)}" if type(state) is tuple else ""
            raise TypeError(f"state must be what an earlier mlp_attention returned, got {type(state).__name__}{parts}")
    memory, log_total = (None, None) if state is None else state
    reading = Reading(scale=scale, dropout=dropout)
    options: dict[str, Any] = {"log_keep": log_keep, "causal": causal, "key_padding_mask": key_padding_mask}
    options["in_place"] = in_place
    out, memory, log_total = mean_attention(q, k, v, logits, memory, log_total, reading, **options, backend=backend)
    return out, (memory, log_total)


def mean_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor | None,
    memory: Memory | None,
    log_total: Tensor | None,
    reading: Reading = Reading(),  # noqa: B008 (immutable)
    *,
    log_keep: Tensor | None = None,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    in_place: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Memory, Tensor]:
    """Attention over running means of the tokens, from the logarithms of their weights (normaliser.running_mean).

    With log_keep = log f, `b h t n` or `b h t 1`, they forget: A_t = f_t A_{t-1} + (1 - f_t) w_t; log_weights None:
    w = 1. in_place: see mlp_attention.
    """
    check_backend(backend)
    answer: Any
    if causal and key_padding_mask is None:  # a decoding step is so short that checks would take half of its time
        answer = call("mean_step", backend, q, k, v, log_weights, log_keep, memory, log_total, reading, in_place)
        if not isinstance(answer, Declined):
            return answer
    if not causal:  # a memory that is read as a whole has no order to forget in
        log_weights, log_keep = weights_of(Mean(log_weights, log_keep)), None
    given = log_keep if log_weights is None else log_weights
    assert given is not None
    every = None if log_keep is None else log_keep.expand(-1, -1, -1, given.shape[-1])
    check_keys(k, v, Write(given, every), memory, key_padding_mask)
    expected = (k.shape[0], k.shape[1], given.shape[-1])
    log_weights, log_keep = (
        None if x is None else cast(x.expand(*k.shape[:3], -1), memory_dtype(k)) for x in (log_weights, log_keep)
    )
    log_total = empty_total(*expected, k) if log_total is None else log_total
    if log_total.shape != expected or log_total.dtype != torch.float64:
        raise ValueError(
            f"the normaliser must have shape {expected} and dtype torch.float64, "
            f"got {tuple(log_total.shape)} and {log_total.dtype}"
        )
    if causal:
        _check_causal(q, k)
    check_queries(q, k, v, expected[2], reading)
    with full_precision(q):
        keys, values, (given, keep, _), before = prepare(k, v, Write(given, log_keep), memory, None)
        weights = None if log_weights is None else given
        if key_padding_mask is not None:
            padding = key_padding_mask[:, None, :, None]
            keys, values = keys.masked_fill(padding, 0), values.masked_fill(padding, 0)
            weights = None if weights is None else weights.masked_fill(padding, -torch.inf)
            keep = None if keep is None else keep.masked_fill(padding, 0)
        answer = call("mean", backend, q, keys, values, weights, keep, before, log_total, reading, causal)
    if not isinstance(answer, Declined):
        out, memory, log_total = answer
        if causal and key_padding_mask is not None:
            out = out.masked_fill(padding, 0)
        return cast(out, q.dtype), memory, log_total
    # The general way: the running mean as a Write with decays.
    decided, log_total = running_mean(Mean(log_weights, log_keep), log_total, key_padding_mask, causal=causal)
    if causal:
        how: dict[str, Any] = reading._asdict()
        out, memory = scan(q, k, v, decided, memory, **how, key_padding_mask=key_padding_mask, backend=backend)
    else:
        memory = write(k, v, decided, memory, key_padding_mask=key_padding_mask)
        out = read(q, memory, **reading._asdict())
    return out, memory, log_total


def exact_attention(q: Tensor, memory: Memory, seen: Tensor | None, reading: Reading, backend: str) -> Tensor:
    """softmax(K q) over the tokens in `seen`, `b 1 t n`, zeros where there is none; None: over those up to the query's.

    Exact attention is the baseline, not a kernel of ours: a backend that does not offer it leaves it to the others.
    """
    bad = None  # tokens that are not finite: left out of the products, where 0 * inf is NaN; what reads them is NaN
    if q.shape[2] > 1 and has_values(memory.k) and not all_finite(memory.k, memory.v):
        bad = infinite(memory.k, memory.v)  # b h n
        memory = memory._replace(k=memory.k.where(~bad[..., None], 0), v=memory.v.where(~bad[..., None], 0))
    answer = call("exact", backend, q, memory, seen, reading)
    out = call("exact", "auto", q, memory, seen, reading) if isinstance(answer, Declined) else answer
    if bad is not None:
        read = torch.ones(q.shape[2], bad.shape[2], dtype=torch.bool, device=q.device).tril() if seen is None else seen
        poisoned = (read & bad[:, :, None]).any(-1, keepdim=True)  # b h t 1
        out = out.masked_fill(poisoned.repeat_interleave(out.shape[1] // bad.shape[1], 1), torch.nan)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, `x * cos + x.roll(d/2) * sin`: heads x `b h t d`, cos and sin `b 1 t d` (the first half of sin
    negated)."""
    return call("rotate", "auto", x, cos, sin)


def _check_causal(q: Tensor, k: Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"causal q and k must have the same number of tokens, got {q.shape[2]} and {k.shape[2]}")
