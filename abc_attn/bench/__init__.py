"""The benchmarks of `abc-attn bench`. benchmarks/README.md says how they measure, and why so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abc_attn import Memory, mlp_attention
from abc_attn.allocator import give_back_memory, keep_freed_memory
from abc_attn.bench.encoding import encode_model
from abc_attn.bench.generation import generate
from abc_attn.bench.measure import (
    BASELINES,
    GATES,
    METHODS,
    Work,
    available_bytes,
    check,
    check_fit,
    does_not_fit,
    error,
    interleave,
    peak_memory,
    runner,
)
from abc_attn.bench.peers import peer
from abc_attn.bench.report import Report, Row, compare_rows, facts_of, load_average, save, table_text
from abc_attn.bench.translation import translate
from abc_attn.progress import Progress
from abc_attn.provenance import backends

CHECKED_TOKENS = 32768  # longer sequences are checked at this length: the fp64 oracle is slow
LONGEST_CALL = 15.0  # seconds: `scaling` leaves out a baseline at lengths where one call is expected to take longer
PREFILL = 1024  # tokens at a time
ALONE = 600  # repetitions of a step at every context, without the baselines (a minute); medians of 150 vary by 6 %

Outcome = tuple[list[Row], Mapping[str, float | str]]


def compare(works: Sequence[Work], repetitions: int, report: Callable[[str], None], skip: dict[Work, str]) -> list[Row]:
    """The rows of works that are timed together: each is checked, then its peak memory measured, then the times.

    `skip` gives the reasons for which some are not measured. `report` is called three times for each work.
    """
    give_back_memory()
    rows = {work: Row.of(work) for work in works}
    runs = {}
    for work, row in rows.items():
        row.note = skip.get(work) or does_not_fit(work) or ""
        if not row.note:
            run = runner(work)
            if work.ours:
                checked = replace(work, tokens=min(work.tokens, CHECKED_TOKENS))
                row.passes(check(checked, run if checked == work else runner(checked)))
            if not row.note:
                runs[work] = run
        report(f"check of {_name(row)}")
    for work, row in rows.items():
        if work in runs:
            row.peak_bytes = peak_memory(work)
            row.note = "" if row.peak_bytes is not None else "the process that measures memory was killed"
        report(f"memory of {_name(row)}")
    times, sgemm = interleave(runs, repetitions, lambda work: report(f"time of {_name(rows[work])}"))
    for work, row in rows.items():
        if work in times:
            row.fill(times[work], work.flops, sgemm)
        else:
            report(f"time of {_name(row)}")
    compare_rows(list(rows.values()))
    return list(rows.values())


def _name(row: Row) -> str:
    return f"{row.label}, {row.tokens:,} tokens, {row.phase}"


def _backends() -> list[str]:
    """Ours, the fastest first, without the reference, which is a loop over tokens."""
    return [name for name, available, _ in backends() if available and name != "reference"]


def op(tokens: list[int], slots: list[int], width: int, heads: int, repetitions: int) -> Outcome:
    """Causal attention, forward and forward + backward, over tokens; 4,096 tokens at least in every batch."""
    groups = []
    for backward in (False, True):
        for t in tokens:
            size: dict[str, Any] = {"batch": max(1, 4096 // t), "heads": heads, "tokens": t, "width": width}
            ours = [Work(backend, slots=n, backward=backward, **size) for backend in _backends() for n in slots]
            ours += [replace(work, gate=gate) for work in ours if work.slots == slots[0] for gate in GATES]
            groups.append([*ours, *(Work(name, backward=backward, **size) for name in BASELINES)])
            check_fit(ours)
    with Progress("bench op", 3 * sum(map(len, groups))) as progress:
        return [row for works in groups for row in compare(works, repetitions, progress, {})], {}


def encode(tokens: int, slots: list[int], width: int, heads: int, batch: int, repetitions: int) -> Outcome:
    """Non-causal attention of an encoder: write every token, then read; forward and forward + backward."""
    groups = []
    for backward in (False, True):
        size: dict[str, Any] = {"batch": batch, "heads": heads, "tokens": tokens, "width": width, "causal": False}
        ours = [Work(name, slots=n, backward=backward, **size) for name in ("mlp", "linformer") for n in slots]
        groups.append([*ours, *(Work(name, backward=backward, **size) for name in BASELINES)])
        check_fit(ours)
    with Progress("bench encode", 3 * sum(map(len, groups))) as progress:
        return [row for works in groups for row in compare(works, repetitions, progress, {})], {}


def scaling(tokens: list[int], slots: int, width: int, heads: int, repetitions: int) -> Outcome:
    """How time and peak memory of causal attention, forward + backward, grow with the tokens of one sequence."""
    tokens = sorted(tokens)
    methods = (_backends()[0], *BASELINES)
    works = [
        Work(method, 1, heads, t, width, None if method in BASELINES else slots, backward=True)
        for method in methods
        for t in tokens
    ]
    check_fit(works)
    with Progress("bench scaling", 3 * len(works)) as progress:
        rows = compare(works, repetitions, progress, _too_slow(works))
    found = {(row.method, row.tokens): row for row in rows}
    for row in rows:
        quarter = found.get((row.method, row.tokens // 4)) if row.tokens % 4 == 0 else None
        if quarter and row.seconds and quarter.seconds:
            row.growth = row.seconds / quarter.seconds
        if quarter and row.peak_bytes and quarter.peak_bytes:
            row.peak_growth = row.peak_bytes / quarter.peak_bytes
    grown = [row.growth for row in rows if row.method == methods[0] and row.growth]
    return rows, {f"largest time(4t) / time(t) of {methods[0]}": max(grown)} if grown else {}


def _too_slow(works: Sequence[Work]) -> dict[Work, str]:
    """Works of the baselines that would take too long, if time grows with the square of t. Works come in order of t."""
    skipped: dict[Work, str] = {}
    last: dict[str, tuple[int, float]] = {}
    for work in works:
        if work.ours or does_not_fit(work):
            continue
        t, seconds = last.get(work.method, (work.tokens, 0.0))
        expected = seconds * (work.tokens / t) ** 2
        if expected > LONGEST_CALL:
            skipped[work] = f"skipped: one call would take about {expected:.0f} s"
            continue
        run = runner(work)
        started = time.perf_counter()
        run()
        last[work.method] = work.tokens, time.perf_counter() - started
    return skipped


@torch.inference_mode()
def decode(contexts: list[int], slots: int, width: int, heads: int, batch: int, repetitions: int) -> Outcome:
    """One step of decoding at each context: the memory's state against a key/value cache allocated once."""
    contexts = sorted(contexts)
    works = [
        Work(method, batch, heads, context, width, None if method in BASELINES else slots)
        for context in contexts
        for method in ("mlp", *BASELINES)
    ]
    check_fit([replace(works[0], tokens=PREFILL)])
    rows = {work: Row.of(work) for work in works}
    runs: dict[Work, Callable[[], Tensor]] = {}
    with Progress("bench decode", 2 * len(contexts) + len(works)) as progress:
        states = _states(contexts, slots, width, heads, batch)
        q, k, v = (torch.randn(batch, heads, 1, width) for _ in range(3))
        logits = torch.randn(batch, heads, 1, slots)
        first = q[:1].double(), k[:1].double(), v[:1].double(), logits[:1].double()
        for context in contexts:
            mlp, *baselines = (work for work in works if work.tokens == context)
            state, exact = next(states)
            run = _mlp_step(q, k, v, logits, state)
            expected, _ = mlp_attention(*first, exact, backend="reference")
            if rows[mlp].passes(error(run()[:1], expected)):
                runs[mlp] = run
                rows[mlp].state_bytes = sum(part.untyped_storage().nbytes() for part in (*state[0], state[1]))
            needed = 2 * batch * heads * context * width * 4
            fits = needed <= available_bytes()
            cache = _cache(batch, heads, context, width) if fits else None
            for work in baselines:
                if cache is None:
                    rows[work].note = f"skipped: a cache of {needed / 1e9:.3g} GB does not fit"
                    progress(f"time of {_name(rows[work])}")
                else:
                    runs[work] = _cache_step(work, q, k, v, cache)
                    rows[work].state_bytes = needed
            if mlp not in runs:
                progress(f"time of {_name(rows[mlp])}")
            progress(f"check and cache of {context:,} tokens")
        times, sgemm = interleave(runs, repetitions, lambda work: progress(f"time of {_name(rows[work])}"))
        # Ours once more by themselves: beside baselines of half a second there are few repetitions, far apart.
        ours = {work: run for work, run in runs.items() if work.ours}
        alone, _ = interleave(
            ours, max(repetitions, ALONE), lambda work: progress(f"{_name(rows[work])} by itself"), budget=60
        )
    for work, taken in alone.items():
        rows[work].seconds_alone = taken.median
    for work, taken in times.items():
        rows[work].fill(taken, replace(work, tokens=1).flops, sgemm)
        rows[work].seconds_per_token = taken.median / batch
    compare_rows(list(rows.values()))
    flat = [taken.median for taken in alone.values()]
    return list(rows.values()), {"slowest / fastest context of mlp, by itself": max(flat) / min(flat)} if flat else {}


