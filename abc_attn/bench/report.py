"""What a benchmark reports: the table, JSON with its provenance, Markdown, plots."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from abc_attn import provenance
from abc_attn.bench.measure import BASELINES, SGEMM_SIZE, TOLERANCE, Times, Work
from abc_attn.files import whole_file

FORWARD, BACKWARD = "forward", "forward + backward"
GENERATING = ("bounded", "dynamic", "preallocated")  # the caches of `generate`
PEERS = ("int8_compiled", "fp32_compiled", "fp32", "llama_cpp")  # of `generate --peer`
NAMES = {"sdpa": "SDPA", "eager": "eager softmax", "dynamic": "DynamicCache", "preallocated": "preallocated"}
NAMES |= {"int8_compiled": "int8, compiled", "fp32_compiled": "fp32, compiled", "llama_cpp": "llama.cpp, Q4_1"}


@dataclass
class Row:
    """One method at one size. What was not measured is None, and `note` says why; ratios above 1 are in our favour."""

    method: str
    phase: str  # FORWARD or BACKWARD
    batch: int
    heads: int
    tokens: int  # decoding: the context
    width: int
    slots: int | None
    gate_error: float | None = None  # of the check before the figures; recorded results have it under this name
    seconds: float | None = None  # the median
    quartiles: tuple[float, float] | None = None
    repetitions: int = 0
    ratio_sdpa: float | None = None  # SDPA's time / this one
    ratio_eager: float | None = None
    ratio_dynamic: float | None = None  # generate: the same, to a DynamicCache
    ratio_preallocated: float | None = None
    ratio_llama_cpp: float | None = None  # generate --peer: the same, to llama.cpp
    ratio_fp32: float | None = None  # ... and to ours uncompiled
    gflops: float | None = None
    sgemm_gflops: float | None = None  # measured beside this row
    sgemm_share: float | None = None
    peak_bytes: int | None = None
    peak_ratio_sdpa: float | None = None  # SDPA's peak / this one
    peak_ratio_eager: float | None = None
    peak_ratio_dynamic: float | None = None
    peak_ratio_preallocated: float | None = None
    seconds_per_token: float | None = None  # decoding: a step's time / batch
    seconds_alone: float | None = None  # decoding: of ours in turn at all contexts, without the baselines
    tokens_per_second: float | None = None  # generate: of the whole batch
    state_bytes: int | None = None  # decoding: of the whole batch
    state_ratio: float | None = None  # generate: bytes of all keys and values / these
    growth: float | None = None  # scaling: time / time at a quarter of the tokens
    peak_growth: float | None = None
    note: str = ""
    gate: str = ""  # of measure.GATES
    gate_cost: float | None = None  # its time / the same without a gate

    @classmethod
    def of(cls, work: Work) -> Self:
        phase = BACKWARD if work.backward else FORWARD
        sizes = (work.batch, work.heads, work.tokens, work.width, work.slots)
        return cls(work.method, phase, *sizes, gate=work.gate)

    @property
    def label(self) -> str:
        label = NAMES.get(self.method, self.method) + (f", n={self.slots}" if self.slots else "")
        if self.gate:
            label += ", slots" if self.gate == "slots" else f", gate={self.gate}"
        return label + (f", b={self.batch}" if self.method in GENERATING else "")

    def passes(self, error: float) -> bool:
        """Whether a figure may be shown; if not, the note says so."""
        self.gate_error = error if math.isfinite(error) else None  # JSON has no infinity or NaN
        if not error < TOLERANCE:  # a NaN fails too
            self.note = f"CHECK FAILED: error {error:.1e}, {TOLERANCE:.0e} is allowed"
        return not self.note

    def fill(self, times: Times, flops: int | None, sgemm: float) -> None:
        """Enter what was measured; `sgemm` in flops per second."""
        self.seconds, self.quartiles, self.repetitions = times.median, times.quartiles, len(times.seconds)
        self.sgemm_gflops = sgemm / 1e9
        if flops:
            self.gflops, self.sgemm_share = flops / times.median / 1e9, flops / times.median / sgemm


def compare_rows(rows: Sequence[Row], baselines: Sequence[str] = BASELINES) -> None:
    """Enter the ratios to the baselines of the same size and phase, and to the same method without a gate."""
    found = {(row.method, row.phase, row.tokens, row.batch): row for row in rows if not row.gate}
    plain = {(row.method, row.phase, row.tokens, row.batch, row.slots): row for row in rows if not row.gate}
    for row in rows:
        same = plain.get((row.method, row.phase, row.tokens, row.batch, row.slots))
        if row.gate and row.seconds and same is not None and same.seconds:
            row.gate_cost = row.seconds / same.seconds
        for baseline in baselines:
            other = found.get((baseline, row.phase, row.tokens, row.batch))
            if other is None:
                continue
            if row.seconds and other.seconds:
                setattr(row, f"ratio_{baseline}", other.seconds / row.seconds)
            if row.peak_bytes and other.peak_bytes:
                setattr(row, f"peak_ratio_{baseline}", other.peak_bytes / row.peak_bytes)


@dataclass
class Report:
    """The rows of one benchmark, and their summary."""

    name: str
    rows: list[Row]
    summary: Mapping[str, float | str]
    provenance: dict[str, Any]

    @property
    def failed(self) -> bool:
        return any(row.note.startswith("CHECK FAILED") for row in self.rows)


# Where the figures come from.


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes, to two places."""
    return [round(load, 2) for load in os.getloadavg()]


