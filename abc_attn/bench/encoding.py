"""The benchmark `encode-model`: whole encoders, exact and bounded, as in the paper's Table 4; and over lengths."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from abc_attn.allocator import give_back_memory
from abc_attn.bench.measure import Work, available_bytes, interleave, peak_of_process
from abc_attn.bench.report import NAMES, Row, compare_rows
from abc_attn.memory_limit import FLOAT, check_fits, in_words
from abc_attn.progress import Progress

if TYPE_CHECKING:
    from abc_attn.bench.encoders import Shape

# By control and slots: speed and memory relative to the base model at 16 x 512 tokens, on a V100.
PAPER = {
    ("sdpa", None): (1.0, 1.0),
    ("linformer", 64): (1.7, 0.5),
    ("linformer", 128): (1.5, 0.6),
    ("mlp", 64): (1.5, 0.5),
    ("mlp", 128): (1.3, 0.6),
}
PAPER_SIZE = (16, 512)
EXACT = ("sdpa", "eager")
NONE = "none"  # attention that computes nothing
TITLES = {"sdpa": NAMES["sdpa"], "eager": NAMES["eager"], NONE: "no attention"}


@dataclass
class EncoderRow(Row):
    """One model at one size. `memory_sdpa` and `memory_eager`: its peak / theirs, as the paper has it."""

    title: str = ""
    memory_sdpa: float | None = None
    memory_eager: float | None = None
    paper_speed: float | None = None
    paper_memory: float | None = None
    attention_share: float | None = None  # of the time: what is left out where attention computes nothing

    @property
    def label(self) -> str:
        return self.title


class Contender(NamedTuple):
    """One model."""

    title: str
    method: str  # of EXACT, NONE, or its control
    slots: int | None
    source: Any  # what a process that measures memory makes it from: a Shape, or a folder
    model: Any


def encode_model(
    model: list[Path] | None,
    tokens: list[int],
    slots: list[int],
    batch: int,
    layers: int,
    width: int,
    heads: int,
    words: int,
    repetitions: int,
) -> tuple[list[Row], dict[str, float | str]]:
    """A whole encoder: `batch` texts of the shortest length, and one text of each longer one."""
    from abc_attn.bench import encoders  # brings transformers

    lengths = sorted(tokens)
    if model is None:
        if width % heads:
            raise ValueError(f"--heads {heads} must divide --width {width}")
        shape = encoders.Shape(layers, width, heads, words, max(lengths))
        kinds = len(TITLES) + 2 * len(slots)
        check_fits(f"{kinds} models of {layers} layers and width {width}", kinds * shape.nbytes)
        _check_batch(lengths, batch, width)
        contenders = _random(shape, slots)
    else:
        contenders = _saved(model, max(lengths))
        config = contenders[0].model.config
        width, heads = config.hidden_size, config.num_attention_heads
        _check_batch(lengths, batch, width)
    print("bench encode-model: about 12 minutes at its default sizes on two idle cores", file=sys.stderr)
    rows: list[EncoderRow] = []
    steps = len(contenders) * (1 + 2 * len(lengths))
    with Progress("bench encode-model", steps) as progress:
        errors = {}
        for one in contenders:
            if one.method != NONE:
                errors[one.title] = encoders.check(one.model, lengths[0])
            progress(f"check of {one.title}")
        for length in lengths:
            size: dict[str, Any] = {
                "batch": batch if length == lengths[0] else 1,
                "heads": heads,
                "width": width // heads,
            }
            works = [Work(one.title, tokens=length, slots=one.slots, causal=False, **size) for one in contenders]
            skip = {} if length == lengths[0] else {"eager": "skipped: it is measured at the shortest length"}
            rows += _measure(dict(zip(works, contenders, strict=True)), errors, skip, repetitions, progress)
            give_back_memory()
    compare_rows(rows, EXACT)
    return [*rows], _compare(rows)


def _check_batch(lengths: Sequence[int], batch: int, width: int) -> None:
    """Refuse what could only fail in the middle of the run: what a layer computes from its tokens must fit."""
    tokens = max(batch * lengths[0], max(lengths))
    check_fits(
        f"a batch of {batch} texts of {lengths[0]} tokens, or one of {max(lengths)},", FLOAT * tokens * 8 * width
    )


def _random(shape: Shape, slots: Sequence[int]) -> list[Contender]:
    """RoBERTas with the same random weights."""
    from abc_attn.bench import encoders

    original = encoders.make_roberta(shape)
    kinds: list[tuple[str, str, int | None]] = [(title, method, None) for method, title in TITLES.items()]
    kinds += [(f"{name}, n={n}", name, n) for name in ("linformer", "mlp") for n in slots]
    return [
        Contender(title, method, n, shape, encoders.prepare(copy.deepcopy(original), method, n))
        for title, method, n in kinds
    ]


def _saved(folders: Sequence[Path], longest: int) -> list[Contender]:
    """The original, with each kind of exact attention, and the others as they were saved."""
    from abc_attn.bench import encoders

    others: list[tuple[str, Any]]
    (_, original), *others = encoders.load_encoders(folders, longest).items()
    found = [
        Contender(title, method, None, folders[0], encoders.prepare(copy.deepcopy(original), method, None))
        for method, title in TITLES.items()
    ]
    for folder, (name, model) in zip(folders[1:], others, strict=True):
        control = next(iter(getattr(model, "controls", {}).values()), None)
        found.append(Contender(name, name, None if control is None else control.slots, folder, model))
    return found


def _measure(
    works: Mapping[Work, Contender],
    errors: Mapping[str, float],
    skip: Mapping[str, str],
    repetitions: int,
    report: Callable[[str], None],
) -> list[EncoderRow]:
    """The rows of one size: memory, then times in turn. `skip` says of some methods why they are not measured."""
    from abc_attn.bench import encoders

    rows, runs = {}, {}
    for work, one in works.items():
        rows[work] = row = EncoderRow.of(work)
        row.method, row.title = one.method, one.title
        scores = 2 * FLOAT * work.batch * work.heads * work.tokens**2 if one.method == "eager" else 0
        if one.method in skip:
            row.note = skip[one.method]
        elif scores > available_bytes():
            row.note = f"skipped: its scores take {in_words(scores)}, and {in_words(available_bytes())} may be used"
        elif one.title not in errors or row.passes(errors[one.title]):
            row.peak_bytes = peak_of_process(encoders.ready, one.source, one.method, one.slots, work.batch, work.tokens)
            runs[work] = encoders.encode(one.model, work.batch, work.tokens)
        report(f"memory of {one.title}, {work.batch} x {work.tokens:,} tokens")
    times, sgemm = interleave(
        runs, repetitions, lambda work: report(f"time of {work.method}, {work.batch} x {work.tokens:,} tokens")
    )
    for work, row in rows.items():
        if work in times:
            row.fill(times[work], None, sgemm)
            row.tokens_per_second = work.batch * work.tokens / times[work].median
        else:
            report(f"time of {work.method}, {work.batch} x {work.tokens:,} tokens")
    return list(rows.values())


def _compare(rows: Sequence[EncoderRow]) -> dict[str, float | str]:
    """Enter what is relative to the exact models, and what the paper has; the summary says what attention takes."""
    summary: dict[str, float | str] = {}
    found = {(row.method, row.tokens): row for row in rows}
    for row in rows:
        for exact in EXACT:
            if (ratio := getattr(row, f"peak_ratio_{exact}")) is not None:
                setattr(row, f"memory_{exact}", 1 / ratio)
        if (row.batch, row.tokens) == PAPER_SIZE:
            row.paper_speed, row.paper_memory = PAPER.get((row.method, row.slots), (None, None))
        without = found.get((NONE, row.tokens))
        if row.seconds and without and without.seconds:
            row.attention_share = 1 - without.seconds / row.seconds
            if row.method == "sdpa":
                summary[f"{row.batch} x {row.tokens:,} tokens: attention is this share of SDPA's time"] = (
                    f"{row.attention_share:.0%}; without any attention it would be "
                    f"{row.seconds / without.seconds:.2f} times as fast"
                )
    return summary
