"""Streams, one token at a time: memory stays flat, a late token costs what an early one does, fp32 stays near fp64.

`pytest -m nightly -s tests/attention/test_streams.py` shows the figures; at a million tokens a control takes minutes.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch

from abc_attn import BoundedAttention, State

EMBED, HEADS = 64, 2
MILLION = 1_000_000
BLOCK = 100  # tokens that are timed together
WARM = 2_000  # tokens after which every buffer is there
TIMED = 10_000  # tokens at the beginning and at the end whose times are compared
CHUNK = 500  # tokens that the fp64 attention takes at once

STATM = Path("/proc/self/statm")
STREAMS = [
    ("mlp:32", {}, MILLION),
    ("mlp:32", {"gate": True}, MILLION),
    ("global:4+window:60", {}, MILLION),
    ("mlp:32", {"activation": "relu", "gate": True}, 200_000),
    ("elu", {"gate": True}, 200_000),
    ("rfa:32", {"gate": True}, 200_000),
    ("window:32+mlp:32", {"gate": True}, 200_000),
]
IDS = [f"{control}{''.join(f',{name}={value}' for name, value in options.items())}" for control, options, _ in STREAMS]


class Stream:
    """Tokens around a mean that is not 0: in a mean over a million of them the late ones must still be seen."""

    def __init__(self, control: str, options: dict[str, Any], length: int) -> None:
        torch.manual_seed(1)
        self.attention = BoundedAttention(EMBED, HEADS, control, causal=True, **options).eval()
        self.x = (1 + torch.randn(length, EMBED)).view(length, 1, 1, EMBED)
        self.y = torch.full((length, EMBED), torch.nan)  # written here: memory that is touched later is no leak

    def step(self, state: State | None, start: int, stop: int) -> State:
        found = state
        for t in range(start, stop):
            y, found = self.attention(self.x[t], state=found, return_state=True)
            self.y[t] = y[0, 0]
        assert found is not None
        return found

    @torch.no_grad()
    def errors(self, last: int) -> tuple[float, float]:
        """max|y - fp64| / max|fp64| of all outputs, and of the `last`. The fp64 attention, of the same weights, takes
        chunks: in fp64 they give what single tokens do."""
        attention, state, found = copy.deepcopy(self.attention).double(), None, []
        for x, y in zip(self.x.view(1, -1, EMBED).split(CHUNK, dim=1), self.y.split(CHUNK), strict=True):
            exact, state = attention(x.double(), state=state, return_state=True)
            found.append([float((y - exact[0]).abs().max()), float(exact.abs().max())])
        of_all, of_last = torch.tensor(found).amax(0), torch.tensor(found[-last // CHUNK :]).amax(0)
        return float(of_all[0] / of_all[1]), float(of_last[0] / of_last[1])


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


needs_proc = pytest.mark.skipif(not STATM.exists(), reason="reads /proc")


@needs_proc
@pytest.mark.parametrize(("control", "options", "length"), STREAMS, ids=IDS)
def test_a_short_stream(control, options, length):
    stream = Stream(control, options, 3_000 if length == MILLION else 1_000)
    end, warm = len(stream.x), len(stream.x) // 3
    with torch.no_grad():
        state = stream.step(None, 0, warm)
        size, before = state.nbytes, resident()
        state = stream.step(state, warm, end)
    assert resident() - before < 2**20
    assert state.nbytes == size
    assert state.length.tolist() == [end]
    assert max(stream.errors(last=CHUNK)) < 1e-5


class Timed(NamedTuple):
    """Of each block, seconds of this process: others on the machine do not count."""

    blocks: list[float]

    def add(self, stream: Stream, state: State, start: int) -> State:
        began = time.process_time()
        state = stream.step(state, start, start + BLOCK)
        self.blocks.append(time.process_time() - began)
        return state

    @property
    def microseconds(self) -> float:
        """Of a token, the median over blocks."""
        return median(self.blocks) / BLOCK * 1e6


@needs_proc
@pytest.mark.nightly
@pytest.mark.parametrize(("control", "options", "length"), STREAMS, ids=IDS)
def test_a_long_stream(control, options, length, monkeypatch, request):
    """The last tokens cost what the first do, as they came and once more in turn: from the state that was kept."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # it would be timed as well
    stream, first, last = Stream(control, options, length), Timed([]), Timed([])
    with torch.no_grad():
        early = state = stream.step(None, 0, WARM)
        size, before = state.nbytes, resident()
        most = before
        for start in range(WARM, WARM + TIMED, BLOCK):
            state = first.add(stream, state, start)
        for start in range(WARM + TIMED, length - TIMED, TIMED):
            state = stream.step(state, start, min(start + TIMED, length - TIMED))
            most = max(most, resident())
        late = state
        for start in range(length - TIMED, length, BLOCK):
            state = last.add(stream, state, start)
        most = max(most, resident())
        assert state.nbytes == size
        assert state.length.tolist() == [length]

        again, together = Timed([]), Timed([])
        for number, (a, b) in enumerate(
            zip(range(WARM, WARM + TIMED, BLOCK), range(length - TIMED, length, BLOCK), strict=True)
        ):
            if number % 2:
                early = again.add(stream, early, a)
                late = together.add(stream, late, b)
            else:
                late = together.add(stream, late, b)
                early = again.add(stream, early, a)
    drift, at_the_end = stream.errors(last=TIMED)
    print(
        f"\n{request.node.callspec.id}, {length:,} tokens one at a time\n"
        f"  memory           {before / 2**20:.1f} MB after {WARM:,} tokens, at most {(most - before) / 2**20:+.2f} MB\n"
        f"  state            {size:,} bytes throughout\n"
        f"  time of a token  first {TIMED:,}: {first.microseconds:.1f} us, last: {last.microseconds:.1f} us "
        f"({last.microseconds / first.microseconds - 1:+.1%})\n"
        f"  the same in turn {again.microseconds:.1f} us, {together.microseconds:.1f} us "
        f"({together.microseconds / again.microseconds - 1:+.1%})\n"
        f"  off fp64         {drift:.1e}, last {TIMED:,}: {at_the_end:.1e}"
    )
    assert most - before < 2**20
    assert max(drift, at_the_end) < 1e-4
    assert together.microseconds < 1.05 * again.microseconds
