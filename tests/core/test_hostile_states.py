"""State files that are damaged or hostile are refused by a clear error; no number in one reaches outside an array.

`python -m fuzz states` and `python -m fuzz caches` look for more of the same for as long as they are let.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from safetensors.torch import load_file, save_file

from abc_attn import BoundedAttention, State
from abc_attn.core import Band, Reading
from abc_attn.kernels import banded, blocks, native
from abc_attn.kernels.door import Declined
from fuzz import states as fuzz_states

WIDTH, HEADS = 32, 2  # heads of 16 channels: the compiled kernels take them


def attention(control, **options):
    torch.manual_seed(0)
    return BoundedAttention(WIDTH, HEADS, control, causal=True, **options)


def state_of(attention, tokens=9):
    with torch.no_grad():
        return attention(torch.randn(1, tokens, WIDTH), return_state=True)[1]


@pytest.mark.parametrize("length", [2**63 - 1, -(10**12), -5, -1, 2**53])
@pytest.mark.parametrize("control", ["window:4", "global:2+window:4"])
def test_a_length_that_no_text_has(control, length, tmp_path):
    """Three tokens after such a state ended the process, or gave outputs that are not finite."""
    state = state_of(attention(control))
    state._replace(length=torch.full_like(state.length, length)).save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"length must be in 0 to 2\*\*53 - 1, got"):
        State.load(tmp_path / "state")


@pytest.mark.parametrize("length", [2**63 - 1, -(10**12), -5, -1])
@pytest.mark.parametrize("control", ["window:4", "global:2+window:4"])
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.skipif(bool(native.unavailable()), reason="no native kernels")
def test_a_length_that_was_never_in_a_file_stays_inside_the_arrays(control, length, t):
    """What is made by hand is not checked; the kernels bear it."""
    layer = attention(control)
    state = state_of(layer)
    with torch.no_grad():
        y = layer(torch.randn(1, t, WIDTH), state=state._replace(length=torch.full_like(state.length, length)))
    assert y.shape == (1, t, WIDTH)


CHANGES = {
    "a count that is not the length": ("window:4", {"inner.0": torch.tensor([7])}, "counted \\[7\\] tokens"),
    "a count of the window that the sinks do not leave": (
        "global:2+window:4",
        {"inner.1": torch.tensor([9])},
        "counted",
    ),
    "a count below 0": ("random:4", {"inner.0": torch.tensor([-1])}, "counted"),
    "a count beyond the length": ("compressive:3", {"inner.0": torch.tensor([10])}, "counted"),
    "a count of fractions": ("cluster:4", {"inner.1": torch.tensor([9.0])}, "float32, torch.int64 is accepted"),
    "flags that the length does not leave": ("window:4", {"memory.used": torch.zeros(1, 2, 4).bool()}, "used"),
    "flags of nothing written": ("mlp:4", {"length": torch.tensor([0])}, "used must be False wherever length is 0"),
    "flags that are bytes": ("mlp:4", {"memory.used": torch.full((1, 2, 4), 2, dtype=torch.uint8)}, "neither False"),
    "more tokens than rows": ("softmax", {"length": torch.tensor([10])}, "counted"),
    "an infinite sum": ("mlp:4", {"inner.0": torch.full((1, 2, 4), torch.inf).double()}, "contains inf"),
    "a sum beyond reach": ("mlp:4", {"inner.0": torch.full((1, 2, 4), -3e38).double()}, "normaliser"),
    "keys beyond reach": ("mlp:4", {"memory.k": torch.full((1, 2, 4, 16), 3e38)}, "overflow"),
    "keys of a linear read": ("elu", {"memory.k": torch.zeros(1, 2, 16, 16)}, "memory.k has shape"),
    "values in half precision": ("mlp:4", {"memory.v": torch.zeros(1, 2, 4, 16).half()}, "float16"),
    "keys and values of two dtypes": ("softmax", {"memory.v": torch.zeros(1, 2, 9, 16).double()}, "the same"),
    "a tensor too many": ("mlp:4", {"more": torch.zeros(1)}, "'more', which belongs to no state"),
}


@pytest.mark.parametrize(("control", "parts", "said"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("version", ["1", "2"])
def test_numbers_that_no_attention_has_left(control, parts, said, version, tmp_path):
    layer = attention(control)
    state = state_of(layer)
    tensors, facts = fuzz_states.parts_of(state)
    if parts.get("memory.used", torch.zeros(0)).dtype == torch.uint8:
        parts = {"memory.used": parts["memory.used"].view(torch.bool)}
    (tmp_path / "good").write_bytes(fuzz_states.written(tensors, facts, version))
    (tmp_path / "bad").write_bytes(fuzz_states.written(tensors | parts, facts, version))
    layer(torch.zeros(1, 1, WIDTH), state=State.load(tmp_path / "good"))
    with pytest.raises(ValueError, match=said):
        layer(torch.zeros(1, 1, WIDTH), state=State.load(tmp_path / "bad"))


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    state_of(attention("window:3+mlp:4")).save(tmp_path / "state")
    content = (tmp_path / "state").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for at in [*range(0, end, 3), *range(end, len(content), 41)]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "state").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged|not a safetensors file|not a saved state|not whole"):
            State.load(tmp_path / "state")


def test_version_1_loads_without_a_checksum(tmp_path):
    layer = attention("mlp:4")
    state = state_of(layer)
    state.save(tmp_path / "state")
    facts = {"format": "abc-attn state", "version": "1", "control": "mlp:4", "cross": "False", "inner": "1"}
    save_file(load_file(tmp_path / "state"), tmp_path / "old", facts)
    x = torch.randn(1, 3, WIDTH)
    assert torch.equal(layer(x, state=State.load(tmp_path / "old")), layer(x, state=state))


def test_fuzzed_files(tmp_path):
    outcomes = {fuzz_states.run(case, tmp_path) for case in range(200)}
    assert any("refused" in outcome for outcome in outcomes)
    assert any("went on" in outcome for outcome in outcomes)


# The compiled kernels, called as no caller of ours does


@pytest.mark.skipif(bool(native.unavailable()), reason="no native kernels")
def test_rows_outside_a_ring_are_refused():
    memory = torch.zeros(1, 1, 4, 16)
    token = torch.zeros(1, 1, 1, 16)
    for row, refused in ((3, False), (4, True), (-1, True), (2**62, True)):
        at, out = torch.tensor([row]), torch.empty(1, 1, 1, 16)
        sizes, held = (1, 1, 1, 4, 16, 16, 0, 1), (memory.clone(), memory.clone())
        pointers = [None if x is None else x.data_ptr() for x in (token, None, token, token, at, None, *held, out)]
        found = native._library().abc_ring(ctypes.byref(native._Ring(*sizes, 1.0, *pointers)))
        assert (found != 0) is refused
        if refused:
            with pytest.raises(ValueError, match="outside the given tensors"):
                native.finish(found)


@pytest.mark.skipif(bool(native.unavailable()), reason="no native kernels")
@pytest.mark.parametrize("count", [-(2**63), -(10**12), -1, 2**63 - 1])
@pytest.mark.parametrize("missing", [-(2**63), 2**63 - 1, 0])
def test_counts_of_a_band_are_declined_or_taken_as_the_nearest_possible(count, missing):
    q, sinks = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 2, 16)
    k = torch.randn(1, 1, 7, 16)
    numbers = (torch.tensor([missing]), torch.tensor([count]))
    stretch = banded.Stretch(q, None, sinks, sinks, k, k, *numbers, Band(2, 4), Reading())
    found = native.band(stretch)
    if count < 0:  # queries before the first token: torch's
        assert isinstance(found, Declined)
        return
    nearest = (torch.tensor([min(max(missing, 0), 7)]), torch.tensor([min(max(count, 0), 2)]))
    if missing <= 0:  # else there is nothing but sinks to read
        assert (found - blocks.band(stretch._replace(missing=nearest[0], before=nearest[1]))).abs().max() < 1e-5


@pytest.mark.skipif(bool(native.unavailable()), reason="no native kernels")
@pytest.mark.parametrize("size", ["t", "n", "g", "d", "threads", "rows"])
def test_sizes_that_cannot_be_are_refused(size):
    sizes = {"rows": 1, "g": 1, "t": 1, "n": 4, "d": 16, "e": 16, "queries": 1, "causal": 1, "threads": 1}
    for wrong in (-1, 2**40) if size != "threads" else (0, -1):
        args = native._Args(**sizes | {size: wrong})
        assert native._library().abc_run(ctypes.byref(args)) == 2
    assert native._library().abc_run(ctypes.byref(native._Args(**sizes))) == 2  # no tensors
    assert native._library().abc_run(ctypes.byref(native._Args(**sizes | {"rows": 0}))) == 0


def test_tensors_that_do_not_hold_what_the_kernels_touch_are_refused():
    args = native._Args(rows=1, g=1, t=1, n=4, d=16, e=16, queries=1, causal=1, threads=1)
    with pytest.raises(ValueError, match=r"need 16 contiguous elements of torch.float32 for 'k', got 8"):
        native._call(args, k=torch.zeros(8))
    with pytest.raises(
        ValueError, match=r"need 4 contiguous elements of torch.bool for 'old_used', got 4 of torch.int64"
    ):
        native._call(args, old_used=torch.zeros(4, dtype=torch.int64))
