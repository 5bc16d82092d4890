"""The plot of a table: its table.yaml names a kind (`plot: {kind: bars, column: test/480, label: ...}`) of those here.

Each draws on a matplotlib figure the mean over seeds of one column.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abc_attn.files import whole_file
from abc_attn.recipes import SCALES
from abc_attn.recipes.reading import read_recipe
from abc_attn.recipes.table import Table
from abc_attn.report.runs import figures, history

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # the runs of each row
OURS, PAPERS = "tab:blue", "tab:gray"


def check_plot(table: Table) -> None:
    """Refuse a plot that cannot be drawn, before anything is trained for it."""
    kind = table.plot.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{table.name}: plot: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    _, keys = KINDS[kind]
    if missing := [key for key in keys if not isinstance(table.plot.get(key), str)]:
        raise ValueError(f"{table.name}: plot: kind {kind} needs {', '.join(missing)}")
    if table.plot["column"] not in table.columns:
        raise ValueError(
            f"{table.name}: plot: column must be one of {', '.join(table.columns)}, got {table.plot['column']!r}"
        )


def draw(table: Table, rows: Rows, path: Path) -> None:
    """Write the plot as PNG."""
    from matplotlib.figure import Figure

    check_plot(table)
    figure = Figure(layout="constrained")
    KINDS[table.plot["kind"]][0](table, rows, figure)
    _save(figure, path)


def histories(table: Table, rows: Rows) -> dict[str, dict[int, float]]:
    """The score over training, by tokens, of each row of a table's history that was scored more than once."""
    shown = table.history
    if shown is None:
        return {}
    found = {row: history(rows[row], shown.score) for row in shown.rows if row in rows}
    return {row: curve for row, curve in found.items() if len(curve) > 1}


def draw_history(table: Table, rows: Rows, path: Path) -> None:
    """Write a plot of a score over the tokens that each row was trained on."""
    from matplotlib.figure import Figure

    assert table.history is not None
    figure = Figure(layout="constrained", figsize=(6, 4))
    axes = figure.subplots()
    for row, curve in histories(table, rows).items():
        axes.plot([tokens / 1e6 for tokens in curve], list(curve.values()), marker=".", label=row)
    axes.set(xlabel="million tokens", ylabel=table.history.label, title=table.title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        # No date or version in the file: the same figures give the same bytes.
        figure.savefig(temporary, dpi=120, format="png", metadata={"Software": None})


def bars(table: Table, rows: Rows, figure: Figure) -> None:
    """A bar a row, with the seeds' spread; the paper's figures in a panel of their own, since the scale is another."""
    column = table.plot["column"]
    found = {row: _figures(runs, column) for row, runs in rows.items()}
    shown = {row: statistics.fmean(several) for row, several in found.items() if several}
    panels: list[Axes] = list(figure.subplots(1, 2 if table.paper else 1, squeeze=False)[0])
    figure.set_size_inches(5 * len(panels), 1.2 + 0.32 * max(len(shown), len(table.paper)))
    _bar_panel(panels[0], shown, OURS, "measured here" if table.paper else "")
    for place, row in enumerate(shown):
        panels[0].plot([min(found[row]), max(found[row])], [place, place], color="black", linewidth=1.5)
    if table.paper:
        number = list(table.columns).index(column)
        _bar_panel(panels[1], _papers(table, number), PAPERS, "the paper")
    figure.supxlabel(table.plot["label"], fontsize="medium")


def _bar_panel(axes: Axes, shown: Mapping[str, float], color: str, title: str) -> None:
    axes.barh(range(len(shown)), list(shown.values()), color=color)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_title(title)
    for place, figure in enumerate(shown.values()):
        axes.annotate(f"{figure:.4g}", (figure, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def curves(table: Table, rows: Rows, figure: Figure) -> None:
    """The column over recipe key `x`: rows mlp-8 and mlp-16 are points of curve mlp. A row without `x` is a level."""
    column, x = (table.plot[key] for key in ("column", "x"))
    curves: dict[str, dict[float, float]] = {}
    levels: dict[str, float] = {}
    for row, runs in rows.items():
        at, found = runs[0]["values"].get(x), _figures(runs, column)
        if found and at is None:
            levels[row] = statistics.fmean(found)
        elif found:
            curves.setdefault(row.removesuffix(f"-{at}"), {})[at] = statistics.fmean(found)
    figure.set_size_inches(6, 4)
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(sorted(points), [points[at] for at in sorted(points)], marker="o", label=name)
    for name, level in levels.items():
        axes.axhline(level, color="black", linestyle=":", label=name)
    axes.set(xlabel=x, ylabel=table.plot["label"], title=table.title)
    if ticks := sorted({at for points in curves.values() for at in points}):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [str(at) for at in ticks])
        axes.minorticks_off()
    if curves or levels:
        axes.legend()


def heatmap(table: Table, rows: Rows, figure: Figure) -> None:
    """The column over recipe keys `x` and `y`, such as slots.cross; the paper's figures in a panel of their own."""
    column, x, y = (table.plot[key] for key in ("column", "x", "y"))
    ours = {}
    for runs in rows.values():
        if found := _figures(runs, column):
            ours[_value(runs[0]["values"], x), _value(runs[0]["values"], y)] = statistics.fmean(found)
    papers = {}
    if table.paper and table.folder is not None:
        full = {row: read_recipe(known.path) | known.values for row, known in table.rows(SCALES[-1]).items()}
        shown = _papers(table, list(table.columns).index(column))
        papers = {(_value(full[row], x), _value(full[row], y)): value for row, value in shown.items() if row in full}
    panels: list[Axes] = list(figure.subplots(1, 2 if papers else 1, squeeze=False)[0])
    figure.set_size_inches(4.5 * len(panels), 4)
    for axes, points, title in zip(panels, (ours, papers), ("measured here", "the paper"), strict=False):
        _heat_panel(axes, points, title if papers else "", table.decimals)
        axes.set(xlabel=table.plot.get("x_label", x), ylabel=table.plot.get("y_label", y))
    figure.suptitle(table.plot["label"], fontsize="medium")


def _heat_panel(axes: Axes, points: Mapping[tuple[float, float], float], title: str, decimals: int) -> None:
    across, up = (sorted({place[axis] for place in points}) for axis in (0, 1))
    grid = [[points.get((one, other), math.nan) for one in across] for other in up]
    if points:
        axes.imshow(grid, origin="lower", cmap="viridis", aspect="auto")
    middle = (max(points.values()) + min(points.values())) / 2 if points else 0.0
    for (one, other), value in points.items():
        where, color = (across.index(one), up.index(other)), "white" if value <= middle else "black"
        axes.annotate(f"{value:.{decimals}f}", where, ha="center", va="center", color=color)
    axes.set_xticks(range(len(across)), [str(value) for value in across])
    axes.set_yticks(range(len(up)), [str(value) for value in up])
    axes.set_title(title)


def _value(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _papers(table: Table, number: int) -> dict[str, float]:
    """The paper's figures for column `number`, where it has one."""
    found = {row: theirs[number] for row, theirs in table.paper.items()}
    return {row: figure for row, figure in found.items() if figure is not None}


def _figures(runs: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """The figures that can be drawn."""
    return [figure for figure in figures(runs, column) if figure < math.inf]


# The function, and the keys of `plot` that it needs.
KINDS: dict[str, tuple[Callable[[Table, Rows, Figure], None], tuple[str, ...]]] = {
    "bars": (bars, ("column", "label")),
    "curves": (curves, ("column", "label", "x")),
    "heatmap": (heatmap, ("column", "label", "x", "y")),
}
