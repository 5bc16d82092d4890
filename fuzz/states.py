"""Damaged and hostile state files: each is refused by a clear error, or it loads and gives finite outputs.

Damage: bits, bytes, ends and whole regions of a file change. A file with a checksum must then be refused. Hostility:
the file is written anew, in order and with a valid checksum, with numbers, shapes, dtypes or names that no attention
has left; or as version 1, which has no checksum.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from abc_attn import BoundedAttention, State

NAME = "states"
WIDTH, HEADS, BATCH = 32, 2, 2  # heads of 16 channels: the compiled kernels take all of them
REFUSED = (ValueError, TypeError, FileNotFoundError)
UNKNOWN = "0" * 64
HUGE = 1e30  # beyond it an output may overflow in fp32 without being wrong

torch.set_num_threads(1)


class Saved(NamedTuple):
    """A good file and the attention that wrote it."""

    attention: BoundedAttention
    content: bytes
    tensors: dict[str, Tensor]
    facts: dict[str, str]
    x: Tensor  # tokens to go on with


CAUSAL: list[tuple[str, dict[str, Any]]] = [
    ("window:4", {}),
    ("window:4", {"num_kv_heads": 1}),
    ("window:4", {"gate": True}),
    ("global:2+window:4", {}),
    ("global:2+window:4", {"num_kv_heads": 1}),
    ("global:2+window:3+random:2", {}),
    ("global:3", {"every": 2}),
    ("dilated:3", {"dilation": 2}),
    ("window:3+mlp:4", {}),
    ("mlp:4", {}),
    ("mlp:16", {"activation": "relu"}),
    ("mlp:4", {"gate": True}),
    ("mlp:4", {"normalization": "write"}),
    ("cluster:4", {}),
    ("random:4", {}),
    ("compressive:3", {}),
    ("linformer:4", {"max_length": 64}),
    ("elu", {}),
    ("rfa:8", {}),
    ("favor:8", {"gate": True}),
    ("t2r:8", {}),
    ("dpfp:32", {}),
    ("softmax", {}),
]
ENCODERS: list[tuple[str, dict[str, Any]]] = [
    ("mlp:4", {}),
    ("window:4", {}),
    ("dilated:3", {"dilation": 2}),
    ("global:2+window:4", {}),
    ("compressive:3", {"ratio": 2}),
    ("cluster:4", {}),
    ("luna:4", {}),
    ("workspace:4", {}),
    ("softmax", {}),
]


@functools.cache
def saved() -> list[Saved]:
    """A state of every control, before and after its memory is full, with and without padding, causal and not."""
    found = []
    for causal, controls in ((True, CAUSAL), (False, ENCODERS)):
        for number, (control, options) in enumerate(controls):
            torch.manual_seed(number)
            attention = BoundedAttention(WIDTH, HEADS, control, causal=causal, **options)
            attention.in_place = number % 2 == 0  # as converted models have it
            for t in (3, 23):
                x = torch.randn(BATCH, t, WIDTH)
                padding = torch.arange(t) < torch.tensor([[1], [0]]) if t == 3 else None
                context = None if causal or t == 3 else torch.randn(BATCH, 9, WIDTH)
                with torch.no_grad():
                    mask = None if context is not None else padding
                    _, state = attention(x, context, key_padding_mask=mask, return_state=True)
                tensors, facts = parts_of(state)
                found.append(Saved(attention, written(tensors, facts), tensors, facts, torch.randn(BATCH, 7, WIDTH)))
    return found


def parts_of(state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = {name: part.contiguous().clone() for name, part in state._tensors().items()}
    inner = "none" if state.inner is None else str(len(state.inner))
    facts = {"format": "abc-attn state", "control": state.control, "cross": str(state.cross), "inner": inner}
    return tensors, facts


def written(tensors: dict[str, Tensor], facts: dict[str, str], version: str = "2") -> bytes:
    """A file with these tensors and facts, in order and with a checksum that is right."""
    told = facts | ({"version": version} if "version" not in facts else {})
    told |= {"checksum": UNKNOWN} if told["version"] != "1" else {}
    return canonical(save(tensors, told))


def canonical(content: bytes) -> bytes:
    """The file with its metadata in order, which safetensors draws anew in every process."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    return with_header(header, content[end:])


