"""The page of a table at one scale: our figures, the paper's, further tables, a plot. As Markdown, or for HTML."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from abc_attn.files import write_whole
from abc_attn.recipes import SCALES
from abc_attn.recipes.reading import read_recipe
from abc_attn.recipes.table import DOWNSTREAM_GRID, ColumnGroup, History, Table
from abc_attn.report.plots import draw, draw_history, histories
from abc_attn.report.runs import figures, read_runs, tokens_until


class Section(NamedTuple):
    """A table with its heading and what it means."""

    title: str
    text: str
    head: list[str]
    rows: list[list[str]]


def write_page(table: Table, scale: str, results: Path) -> Path:
    """Write results/<table>/<scale>.md and its plots beside it, <scale>.png; returns the path of the page."""
    runs = [run for run in read_runs(results / table.name) if run["scale"] == scale]
    page = results / table.name / f"{scale}.md"
    for name, (_, drawn) in pictures(table, scale, runs).items():
        drawn(table, by_row(table, runs), page.with_name(name))
    write_whole(page, markdown(table, scale, runs))
    return page


def pictures(table: Table, scale: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, Callable[..., None]]]:
    """The files of a table's plots: what each shows, and what draws it."""
    found: dict[str, tuple[str, Callable[..., None]]] = {}
    if table.plot:
        found[f"{scale}.png"] = table.plot["label"], draw
    if table.history is not None and histories(table, by_row(table, runs)):
        found[f"{scale}-history.png"] = table.history.label, draw_history
    return found