def facts_of(name: str, options: dict[str, Any], output: Path | None) -> dict[str, Any]:
    """What is needed to get these figures again and to judge them (the load must have been low)."""
    threads = torch.get_num_threads()
    return {
        "command": provenance.command(f"bench {name}", options | {"threads": threads, "output": output}),
        "date": provenance.now(),
        "cpu": provenance.cpu(),
        "threads": threads,
        "backend": next(f"{name} {text}" for name, available, text in provenance.backends() if available),
        "versions": {
            "abc-attn": provenance.installed("abc-attn"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "commit": provenance.commit(),
        "sgemm_size": SGEMM_SIZE,
        "load_average_start": load_average(),
    }


# The table.


def span(seconds: float) -> str:
    """A time with three figures and its unit."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("µs", 1e-6))
    return f"{float(f'{seconds / size:.3g}'):,g} {unit}"


def times(ratio: float) -> str:
    """A ratio with three figures."""
    return f"{float(f'{ratio:.3g}'):,g}x"


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


# Heading, the field of a row, and how its value is written.
Column = tuple[str, str, Callable[[Any], str]]

WHICH: list[Column] = [("tokens", "tokens", "{:,}".format), ("method", "label", str)]
PHASE: list[Column] = [("pass", "phase", str)]
TIME: list[Column] = [
    ("time", "seconds", span),
    ("quartiles", "quartiles", lambda pair: " to ".join(map(span, pair))),
    ("repetitions", "repetitions", str),
    ("speed / SDPA", "ratio_sdpa", times),
    ("speed / eager", "ratio_eager", times),
]
RATE: list[Column] = [("GFLOP/s", "gflops", "{:.1f}".format), ("of sgemm", "sgemm_share", "{:.0%}".format)]
PEAK: list[Column] = [
    ("peak memory", "peak_bytes", megabytes),
    ("SDPA's / it", "peak_ratio_sdpa", times),
    ("eager's / it", "peak_ratio_eager", times),
]
CHECK: list[Column] = [("error", "gate_error", "{:.0e}".format), ("note", "note", str)]
COLUMNS: dict[str, list[Column]] = {
    "op": [*PHASE, *WHICH, *TIME, ("time / no gate", "gate_cost", times), *RATE, *PEAK, *CHECK],
    "decode": [
        ("context", "tokens", "{:,}".format),
        ("method", "label", str),
        *TIME,
        ("per token", "seconds_per_token", span),
        ("by itself", "seconds_alone", span),
        *RATE,
        ("state", "state_bytes", megabytes),
        *CHECK,
    ],
    "generate": [
        ("context", "tokens", "{:,}".format),
        ("method", "label", str),
        ("tokens/s", "tokens_per_second", "{:.1f}".format),
        *TIME[:3],
        ("speed / DynamicCache", "ratio_dynamic", times),
        ("speed / preallocated", "ratio_preallocated", times),
        ("state", "state_bytes", megabytes),
        ("keys and values / it", "state_ratio", times),
        ("peak memory", "peak_bytes", megabytes),
        ("DynamicCache's / it", "peak_ratio_dynamic", times),
        ("preallocated's / it", "peak_ratio_preallocated", times),
        *CHECK,
    ],
    "translate": [
        ("length", "tokens", "{:,}".format),
        ("method", "label", str),
        ("tokens/s", "tokens_per_second", "{:,.0f}".format),
        ("a step", "seconds", span),
        *TIME[1:3],
        ("at the start", "seconds_start", span),
        ("at the end", "seconds_end", span),
        ("source read in", "seconds_reading", span),
        ("tokens/s with it", "tokens_per_second_whole", "{:,.0f}".format),
        ("speed / DynamicCache", "ratio_dynamic", times),
        ("/ StaticCache", "ratio_static", times),
        ("/ preallocated", "ratio_preallocated", times),
        ("/ CTranslate2 fp32", "ratio_ctranslate2", times),
        ("/ int8", "ratio_ctranslate2_int8", times),
        ("state", "state_bytes", megabytes),
        ("peak memory", "peak_bytes", megabytes),
        ("DynamicCache's / it", "peak_ratio_dynamic", times),
        ("same tokens", "same_tokens", "{:.0%}".format),
        *CHECK,
    ],
    "encode-model": [
        ("batch", "batch", str),
        *WHICH,
        ("tokens/s", "tokens_per_second", "{:,.0f}".format),
        *TIME,
        ("paper's speed", "paper_speed", times),
        ("peak memory", "peak_bytes", megabytes),
        ("memory / SDPA's", "memory_sdpa", times),
        ("memory / eager's", "memory_eager", times),
        ("paper's memory", "paper_memory", times),
        ("attention's share", "attention_share", "{:.0%}".format),
        *CHECK,
    ],
    "peer": [
        ("context", "tokens", "{:,}".format),
        ("method", "label", str),
        ("tokens/s", "tokens_per_second", "{:.1f}".format),
        *TIME[:3],
        ("speed / llama.cpp", "ratio_llama_cpp", times),
        ("speed / fp32", "ratio_fp32", times),
        ("state", "state_bytes", megabytes),
        *CHECK,
    ],
    "encode": [*PHASE, *WHICH, *TIME, *RATE, *PEAK, *CHECK],
    "scaling": [
        *WHICH,
        *TIME,
        ("time / time(t/4)", "growth", times),
        *PEAK,
        ("peak / peak(t/4)", "peak_growth", times),
        *CHECK,
    ],
}


def cells(report: Report) -> list[list[str]]:
    """The table, headings first; a dash where nothing was measured."""
    columns = COLUMNS[report.name]
    table = [[heading for heading, _, _ in columns]]
    for row in report.rows:
        values = [(getattr(row, field), text) for _, field, text in columns]
        table.append(["-" if value is None else text(value) for value, text in values])
    return table


def table_text(report: Report) -> str:
    """The table for a terminal."""
    table = cells(report)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for line in table:
        aligned = [
            cell.ljust(width) if heading in ("pass", "method", "note") else cell.rjust(width)
            for heading, cell, width in zip(table[0], line, widths, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join([*lines, *summary_lines(report)])


def markdown(report: Report) -> str:
    """The table and where it comes from, to be included in a page."""
    head, *body = cells(report)
    rule = ["---" if heading in ("pass", "method", "note") else "---:" for heading in head]
    lines = ["| " + " | ".join(line) + " |" for line in (head, rule, *body)]
    facts = report.provenance
    source = (
        f"`{facts['command']}`, {facts['date']}, {facts['cpu']}, {facts['threads']} threads, "
        f"torch {facts['versions']['torch']}, commit {facts['commit'] or 'unknown'}, "
        f"load average {facts['load_average_start'][0]} before and {facts['load_average_end'][0]} after, "
        f"{facts['seconds']:.0f} s in all."
    )
    return "\n\n".join(["\n".join(lines), *summary_lines(report), source]) + "\n"


def summary_lines(report: Report) -> list[str]:
    found = report.summary.items()
    return [f"{name}: {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in found]


# Files.


def save(report: Report, folder: Path) -> list[Path]:
    """Write a report's JSON, Markdown and plot; returns what was written."""
    content = {
        "benchmark": report.name,
        "provenance": report.provenance,
        "summary": dict(report.summary),
        "rows": [asdict(row) for row in report.rows],
    }
    return save_files(folder, report.name, content, markdown(report), partial(draw, report))


def save_files(
    folder: Path, name: str, content: Mapping[str, Any], page: str, draw_on: Callable[[Any], None]
) -> list[Path]:
    """Write JSON, Markdown and, where matplotlib is installed, a plot; returns what was written."""
    written = [folder / f"{name}.json", folder / f"{name}.md"]
    texts = json.dumps(content, indent=2, allow_nan=False) + "\n", page
    for path, text in zip(written, texts, strict=True):
        with whole_file(path) as temporary:
            Path(temporary).write_text(text, encoding="utf-8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return written
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    draw_on(figure)
    picture = folder / f"{name}.png"
    with whole_file(picture) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return [*written, picture]


def draw(report: Report, figure: Any) -> None:
    """The plot of a benchmark, on two axes."""
    left, right = figure.subplots(1, 2)
    if report.name == "op":
        for axes, phase in ((left, FORWARD), (right, BACKWARD)):
            rows = [row for row in report.rows if row.phase == phase and row.method != "sdpa"]
            _lines(axes, rows, "ratio_sdpa", f"{phase}: speed relative to SDPA")
            axes.axhline(1, color="black", linewidth=1)
    elif report.name == "decode":
        _lines(left, report.rows, "seconds", "seconds of one step")
        _lines(right, report.rows, "state_bytes", "bytes of state")
        for axes in (left, right):
            axes.set_xlabel("context, tokens")
    elif report.name == "generate":
        _lines(left, report.rows, "tokens_per_second", "tokens per second")
        _lines(right, report.rows, "peak_bytes", "peak memory beyond the weights, bytes")
        for axes in (left, right):
            axes.set_xlabel("context, tokens")
    elif report.name == "translate":
        _lines(left, report.rows, "tokens_per_second", "decoding speed, tokens per second")
        _lines(right, report.rows, "peak_bytes", "peak memory beyond the weights, bytes")
        for axes in (left, right):
            axes.set_xlabel("length of source and target, tokens")
    elif report.name == "encode-model":
        _lines(left, report.rows, "ratio_sdpa", "speed relative to SDPA")
        _lines(right, report.rows, "memory_sdpa", "peak memory relative to SDPA's")
    elif report.name == "peer":
        _lines(left, report.rows, "tokens_per_second", "tokens per second, one sequence")
        _lines(right, report.rows, "state_bytes", "bytes of state")
        for axes in (left, right):
            axes.set_xlabel("context, tokens")
    elif report.name == "encode":
        _bars(left, report.rows, "ratio_sdpa", "speed relative to SDPA")
        _bars(right, report.rows, "peak_bytes", "peak memory, bytes")
    else:
        _lines(left, report.rows, "seconds", "seconds, forward + backward")
        _lines(right, report.rows, "peak_bytes", "peak memory, bytes")
    threads = report.provenance["threads"]
    figure.suptitle(f"abc-attn bench {report.name}: {report.provenance['cpu']}, {threads} threads", fontsize=10)


def _lines(axes: Any, rows: Sequence[Row], field: str, title: str) -> None:
    """One line for each method, over tokens, both axes logarithmic."""
    for number, label in enumerate(dict.fromkeys(row.label for row in rows)):
        points = [(row.tokens, getattr(row, field)) for row in rows if row.label == label and getattr(row, field)]
        if points:  # markers differ as well as colours, so that the lines can be told apart without colour
            axes.plot(*zip(*points, strict=True), marker="osD^vPX*"[number % 8], label=label)
    axes.set(title=title, xlabel="tokens", xscale="log", yscale="log")
    ticks = sorted({row.tokens for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(True, which="major", alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)


def _bars(axes: Any, rows: Sequence[Row], field: str, title: str) -> None:
    """One bar for each method and pass."""
    shown = [row for row in rows if getattr(row, field)]
    names = [f"{row.label}, {row.phase}" for row in shown]
    colours = ["C0" if row.phase == FORWARD else "C1" for row in shown]
    axes.barh(names, [getattr(row, field) for row in shown], color=colours)
    axes.invert_yaxis()
    axes.set(title=title)
    axes.grid(True, axis="x", alpha=0.3)