def with_header(header: Any, data: bytes, ascii_only: bool = False, padding: int | None = None) -> bytes:
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=ascii_only).encode()
    text += b" " * (-len(text) % 8 if padding is None else padding)
    return signed(len(text).to_bytes(8, "little") + text + data)


def signed(content: bytes) -> bytes:
    """The file with its checksum made right, if it has a place for one."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[:end]
    at = header.find(b'"checksum":"')
    if at < 0:
        return content
    at += len(b'"checksum":"')
    unknown = header[:at] + UNKNOWN.encode() + header[at + 64 :]
    digest = hashlib.blake2b(unknown + content[end:], digest_size=32).hexdigest()
    return header[:at] + digest.encode() + header[at + 64 :] + content[end:]


def run(case: int, folder: Path) -> str:
    """Make the file of this case, load it, and go on from it if it loads."""
    chance = random.Random(case)
    chosen = chance.choice(saved())
    kinds: list[Callable[[random.Random, Saved], bytes]] = [*DAMAGES, *HOSTILITIES]
    make = chance.choices(kinds, [*DAMAGES.values(), *HOSTILITIES.values()])[0]
    content = make(chance, chosen)
    file = folder / "state.safetensors"
    file.write_bytes(content)
    kind = make.__name__.replace("_", " ")
    try:
        state = State.load(file)
    except REFUSED as error:
        if content == chosen.content:
            raise AssertionError("a good file was refused") from error
        return f"{kind}: refused"
    assert make not in DAMAGES or content == chosen.content, f"{kind} of {chosen.facts['control']} went unnoticed"
    return f"{kind}: {_go_on(chance, chosen, state)}"


def _go_on(chance: random.Random, chosen: Saved, state: State) -> str:
    """Continue from a state that has loaded, by 1, 2 and 7 tokens, with gradients and without."""
    if not len(state.length):
        return "has no rows"
    answered = 0
    for t in (1, 2, 7):
        for grad in (False, True):
            x = chosen.x[: len(state.length), :t]
            own = state._map(Tensor.clone)  # it may be written to
            try:
                with torch.set_grad_enabled(grad):
                    y, after = chosen.attention(x, state=own, return_state=True)
                    if grad and t == 2 and chance.random() < 0.3:
                        y.sum().backward()
            except REFUSED:
                continue
            answered += 1
            assert y.shape == x.shape
            assert bool(y.isfinite().all()) or _overflows(chosen, state, x), (
                f"{t} tokens after a state of {state.control} are not finite (grad {grad})"
            )
            assert bool((after.length >= 0).all()), "a length below 0"
    return "went on" if answered else "refused by the attention"


def _overflows(chosen: Saved, state: State, x: Tensor) -> bool:
    """Whether the true output, computed in fp64, is too large for fp32."""
    wide = copy.deepcopy(chosen.attention).double()
    y = wide(x.double(), state=state.to(torch.float64))
    return bool(y.isfinite().all()) and float(y.detach().abs().max()) > HUGE


# Damage: the file is not what was written, and its checksum says so.


def a_bit_flipped(chance: random.Random, chosen: Saved) -> bytes:
    content = bytearray(chosen.content)
    content[_somewhere(chance, chosen.content)] ^= 1 << chance.randrange(8)
    return bytes(content)


def bytes_overwritten(chance: random.Random, chosen: Saved) -> bytes:
    at, count = _somewhere(chance, chosen.content), chance.choice((1, 2, 8, 64))
    return (chosen.content[:at] + chance.randbytes(count) + chosen.content[at + count :])[: len(chosen.content)]


def cut_or_extended(chance: random.Random, chosen: Saved) -> bytes:
    at, more = _somewhere(chance, chosen.content), chance.randbytes(chance.choice((1, 8, 100)))
    ways = (chosen.content[:at], chosen.content + more, chosen.content[:at] + more + chosen.content[at:])
    return chance.choice((*ways, chosen.content[at:], chosen.content[:at] + chosen.content[at + len(more) :]))


def stretches_swapped(chance: random.Random, chosen: Saved) -> bytes:
    """Half of one file and half of another, or two stretches that have changed places."""
    other, content = chance.choice(saved()).content, chosen.content
    ends = [8 + int.from_bytes(file[:8], "little") for file in (content, other)]
    if chance.random() < 0.5:
        changed = content[: ends[0]] + other[ends[1] :]
    else:
        a, b = sorted((_somewhere(chance, content), _somewhere(chance, content)))
        size = min(chance.choice((1, 4, 32)), b - a, len(content) - b)
        changed = (
            content[:a] + content[b : b + size] + content[a + size : b] + content[a : a + size] + content[b + size :]
        )
    # The states of one control at one length share a header, checksum aside.
    return changed if changed != other else content


def _somewhere(chance: random.Random, content: bytes) -> int:
    """An offset: in the header's length, in the header, in the data, or anywhere."""
    end = 8 + int.from_bytes(content[:8], "little")
    low, high = chance.choice(((0, 8), (8, end), (end, len(content)), (0, len(content))))
    return chance.randrange(low, high)


