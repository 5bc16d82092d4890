"""The native backend: fp32 on a CPU, without dropout; C++ kernels, compiled by the install.

They are fused (native.cpp), bound by plain pointers and registered as torch operators. bf16 comes as fp32, see
core.prepare. Everything else is declined.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from abc_attn.core import Memory, Reading, Write, has_values, query_scale, transformed
from abc_attn.kernels.banded import Stretch, Token
from abc_attn.kernels.door import Declined
from abc_attn.kernels.library import load, widths_of

_SIZES = (
    *("rows", "g", "t", "n", "d", "e", "queries", "decay_width"),
    *("mean", "linear", "mask_empty", "causal", "backward", "threads", "checkpoint_floats"),
)
_POINTERS = (
    *("q", "k", "v", "phi", "log_decay", "readable", "old_k", "old_v", "old_mass", "old_used", "old_total"),
    *("memory_k", "memory_v", "mass", "used", "log_total"),
    *("out", "scores", "lse", "checkpoints"),
    *(
        "d_out",
        "d_lse",
        "d_memory_k",
        "d_memory_v",
        "d_mass",
        "d_log_total",
        "d_q",
        "d_k",
        "d_v",
        "d_phi",
        "d_log_decay",
    ),
)


_BEFORE = ("old_k", "old_v", "old_mass", "old_total")
_AFTER = ("memory_k", "memory_v", "mass", "log_total")


def struct(sizes: Sequence[str], pointers: Sequence[str], floats: Sequence[str] = ("scale",)) -> Any:
    """A struct of native.cpp: sizes, the queries' scale and what else is a float, pointers."""
    kinds = ((ctypes.c_int64, sizes), (ctypes.c_float, floats), (ctypes.c_void_p, pointers))
    fields = [(name, kind) for kind, names in kinds for name in names]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


_Args = struct(_SIZES, _POINTERS, ("scale", "floor"))
_Ring = struct(
    ("rows", "heads", "g", "n", "d", "e", "sinks", "threads"),
    ("q", "to_sinks", "k", "v", "at", "used", "memory_k", "memory_v", "out"),
)
_Band = struct(
    ("rows", "heads", "g", "t", "lead", "window", "sinks", "d", "e", "threads"),
    ("q", "to_sinks", "sink_k", "sink_v", "k", "v", "missing", "count", "out"),
)


LIBRARY = load()
_AVAILABLE = not isinstance(LIBRARY, str)

# Made once: a decoding step may be declined at every layer.
_NO_DROPOUT = Declined("it does not apply dropout; call .eval()")
_NO_STEP = Declined("not one contiguous fp32 token on the CPU, after others and without gradients")
_NO_ROTATION = Declined("not one fp32 token on the CPU, without gradients")
_WIDTH = Declined("heads must have a multiple of 16 channels")
_SHAPES = Declined("the shapes of the state and of the inputs differ")
_TOO_LARGE = Declined("its offsets inside a row of the batch are 32 bits wide")


def unavailable() -> str | None:
    return LIBRARY if isinstance(LIBRARY, str) else None


def describe() -> str:
    threads = f"{torch.get_num_threads()} threads, torch's own" if _library().abc_threads() else "one thread"
    return f"fused kernels for fp32 on the CPU ({width()}, {threads})"


def widths() -> list[str]:
    """The vector widths that the kernels have on this machine, widest first; the first is the default."""
    return [] if unavailable() else widths_of(_library())


def width() -> str:
    """The vector width in use."""
    return str(_library().abc_kind().decode())


def use_width(name: str) -> None:
    """Use the kernels of another vector width, as ABC_ATTN_SIMD does from the start.

    Not between a forward pass and its backward pass: what one keeps for the other is laid out by width.
    """
    if _library().abc_use(name.encode()):
        raise ValueError(f"this machine has no vector width {name!r}; accepted: {', '.join(map(repr, widths()))}")


