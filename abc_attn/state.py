"""State: everything an attention layer remembers, and the safetensors files that keep it.

A file of version 2 has a checksum over all of its bytes; one of version 1 has none. Whatever a file says is checked
before it is used: what holds for the states of all controls here, the rest by the attention that takes the state.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from abc_attn.core import Memory, has_values
from abc_attn.files import whole_file

_FORMAT, _VERSION, _WITHOUT_CHECKSUM = "abc-attn state", "2", "1"
_UNKNOWN = "0" * 64  # stands for the checksum while the checksum is computed

# Counts stay exact in fp64, and no sum of them overflows.
MOST_TOKENS = 2**53
# The largest numbers in a memory that can be read without overflow in fp32: a query's product with a key, and the
# square of a mean of values, as norms take it. A linear read divides sums of features, which may be larger.
_LARGEST, _LARGEST_SUM = 2.0**60, 2.0**100


class State(NamedTuple):
    """Everything an attention layer remembers, as it goes in and comes out; nothing in it is changed in place."""

    memory: Memory
    inner: tuple[Tensor, ...] | None  # the control's own state; batch first
    length: Tensor  # b   int64: real tokens written so far
    control: str  # which control wrote it: Control.describe()
    readable: Tensor | None = None  # b h n   what a read without new tokens may see; None means all
    packed: Tensor | None = None  # b n D   depth-carried controls: what the next layer takes as `below`
    cross: bool = False  # the memory is of a context: a call without one only reads it
    loaded: bool = False  # it comes from a file: the attention that takes it checks what only its control can know

    def _map(self, change: Any) -> State:
        return State(
            memory=Memory(*map(change, self.memory)),
            inner=None if self.inner is None else tuple(map(change, self.inner)),
            length=change(self.length),
            control=self.control,
            readable=None if self.readable is None else change(self.readable),
            packed=None if self.packed is None else change(self.packed),
            cross=self.cross,
            loaded=self.loaded,
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
        rows = len(self.length)
        if index.numel() and has_values(index) and not 0 <= int(index.min()) <= int(index.max()) < rows:
            raise ValueError(
                f"index must name rows from 0 to {rows - 1} of this state, got {int(index.min())} to {int(index.max())}"
            )
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
        """Read what `save` wrote; a file that is damaged, or holds what no attention can have left, is refused.

        What version 0.1 saved loads in every later version.
        """
        states, _ = load_states(path, device)
        if states.keys() != {""}:
            raise ValueError(f"{path} holds the states of several layers; abc_attn.hf.load_state reads it")
        return states[""]


def save_states(states: Mapping[str, State], path: str | os.PathLike[str], **facts: str) -> None:
    """Write named states, and what else is to be known of them, into one safetensors file."""
    from safetensors.torch import save

    metadata = {"format": _FORMAT, "version": _VERSION, "checksum": _UNKNOWN, **facts}
    tensors: dict[str, Tensor] = {}
    for name, state in states.items():
        inner = "none" if state.inner is None else str(len(state.inner))
        metadata |= {name + "control": state.control, name + "cross": str(state.cross), name + "inner": inner}
        tensors |= {name + part: x.detach().contiguous().clone() for part, x in state._tensors().items()}
    header, data = _parts(save(tensors, metadata))
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        file.write(_with_checksum(header, _UNKNOWN, _checksum(header, data)))
        file.write(data)


def load_states(
    path: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> tuple[dict[str, State], dict[str, str]]:
    """What `save_states` wrote: the states by name, and all else that was said of them."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not Path(path).is_file():
        raise FileNotFoundError(f"no state file at {path}")
    content = Path(path).read_bytes()
    try:
        parts = load(content)
        header, data = _parts(content)
        facts = json.loads(header[8:]).get("__metadata__") or {}
    # A dtype that torch does not have, or sizes that it refuses, are other errors than that of the format.
    except (
        SafetensorError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        RuntimeError,
        AssertionError,
        OverflowError,
    ) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    versions = {"format": (_FORMAT,), "version": (_VERSION, _WITHOUT_CHECKSUM)}
    for fact, accepted in versions.items():
        if facts.get(fact) not in accepted:
            shown = " and ".join(map(repr, accepted))
            raise ValueError(f"{path} is not a saved state: {fact} {facts.get(fact)!r} was found, {shown} is accepted")
    if facts["version"] == _VERSION:
        _verify(header, data, facts.get("checksum", ""), path)
    names = [fact.removesuffix("control") for fact in facts if fact.endswith("control")]
    if not names:
        raise ValueError(f"{path} lacks 'control': it is not whole, save it again")
    states = {name: _load_state(name, parts, facts, path) for name in names}
    if unknown := parts.keys() - {name + part for name, state in states.items() for part in state._tensors()}:
        raise ValueError(f"{path} holds {sorted(unknown)[0]!r}, which belongs to no state in it")
    return {name: state.to(device) for name, state in states.items()}, facts


# The checksum is that of the whole file, with zeros in its own place: no byte can change unnoticed.


