"""The bounded memory: one write rule, two reads, and the loop that defines what every fast path must give.

    memory_t = exp(log_decay_t) * memory_{t-1} + phi_t (x) [k_t, v_t, 1]                  write (eq. 3 and 5)
    o_t      = p_t . V_t,   p_t = softmax(K_t q_t)   or   f(q_t) / (f(q_t) . mass_t)      read  (eq. 4)

Axes, here and everywhere: b batch, h heads, t tokens, n slots, d key width, e value width.
Queries may have more heads than keys (grouped heads): query head i reads the memory of head i // (query heads / h).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Write(NamedTuple):
    """What a control decides for t tokens. The batch and head axes may be 1: the same for every row or head."""

    phi: Tensor  # b h t n   share of token t entering each slot (any sign)
    log_decay: Tensor | None = None  # b h t n   <= 0, -inf empties the slot; None keeps everything
    readable: Tensor | None = None  # b h t n   bool: which slots query t may read; None means all


class Band(NamedTuple):
    """What a causal control reads that keeps tokens as they are, in the order of its memory's rows.

    The first `sinks` tokens; then of the others a ring with the last `window`, every `dilation`-th seen from the query
    (each residue of the position has a queue of `window` rows).
    """

    sinks: int = 0
    window: int = 0
    dilation: int = 1

    @property
    def rows(self) -> int:
        return self.sinks + self.window * self.dilation

    def in_use(self, count: Tensor) -> Tensor:
        """Which rows of the memory hold a token after `count` `b` of them: `b n`."""
        row, window = torch.arange(self.rows, device=count.device), max(1, self.window)
        ring = row - self.sinks
        first = torch.where(ring < 0, row, self.sinks + ring % window * self.dilation + ring // window)
        return first < count[:, None]  # once the first token of a row has come, the row is in use


class Keep(NamedTuple):
    """What a causal control reads whose rows hold single tokens that it chooses: the first `sinks` tokens; and by its
    decisions, one every `block` tokens, `kept` of those before the last `window`."""

    sinks: int
    window: int
    kept: int
    block: int

    @property
    def rows(self) -> int:
        return self.sinks + self.window + self.kept + self.block


class Table(NamedTuple):
    """Which token each row of a memory holds at the end of each block of tokens; c blocks."""

    source: Tensor  # b h c n   a row of the memory before the call or, from n on, a token of the call
    place: Tensor  # b h c n   where in the text it stands; -1: the row is free
    freed: Tensor  # b h c n   bool: rows that the decision at the block's start has freed
    line: Tensor  # b h l   sources of the tokens in order, from a window and a block before the first block on


class Memory(NamedTuple):
    """The bounded memory. Its size never depends on t."""

    k: Tensor  # b h n d   fp32 or wider, always
    v: Tensor  # b h n e
    mass: Tensor  # b h n     the memory of the constant 1
    used: Tensor  # b h n     bool: written since it was last emptied


class Mean(NamedTuple):
    """What a control decides whose slots are means: A_t = A_{t-1} + w_t and the sum of w [k, v] likewise; or, if they
    forget, A_t = f_t A_{t-1} + (1 - f_t) w_t."""

    log_weights: Tensor | None  # b h t n   log w, -inf leaves a slot alone; None: w = 1, beside log_keep
    log_keep: Tensor | None = None  # b h t n, or b h t 1 for all slots alike   log f <= 0; None forgets nothing


class Reading(NamedTuple):
    """How a memory is read. A control decides the first three, the attention around it the others."""

    linear: bool = False  # f(q) / (f(q) . mass) instead of softmax(K q); q is then f(q), of width n
    floor: float = 0.0  # the least that a linear read divides by, for an f that may be negative; 0: no floor
    mask_empty: bool = False  # leave out the slots that are not `used`
    scale: float | None = None  # of q before a softmax; None: d^-1/2
    dropout: float = 0.0  # of the read weights


def empty_memory(k: Tensor, v: Tensor, slots: int) -> Memory:
    """The memory before any token, for keys `b h t d` and values `b h t e`."""
    b, h, _, d = k.shape
    dtype = torch.promote_types(memory_dtype(k), v.dtype)
    return Memory(
        k=k.new_zeros(b, h, slots, d, dtype=dtype),
        v=v.new_zeros(b, h, slots, v.shape[-1], dtype=dtype),
        mass=k.new_zeros(b, h, slots, dtype=dtype),
        used=k.new_zeros(b, h, slots, dtype=torch.bool),
    )


def write_token(memory: Memory, k: Tensor, v: Tensor, phi: Tensor, log_decay: Tensor | None) -> Memory:
    """The write rule for one token: k `b h d`, v `b h e`, phi and log_decay `b h n`."""
    dtype, used = memory.v.dtype, memory.used
    if log_decay is not None:
        # In fp64 up to the sum, so that a step rounds once: a decay of 1 - 1/t rounded to fp32 is off the same way for
        # thousands of steps, and a mass of 1 became 0.9998 in 65,536 of them.
        decay = log_decay.double().exp()
        memory = Memory(decay[..., None] * memory.k, decay[..., None] * memory.v, decay * memory.mass, used)
        used = used & (log_decay != -torch.inf)
    return Memory(
        k=(memory.k + phi[..., None] * k[..., None, :]).to(dtype),
        v=(memory.v + phi[..., None] * v[..., None, :]).to(dtype),
        mass=(memory.mass + phi).to(dtype),
        used=used | (phi != 0),
    )


def read_memory(q: Tensor, memory: Memory, reading: Reading) -> Tensor:
    """Read one memory with many queries: q `b h t d`, or f(q) `b h t n` of a linear read; returns `b h t e`.

    A query that may read no slot gets zeros.
    """
    with full_precision(q):
        grouped = group_heads(q, memory.k.shape[1]).flatten(2, 3).to(memory.v.dtype)  # every group reads alike
        seen = memory.used[:, :, None] if reading.mask_empty else None
        if reading.linear:
            features = grouped if seen is None else grouped.masked_fill(~seen, 0)
            total = features @ memory.mass[..., None]
            kept = F.dropout(features, reading.dropout) if reading.dropout else features
            out = divide(kept @ memory.v, total, reading.floor)
        else:
            scores = grouped * query_scale(q, reading.scale) @ memory.k.mT
            out = softmax_weights(scores, seen, reading.dropout) @ memory.v
    return out.view(*q.shape[:-1], out.shape[-1]).to(q.dtype)


def write_all(k: Tensor, v: Tensor, write: Write, memory: Memory) -> Memory:
    """Write t prepared tokens at once: the memory after the last of them (encoder self-attention, cross-attention)."""
    phi, log_decay = write.phi, write.log_decay
    if log_decay is not None:
        later = decay_after(log_decay)  # what happens to token j's share before the end
        before = (later[:, :, 0] + log_decay[:, :, 0]).exp()  # ... and to the memory there was
        phi = phi * later.exp()
        memory = Memory(before[..., None] * memory.k, before[..., None] * memory.v, before * memory.mass, memory.used)
    return Memory(
        k=memory.k + phi.mT @ k,
        v=memory.v + phi.mT @ v,
        mass=memory.mass + phi.sum(2),
        used=used_at_end(write, memory.used),
    )


def reference(q: Tensor, k: Tensor, v: Tensor, write: Write, memory: Memory, reading: Reading) -> tuple[Tensor, Memory]:
    """Causal attention as the paper writes it: token by token, write, then read. The oracle of every test."""
    out = []
    for t in range(q.shape[2]):
        log_decay = None if write.log_decay is None else write.log_decay[:, :, t]
        memory = write_token(memory, k[:, :, t], v[:, :, t], write.phi[:, :, t], log_decay)
        seen, how = memory, reading
        if write.readable is not None:
            readable = write.readable[:, :, t]
            seen = memory._replace(used=readable & memory.used if reading.mask_empty else readable)
            how = reading._replace(mask_empty=True)
        out.append(read_memory(q[:, :, t : t + 1], seen, how))
    return torch.cat(out, dim=2), memory


# What every backend shares.


def memory_dtype(like: Tensor) -> torch.dtype:
    """fp32 at least, whatever the inputs."""
    return torch.promote_types(like.dtype, torch.float32)


def working_dtype(k: Tensor, v: Tensor, memory: Memory | None) -> torch.dtype:
    """That of the widest of the inputs and the memory they are written to."""
    dtype = torch.promote_types(memory_dtype(k), v.dtype)
    return dtype if memory is None else torch.promote_types(dtype, memory.v.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), at a tenth of the cost where it is that already: a step of decoding asks a dozen times."""
    return x if x.dtype == dtype else x.to(dtype)