def _not_for(*tensors: Tensor | None) -> Declined | None:
    """Why the kernels cannot take these tensors, if they cannot."""
    if not _AVAILABLE:
        return Declined(str(LIBRARY))
    if transformed():
        return Declined("it does not support torch.func's transforms")
    for x in tensors:
        if x is not None and (x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bool)):
            return Declined(f"it takes fp32 on the CPU, and {x.dtype} on {x.device.type} was given")
    return None


def _too_large(q: Tensor, k: Tensor, v: Tensor, slots: int) -> Declined | None:
    """As `fits` of native_bounds.h, or stricter."""
    slots, width, group = slots + 16, max(k.shape[-1], v.shape[-1]) + 16, q.shape[1] // max(1, k.shape[1])
    return _TOO_LARGE if slots * (width + 2048) >= 2**31 or group * 32 * (slots + width + 1) >= 2**31 else None


def scan(
    q: Tensor, k: Tensor, v: Tensor, write: Write, memory: Memory, reading: Reading
) -> tuple[Tensor, Memory] | Declined:
    """Causal attention: arguments and results of core.reference."""
    if reading.dropout:
        return _NO_DROPOUT
    if reading.linear and reading.mask_empty:
        return Declined("it has no linear read that leaves out empty slots")
    if declined := _not_for(k, *memory) or _too_large(q, k, v, write.phi.shape[-1]):
        return declined
    options = (False, reading.linear, reading.mask_empty, True, query_scale(q, reading.scale), reading.floor)
    out, memory, _ = _run(q, k, v, write.phi, write.log_decay, write.readable, memory, None, *options)
    return out, memory


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
    """Attention over weighted means, of the tokens so far or of all of them.

    In one call what running_mean and core.reference would do, or running_mean, core.write_all and core.read_memory.
    """
    if reading.dropout:
        return _NO_DROPOUT
    if declined := _not_for(k, v, log_weights, log_keep, *memory) or _too_large(q, k, v, memory.k.shape[2]):
        return declined
    options = (True, False, reading.mask_empty, causal, query_scale(q, reading.scale), 0.0)
    return _run(q, k, v, log_weights, log_keep, None, memory, log_total, *options)


_STEP = (*[torch.float32] * 7, torch.bool, torch.float64)  # q, k, v, log_weights, memory, log_total