# Hostility: a file in good order, whose checksum is right, or that has none.

INTEGERS = (2**63 - 1, -(2**63), 2**62, 2**53, 2**53 - 1, 2**32, 2**31 - 1, 100, 7, 1, 0, -1, -5, -(10**12))
FLOATS = (
    float("nan"),
    float("inf"),
    -float("inf"),
    3e38,
    -3e38,
    1e31,
    2.0**64,
    1e9,
    1.0,
    1e-30,
    1e-45,
    0.0,
    -0.0,
    -1.0,
)
DOUBLES = (*FLOATS, 1e300, -1e300, 1e39, -1e39, 5e-324)


def other_numbers(chance: random.Random, chosen: Saved) -> bytes:
    """One to three tensors hold numbers that they never should, all over or in one place."""
    tensors = {name: part.clone() for name, part in chosen.tensors.items()}
    names = [name for name, part in tensors.items() if part.numel()]
    for name in chance.sample(names, min(len(names), chance.choice((1, 1, 2, 3)))):
        part = tensors[name]
        at: Any = slice(None) if chance.random() < 0.5 else chance.randrange(part.numel())
        if part.dtype == torch.bool:
            how = chance.choice(("byte", "flip", "random"))
            if how == "byte":
                part.view(torch.uint8).flatten()[at] = chance.choice((0, 1, 2, 255))
            elif how == "flip":
                part.flatten()[at] = ~part.flatten()[at]
            else:
                part.copy_(torch.tensor([chance.random() < 0.5 for _ in range(part.numel())]).view(part.shape))
        elif part.dtype == torch.int64:
            part.flatten()[at] = chance.choice((*INTEGERS, chance.randrange(40)))
        else:
            part.flatten()[at] = chance.choice(DOUBLES if part.dtype == torch.float64 else FLOATS)
    return written(tensors, chosen.facts, chance.choice("2221"))


def other_lengths(chance: random.Random, chosen: Saved) -> bytes:
    """The length is another, and so are the control's counts, in agreement or not."""
    tensors = {name: part.clone() for name, part in chosen.tensors.items()}
    length = chance.choice((*INTEGERS, chance.randrange(40)))
    for name, part in tensors.items():
        if part.dtype == torch.int64 and (name == "length" or chance.random() < 0.7):
            part[chance.randrange(BATCH) if chance.random() < 0.3 else slice(None)] = length
    if chance.random() < 0.3:
        tensors["memory.used"].fill_(chance.random() < 0.5)
    return written(tensors, chosen.facts, chance.choice("2221"))


DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def other_shapes(chance: random.Random, chosen: Saved) -> bytes:
    """A tensor has another shape or dtype, or all have other rows, heads or slots; one is missing, or too many."""
    tensors = {name: part.clone() for name, part in chosen.tensors.items()}
    name = chance.choice(list(tensors))
    part, other = tensors[name], chance.choice(list(chance.choice(saved()).tensors.values()))
    axis, how = chance.randrange(4), chance.randrange(10)
    if how == 0:
        tensors[name] = part.to(chance.choice(DTYPES))
    elif how == 1:
        tensors[name] = chance.choice((part.flatten(), part[None], part[..., None], part.sum(), part[:0], part[:1]))
    elif how == 2:
        tensors[name] = torch.cat([part, part], dim=chance.randrange(part.dim()))
    elif how == 3:
        tensors[name] = other.clone()
    elif how == 4:
        del tensors[name]
    elif how == 5:
        tensors[chance.choice(("inner.0", "inner.1", "packed", "readable", "more", "memory.", ""))] = other.clone()
    elif how == 6:  # all alike
        rows = chance.choice((0, 1))
        tensors = {name: part[:rows].clone() for name, part in tensors.items()}
    elif how == 7:
        tensors = {
            name: torch.cat([part, part], dim=axis) if part.dim() > axis else part for name, part in tensors.items()
        }
    elif how == 8:
        few = chance.choice((0, 1))
        tensors = {
            name: part.narrow(axis, 0, min(few, part.shape[axis])).clone() if part.dim() > axis else part
            for name, part in tensors.items()
        }
    else:
        tensors = {
            name: part.to(torch.float64 if part.dtype == torch.float32 else part.dtype)
            for name, part in tensors.items()
        }
    return written({name: part.contiguous() for name, part in tensors.items()}, chosen.facts, chance.choice("221"))


def other_facts(chance: random.Random, chosen: Saved) -> bytes:
    """The metadata say something else, or lack something."""
    facts = dict(chosen.facts)
    words: tuple[str, ...] = (
        "",
        "None",
        "True",
        "none",
        "0",
        "1",
        "2",
        "5",
        "-1",
        "999999999",
        "1e9",
        "٣",
        "x" * 300,
        "\0",
        "1" * 5000,
    )
    words += tuple(s.facts["control"] for s in chance.sample(saved(), 3))
    for name in chance.sample(list(facts), chance.choice((1, 1, 2))):
        if chance.random() < 0.2:
            del facts[name]
        else:
            facts[name] = chance.choice(words)
    if chance.random() < 0.3:
        facts[chance.choice(("control", "acontrol", "self.0.control", "version", "inner", "a.inner"))] = chance.choice(
            words
        )
    return written(chosen.tensors, facts, chance.choice("2221"))


def other_header(chance: random.Random, chosen: Saved) -> bytes:
    """The JSON of the header is another: names, dtypes, shapes, offsets, or something that is not a header."""
    content = written(chosen.tensors, chosen.facts, chance.choice("221"))
    end = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:end]), content[end:]
    name = chance.choice([name for name in header if name != "__metadata__"])
    entry, how = header[name], chance.randrange(8)
    number: Any = chance.choice((0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1.5, "1", None, [], len(data), 3))
    if how == 0:
        entry["dtype"] = chance.choice(
            ("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "", 7)
        )
    elif how == 1:
        entry["shape"] = chance.choice(
            (entry["shape"][::-1], [*entry["shape"], number], [number], [], number, [0, number])
        )
    elif how == 2:
        entry["data_offsets"][chance.randrange(2)] = number
    elif how == 3:
        other = header[chance.choice([name for name in header if name != "__metadata__"])]
        entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
    elif how == 4:
        header[chance.choice(("length", "memory.k", "inner.0", "", "é"))] = header.pop(name)
    elif how == 5:
        header["__metadata__"] = chance.choice((None, [], "x", {"format": 1}, {"checksum": UNKNOWN}, {"version": "2"}))
    elif how == 6:
        del entry[chance.choice(list(entry))]
    else:
        brackets = "[" * chance.choice((100, 100_000))
        text = chance.choice(("[1, 2]", "null", "{}", "", brackets, '{"a":' * 1000, '{"__metadata__":{}}')).encode()
        return len(text).to_bytes(8, "little") + text + data
    return with_header(header, data, chance.random() < 0.5, chance.choice((None, chance.randrange(8))))


def nothing(chance: random.Random, chosen: Saved) -> bytes:
    """The good file itself, which must load."""
    assert load(chosen.content).keys() == chosen.tensors.keys()
    return chosen.content


DAMAGES = {a_bit_flipped: 25, bytes_overwritten: 8, cut_or_extended: 5, stretches_swapped: 5}
HOSTILITIES = {other_numbers: 18, other_lengths: 12, other_shapes: 12, other_facts: 7, other_header: 8, nothing: 1}