def cast_memory(memory: Memory, dtype: torch.dtype) -> Memory:
    return Memory(cast(memory.k, dtype), cast(memory.v, dtype), cast(memory.mass, dtype), memory.used)


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: the memory is never summed in half precision."""
    kind = like.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def has_values(x: Tensor) -> bool:
    """Whether a decision may rest on what x holds: not while a graph is traced or captured, nor of a tensor without
    values of its own (fake, on the meta device, under vmap)."""
    if torch.compiler.is_compiling() or x.device.type == "meta" or type(x) not in (Tensor, nn.Parameter):
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:  # make_fx
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    if transformed():
        functorch = torch._C._functorch
        while functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                return False
            x = functorch.get_unwrapped(x)
    return True


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is at work, which only plain operations of torch support."""
    return torch._C._are_functorch_transforms_active()


def all_finite(*tensors: Tensor) -> bool:
    """Whether every number is finite; True may be missed where a sum overflows."""
    total = sum(x.detach().sum() for x in tensors)  # far cheaper than to look at each number, and read once
    return bool(torch.as_tensor(total).isfinite())


def infinite(k: Tensor, v: Tensor) -> Tensor:
    """Which tokens, `b h t`, have a key or a value that is not finite."""
    return ~(k.isfinite().all(-1) & v.isfinite().all(-1))


