"""BoundedAttention: projections around a control and the bounded memory, one call for prefill and decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from abc_attn.checks import check_count, check_number, check_padding
from abc_attn.controls import CONTROLS, Control, make_control
from abc_attn.controls.base import at_least
from abc_attn.core import (
    Memory,
    Reading,
    cast,
    empty_memory,
    full_precision,
    group_heads,
    has_values,
    memory_dtype,
    query_scale,
    scaled_queries,
)
from abc_attn.kernels import check_backend, exact_attention, mean_attention, read, rotate, scan, write
from abc_attn.kernels.banded import banded
from abc_attn.kernels.counts import counted
from abc_attn.kernels.door import Declined
from abc_attn.kernels.kept import kept_attention
from abc_attn.kernels.sinks import widen
from abc_attn.state import State


class MemoryAttention(nn.Module):
    """Attention over a bounded memory between given projections: q, k and v by heads go in, the heads come out.

    What BoundedAttention and the attention of converted models share. `control` is set by the subclass, which decides
    whether it owns the module.
    """

    control: Control
    in_place = False  # whether a step may write into the state that it is given: who keeps states for itself may say so

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_backend(backend)
        check_number("scale", scale, "a number, or None for d^-1/2", scale is None)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.causal, self.dropout, self.scale, self.backend = causal, dropout, scale, backend

    def describe_states(self) -> None:
        """Find out, once, what is asked for at every step: what the states of `control` look like."""
        self._described = self.control.describe()
        self._inner_shapes = self.control.inner_shapes()
        self._rows = None if self.control.grows else self.control.rows
        band = self.control.band() if self.causal else None
        self._band = band if band is not None and band.window else None
        self._keep = self.control.keep() if self.causal else None
        self._sinks = self.control.sinks() if self.causal else 0

    def attend(
        self,
        source: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        state: State | None = None,
        below: Tensor | None = None,
        cross: bool = False,
        to_sinks: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Write the tokens of `source` `b s D`, whose keys and values are k and v `b h s d`; then q reads.

        `to_sinks` is what the first tokens are read by, if not by q, of a control that keeps them (Control.sinks).
        """
        if not k.shape[0]:
            return self._nobody(q, k, v, state, cross)
        if self._band is not None:
            options: dict[str, Any] = {"key_padding_mask": key_padding_mask, "to_sinks": to_sinks}
            options |= {"control": self._described, "in_place": self.in_place, "backend": self.backend}
            answer = banded(q, k, v, self._band, state, self.reading, **options)
            if not isinstance(answer, Declined):
                return answer
        if self._keep is not None:
            options = {"key_padding_mask": key_padding_mask, "to_sinks": to_sinks}
            options |= {"in_place": self.in_place, "backend": self.backend}
            before = self._begin(k, v) if state is None else state
            options |= {"look": self.control.look if self.control.sees_queries else None}
            options |= {"by_values": self.control.sees_values}
            answer = kept_attention(q, k, v, self._keep, self.control.choose, before, self.reading, **options)
            if not isinstance(answer, Declined):
                return answer
        length = k.new_zeros(k.shape[0], dtype=torch.int64) if state is None else state.length
        length = length + (k.shape[2] if key_padding_mask is None else (~key_padding_mask).sum(1))
        if self.control.grows:
            out, state = self._exact(q, k, v, key_padding_mask, state, length)
        else:
            out, state = self._bounded(source, q, k, v, key_padding_mask, state, length, below, to_sinks)
        return cast(out, q.dtype), state._replace(cross=True) if cross else state

    def _nobody(self, q: Tensor, k: Tensor, v: Tensor, state: State | None, cross: bool) -> tuple[Tensor, State]:
        """A batch without rows: nothing is read, and the state has no rows either."""
        state = self._begin(k, v)._replace(cross=cross) if state is None else state
        return q.new_zeros(*q.shape[:3], v.shape[-1]), state

    def _begin(self, k: Tensor, v: Tensor) -> State:
        """The state before any token."""
        memory = empty_memory(k[..., :0] if self.control.linear else k, v, self._rows or 0)
        length = torch.zeros(len(k), dtype=torch.int64, device=k.device)
        return State(memory, self.control.begin(len(k), k.shape[1], k), length, self._described)

    @property
    def reading(self) -> Reading:
        """How the memory is read, now: dropout falls in training alone."""
        control, dropout = self.control, self.dropout if self.training else 0.0
        return Reading(control.linear, control.floor, control.mask_empty, self.scale, dropout)

    def recall(self, q: Tensor, state: State) -> Tensor:
        """Read without writing: encoder self-attention and cross-attention."""
        if self.control.grows:
            return exact_attention(q, state.memory, state.memory.used[:, :1, None], self.reading, self.backend)
        memory, reading = state.memory, self.reading
        if state.readable is not None:
            seen = state.readable & memory.used if reading.mask_empty else state.readable.expand_as(memory.used)
            memory, reading = memory._replace(used=seen), reading._replace(mask_empty=True)
        if self.control.counts:
            assert state.inner is not None
            wide, memory = counted(q * query_scale(q, self.scale), memory, state.inner[0])
            return cast(read(wide, memory, **reading._replace(scale=1.0)._asdict()), q.dtype)
        return read(self._features(q), memory, **reading._asdict())

    def _bounded(
        self,
        source: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        state: State | None,
        length: Tensor,
        below: Tensor | None,
        to_sinks: Tensor | None,
    ) -> tuple[Tensor, State]:
        memory, inner = (
            (None, self.control.begin(k.shape[0], k.shape[1], k)) if state is None else (state.memory, state.inner)
        )
        if below is not None:
            assert inner is not None
            inner = (below, *inner[1:])
        options: dict[str, Any] = {"key_padding_mask": key_padding_mask, "backend": self.backend}
        mean = self.control.mean(source, key_padding_mask)
        if mean is not None:
            assert inner is not None
            options |= {"log_keep": mean.log_keep, "causal": self.causal, "in_place": self.in_place}
            out, memory, log_total = mean_attention(
                q, k, v, mean.log_weights, memory, inner[0], self.reading, **options
            )
            return out, State(memory, (log_total,), length, self._described)
        seen: tuple[Memory, ...] = ()
        if self.control.sees_memory:
            memory = empty_memory(k, v, self._rows or 0) if memory is None else memory
            seen = (memory,)
        asks = {"q": scaled_queries(q, self.num_kv_heads, self.scale)} if self.control.sees_queries else {}
        asks |= {"v": v} if self.control.sees_values else {}
        decided, inner = self.control(source, k, key_padding_mask, inner, *seen, **asks)
        if self.control.linear:
            k = k[..., :0]  # a linear read has no use for the memory of keys
        readable = None if decided.readable is None else decided.readable[:, :, -1].expand(k.shape[0], -1, -1).clone()
        if self.causal and to_sinks is not None:
            before = torch.zeros_like(length) if state is None else state.length
            wide = widen(q, to_sinks, k, v, memory, self._sinks, before, key_padding_mask)
            reading = self.reading._replace(scale=query_scale(q, self.scale))  # that of q as it was
            out, memory = scan(wide.q, wide.k, v, decided, wide.memory, **reading._asdict(), **options)
            return out, State(wide.narrowed(memory), inner, length, self._described, readable)
        if self.causal:
            out, memory = scan(self._features(q), k, v, decided, memory, **self.reading._asdict(), **options)
            return out, State(memory, inner, length, self._described, readable)
        memory = write(k, v, decided, memory, key_padding_mask=key_padding_mask)
        state = State(memory, inner, length, self._described, readable)
        return self.recall(q, state), state

    def _features(self, q: Tensor) -> Tensor:
        """f(q) for a linear read, each query head mapped by the key head it reads."""
        if not self.control.linear:
            return q
        grouped = group_heads(q, self.num_kv_heads).flatten(2, 3).to(memory_dtype(q))
        with full_precision(q):
            mapped = self.control.features(grouped)
        return mapped.view(*q.shape[:-1], mapped.shape[-1])

    def _exact(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        state: State | None,
        length: Tensor,
    ) -> tuple[Tensor, State]:
        """Softmax attention over every token so far: a memory with phi_t = e_t and no bound."""
        t, dtype = k.shape[2], memory_dtype(k)
        if key_padding_mask is not None:  # whatever stands there
            padding = key_padding_mask[:, None, :, None]
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        old = empty_memory(k, v, 0) if state is None else state.memory
        real = k.new_ones(len(k), t, dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
        used = torch.cat([old.used, real[:, None].expand(k.shape[:3])], dim=2)
        memory = Memory(
            torch.cat([old.k, k.to(dtype)], dim=2), torch.cat([old.v, v.to(dtype)], dim=2), used.to(dtype), used
        )
        seen = None  # the tokens up to the query's own
        if not (self.causal and state is None and key_padding_mask is None):
            seen = used[:, :1, None]
            if self.causal:
                seen = seen & torch.ones(t, used.shape[2], dtype=torch.bool, device=k.device).tril(used.shape[2] - t)
        out = exact_attention(q, memory, seen, self.reading, self.backend)
        if key_padding_mask is not None:  # a token's slot is its position, whatever padding stood around it
            out = out.masked_fill(key_padding_mask[:, None, :, None], 0) if self.causal else out
            order = (~used[:, 0]).sort(dim=1, stable=True).indices[:, : max(1, int(length.max()))]
            memory = Memory(
                *(part.take_along_dim(order.view(len(k), 1, -1, *[1] * (part.dim() - 3)), 2) for part in memory)
            )
            kept = memory.used[..., None]
            memory = memory._replace(k=memory.k.where(kept, 0), v=memory.v.where(kept, 0))
        return out, State(memory, None, length, self._described)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim)).transpose(1, 2)

    def check_state(self, state: State, batch: int, has_context: bool) -> None:
        if not isinstance(state, State):
            raise TypeError(f"state must be a State, as an earlier call returned it, got {type(state).__name__}")
        if state.control != self._described:
            raise ValueError(
                f"this state was written by control {state.control!r}, this attention has {self._described!r}"
            )
        if state.cross and self.causal:
            raise ValueError("this state is that of a cross-attention; a causal attention continues a self-attention's")
        if has_context and not state.cross:
            raise ValueError("this state is that of a self-attention; a context cannot be appended to it")
        rows = state.memory.v.shape[2] if self._rows is None else self._rows
        expected = (batch, self.num_kv_heads, rows, self.head_dim)
        if state.memory.v.shape != expected:
            raise ValueError(
                f"this state's memory has shape {tuple(state.memory.v.shape)} (batch, heads, slots, width), "
                f"{expected} is needed here"
            )
        needed = [(batch, *shape) for shape in self._inner_shapes]
        held = [tuple(part.shape) for part in state.inner or ()]
        if held != needed:
            raise ValueError(
                f"this state holds {len(held)} tensors of the control, of shapes {held}; "
                f"{len(needed)} of shapes {needed} are needed here"
            )
        if state.loaded and has_values(state.length):
            self._check_loaded(state)

    def _check_loaded(self, state: State) -> None:
        """Refuse what no call of this attention can have left: a state from a file may say anything.

        What holds for all controls was checked as the file was read.
        """
        memory, length, control = state.memory, state.length, self.control
        keys = (*memory.v.shape[:3], 0 if control.linear else self.head_dim)
        if memory.k.shape != keys:
            raise ValueError(f"this state's memory.k has shape {tuple(memory.k.shape)}, {keys} is needed here")
        control.check_inner(state.inner or (), length)
        band = control.band()
        if band is not None:
            used = band.in_use(length)[:, None]
            counts = (length, (length - band.sinks).clamp(min=0))
            for count, expected in zip(state.inner or (), counts, strict=False):
                check_count(count, expected, exact=True)
        elif (keep := control.keep()) is not None:
            assert state.inner is not None
            sinks = torch.arange(keep.sinks, device=length.device) < length[:, None]
            place = state.inner[2 if keep.sinks else 1]  # checked above
            used = torch.cat([sinks[:, None].expand(-1, place.shape[1], -1), place >= 0], dim=2)
            check_count(state.inner[1 if keep.sinks else 0], (length - keep.sinks).clamp(min=0), exact=True)
        elif control.grows:  # a row for every token, and some that padding has left
            used = memory.used[:, :1]
            check_count(used[:, 0].sum(1), length, exact=True)
        else:
            return
        if not torch.equal(memory.used, used.expand_as(memory.used)):
            raise ValueError(
                f"this state's memory.used does not mark the rows that control {self._described!r} has in use after "
                f"{length.tolist()[:8]} tokens"
            )


