"""The benchmark `translate`: sequence-to-sequence decoding over lengths, as in the paper's Figure 2."""

from __future__ import annotations

import copy
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from abc_attn.allocator import give_back_memory
from abc_attn.bench import ctranslate2_peer
from abc_attn.bench.measure import (
    LEAST,
    LEAST_BASELINE,
    Times,
    available_bytes,
    error,
    peak_of_process,
)
from abc_attn.bench.report import FORWARD, Row, compare_rows
from abc_attn.memory_limit import check_fits, in_words
from abc_attn.progress import Progress

if TYPE_CHECKING:
    from abc_attn.bench.translators import Decoder, Shape, Text

BUDGET = 4.0  # seconds for each method and length: once spent, only the minimum of repetitions is still made
WHOLE = 64  # tokens: targets up to this length are also decoded from start to end, to see that the estimate holds
SCORED = 32  # words over which CTranslate2's log p are compared with ours
REACH = 256  # words of a target that CTranslate2 is forced through: it takes them one by one, which is slow


class Method(NamedTuple):
    """One way to decode with the same weights."""

    name: str
    title: str
    control: str | None = None  # of the decoder's attentions; None: exact
    slots: tuple[int, int] | None = None  # of its cross- and its self-attention
    compute: str | None = None  # what CTranslate2 computes with; None: it is not CTranslate2
    compiled: bool = False  # a step is one graph (hf/compiled.py)
    weights: str | None = None  # "int8"

    @property
    def rounded(self) -> bool:
        """Whether its weights are not those of the others, so that it may write other tokens."""
        return "int8" in (self.compute, self.weights)


METHODS = (
    Method("dynamic", "DynamicCache"),
    Method("static", "StaticCache"),
    Method("preallocated", "preallocated"),
    Method("rfa", "rfa 256/128", "rfa", (256, 128)),
    Method("t2r", "t2r 32/4", "t2r", (32, 4)),
    Method("mlp", "mlp 32/8", "mlp", (32, 8)),
    Method("mlp_compiled", "mlp 32/8, compiled", "mlp", (32, 8), compiled=True),
    Method("mlp_int8", "mlp 32/8, int8, compiled", "mlp", (32, 8), compiled=True, weights="int8"),
    Method("ctranslate2", "CTranslate2, fp32", compute="float32"),
    Method("ctranslate2_int8", "CTranslate2, int8", compute="int8"),
)
OTHERS = tuple(method.name for method in METHODS if method.control is None)


@dataclass
class TranslationRow(Row):
    """One method at one length of source and target. Tokens per second are those of decoding, without reading the
    source; `seconds` are those of a step, the mean over a target."""

    title: str = ""
    seconds_start: float | None = None  # of a step at the start of a target
    seconds_end: float | None = None  # ... and at its end
    seconds_reading: float | None = None  # the source, once: the encoder, and the memory or the keys and values of it
    tokens_per_second_whole: float | None = None  # reading included
    same_tokens: float | None = None  # share of the tokens that are those of DynamicCache; or of ours, uncompiled
    ratio_static: float | None = None
    ratio_ctranslate2: float | None = None
    ratio_ctranslate2_int8: float | None = None
    peak_ratio_static: float | None = None
    peak_ratio_ctranslate2: float | None = None
    peak_ratio_ctranslate2_int8: float | None = None

    @property
    def label(self) -> str:
        return self.title


class Pair(NamedTuple):
    """What one repetition gave: `first`, `steps` and `tokens` of a decoding at the start, and of one at the end."""

    start: Any
    end: Any

    @property
    def seconds(self) -> float:
        """Of a step. Where its time grows with the target it grows in proportion, so the mean of both ends is that of
        the whole."""
        return (statistics.median(self.start.steps) + statistics.median(self.end.steps)) / 2

    @property
    def tokens(self) -> list[int]:
        return [*self.start.tokens, *self.end.tokens]


