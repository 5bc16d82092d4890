"""Bad input is refused by an error that says what was given and what is accepted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from abc_attn import (
    BoundedAttention,
    Control,
    Memory,
    State,
    Write,
    make_control,
    mlp_attention,
    read,
    register_control,
    scan,
    write,
)

B, H, T, N, D = 2, 3, 5, 4, 8
EMBED = 24


def heads(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(*(shape or (B, H, T, D)), **options)


def phi(*shape: int, **options) -> Write:
    return Write(heads(*(shape or (B, H, T, N)), **options))


def memory(n: int = N, b: int = B) -> Memory:
    return Memory(heads(b, H, n, D), heads(b, H, n, D), heads(b, H, n), heads(b, H, n, dtype=torch.bool))


def attn(control: str | Control = "mlp", slots: int | None = None, **options) -> BoundedAttention:
    return BoundedAttention(options.pop("embed_dim", EMBED), options.pop("num_heads", H), control, slots, **options)


def tokens(t: int = T, width: int = EMBED, b: int = B) -> torch.Tensor:
    return torch.zeros(b, t, width)


def state_of(control: str = "mlp:4", b: int = B, context: torch.Tensor | None = None, **options) -> State:
    return attn(control, **options)(tokens(b=b), context, return_state=True)[1]


def control(name: str = "mlp:4", **options) -> Control:
    sizes = {"embed_dim": EMBED, "num_heads": H, "causal": True}
    return make_control(name, **sizes | options)


def parametrised(cases: dict):
    """id: (call, what was given, what is accepted)."""
    return pytest.mark.parametrize(("call", "given", "accepted"), cases.values(), ids=cases)


def refuses(call, given: str, accepted: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert given in str(caught.value)
    assert accepted in str(caught.value)


q, k, v = heads(), heads(), heads()
RANK = "4 axes (batch, heads, tokens, width)"
padding = torch.zeros(B, T, dtype=torch.bool)

TENSORS = {
    "q of rank 3": (lambda: scan(q[0], k, v, phi()), "(3, 5, 8)", RANK),
    "k of rank 3": (lambda: scan(q, k[0], v, phi()), "(3, 5, 8)", RANK),
    "v of rank 2": (lambda: write(k, v[0, 0], phi()), "(5, 8)", RANK),
    "phi of rank 5": (lambda: write(k, v, phi(1, B, H, T, N)), "(1, 2, 3, 5, 4)", RANK),
    "logits of rank 3": (lambda: mlp_attention(q, k, v, heads(H, T, N)), "(3, 5, 4)", RANK),
    "q for read of rank 3": (lambda: read(q[0], memory()), "(3, 5, 8)", RANK),
    "k not a tensor": (lambda: write([1.0], v, phi()), "list", "Tensor"),
    "q not a tensor": (lambda: scan([1.0], k, v, phi()), "list", "Tensor"),
    "phi not in a Write": (lambda: scan(q, k, v, phi().phi), "Tensor", "Write"),
    "a memory for mlp_attention's state": (
        lambda: mlp_attention(q, k, v, heads(B, H, T, N), memory()),
        "Memory",
        "state",
    ),
    "a number for mlp_attention's state": (lambda: mlp_attention(q, k, v, heads(B, H, T, N), 5), "int", "earlier"),
    "nothing twice for mlp_attention's state": (
        lambda: mlp_attention(q, k, v, heads(B, H, T, N), (None, None)),
        "tuple of NoneType, NoneType",
        "earlier mlp_attention",
    ),
    "numbers to read": (lambda: read(q, (1, 2)), "tuple", "Memory"),
    "numbers in a memory to read": (lambda: read(q, Memory(1, 2, 3, 4)), "memory.k", "floating point Tensor, got int"),
    "integers for log_decay": (
        lambda: scan(q, k, v, Write(phi().phi, phi().phi.long())),
        "torch.int64",
        "log_decay must be floating point",
    ),
    "k and v of other lengths": (
        lambda: write(k, heads(B, H, 6, D), phi()),
        "(2, 3, 6, 8)",
        "share batch, heads and tokens",
    ),
    "q and k of other lengths": (lambda: scan(heads(B, H, 6, D), k, v, phi()), "6 and 5", "same number of tokens"),
    "q and k of other lengths, from logits": (
        lambda: mlp_attention(heads(B, H, 6, D), k, v, heads(B, H, T, N)),
        "6 and 5",
        "same number of tokens",
    ),
    "q and k of other widths": (lambda: scan(heads(B, H, T, 7), k, v, phi()), "(2, 3, 5, 7)", "width 8"),
    "q of another batch": (lambda: scan(heads(3, H, T, D), k, v, phi()), "(3, 3, 5, 8)", "batch 2"),
    "q heads not a multiple": (lambda: scan(heads(B, 4, T, D), k, v, phi()), "(2, 4, 5, 8)", "multiple of 3 heads"),
    "f(q) not as wide as the slots": (lambda: scan(q, k, v, phi(), linear=True), "(2, 3, 5, 8)", "width 4"),
    "phi of another length": (lambda: write(k, v, phi(B, H, 6, N)), "(2, 3, 6, 4)", "(2 or 1, 3 or 1, 5, 4)"),
    "log_decay of other slots": (
        lambda: write(k, v, Write(phi().phi, heads(B, H, T, 1))),
        "(2, 3, 5, 1)",
        "(2 or 1, 3 or 1, 5, 4)",
    ),
    "logits of another length": (lambda: mlp_attention(q, k, v, heads(B, H, 6, N)), "(2, 3, 6, 4)", "3 or 1, 5, 4)"),
    "memory of other slots": (lambda: scan(q, k, v, phi(), memory(5)), "(2, 3, 5, 8)", "(2, 3, 4, 8)"),
    "memory of another batch": (lambda: write(k, v, phi(), memory(b=1)), "(1, 3, 4, 8)", "(2, 3, 4, 8)"),
    "a state of other slots": (
        lambda: mlp_attention(q, k, v, heads(B, H, T, N), mlp_attention(q, k, v, heads(B, H, T, 2))[1]),
        "(2, 3, 2, 8)",
        "(2, 3, 4, 8)",
    ),
    "a normaliser of other slots": (
        lambda: mlp_attention(q, k, v, heads(B, H, T, N), (memory(), heads(B, H, 3).double())),
        "(2, 3, 3)",
        "(2, 3, 4)",
    ),
    "numbers for a memory's flags": (
        lambda: scan(q, k, v, phi(), memory()._replace(used=heads(B, H, N))),
        "torch.float32",
        "bool",
    ),
    "no tokens": (lambda: write(k[:, :, :0], v[:, :, :0], phi(B, H, 0, N)), "(2, 3, 0, 8)", "at least one token"),
    "no slots": (lambda: write(k, v, phi(B, H, T, 0)), "(2, 3, 5, 0)", "at least one slot"),
    "integers for q": (lambda: scan(q.long(), k, v, phi()), "torch.int64", "floating point"),
    "integers for k": (lambda: scan(q, k.long(), v, phi()), "torch.int64", "floating point"),
    "integers for phi": (lambda: write(k, v, phi(dtype=torch.int32)), "torch.int32", "floating point"),
    "numbers for readable": (lambda: scan(q, k, v, Write(phi().phi, None, phi().phi)), "torch.float32", "bool"),
    "integers to read with": (lambda: read(q.long(), memory()), "torch.int64", "floating point"),
    "a mask of floats": (lambda: scan(q, k, v, phi(), key_padding_mask=padding.float()), "torch.float32", "bool"),
    "a mask of another shape": (lambda: write(k, v, phi(), key_padding_mask=padding.mT), "(5, 2)", "(2, 5)"),
    "an unknown backend": (
        lambda: scan(q, k, v, phi(), backend="trition"),
        "'trition'",
        "'auto', 'native', 'torch', 'reference'",
    ),
    "an unknown backend, not causal": (
        lambda: mlp_attention(q, k, v, heads(B, H, T, N), causal=False, backend="fast"),
        "'fast'",
        "'reference'",
    ),
}


@parametrised(TENSORS)
def test_tensors(call, given, accepted):
    refuses(call, given, accepted)


BUILDING = {
    "no slots": (lambda: attn("mlp", 0), "slots=0", "at least 1"),
    "negative slots": (lambda: attn("window", -3), "slots=-3", "at least 1"),
    "half a slot": (lambda: attn("window", 2.5), "slots=2.5", "at least 1"),
    "no slots in the name": (lambda: attn("mlp:0"), "'mlp:0'", "from 1"),
    "words for slots": (lambda: attn("mlp:many"), "'mlp:many'", "'mlp:32'"),
    "slots that contradict the name": (lambda: attn("mlp:8", 4), "slots=4", "'mlp:8'"),
    "slots that contradict a sum": (lambda: attn("window:2+mlp:3", 4), "slots=4", "5 in all"),
    "softmax with slots": (lambda: attn("softmax", 8), "slots=8", "leave slots out"),
    "softmax with slots in the name": (lambda: attn("softmax:8"), "slots=8", "leave slots out"),
    "elu with slots": (lambda: attn("elu", 5), "got 5", "8"),
    "a negative floor for rfa": (lambda: attn("rfa", 6, floor=-1), "got -1", "at least 0"),
    "no end of rfa's floor": (lambda: attn("rfa", 6, floor=float("inf")), "inf", "at least 0"),
    "words for rfa's floor": (lambda: attn("rfa", 6, floor="a"), "'a'", "at least 0"),
    "odd slots for rfa": (lambda: attn("rfa", 5), "got 5", "even"),
    "dpfp slots of no order": (lambda: attn("dpfp", 20), "got 20", "multiple of 16"),
    "dpfp slots of another order": (lambda: attn("dpfp", 16, order=2), "got 16", "32 with order=2"),
    "half a width": (lambda: attn(embed_dim=24.0), "embed_dim", "whole number from 1, got 24.0"),
    "heads in fractions": (lambda: attn(num_heads=2.0), "num_heads", "whole number from 1, got 2.0"),
    "key heads in fractions": (lambda: attn(num_kv_heads=1.0), "num_kv_heads", "whole number from 1, got 1.0"),
    "heads in fractions for a control": (lambda: control(num_heads=3.0), "num_heads", "whole number from 1, got 3.0"),
    "heads that do not divide": (lambda: attn(num_heads=5), "num_heads=5", "divide embed_dim"),
    "no heads": (lambda: attn(num_heads=0), "num_heads", "from 1, got 0"),
    "key heads that do not divide": (lambda: attn(num_kv_heads=2), "num_kv_heads=2", "num_heads=3"),
    "dropout of 1": (lambda: attn(dropout=1.0), "1.0", "[0, 1)"),
    "causal luna": (lambda: attn("luna", causal=True), "'luna'", "causal=False"),
    "causal workspace": (lambda: attn("workspace", causal=True), "'workspace'", "mlp"),
    "causal with a context": (lambda: attn(causal=True, context_dim=8), "causal=True", "context_dim"),
    "an unknown control": (lambda: attn("mpl"), "'mpl'", "accepted: softmax, window"),
    "an unknown part": (lambda: attn("window:4+mpl:4"), "'mpl' in 'window:4+mpl:4'", "window"),
    "an empty part": (lambda: attn("window:4+"), "'window:4+'", "window"),
    "a control that is no name": (lambda: attn(7), "int", "'window:32+mlp:32'"),
    "a control that is none": (lambda: attn(7), "int", "a Control"),
    "words for a gate": (lambda: attn(gate="no"), "'no'", "head, slot"),
    "words for a gate around": (lambda: attn("window", gate="no"), "'no'", "'head'"),
    "a gate for each slot where there is none": (lambda: attn("window", gate="slot"), "'slot'", "'head'"),
    "a gate for each slot of shares": (lambda: attn("mlp", gate="slot", normalization="write"), "gate='slot'", "means"),
    "a half-life below a token": (lambda: attn("slots", half_life=0.5), "half_life", "0.5"),
    "an exponent that is none": (lambda: attn("slots", exponent="8"), "exponent", "'8'"),
    "an unknown option": (lambda: attn("mlp", activaton="exp"), "'activaton'", "activation, exponent, gate"),
    "another control's option": (lambda: attn("window", topk=3), "'topk'", "gate"),
    "an option of no part": (lambda: attn("window:4+mlp:4", ratio=3), "'ratio'", "normalization"),
    "an option where there is none": (lambda: attn("softmax", gate=True), "'gate'", "none"),
    "an unknown activation": (lambda: attn(activation="tanh"), "'tanh'", "exp, relu, sigmoid, softmax"),
    "no temperature": (lambda: attn(temperature=0), "got 0", "temperature must be above 0"),
    "an unknown normalization": (lambda: attn(normalization="sum"), "'sum'", "mean, write"),
    "dilation 0": (lambda: attn("dilated", dilation=0), "dilation", "from 1, got 0"),
    "half a ratio": (lambda: attn("compressive", ratio=1.5), "ratio", "from 1, got 1.5"),
    "no iterations": (lambda: attn("cluster", iterations=0), "iterations", "from 1, got 0"),
    "no topk": (lambda: attn("workspace", topk=0), "topk", "from 1, got 0"),
    "no length": (lambda: attn("linformer", max_length=0), "max_length", "from 1, got 0"),
    "no width": (lambda: attn("placed", width=0), "width must be a number above 0", "got 0"),
    "no sharpness": (lambda: attn("landmarks", sharpness=0), "sharpness must be a number above 0", "got 0"),
    "landmarks beside others": (lambda: attn("window:4+landmarks:4"), "'landmarks'", "use it alone"),
    "unknown start": (lambda: attn("linformer", start="zero"), "start must be one of random, identity", "got 'zero'"),
    "positions and every": (lambda: attn("global", positions=[1], every=2), "[1] and 2", "positions or every"),
    "more positions than slots": (lambda: attn("global", 2, positions=[1, 2, 3]), "[1, 2, 3]", "1 to 2"),
    "a position before the start": (lambda: attn("global", positions=[-1]), "[-1]", "from 0"),
    "half a position": (lambda: attn("global", positions=[0.5]), "0.5", "whole numbers"),
    "a number for positions": (lambda: attn("global", positions=3), "got 3", "whole numbers from 0"),
    "words among positions": (lambda: attn("global", positions=[0, "a"]), "[0, 'a']", "whole numbers from 0"),
    "words for a seed": (lambda: attn("random", seed="x"), "'x'", "seed"),
    "words for rfa's seed": (lambda: attn("rfa", seed="a"), "'a'", "seed must be a whole number"),
    "words for favor's seed": (lambda: attn("favor", seed="a"), "'a'", "seed must be a whole number"),
    "a seed of too many bits": (lambda: attn("favor", seed=2**64), str(2**64), "64 bits"),
    "an unknown backend": (lambda: attn(backend="cuda"), "'cuda'", "'torch'"),
    "composing luna": (lambda: attn("luna:4+window:4"), "'luna'", "use it alone"),
    "composing softmax": (lambda: attn("window:4+softmax"), "'softmax'", "use it alone"),
    "mixing reads": (lambda: attn("window:4+elu"), "elu is linear", "one kind of read"),
    "a tied control of other heads": (lambda: attn(control(num_heads=2), causal=True), "num_heads=2", "num_heads=3"),
    "a tied control of another width": (
        lambda: attn(control(embed_dim=12), causal=True),
        "embed_dim=12",
        "embed_dim=24",
    ),
    "a tied control that is not causal": (
        lambda: attn(control(causal=False), causal=True),
        "causal=False",
        "causal=True",
    ),
    "a tied control of other slots": (lambda: attn(control(), 8, causal=True), "slots=8", "has 4"),
    "a tied control that packs into another width": (
        lambda: attn(control("luna:4", embed_dim=12, head_dim=8, causal=False), context_dim=12),
        "width of 12",
        "packed_dim=24",
    ),
    "a tied control with options": (lambda: attn(control(), causal=True, gate=True), "gate", "built here"),
    "a name of odd letters": (
        lambda: register_control("a+b")(type("Mine", (Control,), {})),
        "'a+b'",
        "letters, digits",
    ),
    "registering a function": (lambda: register_control("mine")(len), "len", "subclass of Control"),
    "a name that is taken": (
        lambda: register_control("mlp")(type("Mine", (Control,), {})),
        "'mlp'",
        "registered already",
    ),
}


@parametrised(BUILDING)
def test_building(call, given, accepted):
    refuses(call, given, accepted)


CALLING = {
    "x of rank 2": (lambda: attn()(tokens()[0]), "(5, 24)", "(batch, tokens from 1, 24)"),
    "x of another width": (lambda: attn()(tokens(width=8)), "(2, 5, 8)", "(batch, tokens from 1, 24)"),
    "x of no tokens": (lambda: attn()(tokens(0)), "(2, 0, 24)", "tokens from 1"),
    "x not a tensor": (lambda: attn()([1.0]), "list", "Tensor"),
    "integers for x": (lambda: attn()(tokens().long()), "torch.int64", "floating point"),
    "a context of another width": (lambda: attn(context_dim=8)(tokens(), tokens()), "(2, 5, 24)", "8)"),
    "a context of another batch": (lambda: attn()(tokens(), tokens(b=3)), "2 and 3", "same batch"),
    "a causal context": (lambda: attn(causal=True)(tokens(), tokens()), "context", "causal=False"),
    "no context where it is needed": (lambda: attn(context_dim=8)(tokens()), "width 8", "context="),
    "a mask of floats": (lambda: attn()(tokens(), key_padding_mask=padding.float()), "torch.float32", "bool"),
    "a mask of another shape": (lambda: attn()(tokens(), key_padding_mask=padding[:1]), "(1, 5)", "(2, 5)"),
    "a mask of x for a context": (lambda: attn()(tokens(), tokens(7), key_padding_mask=padding), "(2, 5)", "(2, 7)"),
    "a mask without new keys": (
        lambda: attn("mlp:4")(tokens(), state=state_of(context=tokens()), key_padding_mask=padding),
        "key_padding_mask",
        "without context",
    ),
    "beyond a linformer's length": (
        lambda: attn("linformer", 4, max_length=4)(tokens()),
        "given 5 tokens",
        "learned 4 positions",
    ),
    "continuing beyond a linformer's length": (
        lambda: attn("linformer", 4, causal=True, max_length=8)(
            tokens(), state=state_of("linformer:4", causal=True, max_length=8)
        ),
        "given 10 tokens",
        "learned 8 positions",
    ),
    "a state that is none": (lambda: attn()(tokens(), state=memory()), "Memory", "State"),
    "a state of another control": (
        lambda: attn("window:4", causal=True)(tokens(), state=state_of(causal=True)),
        "'mlp:4'",
        "'window:4'",
    ),
    "a state of other slots": (
        lambda: attn("mlp:8", causal=True)(tokens(), state=state_of(causal=True)),
        "'mlp:4'",
        "'mlp:8'",
    ),
    "a state of other options": (
        lambda: attn("mlp:4", causal=True, activation="relu")(tokens(), state=state_of(causal=True)),
        "'mlp:4'",
        "activation=relu",
    ),
    "a state of another batch": (
        lambda: attn("mlp:4", causal=True)(tokens(), state=state_of(b=3, causal=True)),
        "(3, 3, 4, 8)",
        "(2, 3, 4, 8)",
    ),
    "a state of other heads": (
        lambda: attn("mlp:4", causal=True)(tokens(), state=state_of(causal=True, num_heads=2)),
        "(2, 2, 4, 12)",
        "(2, 3, 4, 8)",
    ),
    "a context for a state without": (
        lambda: attn("mlp:4")(tokens(), tokens(), state=state_of()),
        "self-attention",
        "context cannot be appended",
    ),
    "appending to workspace": (
        lambda: attn("workspace:4")(tokens(), state=state_of("workspace:4")),
        "'workspace'",
        "whole sequence at once",
    ),
    "appending to k-means": (
        lambda: attn("cluster:4")(tokens(), state=state_of("cluster:4")),
        "'cluster'",
        "whole sequence at once",
    ),
    "appending to mean pooling": (
        lambda: attn("compressive:4")(tokens(), state=state_of("compressive:4")),
        "'compressive'",
        "whole sequence",
    ),
    "below for mlp": (lambda: attn()(tokens(), below=tokens(4)), "'mlp'", "luna, workspace"),
    "below of another shape": (lambda: attn("luna:4")(tokens(), below=tokens(3)), "(2, 3, 24)", "(2, 4, 24)"),
    "below as a list": (lambda: attn("luna:4")(tokens(), below=[1.0]), "list", "state.packed"),
    "integers below": (lambda: attn("luna:4")(tokens(), below=tokens(4).long()), "torch.int64", "floating point"),
    "a state of k-means for running centroids": (
        lambda: attn("cluster:4", causal=True)(tokens(), state=state_of("cluster:4")),
        "'cluster:4'",
        "'cluster:4(causal)'",
    ),
    "a state of another ratio of pooling": (
        lambda: attn("compressive:4", causal=True)(tokens(), state=state_of("compressive:4")),
        "'compressive:4'",
        "'compressive:4(causal)'",
    ),
    "a state of means for sums": (
        lambda: attn("mlp:4", causal=True, normalization="write")(tokens(), state=state_of(normalization="write")),
        "'mlp:4(normalization=write)'",
        "'mlp:4(normalization=write, causal)'",
    ),
    "reordering by a list": (lambda: state_of().reorder([1, 0]), "[1, 0]", "Tensor of int64"),
    "reordering by fractions": (lambda: state_of().reorder(torch.zeros(2)), "torch.float32", "int64 with one axis"),
    "reordering by rows that are not there": (
        lambda: state_of().reorder(torch.tensor([1, B])),
        "1 to 2",
        "from 0 to 1",
    ),
    "reordering by rows from the end": (lambda: state_of().reorder(torch.tensor([0, -1])), "-1 to 0", "from 0 to 1"),
    "reordering by a table": (lambda: state_of().reorder(padding.long()), "(2, 5)", "one axis"),
    "below beside a state": (
        lambda: attn("luna:4")(tokens(), below=tokens(4), state=state_of("luna:4")),
        "below=",
        "one of them",
    ),
}


@parametrised(CALLING)
def test_calling(call, given, accepted):
    refuses(call, given, accepted)


# Backends


def test_native_by_name_is_native_or_an_error(monkeypatch):
    monkeypatch.setattr("abc_attn.kernels.native.LIBRARY", "no C++ compiler was found")
    monkeypatch.setattr("abc_attn.kernels.native._AVAILABLE", False)
    for call in (
        lambda: attn(backend="native"),
        lambda: scan(q, k, v, phi(), backend="native"),
    ):
        with pytest.raises(ValueError, match=r"'native' is unavailable: no C\+\+ compiler was found. Use 'auto'"):
            call()
    attn(causal=True)(tokens())


def test_an_unknown_backend_in_the_environment_is_an_error():
    environment = os.environ | {"ABC_ATTN_BACKEND": "tourch"}
    code = [sys.executable, "-c", "import abc_attn.kernels"]
    said = subprocess.run(code, env=environment, check=False, capture_output=True, text=True)
    assert "ValueError: ABC_ATTN_BACKEND must be 'torch'" in said.stderr
    assert "got 'tourch'" in said.stderr


# Files


@pytest.fixture
def file(tmp_path):
    state_of(causal=True).save(tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


METADATA = {"format": "abc-attn state", "version": "1", "control": "mlp:4", "cross": "False", "inner": "1"}


def rewrite(file, metadata: dict[str, str] | None = None, **parts: torch.Tensor | None) -> None:
    """The saved state with some of its parts replaced, or left out if None."""
    kept = {name: part for name, part in (load_file(file) | parts).items() if part is not None}
    save_file(kept, file, METADATA | (metadata or {}))


def test_the_rewritten_file_is_good_if_nothing_is_changed(file):
    rewrite(file)
    attn("mlp:4", causal=True)(tokens(), state=State.load(file))


FILES = {
    "another version": ({"version": "3"}, {}, "version '3'", "'2' and '1'"),
    "no checksum": ({"version": "2"}, {}, "checksum", "damaged"),
    "another format": ({"format": "a model"}, {}, "'a model'", "'abc-attn state'"),
    "NaN in the memory": ({}, {"memory.k": torch.full((B, H, N, D), torch.nan)}, "memory.k", "NaN"),
    "inf in the memory": ({}, {"memory.v": torch.full((B, H, N, D), torch.inf)}, "memory.v", "inf"),
    "NaN in the control's state": ({}, {"inner.0": torch.full((B, H, N), torch.nan).double()}, "inner.0", "NaN"),
    "no values": ({}, {"memory.v": None}, "memory.v", "not whole"),
    "no length": ({}, {"length": None}, "length", "not whole"),
    "words for a number": ({"inner": "two"}, {}, "two", "not whole"),
    "rows that differ": ({}, {"memory.k": torch.zeros(3, H, N, D)}, "(3, 3, 4, 8)", "2 rows"),
    "slots that differ": ({}, {"memory.mass": torch.zeros(B, H, 5)}, "(2, 3, 5)", "(2, 3, 4)"),
    "a control's state of other slots": ({}, {"inner.0": torch.zeros(B, H, 5).double()}, "(2, 3, 5)", "(2, 3, 4)"),
    "a control's state of fewer digits": ({}, {"inner.0": torch.zeros(B, H, N)}, "float32", "float64"),
    "no control's state": ({"inner": "0"}, {"inner.0": None}, "0", "1"),
    "numbers for flags": ({}, {"memory.used": torch.zeros(B, H, N)}, "float32", "bool"),
    "fractions for a length": ({}, {"length": torch.zeros(B)}, "float32", "int64"),
}


@pytest.mark.parametrize(("metadata", "parts", "given", "accepted"), FILES.values(), ids=FILES)
def test_files_that_hold_something_else(file, metadata, parts, given, accepted):
    rewrite(file, metadata, **parts)
    causal = attn("mlp:4", causal=True)
    refuses(lambda: causal(tokens(), state=State.load(file)), given, accepted)


def test_a_file_of_another_control(file):
    refuses(lambda: attn("window:4", causal=True)(tokens(), state=State.load(file)), "'mlp:4'", "'window:4'")


def test_a_file_of_another_number_of_slots(file):
    rewrite(file, {"control": "mlp:8"})
    refuses(lambda: attn("mlp:8", causal=True)(tokens(), state=State.load(file)), "(2, 3, 4, 8)", "(2, 3, 8, 8)")


def test_a_file_without_metadata(file):
    save_file({"weight": torch.zeros(2)}, file)
    refuses(lambda: State.load(file), "None", "'abc-attn state'")


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_file_of_another_kind(file, content):
    file.write_bytes(content)
    refuses(lambda: State.load(file), file.name, "safetensors")


def test_half_a_file(file):
    file.write_bytes(file.read_bytes()[:-100])
    refuses(lambda: State.load(file), file.name, "safetensors")


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no state file at .*nowhere"):
        State.load(tmp_path / "nowhere")