def query_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def group_heads(q: Tensor, heads: int) -> Tensor:
    """`b (h g) t d` -> `b h g t d`."""
    return q.unflatten(1, (heads, q.shape[1] // heads))


def scaled_queries(q: Tensor, heads: int, scale: float | None) -> Tensor:
    """The same, as they are multiplied with keys; for choices, which carry no gradient."""
    return group_heads(q.detach(), heads) * query_scale(q, scale)


def softmax_weights(scores: Tensor, seen: Tensor | None, dropout: float) -> Tensor:
    """softmax over the last axis where `seen`; all zeros where nothing is seen."""
    if seen is None:
        return F.dropout(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
    # A row of -inf would give NaN, in its gradient too: such a row is made finite, then its weights are zeroed.
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0)
    return F.dropout(weights, dropout) if dropout else weights


def divide(numerator: Tensor, total: Tensor, floor: float) -> Tensor:
    """numerator / max(total, floor); without a floor, zeros where the total is zero (no eps: the sign and size of the
    rest are kept).

    f(q) V / (f(q) . mass) is divided last: f(q) over a total that has decayed to almost nothing would overflow.
    """
    if floor:
        return numerator / total.where(total > floor, floor)
    return (numerator / total.masked_fill(total == 0, 1)).masked_fill(total == 0, 0)


def decay_after(log_decay: Tensor) -> Tensor:
    """Sum over later tokens (the axis but last): sums of one sign, so nothing cancels and -inf is safe."""
    total = log_decay.flip(-2).cumsum(-2).flip(-2)
    return F.pad(total[..., 1:, :], (0, 0, 0, 1))


def used_at_end(write: Write, used: Tensor) -> Tensor:
    """`Memory.used` after the last token."""
    last = _last_event(write)
    return torch.where(last.amax(2) == 0, used, last.amax(2) % 2 == 1)


def used_at_each(write: Write, used: Tensor) -> Tensor:
    """`Memory.used` after each token, b h t n."""
    last = _last_event(write).cummax(2).values
    return torch.where(last == 0, used[:, :, None], last % 2 == 1)


def _last_event(write: Write) -> Tensor:
    """Odd where token t writes a slot, even where it only empties it, 0 where it does neither; growing with t."""
    time = torch.arange(1, write.phi.shape[2] + 1, device=write.phi.device)[:, None] * 2
    event = torch.where(write.phi != 0, time + 1, 0)
    return (
        event if write.log_decay is None else torch.where((write.log_decay == -torch.inf) & (event == 0), time, event)
    )


def prepare(
    k: Tensor, v: Tensor, write: Write, memory: Memory | None, key_padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Write, Memory]:
    """Full size, full precision, and padding that neither writes nor decays."""
    b, h, t, _ = k.shape
    dtype = working_dtype(k, v, memory)
    phi, log_decay, readable = (
        None if part is None else part.expand(b, h, t, part.shape[-1])
        for part in (write.phi, write.log_decay, write.readable)
    )
    assert phi is not None
    phi, log_decay = cast(phi, dtype), None if log_decay is None else cast(log_decay, dtype)
    k, v = cast(k, dtype), cast(v, dtype)
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, :, None]
        phi = phi.masked_fill(padding, 0)
        log_decay = None if log_decay is None else log_decay.masked_fill(padding, 0)
        k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)  # 0 * inf must not enter the memory
    memory = empty_memory(k, v, phi.shape[-1]) if memory is None else cast_memory(memory, dtype)
    return k, v, Write(phi, log_decay, readable), memory