State = tuple[Memory, Tensor] | None


def _states(contexts: Sequence[int], slots: int, width: int, heads: int, batch: int) -> Any:
    """For each context, the state one token before it; and that of the first sequence, computed in fp64 throughout."""
    generator = torch.Generator().manual_seed(0)
    # The same chunk again and again: its content does not matter, and the whole context would not fit into memory.
    sizes = (width, width, width, slots)
    chunk = [torch.randn(batch, heads, PREFILL, size, generator=generator) for size in sizes]  # q, k, v, logits
    state: State = None
    exact: State = None
    written = 0
    for context in contexts:
        while written < context - 1:
            count = min(PREFILL, context - 1 - written)
            q, k, v, logits = (x[:, :, :count] for x in chunk)
            _, state = mlp_attention(q, k, v, logits, state)
            q, k, v, logits = (x[:1].double() for x in (q, k, v, logits))
            _, exact = mlp_attention(q, k, v, logits, exact, backend="torch")
            written += count
        yield state, exact


def _mlp_step(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, state: State) -> Callable[[], Tensor]:
    """Every call continues from the state before, as decoding does; the first is the step at the context itself. The
    state is a copy of our own, so it may be written in place, as the cache of the baselines is."""
    if state is not None:
        memory, log_total = state
        state = Memory(*(part.clone() for part in memory)), log_total.clone()

    def step() -> Tensor:
        nonlocal state
        out, state = mlp_attention(q, k, v, logits, state, in_place=True)
        return out

    return step