def translate(
    lengths: list[int],
    batch: int,
    tokens: int,
    layers: int,
    width: int,
    heads: int,
    words: int,
    repetitions: int,
) -> tuple[list[Row], dict[str, float | str]]:
    """Greedy decoding of targets as long as their sources: tokens per second and peak memory."""
    from abc_attn.bench import translators  # brings transformers

    lengths = sorted(lengths)
    shape = translators.Shape(layers, width, heads, 4 * width, words, max(lengths) + 1)
    _check_sizes(shape, lengths, batch, tokens)
    print("bench translate: about 20 minutes at its default sizes on two idle cores, and 24 GB", file=sys.stderr)
    rows: list[TranslationRow] = []
    whole: list[float] = []
    with (
        TemporaryDirectory() as folder,
        ExitStack() as stack,
        Progress("bench translate", 2 + 2 * len(METHODS) * len(lengths)) as progress,
    ):
        original = translators.make_marian(shape)
        models = {
            method.name: translators.prepare(copy.deepcopy(original), method) for method in METHODS if method.control
        }
        notes = {
            method.name: translators.compile_step(models[method.name], batch) for method in METHODS if method.compiled
        }
        progress("the models")
        peers = _peers(original, shape, Path(folder), stack)
        progress("the models of CTranslate2")
        for length in lengths:
            one = _Length(shape, original, models, peers, notes, length, batch, min(tokens, (length - 1) // 2))
            rows += one.compare(repetitions, progress)
            whole += one.whole()
            del one
            give_back_memory()
    compare_rows(rows, OTHERS)
    summary: dict[str, float | str] = dict(crossovers(rows))
    if whole:
        summary[f"targets of up to {WHOLE} tokens decoded whole, time / what both ends give"] = (
            f"{min(whole):.2f} to {max(whole):.2f}"
        )
    return [*rows], summary


def _check_sizes(shape: Shape, lengths: Sequence[int], batch: int, tokens: int) -> None:
    """Refuse what could only fail in the middle of the run."""
    if shape.width % shape.heads or shape.width // shape.heads % 2:
        raise ValueError(f"--heads {shape.heads} must divide --width {shape.width} into heads of an even width")
    if shape.words < 8:
        raise ValueError(f"--words {shape.words}: at least 8 are needed, four of which have a meaning of their own")
    if min(lengths) < 5:
        raise ValueError(f"--lengths {min(lengths)}: at least 5 tokens are needed, to be measured at both ends")
    kinds = 2 + sum(method.control is not None for method in METHODS)
    check_fits(f"{kinds} models of {shape.layers} layers and width {shape.width}", kinds * shape.nbytes)
    hidden = batch * max(lengths) * (4 * shape.width + shape.inner) * 4
    check_fits(f"a batch of {batch} sources of {max(lengths)} tokens", hidden)


def _peers(original: Any, shape: Shape, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """CTranslate2 with the weights of `original`, a process for each type of numbers; none if it is not installed."""
    from abc_attn.bench import translators

    if ctranslate2_peer.missing():
        return {}
    translators.save(original, shape, folder / "model")
    ctranslate2_peer.convert(folder / "model", folder / "converted")
    peers = {}
    for method in METHODS:
        if method.compute:
            peers[method.name] = ctranslate2_peer.Peer(folder / "converted", method.compute, torch.get_num_threads())
            stack.callback(peers[method.name].close)
    return peers


class _Length:
    """All methods at one length."""

    def __init__(
        self,
        shape: Shape,
        original: Any,
        models: dict[str, Any],
        peers: dict[str, Any],
        notes: dict[str, str],
        length: int,
        batch: int,
        steps: int,
    ) -> None:
        from abc_attn.bench import translators

        self.shape, self.original, self.models, self.peers, self.notes = shape, original, models, peers, notes
        self.length, self.batch, self.steps = length, batch, steps
        self.seen = length - steps - 1  # words of a target before the steps at its end
        self.text: Text = translators.make_text(original, length, self.seen)
        names = translators.words_of(shape)
        self.source, (_, *self.target) = (
            [names[token] for token in tokens[0].tolist()] for tokens in (self.text.source, self.text.target)
        )
        size: dict[str, Any] = {
            "batch": batch,
            "heads": shape.heads,
            "tokens": length,
            "width": shape.width // shape.heads,
        }
        self.rows = {
            method.name: TranslationRow(method.name, FORWARD, slots=None, title=method.title, **size)
            for method in METHODS
        }
        self.runs: dict[str, Callable[[], Pair]] = {}
        self.decoders: dict[str, Decoder] = {}

    def compare(self, repetitions: int, report: Callable[[str], None]) -> list[TranslationRow]:
        """Each method is checked, then its memory measured; then their times, in turn."""
        from abc_attn.bench import translators

        for method in METHODS:
            row = self.rows[method.name]
            row.note = self._does_not_fit(method) or ""
            if not row.note:
                (self._prepare_peer if method.compute else self._prepare)(method, row)
            report(f"check and memory of {row.label}, {self.length:,} tokens")
        encoding = translators.encoder_seconds(self.original, self.text.source, self.batch)
        found = interleave_turns(
            self.runs,
            repetitions,
            lambda name: report(f"time of {self.rows[name].label}, {self.length:,} tokens"),
        )
        for method in METHODS:
            row = self.rows[method.name]
            if method.name in found:
                self._fill(method, row, found[method.name], encoding)
            else:
                report(f"time of {row.label}, {self.length:,} tokens")
        self._compare_tokens(found)
        return list(self.rows.values())

    def _does_not_fit(self, method: Method) -> str | None:
        """Why it is not measured; None if it is."""
        if method.compute:
            if why := ctranslate2_peer.missing():
                return why
            # Scores and weights of the encoder, both whole; and a tenth for the rest.
            needed = 2.2 * self.shape.bytes_of_scores(self.batch, self.length)
            what = "the scores of its encoder"
        elif method.control is None:
            # Both attentions, the copy that a decoding at the start makes of one, and what a step copies.
            needed = 3.5 * self.shape.bytes_of_keys_and_values(self.batch, self.length)
            what = "keys and values"
        else:
            return self.notes.get(method.name)
        if needed <= available_bytes():
            return None
        return f"skipped: {what} take {in_words(int(needed))}, and {in_words(available_bytes())} may be used"

    def _prepare(self, method: Method, row: TranslationRow) -> None:
        from abc_attn.bench import translators

        model = self.models.get(method.name, self.original)
        if method.control and not row.passes(
            error(*translators.check_state(model, method.name, self.text, min(self.batch, 2)))
        ):
            return
        sizes = (self.length, self.seen), self.batch, min(self.steps, 2)
        row.peak_bytes = peak_of_process(translators.ready, self.shape, method, *sizes)
        decoder = translators.Decoder(model, method.name, self.text, self.batch, self.steps)
        row.state_bytes = translators.bytes_held(decoder.full(), method.name)
        self.decoders[method.name] = decoder
        self.runs[method.name] = lambda: Pair(decoder.start(), decoder.end(decoder.full()))

    def _prepare_peer(self, method: Method, row: TranslationRow) -> None:
        from abc_attn.bench import translators

        peer = self.peers[method.name]
        text = translators.make_text(self.original, min(self.length, SCORED), min(self.seen, SCORED))
        names = translators.words_of(self.shape)
        source, (_, *target) = ([names[token] for token in tokens[0].tolist()] for tokens in (text.source, text.target))
        found = torch.tensor(peer.log_likelihoods(source, target))
        expected = translators.log_likelihoods(self.original, text).double()
        if method.compute == "float32":
            if not row.passes(error(found, expected)):
                return
        else:
            row.gate_error = error(found, expected)  # of its rounding: told, not judged
        reach = min(self.seen, REACH)

        def run() -> Pair:
            start, reached = (
                peer.decode(self.source, target, self.batch, self.steps) for target in ([], self.target[:reach])
            )
            return Pair(start, ctranslate2_peer.continued(start, reached, self.seen / reach))

        self.runs[method.name] = run

    def _fill(self, method: Method, row: TranslationRow, pairs: Sequence[Pair], encoding: float) -> None:
        times = Times([pair.seconds for pair in pairs])
        row.seconds, row.quartiles, row.repetitions = times.median, times.quartiles, len(pairs)
        row.seconds_start = statistics.median(statistics.median(pair.start.steps) for pair in pairs)
        row.seconds_end = statistics.median(statistics.median(pair.end.steps) for pair in pairs)
        first = statistics.median(pair.start.first for pair in pairs) - row.seconds_start
        if method.compute:  # all in one call, the encoder too
            row.seconds_reading = first
            row.peak_bytes = max(pair.end.peak_bytes for pair in pairs)
        else:
            row.seconds_reading = encoding + first
        row.tokens_per_second = self.batch / row.seconds
        row.tokens_per_second_whole = self.batch * self.length / (row.seconds_reading + self.length * row.seconds)

    def _compare_tokens(self, found: Mapping[str, Sequence[Pair]]) -> None:
        """Every exact method must write what DynamicCache writes, and a compiled one what it writes uncompiled; unless
        its weights are rounded."""
        for method in METHODS:
            model = METHODS[0] if method.control is None else next(m for m in METHODS if m.control == method.control)
            if method.name not in found or model.name not in found or method == model:
                continue
            expected, row = found[model.name][0].tokens, self.rows[method.name]
            # Where CTranslate2 has not reached the end of the target, there are no tokens of it.
            strict = not method.compute
            same = [a == b for pair in found[method.name] for a, b in zip(pair.tokens, expected, strict=strict)]
            share = sum(same) / len(same)
            if share < 1 and not method.rounded:
                row = TranslationRow(
                    row.method, row.phase, row.batch, row.heads, row.tokens, row.width, None, title=row.title,
                    note=f"CHECK FAILED: {share:.0%} of its tokens are those of {model.title}",
                )  # fmt: skip
                self.rows[method.name] = row
            row.same_tokens = share

    def whole(self) -> Iterator[float]:
        """Of each method, the time of a target decoded from start to end / what both ends give; for short targets."""
        if self.length > WHOLE:
            return
        for name, row in self.rows.items():
            if row.seconds is None:
                continue
            if name in self.peers:
                steps = self.peers[name].decode(self.source, [], self.batch, self.length - 1).steps
            else:
                decoder = self.decoders[name]
                decoder.steps, decoder.room = self.length - 1, self.length + 1
                steps = decoder.start().steps
            yield statistics.mean(steps) / row.seconds


def interleave_turns(
    runs: Mapping[str, Callable[[], Pair]], repetitions: int, report: Callable[[str], None]
) -> dict[str, list[Pair]]:
    """All in turn, each round in another order, so that a slow moment of the machine affects all of them alike."""
    contenders = dict(runs)
    found: dict[str, list[Pair]] = {name: [] for name in runs}
    spent = dict.fromkeys(runs, 0.0)
    shuffle = random.Random(0).shuffle
    while contenders:
        order = list(contenders.items())
        shuffle(order)
        for name, run in order:
            started = time.perf_counter()
            found[name].append(run())
            spent[name] += time.perf_counter() - started
            least = LEAST_BASELINE if name in OTHERS else LEAST
            if len(found[name]) >= repetitions or (spent[name] >= BUDGET and len(found[name]) >= least):
                del contenders[name]
                report(name)
    return found


def crossovers(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """From which length on each bounded decoder is faster than each of the others, in words."""
    titles = {method.name: method.title for method in METHODS}
    for method in METHODS:
        if method.control is None:
            continue
        ours = sorted((row for row in rows if row.method == method.name), key=lambda row: row.tokens)
        for other in OTHERS:
            ratios = [(row.tokens, ratio) for row in ours if (ratio := getattr(row, f"ratio_{other}")) is not None]
            if ratios:
                yield f"{method.title} against {titles[other]}", crossover(ratios)


def crossover(ratios: Sequence[tuple[int, float]]) -> str:
    """`ratios`: length, and how many times as fast; between lengths both are taken to grow by a power."""
    (shortest, at_shortest), (longest, at_longest) = ratios[0], ratios[-1]
    ends = f"{at_shortest:.2f} times as fast at {shortest:,} tokens, {at_longest:.2f} at {longest:,}"
    slower = [index for index, (_, ratio) in enumerate(ratios) if ratio < 1]
    if not slower:
        return f"faster at every length: {ends}"
    if slower[-1] == len(ratios) - 1:
        return f"not faster up to {longest:,} tokens: {ends}"
    (below, low), (above, high) = ratios[slower[-1]], ratios[slower[-1] + 1]
    share = -math.log(low) / (math.log(high) - math.log(low))
    length = math.exp(math.log(below) + share * (math.log(above) - math.log(below)))
    return f"faster from about {float(f'{length:.2g}'):,.0f} tokens on: {ends}"
