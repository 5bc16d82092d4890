"""The results of a table: runs.jsonl, a line a run, sorted by row, seed and scale."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from abc_attn.files import write_whole

RUNS = "runs.jsonl"


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """The records in a table's folder of results; none if it has none."""
    path = folder / RUNS
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a JSON object is needed, and it is a {type(record).__name__}")
        if missing := {"row", "seed", "scale", "values", "scores"} - record.keys():
            raise ValueError(f"{path}, line {number}: {', '.join(sorted(missing))} missing")
        records.append(record)
    return records


def add_run(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a record, or replace that of the same run. The file is whole at any moment, also if others add to it too."""
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        runs = {_key(known): known for known in read_runs(folder)}
        runs[_key(record)] = dict(_finite(record))
        lines = (json.dumps(runs[key], allow_nan=False) + "\n" for key in sorted(runs))
        write_whole(folder / RUNS, "".join(lines))


def figures(runs: Sequence[Mapping[str, Any]], score: str) -> list[float]:
    """What runs have for a score; nothing for those that have none."""
    found = (run["scores"].get(score) for run in runs)
    return [float(figure) for figure in found if figure is not None]


def history(runs: Sequence[Mapping[str, Any]], score: str) -> dict[int, float]:
    """A score during training by the tokens trained on until then: the mean of all runs, where all were scored."""
    curves = [
        {point["tokens"]: float(point[score]) for point in run.get("training", {}).get("history", ()) if score in point}
        for run in runs
    ]
    common = set.intersection(*map(set, curves)) if curves else set()
    return {tokens: statistics.fmean(curve[tokens] for curve in curves) for tokens in sorted(common)}


def tokens_until(curve: Mapping[int, float], level: float) -> float | None:
    """How many tokens it takes until a falling curve is at `level`, on straight lines between its points."""
    before: tuple[int, float] | None = None
    for tokens, value in curve.items():
        if value <= level:
            if before is None:
                return float(tokens)
            share = (before[1] - level) / (before[1] - value)
            return before[0] + share * (tokens - before[0])
        before = tokens, value
    return None


def _key(record: Mapping[str, Any]) -> tuple[str, int, str]:
    return record["row"], record["seed"], record["scale"]


def _finite(value: Any) -> Any:
    """JSON has no infinity: it becomes the word "inf"; likewise "nan"."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two processes that train rows of one table do not write at the same time, where the system has such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