def markdown(table: Table, scale: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """The page as Markdown."""
    blocks = [f"# {title(table, scale)}", introduction(table, scale, runs)]
    blocks += [f"![{label}]({name})" for name, (label, _) in pictures(table, scale, runs).items()]
    for section in sections(table, runs):
        lines = [section.head, ["---"] * len(section.head), *section.rows]
        blocks += [f"## {section.title}", section.text]
        blocks.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(filter(None, blocks)) + "\n"


def title(table: Table, scale: str) -> str:
    what = table.scales.get(scale, scale)
    if not table.paper:
        return f"{table.title}: {what}"
    paper = f" (the paper: {table.scales['full']})" if scale != "full" and "full" in table.scales else ""
    return f"{table.title} at {scale} scale: {what}{paper}"


def introduction(table: Table, scale: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """What the figures mean, and which command made them."""
    sentences = [table.reading]
    for key, sentence in table.notes.items():
        found = dict.fromkeys(run["values"][key] for run in runs if run["values"].get(key) is not None)
        sentences += [sentence.format(value) for value in found]
    if parameters := sorted({run["parameters"] for run in runs if "parameters" in run}):
        sentences.append(f"The models have {' to '.join(f'{n:,}' for n in _ends(parameters))} parameters.")
    if minutes := sorted(
        round(run["training"]["seconds"] / 60) for run in runs if "seconds" in run.get("training", ())
    ):
        threads = sorted({run["machine"]["threads"] for run in runs if "threads" in run.get("machine", {})})
        with_threads = f" with {' or '.join(map(str, threads))} thread{'s' * (threads != [1])}" if threads else ""
        sentences.append(f"Training took {' to '.join(map(str, _ends(minutes)))} minutes a run{with_threads}.")
    for name, signature in dict.fromkeys(item for run in runs for item in run.get("signatures", {}).items()):
        sentences.append(f"{name}: `{signature}`.")
    if {run["row"] for run in runs} - table.paper.keys() and table.paper:
        sentences.append("Rows marked (ours) are not in the paper.")
    if any(sum(other["row"] == run["row"] for other in runs) > 1 for run in runs):
        sentences.append("Several seeds: mean (lowest to highest).")
    seeds = [sorted(run["seed"] for run in runs if run["row"] == row) for row in {run["row"] for run in runs}]
    most = max(seeds, key=len, default=[])
    short = any(one != most for one in seeds) and all(one == most[: len(one)] for one in seeds)
    fewer = " (rows with fewer seeds: the first of them)" if short else ""
    sentences.append(f"Made by `{command(table, scale, runs)}`{fewer}.")
    return "\n".join(sentences)


def command(table: Table, scale: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """What makes these runs; where rows differ in their seeds, all of them. Values that all runs have and their recipes
    do not say, were given by --set."""
    parts = [f"abc-attn reproduce {table.name}"]
    seeds = sorted({run["seed"] for run in runs})
    if scale != SCALES[0]:
        parts.append(f"--scale {scale}")
    if seeds != [0]:
        parts.append(f"--seeds {' '.join(map(str, seeds))}")
    changes = [table.data[scale]] if scale in table.data else []
    changes += [shlex.quote(f"{key}={value}") for key, value in _given_to_all(table, scale, runs).items()]
    if changes:
        parts.append(f"--set {' '.join(changes)}")
    return " ".join(parts)


def _given_to_all(table: Table, scale: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The values that every run has, and no recipe of theirs; as JSON, which YAML can read."""
    rows = table.rows(scale) if table.folder is not None and (table.folder / scale).is_dir() else {}
    if not runs or any(run["row"] not in rows for run in runs):
        return {}
    found = []
    for run in runs:
        recipe = read_recipe(rows[run["row"]].path) | rows[run["row"]].values
        changed = {key: value for key, value in run["values"].items() if recipe.get(key) != value}
        found.append({key: json.dumps(value) for key, value in changed.items() if key not in ("seed", "init_from")})
    return {key: value for key, value in found[0].items() if all(other.get(key) == value for other in found)}


def _ends(ordered: Sequence[int]) -> list[int]:
    return [ordered[0], *ordered[-1:]] if len(ordered) > 1 else [*ordered]


def sections(table: Table, runs: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Our figures, the paper's, and each further group of columns in a table of its own."""
    rows = by_row(table, runs)
    found = [_ours(table, ColumnGroup("Figures" if not table.paper else "Measured here", "", table.columns), rows)]
    if table.paper:
        theirs = [
            [row, *("-" if figure is None else str(figure) for figure in known)] for row, known in table.paper.items()
        ]
        found.append(Section("The paper's figures", "", ["row", *table.columns.values()], theirs))
    found += [_ours(table, group, rows) for group in table.more]
    if table.history is not None and (scored := histories(table, rows)):
        found.append(_history(table, table.history, scored))
    if any(len(task["points"]) > 1 for run in runs for task in run.get("downstream", {}).values()):
        found.append(_chosen(table, rows))
    return found


def by_row(table: Table, runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs of each row: the paper's rows in its order, then those of our own in the grid's order or by name."""
    names = {run["row"] for run in runs}
    grid = [key for key in table.grid if key != "recipe"]

    def place(row: str) -> tuple[Any, ...]:
        values = next(run["values"] for run in runs if run["row"] == row)
        options = [table.grid[key] for key in grid]
        inside = all(values.get(key) in known for key, known in zip(grid, options, strict=True))
        in_grid = [known.index(values[key]) for key, known in zip(grid, options, strict=True)] if inside else []
        in_paper = list(table.paper).index(row) if row in table.paper else len(table.paper)
        return in_paper, bool(in_grid), in_grid, row

    return {row: [run for run in runs if run["row"] == row] for row in sorted(names, key=place)}


def _ours(table: Table, group: ColumnGroup, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Section:
    lines = []
    for row, runs in rows.items():
        values = runs[0]["values"]
        shown = [_shown(figures(runs, column), table.decimals, len(runs)) for column in group.columns]
        name = row if row in table.paper or not table.paper else f"{row} (ours)"
        lines.append([name, _control(values), _slots(values), str(len(runs)), *shown])
    return Section(group.title, group.reading, ["row", "control", "slots", "seeds", *group.columns.values()], lines)


def _history(table: Table, shown: History, scored: Mapping[str, Mapping[int, float]]) -> Section:
    """The score before and after training, and the tokens until a row is as good as another at its end, or nearly."""
    lines = []
    for row, curve in scored.items():
        values = list(curve.values())
        goal = [*scored[shown.row].values()][-1] + shown.within if shown.row in scored else None
        until = None if goal is None else tokens_until(curve, goal)
        ends = [f"{value:,.{table.decimals}f}" for value in (values[0], values[-1])]
        lines.append([row, *ends, "-" if until is None else f"{until / 1e6:.2f}M"])
    head = ["row", "at the start", "at the end", f"tokens until {shown.row} + {shown.within}"]
    return Section(shown.title, shown.reading, head, lines)


def _chosen(table: Table, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Section:
    """Which point of the grid each fine-tuned model is."""
    tasks = [task for task in table.downstream if task != DOWNSTREAM_GRID]
    lines = [[row, *(", ".join(_best(run, task) for run in runs) for task in tasks)] for row, runs in rows.items()]
    reading = "By the score on held-out training text; for each seed."
    return Section("Chosen from the grid", reading, ["row", *tasks], lines)


def _best(run: Mapping[str, Any], task: str) -> str:
    """The values of the best point that not all points share."""
    if (found := run.get("downstream", {}).get(task)) is None:
        return "-"
    points = [point["values"] for point in found["points"]]
    best = points[found["best"]]
    tried = [key for key in best if any(point.get(key) != best[key] for point in points)]
    return ", ".join(f"{key} {best[key]}" for key in tried) or "the only one"


def _control(values: Mapping[str, Any]) -> str:
    """The control of a run, or those of its layers."""
    control = values.get("control")
    if control is None:
        return "-"
    if isinstance(control, Mapping):
        return ", ".join(f"{site} `{name}`" for site, name in control.items())
    return ", ".join(f"`{name}`" for name in ([control] if isinstance(control, str) else control))


def _slots(values: Mapping[str, Any]) -> str:
    slots = values.get("slots")
    if isinstance(slots, Mapping):
        return ", ".join(f"{site} {count}" for site, count in slots.items())
    return "-" if slots is None else str(slots)


def _shown(found: Sequence[float], decimals: int, of: int) -> str:
    """The mean of the runs that have a figure, their spread, and how many they are if not all `of` a row."""
    if not found:
        return "n/a"
    mean = statistics.fmean(found)
    decimals = min(decimals, 1) if mean >= 100 else decimals  # more would only show how far seeds are apart
    spread = f" ({min(found):,.{decimals}f} to {max(found):,.{decimals}f})"
    fewer = f", {len(found)} of {of} seeds" if len(found) < of else ""
    return f"{mean:,.{decimals}f}" + (spread if min(found) < max(found) else "") + fewer