def _parts(content: bytes) -> tuple[bytes, memoryview]:
    """The header of a safetensors file (its length in 8 bytes, then JSON) and the data of the tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    return content[:end], memoryview(content)[end:]


def _checksum(header: bytes, data: memoryview) -> str:
    digest = hashlib.blake2b(header, digest_size=32)
    digest.update(data)
    return digest.hexdigest()


def _with_checksum(header: bytes, old: str, new: str) -> bytes:
    return header.replace(f'"checksum":"{old}"'.encode(), f'"checksum":"{new}"'.encode(), 1)


def _verify(header: bytes, data: memoryview, checksum: str, path: str | os.PathLike[str]) -> None:
    if _checksum(_with_checksum(header, checksum, _UNKNOWN), data) != checksum:
        raise ValueError(
            f"{path} is damaged: its checksum does not fit what it holds. Use another copy, or save the state again"
        )


def _load_state(name: str, parts: dict[str, Tensor], facts: dict[str, str], path: str | os.PathLike[str]) -> State:
    try:
        count = facts[name + "inner"]
        if not re.fullmatch("none|[0-9]{1,9}", count):
            raise ValueError(f"a number of tensors of the control, {name}inner is {count[:40]!r}")
        inner = None if count == "none" else tuple(parts[f"{name}inner.{i}"] for i in range(int(count)))
        memory = Memory(*(parts[f"{name}memory.{field}"] for field in Memory._fields))
        carried = {part: parts.get(name + part) for part in ("readable", "packed")}
        if facts[name + "cross"] not in ("True", "False"):
            raise ValueError(f"True or False, {name}cross is {facts[name + 'cross'][:40]!r}")
        cross = facts[name + "cross"] == "True"
        state = State(
            memory, inner, parts[name + "length"], facts[name + "control"], **carried, cross=cross, loaded=True
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} lacks {error}: it is not whole, save it again") from None
    _check_shapes(state, f"{path}: {name}")
    for part, tensor in state._tensors().items():
        sums = part == "memory.mass" or not memory.k.shape[-1]  # a linear read has no keys
        _check_values(tensor, part.startswith("inner"), _LARGEST_SUM if sums else _LARGEST, f"{path}: {name}{part}")
    if bool(((state.length < 0) | (state.length >= MOST_TOKENS)).any()):
        raise ValueError(f"{path}: {name}length must be in 0 to 2**53 - 1, got {state.length.tolist()[:8]}")
    if bool((memory.used.flatten(1).any(1) & (state.length == 0)).any()):
        raise ValueError(f"{path}: {name}memory.used must be False wherever length is 0: nothing was written there")
    return state


_WIDE = (torch.float32, torch.float64)
_DTYPES = {
    "memory.k": _WIDE,
    "memory.v": _WIDE,
    "memory.mass": _WIDE,
    "memory.used": (torch.bool,),
    "length": (torch.int64,),
    "readable": (torch.bool,),
    "packed": (torch.float16, torch.bfloat16, *_WIDE),
}


_AXES = {"memory.k": 4, "memory.v": 4, "memory.mass": 3, "memory.used": 3, "length": 1, "readable": 3, "packed": 3}


def _check_shapes(state: State, where: str) -> None:
    """Refuse parts that do not belong together. What the sizes are is for the attention to judge."""
    parts = state._tensors()
    for part, tensor in parts.items():
        if tensor.dtype not in _DTYPES.get(part, (tensor.dtype,)):
            accepted = " or ".join(map(str, _DTYPES[part]))
            raise ValueError(f"{where}{part} has dtype {tensor.dtype}, {accepted} is accepted")
        if tensor.dim() != _AXES.get(part, tensor.dim() or 1):
            raise ValueError(f"{where}{part} has shape {tuple(tensor.shape)}, {_AXES.get(part, 1)} axes are accepted")
    rows = len(state.length)
    for part, tensor in parts.items():
        if tensor.shape[0] != rows:
            raise ValueError(f"{where}{part} has shape {tuple(tensor.shape)}, its first axis must be {rows} rows")
    k, v, mass, used = state.memory
    if k.dtype != v.dtype:
        raise ValueError(f"{where}memory.k has dtype {k.dtype} and memory.v {v.dtype}: they must be the same")
    slots = v.shape[:3]
    shapes = {"memory.k": (k.shape, (*slots, k.shape[3])), "memory.mass": (mass.shape, slots)}
    shapes["memory.used"] = (used.shape, slots)
    if state.readable is not None and state.readable.shape[1] != 1:  # it may be one for all heads
        shapes["readable"] = (state.readable.shape, slots)
    elif state.readable is not None:
        shapes["readable"] = (state.readable.shape, (rows, 1, slots[2]))
    for part, (shape, fitting) in shapes.items():
        if shape != fitting:
            raise ValueError(
                f"{where}{part} has shape {tuple(shape)}, {tuple(fitting)} is needed beside memory.v {tuple(v.shape)}"
            )


def _check_values(tensor: Tensor, inner: bool, largest: float, where: str) -> None:
    if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
        raise ValueError(f"{where} holds bytes that are neither False nor True")
    if not tensor.is_floating_point() or not tensor.numel():
        return
    low, high = (float(x) for x in tensor.aminmax())
    if low != low or high != high:
        raise ValueError(f"{where} contains NaN; a state must be finite to be continued")
    if inner:  # the logarithm of an empty sum is -inf; what else is allowed, the control knows
        return
    if max(-low, high) == float("inf"):
        raise ValueError(f"{where} contains inf; a state must be finite to be continued")
    if max(-low, high) > largest:
        raise ValueError(
            f"{where} contains {max(-low, high):g}; beyond {largest:g} what is read from it would overflow"
        )
