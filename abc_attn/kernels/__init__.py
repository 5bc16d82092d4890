"""Causal attention behind one function: `scan` is the only place where a backend is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from abc_attn.core import (
    Memory,
    Write,
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
from abc_attn.normaliser import empty_total, running_mean

BACKENDS: dict[str, Callable[..., tuple[Tensor, Memory]]] = {"reference": reference, "torch": chunked}


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Write,
    memory: Memory | None = None,
    *,
    linear: bool = False,
    mask_empty: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Memory]:
    """Causal bounded-memory attention: o_t reads the memory of the tokens up to t. Returns the outputs and the memory.

    q `b h t d` (with `linear`, f(q) `b h t n`), k `b h t d`, v `b h t e`; `memory` continues an earlier call, of any
    length. q may have a multiple of k's heads. key_padding_mask `b t`: True marks padding, which neither writes nor
    decays; the output there is zero. `mask_empty` leaves unused slots unread. Dropout falls on the read weights.
    """
    check_keys(k, v, write, memory, key_padding_mask)
    check_queries(q, k, v, write.phi.shape[-1], linear)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"causal q and k must have the same number of tokens, got {q.shape[2]} and {k.shape[2]}")
    run = BACKENDS[choose_backend(backend, q.shape[2])]
    with full_precision(q):
        k, v, write, memory = prepare(k, v, write, memory, key_padding_mask)
        out, memory = run(q, k, v, write, memory, linear=linear, mask_empty=mask_empty, scale=scale, dropout=dropout)
    if key_padding_mask is not None:
        out = out.masked_fill(key_padding_mask[:, None, :, None], 0)
    return out.to(q.dtype), memory


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
    check_keys(k, v, Write(logits), None if state is None else state[0], key_padding_mask)
    b, h, _, n = (*k.shape[:3], logits.shape[-1])
    memory, log_total = (None, empty_total(b, h, n, k)) if state is None else state
    logits = logits.expand(b, h, *logits.shape[2:]).to(memory_dtype(k))
    decided, log_total = running_mean(logits, log_total, key_padding_mask, causal=causal)
    if causal:
        out, memory = scan(
            q, k, v, decided, memory, scale=scale, key_padding_mask=key_padding_mask, dropout=dropout, backend=backend
        )
    else:
        choose_backend(backend, q.shape[2])
        memory = write(k, v, decided, memory, key_padding_mask=key_padding_mask)
        out = read(q, memory, scale=scale, dropout=dropout)
    return out, (memory, log_total)


def choose_backend(backend: str, tokens: int) -> str:
    """The backend to run `tokens` tokens with; an unknown name is an error."""
    if backend == "auto":
        return "reference" if tokens == 1 else "torch"  # one step of the loop is all there is to do
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; accepted: 'auto', {', '.join(map(repr, BACKENDS))}")
    return backend


def describe_backend() -> tuple[str, str]:
    """The backend that "auto" takes for whole sequences, and why."""
    return "torch", f"chunked matrix products on {torch.get_num_threads()} CPU threads, or on any device torch has"
