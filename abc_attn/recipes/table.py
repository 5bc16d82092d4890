"""A table of results: what table.yaml says of it, and which recipes are its rows."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from abc_attn.recipes import ROOT, SCALES, TABLE, tables
from abc_attn.recipes.reading import read_mapping

AVERAGE = "average"  # begins the name of a score that is the mean of those of all downstream tasks
DOWNSTREAM_GRID = "grid"


class ColumnGroup(NamedTuple):
    """A further table of the same runs, with columns of its own."""

    title: str
    reading: str
    columns: dict[str, str]  # heading by score


class History(NamedTuple):
    """What is shown of a score over the tokens that a row was trained on."""

    title: str
    reading: str
    score: str  # such as loss: less is better
    label: str
    rows: list[str]  # which rows: those whose scores during training mean the same
    row: str  # how many tokens the others take until they are as good as this one at its end,
    within: float  # but for so much


class Row(NamedTuple):
    """A recipe, and the values that a grid adds to it."""

    path: Path
    values: dict[str, Any]

    def run(self) -> Path:
        """table/scale/row of the run that this row shows: another table's, if the recipe extends that and no more."""
        path = self.path.resolve()
        said = read_mapping(path)
        if said.keys() == {"extends"} and not self.values:
            other = (path.parent / str(said["extends"])).resolve()
            if other.parent.name in SCALES and (other.parent.parent / TABLE).is_file():
                return Row(other, {}).run()
        return Path(path.parent.parent.name, path.parent.name, path.stem)


@dataclass(frozen=True)
class Table:
    """What a table.yaml says. Its fields are the keys of that file, except `name` and `folder`."""

    name: str
    folder: Path | None  # None: only the results are known
    title: str
    task: str
    reading: str  # what the figures mean, and which way is better
    columns: dict[str, str]  # heading by score, such as {"test/480": "test, 480"}
    scales: dict[str, str] = field(default_factory=dict)  # what each scale is
    data: dict[str, str] = field(default_factory=dict)  # by scale: what `--set` says of the data, if it must
    # By row: the paper's figure for each of `columns`; null where it has none.
    paper: dict[str, list[float | None]] = field(default_factory=dict)
    more: list[ColumnGroup] = field(default_factory=list)
    plot: dict[str, Any] = field(default_factory=dict)  # kind, column, label and what the kind needs: report/plots.py
    history: History | None = None  # a score while a row is trained: a plot and a table of their own
    grid: dict[str, Any] = field(default_factory=dict)  # recipe: its name; every other key: the values it takes
    notes: dict[str, str] = field(
        default_factory=dict
    )  # by recipe key: a sentence with {} for the value, if it has one
    decimals: int = 2
    # By task: the file, in the folder of a scale, of the recipe that fine-tunes a row's model on it; and under "grid",
    # the file with the values to choose from. Its scores are the columns <task>/<measure>.
    downstream: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, name: str, root: Path | None = None) -> Table:
        """The table in folder `name` of `root` (default: the package's recipes)."""
        root = root or ROOT
        path = root / name / TABLE
        if not path.is_file():
            raise FileNotFoundError(f"no table {name!r} in {root}; there are {', '.join(tables(root)) or 'none'}")
        said = read_mapping(path)
        known_keys = {known.name for known in fields(cls)} - {"name", "folder"}
        if unknown := sorted(said.keys() - known_keys):
            close = difflib.get_close_matches(unknown[0], known_keys)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known_keys))}"
            raise ValueError(f"{path}: unknown key {unknown[0]!r}; {hint}")
        if missing := sorted({"title", "task", "reading", "columns"} - said.keys()):
            raise ValueError(f"{path}: {', '.join(missing)} missing")
        for key, value in said.items():
            _check_value(path, key, value)
        try:
            table = cls(
                name=name,
                folder=path.parent,
                **said
                | {"more": [ColumnGroup(**group) for group in said.get("more", [])]}
                | {"history": History(**said["history"]) if "history" in said else None},
            )
        except TypeError as error:
            raise ValueError(f"{path}, more or history: {error}") from None
        _check_history(path, table.history)
        for row, figures in table.paper.items():
            if len(figures) != len(table.columns):
                raise ValueError(
                    f"{path}: paper: {row} has {len(figures)} figures, there are {len(table.columns)} columns"
                )
        if "recipe" not in table.grid and table.grid:
            raise ValueError(f"{path}: grid needs `recipe`, the name of the recipe that its values are for")
        return table

    def scores(self) -> list[str]:
        """Every score that a column shows, once."""
        return list(dict.fromkeys([*self.columns, *(name for group in self.more for name in group.columns)]))

    def own_scores(self) -> list[str]:
        """Those of a row's model itself, before it is fine-tuned on anything."""
        tasks = {*self.downstream, AVERAGE} if self.downstream else set()
        return [name for name in self.scores() if name.partition("/")[0] not in tasks]

    def rows(self, scale: str) -> dict[str, Row]:
        """The rows of a scale by name: the recipes in its folder and the points of the grid, the paper's first."""
        assert self.folder is not None
        folder = self.folder / scale
        if not folder.is_dir():
            there = ", ".join(known for known in SCALES if (self.folder / known).is_dir()) or "none"
            raise FileNotFoundError(
                f"{self.name} has no recipes at scale {scale!r} in {self.folder}; there are: {there}"
            )
        rows = {path.stem: Row(path, {}) for path in folder.glob("*.yaml") if not path.name.startswith("_")}
        if self.grid:
            base = rows.pop(self.grid["recipe"], None)
            if base is None:
                raise FileNotFoundError(f"no recipe {self.grid['recipe']!r} in {folder}, which the grid names")
            names = [name for name in self.grid if name != "recipe"]
            for values in product(*(self.grid[name] for name in names)):
                rows["-".join(map(_word, values))] = Row(base.path, dict(zip(names, values, strict=True)))
        place = {row: number for number, row in enumerate(self.paper)}
        return {row: rows[row] for row in sorted(rows, key=lambda row: (place.get(row, len(place)), row))}


