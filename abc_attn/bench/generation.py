"""The benchmark `generate`: a pretrained model, converted, against the original under transformers' generate()."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from abc_attn.bench.measure import Times, Work, available_bytes, error, interleave, peak_of_process
from abc_attn.bench.report import GENERATING, Row, compare_rows
from abc_attn.progress import Progress


def generate(
    model: Path | None, control: str, contexts: list[int], batches: list[int], tokens: int, repetitions: int
) -> tuple[list[Row], dict[str, float]]:
    """Steps of generate() from a full cache, at each context and batch: tokens per second and memory."""
    from abc_attn.bench import models as caches  # brings transformers

    caches.check_control(control)
    contexts = sorted(contexts)
    rows: list[Row] = []
    steps = 3 + 2 * len(GENERATING) * len(contexts) * len(batches)
    with TemporaryDirectory() as name, Progress("bench generate", steps) as progress:
        folder = Path(name)
        original = caches.load_original(model)
        original.save_pretrained(folder / "model")  # every process that measures memory loads it from here
        progress("the model")
        models: dict[str, Any] = {
            method: caches.prepare(method, copy.deepcopy(original), control) for method in GENERATING
        }
        caches.check_fit(models["bounded"], contexts, batches, tokens)
        slots = models["bounded"].controls["self"].slots
        at_first = error(*caches.check_against_original(original, models["bounded"]))
        del original
        progress("check against the original")
        states = caches.read_and_check(models["bounded"], contexts, folder)
        progress(f"{max(contexts):,} tokens")
        config: Any = models["bounded"].config
        for batch in batches:
            size: dict[str, Any] = {"batch": batch, "heads": config.num_attention_heads, "width": config.head_dim}
            for context in contexts:
                state, check = states[context]
                ours = Work("bounded", tokens=context, slots=slots, **size)
                works = [ours, *(Work(method, tokens=context, **size) for method in GENERATING[1:])]
                errors = torch.tensor([at_first, error(*check)])
                rows += _compare(works, errors.max().item(), models, state, control, tokens, repetitions, progress)
    compare_rows(rows, GENERATING[1:])
    return rows, {"bytes of the weights": sum(p.nbytes for p in models["bounded"].parameters())}


def _compare(
    works: Sequence[Work],
    checked_error: float,
    models: dict[str, Any],
    state: Path,
    control: str,
    tokens: int,
    repetitions: int,
    report: Callable[[str], None],
) -> list[Row]:
    """The rows of one batch and context: checked, then peak memory, then the times in turn."""
    from abc_attn.bench import models as caches
    from abc_attn.hf import state_bytes

    rows = {work: Row.of(work) for work in works}
    runs: dict[Work, Callable[[], object]] = {}
    for work, row in rows.items():
        name = f"{row.label}, {row.tokens:,} tokens"
        whole = caches.bytes_of_keys_and_values(models[work.method], work.batch, work.tokens)
        if work.ours:
            row.passes(checked_error)
        elif 3 * whole > available_bytes():  # both baselines', and what a step copies
            row.note = f"skipped: keys and values of {whole / 1e9:.3g} GB do not fit"
        if not row.note:
            size = (work.method, work.batch, work.tokens, tokens, state)
            row.peak_bytes = peak_of_process(caches.ready, state.parent / "model", control, *size)
            run, cache = caches.generation(models[work.method], *size)
            row.state_bytes = state_bytes(cache) if work.ours else whole
            row.state_ratio = whole / row.state_bytes
            runs[work] = run
        report(f"memory of {name}")
    times, sgemm = interleave(runs, repetitions, lambda work: report(f"time of {rows[work].label}"))
    for work, row in rows.items():
        if work in times:
            row.fill(Times([seconds / tokens for seconds in times[work].seconds]), None, sgemm)
            row.tokens_per_second = work.batch * tokens / times[work].median
        else:
            report(f"time of {row.label}")
    return list(rows.values())