def mean_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor | None,
    log_keep: Tensor | None,
    memory: Memory | None,
    log_total: Tensor | None,
    reading: Reading,
    in_place: bool = False,
) -> tuple[Tensor, Memory, Tensor] | Declined:
    """One token of `mean` after others. Decoding is made of it, so as little as possible is done besides.

    in_place: memory and log_total may be written to, unless gradients are recorded, for which they may be kept.
    Declines inputs that the fast path does not support; `mean` handles them, or they are refused on the way there.
    """
    if (
        not _AVAILABLE
        or torch.compiler.is_compiling()
        or type(memory) is not Memory
        or reading.dropout
        or transformed()
    ):
        return _NO_STEP
    weights = log_keep if log_weights is None else log_weights
    given: tuple[Any, ...] = (q, k, v, weights, *memory, log_total)
    if not all(type(x) is Tensor and x.is_cpu and x.is_contiguous() for x in given):
        return _NO_STEP
    if tuple(x.dtype for x in given) != _STEP or not q.dim() == k.dim() == v.dim() == given[3].dim() == 4:
        return _NO_STEP
    b, h, _, d = k.shape
    heads, e, n = q.shape[1], v.shape[3], given[3].shape[3]
    if not b * h * d * e * n or heads % h:
        return _NO_STEP
    of_slots, of_token = (b, h, n), ((b, heads, 1, d), (b, h, 1, d), (b, h, 1, e), (b, h, 1, n))
    if tuple(x.shape for x in given) != (*of_token, (*of_slots, d), (*of_slots, e), of_slots, of_slots, of_slots):
        return _NO_STEP
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return _NO_STEP
    if log_keep is not None and log_keep is not weights:
        fits = type(log_keep) is Tensor and log_keep.is_cpu and log_keep.is_contiguous()
        if not fits or log_keep.dtype != torch.float32 or log_keep.shape not in ((b, h, 1, 1), (b, h, 1, n)):
            return _NO_STEP
        if torch.is_grad_enabled() and log_keep.requires_grad:
            return _NO_STEP
    # The kernel reads each number of the old memory before it writes that number of the new one: they may be the same.
    after = given[4:] if in_place and not torch.is_grad_enabled() else [torch.empty_like(x) for x in given[4:]]
    out = v.new_empty(b, heads, 1, e)
    width, threads = 0 if log_keep is None else log_keep.shape[3], torch.get_num_threads()
    sizes = (b * h, heads // h, 1, n, d, e, 1, width, 1, 0, reading.mask_empty, 1, 0, threads, 0)  # as _SIZES
    token = (q, k, v, log_weights, log_keep, None)
    pointers = [None if x is None else x.data_ptr() for x in (*token, *given[4:], *after, out)]
    _run_native(_Args(*sizes, query_scale(q, reading.scale), 0.0, *pointers))
    *after_memory, after_total = after
    return out, Memory(*after_memory), after_total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | Declined:
    """`x * cos + x.roll(d/2) * sin` of one token: heads x `b h 1 d`, cos and sin `b 1 1 d`.

    With so little to compute, the overhead of torch's operators would be most of the time.
    """
    batch, heads, t, d = x.shape
    if t != 1 or d % 2 or cos.shape != (batch, 1, 1, d) or sin.shape != cos.shape or not has_values(x):
        return _NO_ROTATION
    if _not_for(x, cos, sin) or (x.requires_grad and torch.is_grad_enabled()):
        return _NO_ROTATION
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    _library().abc_rotate(batch, heads, d, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    return out


def band_step(token: Token) -> tuple[Tensor, Memory] | Declined:
    """A token replaces a row of the memory, in place, and all rows in use are read."""
    q, k, v, memory, row = token.q, token.k, token.v, token.memory, token.place.row
    (batch, heads, n, d), e = memory.k.shape, memory.v.shape[3]
    if not token.in_place or token.key_padding_mask is not None or token.band.dilation > 1:
        return Declined("it replaces a token of the memory in place, without padding or dilation")
    if token.reading.dropout:
        return _NO_DROPOUT
    if d % 16 or e % 16:
        return _WIDTH
    if declined := _not_for(memory.k, memory.v):
        return declined
    if not has_values(q):
        return Declined("a graph is traced, and it is called by pointers")
    # What does not fit is left to torch, which says so: a state may come from a file.
    shapes = (k.shape, v.shape, memory.v.shape[:3], row.dtype, len(q), q.shape[1] % heads, q.shape[2:])
    fitting = ((batch, heads, 1, d), (batch, heads, 1, e), (batch, heads, n), torch.int64, batch, 0, (1, d))
    if shapes != fitting or token.band.sinks > n or row.numel() not in (batch, batch * heads):
        return _SHAPES
    if not (memory.k.is_contiguous() and memory.v.is_contiguous()):
        return Declined("the memory must be contiguous to be written in place")
    used = None if token.place.full else memory.used
    if used is not None and not used.shape == memory.mass.shape == (batch, heads, n):
        return _SHAPES
    for part in () if used is None else (used, memory.mass):
        part.scatter_(2, row[..., 0].expand(-1, heads, -1), 1)
    rows, threads = batch * heads, torch.get_num_threads()
    sizes = (rows, rows // row.numel(), q.shape[1] // heads, n, d, e, token.band.sinks, threads)
    out = v.new_empty(*q.shape[:3], e)
    # A copy must live until the call is over, so all are kept here.
    given = [None if x is None else x.contiguous() for x in (q, token.to_sinks, k, v, row, used)]
    pointers = [None if x is None else x.data_ptr() for x in (*given, memory.k, memory.v, out)]
    finish(_library().abc_ring(ctypes.byref(_Ring(*sizes, query_scale(q, token.reading.scale), *pointers))))
    return out, memory


def band(stretch: Stretch) -> Tensor | Declined:
    """What the queries of a stretch read; without gradients."""
    q, to_sinks, sink_k, sink_v, k, v, missing, before, band, reading = stretch
    batch, heads, _, d = k.shape
    e, t = v.shape[3], q.shape[2]
    given = (q, to_sinks, sink_k, sink_v, k, v)
    if band.dilation > 1 or not has_values(k) or bool((before < 0).any()):
        return Declined("it has no dilated bands, none in a traced graph, and no queries before the first token")
    if reading.dropout:
        return _NO_DROPOUT
    if d % 16 or e % 16:
        return _WIDTH
    if declined := _not_for(*given):
        return declined
    held, of_query = sink_k.shape[2], (batch, q.shape[1], t, d)
    shapes = (q.shape, to_sinks is None or to_sinks.shape, v.shape[:3], sink_k.shape, sink_v.shape, q.shape[1] % heads)
    fitting = (of_query, to_sinks is None or of_query, k.shape[:3], (batch, heads, held, d), (batch, heads, held, e), 0)
    if shapes != fitting or any(x.shape != (batch,) or x.dtype != torch.int64 for x in (missing, before)):
        return _SHAPES
    if (held + 32 + min(band.window + 128, k.shape[2])) * (2 * d + e + 32) >= 2**31 or band.window >= 2**53:
        return _TOO_LARGE
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return Declined("attention over a band has no gradients there")
    sizes = (batch * heads, heads, q.shape[1] // heads, t, stretch.lead, band.window, held, d, e)
    out = v.new_empty(*q.shape[:3], e)
    kept = [None if x is None else x.contiguous() for x in (*given, missing, before)]
    pointers = [None if x is None else x.data_ptr() for x in (*kept, out)]
    scale, threads = query_scale(q, reading.scale), torch.get_num_threads()
    finish(_library().abc_band(ctypes.byref(_Band(*sizes, threads, scale, *pointers))))
    return out


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Tensor | None,
    log_decay: Tensor | None,
    readable: Tensor | None,
    memory: Memory,
    log_total: Tensor | None,
    mean: bool,
    linear: bool,
    mask_empty: bool,
    causal: bool,
    scale: float,
    floor: float,
) -> tuple[Tensor, Memory, Tensor]:
    inputs = (q.to(v.dtype), k, v, phi, log_decay, readable, *memory, log_total)
    saves = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    # Dispatching the operator takes longer than a short sequence does: skip it where no gradient is needed.
    run = _forward if saves or torch.compiler.is_compiling() else _forward_now
    options = (mean, linear, mask_empty, causal, scale, floor, saves)
    shards = 1 if linear or k.shape[2] == 1 else _shards(k.shape[0] * k.shape[1], memory.k.shape[2])
    if shards == 1:
        out, mk, mv, mass, used, total, *_ = run(*inputs, *options, False)
        return out, Memory(mk, mv, mass, used), total
    out, *state, lse, _, _ = run(*_apart(shards, *inputs), *options, True)  # type: ignore[arg-type, call-arg]
    mk, mv, mass, used, total = (x if x.dim() == 1 else x.unflatten(1, (-1, shards)).flatten(2, 3) for x in state)
    return _joined(out, lse, k.shape[1], shards), Memory(mk, mv, mass, used), total


# With fewer rows (batch x heads) than threads, each thread takes some of a row's slots.


def _shards(rows: int, slots: int) -> int:
    """Into how many shards the slots of each row are cut: of 16 slots at least, a vector's worth."""
    if torch.compiler.is_compiling():  # which cannot ask for the number of threads
        return 1
    threads, shards = torch.get_num_threads(), 1
    while 2 * shards * rows <= threads and slots % (32 * shards) == 0:
        shards *= 2
    return shards


def _apart(shards: int, *tensors: Tensor | None) -> list[Tensor | None]:
    """The arguments of a pass with each shard of the slots as a head of its own."""
    q, k, v, phi, log_decay, readable, *state = tensors
    assert q is not None and k is not None and v is not None  # noqa: PT018
    every_q = q.unflatten(1, (k.shape[1], 1, -1)).expand(-1, -1, shards, -1, -1, -1).flatten(1, 3)
    every = (x[:, :, None].expand(-1, -1, shards, -1, -1).flatten(1, 2) for x in (k, v))

    def slots(x: Tensor | None) -> Tensor | None:
        if x is not None and x.shape[-1] == 1:  # a decay of all slots alike
            return x[:, :, None].expand(-1, -1, shards, -1, -1).flatten(1, 2)
        return None if x is None else x.unflatten(-1, (shards, -1)).movedim(3, 2).flatten(1, 2)

    kept = (None if x is None else x.unflatten(2, (shards, -1)).flatten(1, 2) for x in state)
    return [every_q, *every, *map(slots, (phi, log_decay, readable)), *kept]


def _joined(out: Tensor, lse: Tensor, heads: int, shards: int) -> Tensor:
    """What a softmax over all slots would have read: each shard's output by the size of its scores."""
    out, lse = (x.unflatten(1, (heads, shards, -1)) for x in (out, lse))
    nothing = (lse == -torch.inf).all(2, keepdim=True)
    share = lse.masked_fill(nothing, 0).softmax(2)
    return (share[..., None] * out).sum(2).flatten(1, 2)


def _forward_now(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Tensor | None,
    log_decay: Tensor | None,
    readable: Tensor | None,
    memory_k: Tensor,
    memory_v: Tensor,
    mass: Tensor,
    used: Tensor,
    log_total: Tensor | None,
    mean: bool,
    linear: bool,
    mask_empty: bool,
    causal: bool,
    scale: float,
    floor: float,
    saves: bool,
    joins: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = _contiguous(q=q, k=k, v=v, phi=phi, log_decay=log_decay, readable=readable)
    tensors |= _contiguous(old_k=memory_k, old_v=memory_v, old_mass=mass, old_used=used, old_total=log_total)
    after = {"memory_k": memory_k, "memory_v": memory_v, "mass": mass, "used": used, "log_total": log_total}
    state = {name: None if x is None else x.new_empty(x.shape) for name, x in after.items()}
    args = _arguments(q, k, v, memory_k.shape[2], log_decay, mean, linear, mask_empty, causal, scale, floor)
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    lse = v.new_empty(q.shape[:3]) if joins or (saves and not linear) else None
    scores = v.new_empty(*q.shape[:3], memory_k.shape[2]) if saves and not linear else None
    checkpoints = v.new_empty(_library().abc_checkpoint_floats(ctypes.byref(args))) if saves else None
    _call(args, **tensors, **state, out=out, lse=lse, scores=scores, checkpoints=checkpoints)
    results = (out, *state.values(), lse, scores, checkpoints)
    return tuple(v.new_empty(0) if x is None else x for x in results)  # type: ignore[return-value]


_forward = torch.library.custom_op("abc_attn::native_forward", _forward_now, mutates_args=())


@_forward.register_fake
def _(q, k, v, phi, log_decay, readable, mk, mv, mass, used, log_total, *options):  # type: ignore[no-untyped-def]
    none, (mean, linear, mask_empty, causal, scale, floor, saves, joins) = v.new_empty(0), options
    lse = v.new_empty(q.shape[:3]) if joins or (saves and not linear) else none.clone()
    scores = v.new_empty(*q.shape[:3], mk.shape[2]) if saves and not linear else none
    state = (x.new_empty(x.shape) for x in (mk, mv, mass, used))
    total = none.clone() if log_total is None else log_total.new_empty(log_total.shape)
    floats = 0
    if saves:  # else no size becomes a number: the batch of a graph may be of any size
        args = _arguments(q, k, v, mk.shape[2], log_decay, mean, linear, mask_empty, causal, scale, floor)
        floats = _library().abc_checkpoint_floats(ctypes.byref(args))
    return v.new_empty(*q.shape[:3], v.shape[-1]), *state, total, lse, scores, v.new_empty(floats)


@torch.library.custom_op("abc_attn::native_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Tensor | None,
    log_decay: Tensor | None,
    readable: Tensor | None,
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    scores: Tensor,
    lse: Tensor,
    checkpoints: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    d_memory_k: Tensor,
    d_memory_v: Tensor,
    d_mass: Tensor,
    d_log_total: Tensor,
    mean: bool,
    linear: bool,
    mask_empty: bool,
    causal: bool,
    scale: float,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = _contiguous(q=q, k=k, v=v, phi=phi, log_decay=log_decay, readable=readable, d_out=d_out)
    tensors |= _contiguous(d_lse=d_lse if d_lse.numel() else None)
    state = {"d_memory_k": _copy(d_memory_k), "d_memory_v": _copy(d_memory_v), "d_mass": _copy(d_mass)}
    d_log_total = _copy(d_log_total)
    wanted = {"q": q, "k": k, "v": v, "phi": phi, "log_decay": log_decay}
    found = {f"d_{name}": v.new_empty(0 if x is None else x.shape) for name, x in wanted.items()}
    args = _arguments(q, k, v, d_mass.shape[2], log_decay, mean, linear, mask_empty, causal, scale, floor)
    args.backward = 1
    saved = {"scores": scores, "lse": lse, "checkpoints": checkpoints}
    tensors |= _contiguous(**dict(zip(_BEFORE, before, strict=False)), **dict(zip(_AFTER, after, strict=False)))
    _call(args, **tensors, **saved, **state, d_log_total=d_log_total, **found)
    return *found.values(), *state.values(), d_log_total  # type: ignore[return-value]


@_backward.register_fake
def _(q, k, v, phi, log_decay, readable, before, after, scores, lse, checkpoints, d_out, d_lse, *state):  # type: ignore[no-untyped-def]
    found = (v.new_empty(0 if x is None else x.shape) for x in (q, k, v, phi, log_decay))
    return *found, *(x.new_empty(x.shape) for x in state[:4])


def _keep_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tokens, mk, mv, mass, _, log_total, mean, linear, mask_empty, causal, scale, floor, _, _ = inputs
    _, *after, used, total, lse, scores, checkpoints = output
    ctx.mark_non_differentiable(used, scores, checkpoints)
    ctx.set_materialize_grads(False)  # zeros as large as the scores and the checkpoints, for nothing
    ctx.slots, ctx.has_total, ctx.options = (
        mk.shape[2],
        log_total is not None,
        (mean, linear, mask_empty, causal, scale, floor),
    )
    # A causal pass goes back from its checkpoints, one that is not from the memory before and after.
    memories = () if causal else (mk, mv, mass, log_total, *after, total)
    ctx.save_for_backward(*tokens, scores, lse, checkpoints, *memories)


def _differentiate(ctx, d_out, d_mk, d_mv, d_mass, d_used, d_total, d_lse, *_):  # type: ignore[no-untyped-def]
    kept = ctx.saved_tensors  # asked for once: checkpointing recomputes it
    (*tokens, scores, lse, checkpoints), memories = kept[:9], kept[9:]
    q, k, v, phi, log_decay, _ = tokens
    rows, n = k.shape[:2], ctx.slots

    def given(grad: Tensor | None, *shape: int) -> Tensor:
        return v.new_zeros(shape) if grad is None else grad

    memory = (given(d_mk, *rows, n, k.shape[-1]), given(d_mv, *rows, n, v.shape[-1]), given(d_mass, *rows, n))
    state = (given(d_out, *q.shape[:3], v.shape[-1]), given(d_lse, 0), *memory)
    if d_total is None or not ctx.has_total:
        d_total = v.new_zeros(*rows, n, dtype=torch.float64)
    d_q, d_k, d_v, d_phi, d_decay, d_mk, d_mv, d_mass, d_total = _backward(
        *tokens, memories[:4], memories[4:], scores, lse, checkpoints, *state, d_total, *ctx.options
    )
    d_phi, d_decay = (d if x is not None else None for d, x in ((d_phi, phi), (d_decay, log_decay)))
    total = d_total if ctx.has_total else None
    return d_q, d_k, d_v, d_phi, d_decay, None, d_mk, d_mv, d_mass, None, total, *[None] * 8


_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _no_second_derivative(ctx, *_):  # type: ignore[no-untyped-def]
    raise NotImplementedError("the native backend has no second derivatives: use backend='torch'")


_backward.register_autograd(_no_second_derivative)


def _library() -> ctypes.CDLL:
    assert isinstance(LIBRARY, ctypes.CDLL)
    return LIBRARY


def _arguments(q: Tensor, k: Tensor, v: Tensor, slots: int, log_decay: Tensor | None, *options: float) -> Any:
    """The sizes and, in the order of every signature here, the options."""
    b, h, t, d = k.shape
    sizes = {"rows": b * h, "g": q.shape[1] // h, "t": t, "n": slots, "d": d, "e": v.shape[-1], "queries": q.shape[2]}
    sizes["decay_width"] = 0 if log_decay is None else log_decay.shape[-1]
    named = dict(zip(("mean", "linear", "mask_empty", "causal", "scale", "floor"), options, strict=True))
    return _Args(**sizes, **named, backward=0, threads=torch.get_num_threads())


def _contiguous(**tensors: Tensor | None) -> dict[str, Tensor | None]:
    return {name: x if x is None or x.is_contiguous() else x.detach().contiguous() for name, x in tensors.items()}


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _call(args: Any, **tensors: Tensor | None) -> None:
    """Run on these tensors, each of which must hold as many elements as the kernels will touch."""
    tokens, queries, slots = args.rows * args.t, args.rows * args.g * args.queries, args.rows * args.n
    counts = {"out": queries * args.e, "scores": queries * args.n, "lse": queries}
    counts |= {"q": queries * (args.n if args.linear else args.d), "k": tokens * args.d, "v": tokens * args.e}
    counts |= {"phi": tokens * args.n, "readable": tokens * args.n, "log_decay": tokens * args.decay_width}
    counts |= {"memory_k": slots * args.d, "memory_v": slots * args.e}
    for name, x in tensors.items():
        if x is None:
            continue
        kind = name.removeprefix("d_").replace("old_", "memory_" if name in ("old_k", "old_v") else "")
        count, dtype = counts.get(kind, slots), _DTYPES.get(kind, torch.float32)
        if kind == "checkpoints":
            args.checkpoint_floats = count = x.numel()
        empty = not x.numel() and (kind in ("scores", "lse", "log_total") or name in ("d_phi", "d_log_decay"))  # none
        if (x.numel() != count and not empty) or x.dtype != dtype or not x.is_contiguous() or not x.is_cpu:
            raise ValueError(
                f"the native kernels need {count} contiguous elements of {dtype} for {name!r}, "
                f"got {x.numel()} of {x.dtype}"
            )
        setattr(args, name, x.data_ptr())
    _run_native(args)


_DTYPES = {"log_total": torch.float64, "total": torch.float64, "used": torch.bool, "readable": torch.bool}


def _run_native(args: Any) -> None:
    finish(_library().abc_run(ctypes.byref(args)))


def finish(failed: int) -> None:
    if failed == 1:
        raise MemoryError("the native kernels could not allocate their scratch memory")
    if failed:  # OUT_OF_BOUNDS
        raise ValueError("the native kernels refused sizes or rows of the memory that lie outside the given tensors")