def _cache(batch: int, heads: int, context: int, width: int) -> Tensor:
    """Keys and values, 2 b h t d, filled: pages never written share one physical page, which is read too fast."""
    chunk = torch.randn(2, batch, heads, min(context, PREFILL), width)
    cache = torch.empty(2, batch, heads, context, width)
    for start in range(0, context, PREFILL):
        part = cache[..., start : start + PREFILL, :]
        part.copy_(chunk[..., : part.shape[-2], :])
    return cache


def _cache_step(work: Work, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Callable[[], Tensor]:
    """Write the token at its position, read the whole prefix: one query sees every key, so no mask is needed."""
    keys, values = cache
    attend = METHODS[work.method]
    whole = replace(work, causal=False)

    def step() -> Tensor:
        keys[:, :, work.tokens - 1 : work.tokens] = k
        values[:, :, work.tokens - 1 : work.tokens] = v
        return attend(whole, q, keys[:, :, : work.tokens], values[:, :, : work.tokens])

    return step


BENCHMARKS: dict[str, Callable[..., Outcome]] = {
    "op": op,
    "decode": decode,
    "encode": encode,
    "scaling": scaling,
    "generate": generate,
    "peer": peer,
    "translate": translate,
    "encode-model": encode_model,
}


def run_bench(name: str, options: dict[str, Any], output: Path | None) -> bool:
    """Run one benchmark with its options, print the table, write files into `output`; False if a check failed."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)  # fails now, not after minutes of measuring
    keep_freed_memory()
    facts, started = facts_of(name, options, output), time.monotonic()
    once = {
        option: list(dict.fromkeys(value)) if isinstance(value, list) else value for option, value in options.items()
    }
    if once.pop("peer", None):  # another question about the same models: one sequence, and no other cache
        name = "peer"
        once = {option: once[option] for option in ("control", "contexts", "tokens", "repetitions")}
    rows, summary = BENCHMARKS[name](**once)
    facts |= {"load_average_end": load_average(), "seconds": round(time.monotonic() - started, 1)}
    report = Report(name, rows, summary, facts)
    print(table_text(report))
    if output is not None:
        written = save(report, output)
        print(f"\nwritten: {', '.join(map(str, written))}")
        if len(written) < 3:
            print("no plot: matplotlib is not installed (pip install 'abc-attn[bench]')")
    if report.failed:
        print("\nno figures for the rows whose check failed")
    return not report.failed