class BoundedAttention(MemoryAttention):
    """Multi-head attention over a memory of `slots` rows that `control` fills. Batch first.

    control: a name, "name:slots", several joined by "+", or a Control (the same one in several layers ties them).
    num_kv_heads: fewer key and value heads than query heads (grouped heads). context_dim: width of `context`.
    Other options go to the control; one it does not declare is an error.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        control: str | Control = "mlp",
        slots: int | None = None,
        *,
        causal: bool = False,
        num_kv_heads: int | None = None,
        context_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        scale: float | None = None,
        backend: str = "auto",
        **control_options: Any,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        context_dim = embed_dim if context_dim is None else context_dim
        at_least(1, embed_dim=embed_dim)
        at_least(1, num_heads=num_heads)
        at_least(1, num_kv_heads=num_kv_heads)
        at_least(1, context_dim=context_dim)
        if embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim, got num_heads={num_heads} and embed_dim={embed_dim}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got num_kv_heads={num_kv_heads} and num_heads={num_heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        if causal and context_dim != embed_dim:
            raise ValueError("cross-attention is not causal: leave out causal=True or context_dim")
        super().__init__(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=embed_dim // num_heads,
            causal=causal,
            dropout=dropout,
            scale=scale,
            backend=backend,
        )
        self.embed_dim, self.context_dim = embed_dim, context_dim
        sizes: dict[str, Any] = {
            "embed_dim": context_dim,
            "num_heads": num_kv_heads,
            "head_dim": self.head_dim,
            "causal": causal,
        }
        if isinstance(control, Control):
            self._check_shared(control, slots, sizes, control_options)
            self.control = control
        else:
            packs = isinstance(control, str) and CONTROLS.get(control.partition(":")[0], Control).packs
            if packs and context_dim != embed_dim:  # P is the queries' side's, like what the next layer gets of it
                control_options = {"packed_dim": embed_dim} | control_options
            self.control = make_control(control, slots, **sizes, **control_options)
        self.describe_states()
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(context_dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(context_dim, num_kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
        below: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """x `b t D` attends to itself, or to `context` `b s D'`. Returns `b t D`, with the new State if return_state.

        A state goes on from an earlier call: x, or context, is appended to its memory. Of a cross-attention's state
        without context it only reads. key_padding_mask (`b t`, or `b s` with context) is True at padding; the output
        is zero there in self-attention, and wherever a row has no real token to attend to. `below` `b n D` is the
        `state.packed` of the layer below, for controls carried by depth. `rotation`: cos and sin of rotary positions,
        as kernels.rotate takes them; queries and keys of self-attention are rotated before they are used.
        """
        source = self._source(x, context, key_padding_mask, state, below)
        if rotation is not None and source is not x:
            raise ValueError("rotation is for self-attention: the positions of x and of a context do not compare")
        q = self._heads(self.q_proj(x))
        if source is None:
            assert state is not None
            out = self.recall(q, state)
        else:
            k, v = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
            if rotation is not None:
                q, k = (rotate(heads, *rotation).to(heads.dtype) for heads in (q, k))
            options = {"key_padding_mask": key_padding_mask, "state": state, "below": below}
            out, state = self.attend(source, q, k, v, **options, cross=context is not None)  # type: ignore[arg-type]
            if self.control.packs:  # P' = MultiHead(P, X, X): the tokens as P's queries see them
                heads = state.memory.v.repeat_interleave(self.num_heads // self.num_kv_heads, 1)
                packed = self.out_proj(heads.transpose(1, 2).flatten(2).to(v.dtype))
                state = state._replace(packed=packed.masked_fill((state.length == 0)[:, None, None], 0))
        y = self.out_proj(out.transpose(1, 2).flatten(2))
        if source is None or key_padding_mask is not None:  # otherwise every query has something to read
            y = y.masked_fill((state.length == 0)[:, None, None], 0)
        if source is x and key_padding_mask is not None:
            y = y.masked_fill(key_padding_mask[..., None], 0)
        return (y, state) if return_state else y

    def _source(
        self,
        x: Tensor,
        context: Tensor | None,
        key_padding_mask: Tensor | None,
        state: State | None,
        below: Tensor | None,
    ) -> Tensor | None:
        """What is written: x, the context, or nothing; after checking that all that was given fits together."""
        for name, tensor, width in (("x", x, self.embed_dim), ("context", context, self.context_dim)):
            if tensor is not None and not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
                given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(f"{name} must be a floating point Tensor, got {given}")
            if tensor is not None and (tensor.dim() != 3 or tensor.shape[-1] != width or tensor.shape[1] < 1):
                raise ValueError(f"{name} must have shape (batch, tokens from 1, {width}), got {tuple(tensor.shape)}")
        if context is not None and self.causal:
            raise ValueError("a causal attention attends to x alone; leave out context, or build it with causal=False")
        if context is not None and len(context) != len(x):
            raise ValueError(f"x and context must have the same batch, got {len(x)} and {len(context)}")
        if state is not None:
            self.check_state(state, len(x), context is not None)
        source = context if context is not None else None if state is not None and state.cross else x
        if source is None and key_padding_mask is not None:
            raise ValueError(
                "key_padding_mask marks padding in new keys, and a cross-attention state without context adds none"
            )
        if source is x and self.context_dim != self.embed_dim:
            raise ValueError(
                f"this attention reads a context of width {self.context_dim}; pass context=, or a state that holds one"
            )
        if source is not None:
            check_padding(key_padding_mask, len(source), source.shape[1])
            if state is not None and not self.control.appends:
                raise ValueError(
                    f"{self.control.title()} needs the whole sequence at once; it cannot append to a state"
                )
        if below is not None:
            if not self.control.packs:
                raise ValueError(
                    f"below= is for controls carried by depth (luna, workspace), not {self.control.title()}"
                )
            if not isinstance(below, Tensor) or not below.is_floating_point():
                given = below.dtype if isinstance(below, Tensor) else type(below).__name__
                raise TypeError(f"below must be a floating point Tensor, the state.packed of a layer, got {given}")
            expected = (len(x), self.control.slots, self.embed_dim)
            if below.shape != expected:
                raise ValueError(f"below must have shape {expected} (batch, slots, width), got {tuple(below.shape)}")
            if state is not None:
                raise ValueError("below= starts a memory; a state has started its own. Give one of them")
        return source

    def _check_shared(
        self, control: Control, slots: int | None, sizes: dict[str, Any], options: dict[str, Any]
    ) -> None:
        if options:
            raise TypeError(f"options go to a control built here, not to one passed in: {', '.join(options)}")
        if slots not in (None, control.slots):
            raise ValueError(f"slots={slots} contradicts the control passed in, which has {control.slots}")
        for name, needed in sizes.items():
            if getattr(control, name) != needed:
                raise ValueError(
                    f"the control passed in has {name}={getattr(control, name)}, this attention needs {name}={needed}"
                )
        if control.packs and control.packed_width != self.embed_dim:
            raise ValueError(
                f"the control passed in packs into a width of {control.packed_width}, this attention's is "
                f"{self.embed_dim}; build it with packed_dim={self.embed_dim}"
            )

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, causal={self.causal}"