def _check_value(path: Path, key: str, value: Any) -> None:
    """Refuse a value of table.yaml that is not of its key's kind."""
    kinds: dict[str, tuple[type, str]] = dict.fromkeys(("title", "task", "reading"), (str, "text"))
    kinds |= {"more": (list, "a list"), "decimals": (int, "a whole number from 0 to 9")}
    kind, said = kinds.get(key, (dict, "a mapping"))
    good = isinstance(value, kind) and not isinstance(value, bool)
    if kind is int:
        good = good and 0 <= value <= 9
    elif kind is dict and good:
        good = all(isinstance(name, str) for name in value)
    inner: dict[str, type] = {
        "columns": str,
        "scales": str,
        "data": str,
        "paper": list,
        "notes": str,
        "downstream": str,
    }
    if good and key in inner:
        good = all(isinstance(part, inner[key]) for part in value.values())
        said += " of lists of numbers" if key == "paper" else " of texts"
    if good and key == "paper":
        good = all(isinstance(figure, (int, float, type(None))) for figures in value.values() for figure in figures)
    if good and key == "grid":
        good = all(isinstance(part, str if name == "recipe" else list) for name, part in value.items())
        said = "`recipe`, a name, and a list of values for each other key"
    if good and key == "more":
        good = all(isinstance(part, dict) and isinstance(part.get("columns"), dict) for part in value)
        said += " of tables with columns"
    if not good:
        raise ValueError(f"{path}: {key} must be {said}, got {value!r:.100}")


def _check_history(path: Path, history: History | None) -> None:
    if history is None:
        return
    if not isinstance(history.rows, list) or not all(isinstance(row, str) for row in history.rows):
        raise ValueError(f"{path}: history: rows must be a list of rows, got {history.rows!r:.100}")
    if history.row not in history.rows:
        raise ValueError(f"{path}: history: row must be one of rows, got {history.row!r:.60}")
    if not isinstance(history.within, int | float) or isinstance(history.within, bool):
        raise ValueError(f"{path}: history: within must be a number, got {history.within!r:.60}")


def _word(value: Any) -> str:
    """A grid's value in the name of a row: mlp, 8; 32-8 of {cross: 32, self: 8}."""
    return "-".join(map(_word, value.values())) if isinstance(value, dict) else str(value)
