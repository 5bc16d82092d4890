"""The bounded memory: one write rule, two reads, and the loop that defines what every fast path must give.

    memory_t = exp(log_decay_t) * memory_{t-1} + phi_t (x) [k_t, v_t, 1]                  write (eq. 3 and 5)
    o_t      = p_t . V_t,   p_t = softmax(K_t q_t)   or   f(q_t) / (f(q_t) . mass_t)      read  (eq. 4)

Axes, here and everywhere: b batch, h heads, t tokens, n slots, d key width, e value width.
Queries may have more heads than keys (grouped heads): query head i reads the memory of head i // (query heads / h).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.files import whole_file


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


class Memory(NamedTuple):
    """The bounded memory. Its size never depends on t."""

    k: Tensor  # b h n d   fp32 or wider, always
    v: Tensor  # b h n e
    mass: Tensor  # b h n     the memory of the constant 1
    used: Tensor  # b h n     bool: written since it was last emptied


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
    check_memory(memory)
    check_queries(q, memory.k, memory.v, memory.k.shape[2], linear, floor)
    with full_precision(q):
        grouped = group_heads(q, memory.k.shape[1]).flatten(2, 3).to(memory.v.dtype)  # every group reads alike
        seen = memory.used[:, :, None] if mask_empty else None
        if linear:
            features = grouped if seen is None else grouped.masked_fill(~seen, 0)
            total = features @ memory.mass[..., None]
            out = divide((F.dropout(features, dropout) if dropout else features) @ memory.v, total, floor)
        else:
            scores = grouped * query_scale(q, scale) @ memory.k.mT
            out = softmax_weights(scores, seen, dropout) @ memory.v
    return out.view(*q.shape[:-1], out.shape[-1]).to(q.dtype)


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
        k, v, write, memory = prepare(k, v, write, memory, key_padding_mask)
        phi, log_decay = write.phi, write.log_decay
        if log_decay is not None:
            later = decay_after(log_decay)  # what happens to token j's share before the end
            before = (later[:, :, 0] + log_decay[:, :, 0]).exp()  # ... and to the memory there was
            phi = phi * later.exp()
            memory = Memory(
                before[..., None] * memory.k, before[..., None] * memory.v, before * memory.mass, memory.used
            )
        return Memory(
            k=memory.k + phi.mT @ k,
            v=memory.v + phi.mT @ v,
            mass=memory.mass + phi.sum(2),
            used=used_at_end(write, memory.used),
        )


def reference(
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
    """Causal attention as the paper writes it: token by token, write, then read. The oracle of every test."""
    out = []
    options: dict[str, Any] = {"linear": linear, "floor": floor, "scale": scale, "dropout": dropout}
    for t in range(q.shape[2]):
        log_decay = None if write.log_decay is None else write.log_decay[:, :, t]
        memory = write_token(memory, k[:, :, t], v[:, :, t], write.phi[:, :, t], log_decay)
        seen, masked = memory, mask_empty
        if write.readable is not None:
            readable = write.readable[:, :, t]
            seen, masked = memory._replace(used=readable & memory.used if mask_empty else readable), True
        out.append(read(q[:, :, t : t + 1], seen, mask_empty=masked, **options))
    return torch.cat(out, dim=2), memory


# The pieces that every backend shares.


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
    """Whether a decision may rest on what x holds: not where a graph is traced, nor on the meta device."""
    return not torch.compiler.is_compiling() and x.device.type != "meta"


def query_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def group_heads(q: Tensor, heads: int) -> Tensor:
    """`b (h g) t d` -> `b h g t d`."""
    return q.unflatten(1, (heads, q.shape[1] // heads))


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

    f(q) V / (f(q) . mass) is divided last: f(q) over a total that has all but decayed would overflow.
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


_WRITTEN = tuple(f"write.{field}" for field in Write._fields)


def check_keys(k: Tensor, v: Tensor, write: Write, memory: Memory | None, key_padding_mask: Tensor | None) -> None:
    """Refuse what does not fit together, saying what was given and what is accepted."""
    if not isinstance(write, Write):
        raise TypeError(f"write must be a Write (phi, log_decay, readable), got {type(write).__name__}")
    for name, tensor in zip(("k", "v", *_WRITTEN), (k, v, *write), strict=True):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 axes (batch, heads, tokens, width), got shape {tuple(tensor.shape)}")
    b, h, t, d = k.shape
    if t < 1:
        raise ValueError(f"at least one token is needed, got k of shape {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k and v must share batch, heads and tokens, got {tuple(k.shape)} and {tuple(v.shape)}")
    if not (k.is_floating_point() and v.is_floating_point() and write.phi.is_floating_point()):
        raise TypeError(f"k, v and phi must be floating point, got {k.dtype}, {v.dtype} and {write.phi.dtype}")
    if write.log_decay is not None and not write.log_decay.is_floating_point():
        raise TypeError(f"write.log_decay must be floating point, got {write.log_decay.dtype}")
    if write.readable is not None and write.readable.dtype != torch.bool:
        raise TypeError(f"write.readable must be bool, got {write.readable.dtype}")
    n = write.phi.shape[-1]
    if n < 1:
        raise ValueError(f"at least one slot is needed, got write.phi of shape {tuple(write.phi.shape)}")
    for name, part in zip(_WRITTEN, write, strict=True):
        if part is None:
            continue
        if part.shape[0] not in (1, b) or part.shape[1] not in (1, h) or part.shape[2:] != (t, n):
            raise ValueError(
                f"{name} must have shape ({b} or 1, {h} or 1, {t}, {n}) beside k {tuple(k.shape)}, "
                f"got {tuple(part.shape)}"
            )
    if memory is not None:
        check_memory(memory)
        expected = ((b, h, n, d), (b, h, n, v.shape[-1]), (b, h, n), (b, h, n))
        for field, part, shape in zip(Memory._fields, memory, expected, strict=True):
            if part.shape != shape:
                raise ValueError(f"memory.{field} must have shape {shape} for these inputs, got {tuple(part.shape)}")
    check_padding(key_padding_mask, b, t)


def check_memory(memory: Memory) -> None:
    if not isinstance(memory, Memory):
        raise TypeError(f"memory must be a Memory, as write and scan return it, got {type(memory).__name__}")
    for field, part in zip(Memory._fields, memory, strict=True):
        fits = isinstance(part, Tensor) and (part.dtype == torch.bool if field == "used" else part.is_floating_point())
        if not fits:
            accepted = "bool" if field == "used" else "floating point"
            given = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise TypeError(f"memory.{field} must be a {accepted} Tensor, got {given}")


def check_padding(key_padding_mask: Tensor | None, b: int, t: int) -> None:
    if key_padding_mask is None:
        return
    if not isinstance(key_padding_mask, Tensor):
        raise TypeError(f"key_padding_mask must be a bool Tensor, got {type(key_padding_mask).__name__}")
    if key_padding_mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool with True at padding, got {key_padding_mask.dtype}")
    if key_padding_mask.shape != (b, t):
        raise ValueError(f"key_padding_mask must have shape ({b}, {t}), got {tuple(key_padding_mask.shape)}")


def check_queries(q: Tensor, k: Tensor, v: Tensor, slots: int, linear: bool, floor: float = 0.0) -> None:
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a Tensor, got {type(q).__name__}")
    if not q.is_floating_point():
        raise TypeError(f"q must be floating point, got {q.dtype}")
    if q.dim() != 4:
        raise ValueError(f"q must have 4 axes (batch, heads, tokens, width), got shape {tuple(q.shape)}")
    if q.shape[0] != v.shape[0] or q.shape[1] % v.shape[1]:
        raise ValueError(
            f"q must have batch {v.shape[0]} and a multiple of {v.shape[1]} heads, as the keys and values have, "
            f"got q of shape {tuple(q.shape)}"
        )
    width = slots if linear else k.shape[-1]
    if q.shape[-1] != width:
        what = "the number of slots (a linear read takes f(q))" if linear else "the width of the keys"
        raise ValueError(f"q must have width {width}, {what}, got q of shape {tuple(q.shape)}")
    if not floor >= 0 or (floor and not linear):
        raise ValueError(
            f"floor must be 0 or more, and 0 unless the read is linear, got {floor!r} with linear={linear}"
        )


class State(NamedTuple):
    """Everything an attention layer remembers, as it goes in and comes out; nothing in it is changed in place."""

    memory: Memory
    inner: tuple[Tensor, ...] | None  # the control's own state; batch first
    length: Tensor  # b   int64: real tokens written so far
    control: str  # which control wrote it: Control.describe()
    readable: Tensor | None = None  # b h n   what a read without new tokens may see; None means all
    packed: Tensor | None = None  # b n D   depth-carried controls: what the next layer takes as `below`
    cross: bool = False  # the memory is of a context: a call without one only reads it

    def _map(self, change: Any) -> State:
        return State(
            memory=Memory(*map(change, self.memory)),
            inner=None if self.inner is None else tuple(map(change, self.inner)),
            length=change(self.length),
            control=self.control,
            readable=None if self.readable is None else change(self.readable),
            packed=None if self.packed is None else change(self.packed),
            cross=self.cross,
        )

    def _tensors(self) -> dict[str, Tensor]:
        named = {f"memory.{field}": part for field, part in self.memory._asdict().items()}
        named |= {f"inner.{i}": part for i, part in enumerate(self.inner or ())}
        named |= {"length": self.length, "readable": self.readable, "packed": self.packed}
        return {name: part for name, part in named.items() if part is not None}

    def reorder(self, index: Tensor) -> State:
        """The state whose row i is this one's row index[i] (beam search); index may repeat or drop rows."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
            shown = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else repr(index)
            raise TypeError(f"index must be a Tensor of int64 with one axis, a row for each new row, got {shown}")
        return self._map(lambda part: part.index_select(0, index.to(part.device)))

    def to(self, *args: Any, **kwargs: Any) -> State:
        """As `Tensor.to`, except that a dtype only widens floating-point parts: memory is fp32 or wider, always."""

        def move(part: Tensor) -> Tensor:
            moved = part.to(*args, **kwargs)
            if not part.is_floating_point():
                return part.to(moved.device)
            return part.to(moved.device, torch.promote_types(part.dtype, moved.dtype))

        return self._map(move)

    @property
    def nbytes(self) -> int:
        """Bytes of storage this state owns."""
        return sum({s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in self._tensors().values())}.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        save_states({"": self}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> State:
        """Read what `save` wrote; anything else, and any state with a NaN or an infinite memory, is refused."""
        states, _ = load_states(path, device)
        if "" not in states:
            raise ValueError(f"{path} holds the states of several layers; abc_attn.hf.load_state reads it")
        return states[""]


def save_states(states: Mapping[str, State], path: str | os.PathLike[str], **facts: str) -> None:
    """Write named states, and what else is to be known of them, into one safetensors file."""
    from safetensors.torch import save_file

    metadata = {"format": _FORMAT, "version": _VERSION, **facts}
    tensors: dict[str, Tensor] = {}
    for name, state in states.items():
        inner = "none" if state.inner is None else str(len(state.inner))
        metadata |= {name + "control": state.control, name + "cross": str(state.cross), name + "inner": inner}
        tensors |= {name + part: x.detach().contiguous().clone() for part, x in state._tensors().items()}
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata)


