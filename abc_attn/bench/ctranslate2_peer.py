"""CTranslate2 beside us: the same weights in its own format, decoding in a process of its own.

So its threads and its memory are apart from torch's, and its peak is that of the process.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from abc_attn.allocator import give_back_memory
from abc_attn.bench.measure import high_water, preloaded

INSTALL = "pip install 'abc-attn[bench]'"
END = "</s>"
PROCESSES = "abc_attn.bench.translators"  # what the processes need that measure memory beside it
WHOLE_INPUT = 0  # its max_input_length that cuts nothing off; by default it reads 1,024 tokens


def missing() -> str | None:
    """Why CTranslate2 cannot be measured here; None if it can."""
    return None if importlib.util.find_spec("ctranslate2") else f"skipped: ctranslate2 is not installed: {INSTALL}"


def convert(folder: Path, converted: Path) -> None:
    """Write the Marian saved in `folder`, with its tokenizer, in CTranslate2's format. It is quantised when loaded."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(converted))


class Decoded(NamedTuple):
    """One greedy decoding from a point of the target on."""

    first: float  # seconds to the first token: the source is read and the beginning of the target
    steps: list[float]  # seconds of each step after it
    tokens: list[int]  # of the first row
    peak_bytes: int  # above what the process held before, while these steps were made


def continued(start: Decoded, reached: Decoded, factor: float) -> Decoded:
    """A decoding `factor` times as far into the target as `reached`. Keys and values grow by as much at every token,
    and with them the time of a step and the memory: both are continued as a line from the start of the target. Where
    noise lets that line fall, they stay as measured: a step further on takes no less."""
    if factor == 1:
        return reached
    base = statistics.median(start.steps)
    steps = [max(seconds, base + factor * (seconds - base)) for seconds in reached.steps]
    peak = start.peak_bytes + factor * (reached.peak_bytes - start.peak_bytes)
    return Decoded(reached.first, steps, [], max(reached.peak_bytes, int(peak)))


class Peer:
    """A process with one model: it answers one request at a time."""

    def __init__(self, converted: Path, compute_type: str, threads: int) -> None:
        context = preloaded(PROCESSES)
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, converted, compute_type, threads), daemon=True)
        self._process.start()
        other.close()

    def decode(self, source: Sequence[str], target: Sequence[str], batch: int, steps: int) -> Decoded:
        """Greedy decoding of `steps` tokens after the first, from the beginning `target` of a target on; `batch` rows
        of the same source."""
        return self._ask("decode", source, target, batch, steps)

    def log_likelihoods(self, source: Sequence[str], target: Sequence[str]) -> list[float]:
        """log p of each token of a target, and of its end."""
        return self._ask("log_likelihoods", source, target)

    def close(self) -> None:
        with suppress(OSError):  # it may have been killed
            self._connection.send(None)
        self._process.join()

    def _ask(self, *request: Any) -> Any:
        try:
            self._connection.send(request)
            return self._connection.recv()
        except (EOFError, OSError):
            raise MemoryError("the process of CTranslate2 was killed") from None


def _serve(connection: Connection, converted: Path, compute_type: str, threads: int) -> None:
    """The work of the process."""
    import ctranslate2

    model = ctranslate2.Translator(
        str(converted), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
    )
    vocabulary = json.loads((converted / "shared_vocabulary.json").read_text(encoding="utf-8"))
    words = {word: number for number, word in enumerate(vocabulary)}
    answers: dict[str, Any] = {"decode": _decode, "log_likelihoods": _log_likelihoods}
    while (request := connection.recv()) is not None:
        kind, *given = request
        connection.send(answers[kind](model, words, *given))


def _decode(
    model: Any, words: dict[str, int], source: Sequence[str], target: Sequence[str], batch: int, steps: int
) -> Decoded:
    give_back_memory()
    before = high_water(reset=True)
    times = [time.perf_counter()]
    seen = -1

    def note(result: Any) -> bool:
        """After each token of each row."""
        nonlocal seen
        if result.step > seen and result.step >= len(target):
            seen = result.step
            times.append(time.perf_counter())
            if len(times) == 2:  # what reading needed is not what decoding needs
                give_back_memory()
                high_water(reset=True)
                times[-1] = time.perf_counter()
        return False

    length = len(target) + 1 + steps
    results = model.translate_batch(
        [list(source)] * batch,
        target_prefix=[list(target)] * batch,
        beam_size=1,
        min_decoding_length=length,
        max_decoding_length=length,
        suppress_sequences=[[END]],  # the last token may be the end otherwise
        max_input_length=WHOLE_INPUT,
        callback=note,
    )
    peak = high_water() - before
    tokens = [words[word] for word in results[0].hypotheses[0][len(target) :]]
    taken = [later - earlier for earlier, later in pairwise(times)]
    return Decoded(taken[0], taken[1:], tokens, peak)


def _log_likelihoods(model: Any, words: dict[str, int], source: Sequence[str], target: Sequence[str]) -> list[float]:
    (found,) = model.score_batch([list(source)], [list(target)], max_input_length=WHOLE_INPUT)
    return list(found.log_probs)
