"""State: everything an attention layer remembers, and the safetensors files that keep it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from abc_attn.core import Memory
from abc_attn.files import whole_file

_FORMAT, _VERSION = "abc-attn state", "1"


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