def load_states(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> tuple[dict[str, State], dict[str, str]]:
    """What `save_states` wrote: the states by name, and all else that was said of them."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no state file at {path}")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            facts = file.metadata() or {}
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    for fact, accepted in (("format", _FORMAT), ("version", _VERSION)):
        if facts.get(fact) != accepted:
            raise ValueError(
                f"{path} is not a saved state: {fact} {facts.get(fact)!r} was found, {accepted!r} is accepted"
            )
    names = [fact.removesuffix("control") for fact in facts if fact.endswith("control")]
    if not names:
        raise ValueError(f"{path} lacks 'control': it is not whole, save it again")
    return {name: _load_state(name, parts, facts, path) for name in names}, facts


def _load_state(name: str, parts: dict[str, Tensor], facts: dict[str, str], path: str | os.PathLike[str]) -> State:
    try:
        count = facts[name + "inner"]
        inner = None if count == "none" else tuple(parts[f"{name}inner.{i}"] for i in range(int(count)))
        memory = Memory(*(parts[f"{name}memory.{field}"] for field in Memory._fields))
        carried = {part: parts.get(name + part) for part in ("readable", "packed")}
        cross = facts[name + "cross"] == "True"
        state = State(memory, inner, parts[name + "length"], facts[name + "control"], **carried, cross=cross)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} lacks {error}: it is not whole, save it again") from None
    for part, tensor, dtype in (("memory.used", memory.used, torch.bool), ("length", state.length, torch.int64)):
        if tensor.dtype != dtype:
            raise ValueError(f"{path}: {name}{part} has dtype {tensor.dtype}, {dtype} is accepted")
    for part, tensor in state._tensors().items():
        if tensor.shape[:1] != state.length.shape:
            raise ValueError(
                f"{path}: {name}{part} has shape {tuple(tensor.shape)}, its first axis must be {len(state.length)} rows"
            )
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(f"{path}: {name}{part} contains NaN; a state must be finite to be continued")
        if not part.startswith("inner") and bool(tensor.isinf().any()):  # an empty sum's logarithm is -inf
            raise ValueError(f"{path}: {name}{part} contains inf; a state must be finite to be continued")
    return state


_FORMAT, _VERSION = "abc-attn state", "1"
