"""Causal attention behind one function: `scan` is the only place where a backend is chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from abc_attn.core import (
    Memory,
    Write,
    cast,
    check_keys,
    check_queries,
    full_precision,
    memory_dtype,
    prepare,
    read,
    reference,
    write,
)
from abc_attn.kernels.chunked import chunked
from abc_attn.kernels.chunked_mean import chunked_mean, write_mean
from abc_attn.kernels.native import LIBRARY, applies, native, native_mean, native_mean_step
from abc_attn.normaliser import empty_total, running_mean

BACKENDS = ("auto", "reference", "torch", "native")


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
    check_keys(k, v, write, memory, key_padding_mask)
    check_queries(q, k, v, write.phi.shape[-1], linear, floor)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"causal q and k must have the same number of tokens, got {q.shape[2]} and {k.shape[2]}")
    check_backend(backend)
    with full_precision(q):
        k, v, write, memory = prepare(k, v, write, memory, key_padding_mask)
        if backend in ("auto", "native") and not dropout and not (linear and mask_empty) and applies(k, *memory):
            run = native
        elif backend == "reference" or (backend == "auto" and q.shape[2] == 1):
            run = reference  # of one token, a step of the loop is all there is to do
        else:
            run = chunked
        options: dict[str, Any] = {"linear": linear, "floor": floor, "mask_empty": mask_empty}
        out, memory = run(q, k, v, write, memory, **options, scale=scale, dropout=dropout)
    if key_padding_mask is not None:
        out = out.masked_fill(key_padding_mask[:, None, :, None], 0)
    return cast(out, q.dtype), memory


def mlp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logits: Tensor,
    state: tuple[Memory, Tensor] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Memory, Tensor]]:
    """ABC_MLP (section 4, appendix B.1) from its logits W x, `b h t n`: phi_i = exp(logits_i) / sum_j exp(logits_j).

    The sum runs over the prefix if `causal` (each slot is a running mean), over all tokens if not (then q may have any
    number of tokens). The state is opaque: pass it back to continue.
    """
    match state:
        case None | (Memory(), Tensor()):
            pass
        case _:
            parts = f" of {', '.join(type(part).__name__ for part in state)}" if type(state) is tuple else ""
            raise TypeError(f"state must be what an earlier mlp_attention returned, got {type(state).__name__}{parts}")
    memory, log_total = (None, None) if state is None else state
    out, memory, log_total = mean_attention(
        q,
        k,
        v,
        logits,
        memory,
        log_total,
        causal=causal,
        scale=scale,
        key_padding_mask=key_padding_mask,
        dropout=dropout,
        backend=backend,
    )
    return out, (memory, log_total)


def mean_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor,
    memory: Memory | None,
    log_total: Tensor | None,
    *,
    causal: bool,
    mask_empty: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Memory, Tensor]:
    """Attention over running means of the tokens, from the logarithms of their weights (normaliser.running_mean)."""
    check_backend(backend)
    if causal and key_padding_mask is None and not dropout and backend in ("auto", "native"):
        step = native_mean_step(q, k, v, log_weights, memory, log_total, mask_empty=mask_empty, scale=scale)
        if step is not None:
            return step
    check_keys(k, v, Write(log_weights), memory, key_padding_mask)
    expected = (k.shape[0], k.shape[1], log_weights.shape[-1])
    log_weights = cast(log_weights.expand(*k.shape[:3], -1), memory_dtype(k))
    log_total = empty_total(*expected, k) if log_total is None else log_total
    if log_total.shape != expected or log_total.dtype != torch.float64:
        raise ValueError(
            f"the normaliser must have shape {expected} and dtype torch.float64, "
            f"got {tuple(log_total.shape)} and {log_total.dtype}"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal q and k must have the same number of tokens, got {q.shape[2]} and {k.shape[2]}")
    check_queries(q, k, v, log_weights.shape[-1], linear=False)
    wide = k.dtype == torch.float64
    fused = backend in ("auto", "native") and not dropout and not wide and applies(log_weights, *memory or ())
    found = None
    one = causal and q.shape[2] == 1  # nothing to sum: a step of the recurrence is all there is to do
    if fused or not (backend == "reference" or one):
        with full_precision(q):
            keys, values, (weights, _, _), before = prepare(k, v, Write(log_weights), memory, None)
            if key_padding_mask is not None:
                padding = key_padding_mask[:, None, :, None]
                keys, values = keys.masked_fill(padding, 0), values.masked_fill(padding, 0)
                weights = weights.masked_fill(padding, -torch.inf)
            tokens = (q, keys, values, weights, before, log_total)
            if fused:
                found = native_mean(*tokens, causal=causal, mask_empty=mask_empty, scale=scale)
            elif causal:
                found = chunked_mean(*tokens, mask_empty=mask_empty, scale=scale, dropout=dropout)
            else:
                after, total = write_mean(*tokens[1:])
                found = read(q, after, mask_empty=mask_empty, scale=scale, dropout=dropout), after, total
    if found is not None:
        out, memory, log_total = found
        if causal and key_padding_mask is not None:
            out = out.masked_fill(padding, 0)
        return cast(out, q.dtype), memory, log_total
    decided, log_total = running_mean(log_weights, log_total, key_padding_mask, causal=causal)
    if causal:
        options = {"mask_empty": mask_empty, "scale": scale, "dropout": dropout, "backend": backend}
        out, memory = scan(q, k, v, decided, memory, key_padding_mask=key_padding_mask, **options)  # type: ignore[arg-type]
    else:
        memory = write(k, v, decided, memory, key_padding_mask=key_padding_mask)
        out = read(q, memory, mask_empty=mask_empty, scale=scale, dropout=dropout)
    return out, memory, log_total


def check_backend(backend: str) -> None:
    """An unknown backend is an error that lists the known ones; so is one that was asked for and is not there."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; accepted: {', '.join(map(repr, BACKENDS))}")
    if backend == "native" and isinstance(LIBRARY, str):
        raise ValueError(
            f"backend 'native' is not to be had here: {LIBRARY}. Take 'auto', or install again with a C++ compiler and "
            "without ABC_ATTN_BACKEND"
        )


def describe_backend() -> tuple[str, str]:
    """The backend that "auto" takes for fp32 on the CPU, and why."""
    found = LIBRARY
    if isinstance(found, str):
        return "torch", f"chunked matrix products; {found}"
    threads = f"{torch.get_num_threads()} threads, torch's own" if found.abc_threads() else "one thread"
    return "native", f"fused kernels for fp32 on the CPU ({found.abc_kind().decode()}, {threads}); torch for all else"
