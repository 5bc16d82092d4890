"""Labelled texts, one or two with each label: TSV, CSV or JSON lines, or a GLUE task by name.

Rows that cannot be used are errors that name the file and the line. GLUE's own files have a few (QQP): those are left
out, and said.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from abc_attn.data.text import PACKED, json_object
from abc_attn.paths import shown_lines, text_lines

KINDS = (".tsv", ".csv", ".jsonl")
MOST_LABELS = 1000  # more are a sign that the column is not one of labels
_LONGEST_CELL = 2**20  # characters
_BATCHES_SORTED = 50  # together by length


class Labelled(NamedTuple):
    """A text, or two, and its label."""

    text: str
    pair: str | None
    label: str
    line: int  # of the file, counted from 1; of a data set, the row


class GlueTask(NamedTuple):
    """A task of GLUE: https://gluebenchmark.com"""

    folder: str
    texts: tuple[tuple[str, ...], ...]  # for each text, the names that its column has in one copy or another
    labels: tuple[str, ...]
    label_columns: tuple[str, ...] = ("label",)
    scored: str = "dev"  # begins the name of the file that is scored; test labels are not public
    dataset_split: str = "validation"
    header: tuple[str, ...] = ()  # the columns of a file without a line that names them


_TWO = ("entailment", "not_entailment")
GLUE = {
    "sst2": GlueTask("SST-2", (("sentence",),), ("0", "1")),
    "cola": GlueTask("CoLA", (("sentence",),), ("0", "1"), header=("source", "label", "star", "sentence")),
    "qnli": GlueTask("QNLI", (("question",), ("sentence",)), _TWO),
    "rte": GlueTask("RTE", (("sentence1",), ("sentence2",)), _TWO),
    "mnli": GlueTask(
        "MNLI",
        (("premise", "sentence1"), ("hypothesis", "sentence2")),
        ("entailment", "neutral", "contradiction"),
        ("gold_label", "label"),
        "dev_matched",
        "validation_matched",
    ),
    "mrpc": GlueTask(
        "MRPC", (("sentence1", "#1 String"), ("sentence2", "#2 String")), ("0", "1"), ("label", "Quality")
    ),
    "qqp": GlueTask("QQP", (("question1",), ("question2",)), ("0", "1"), ("is_duplicate", "label")),
}


@dataclass(frozen=True)
class LabelledSource:
    """Where labelled texts come from: files, or a GLUE task of the `datasets` library.

    files: the training file, and the one that is scored if there is one. columns: the names of the texts' columns and
    of the label's; each a choice, of which a file has one. labels: in order; None: those of the training file.
    """

    columns: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...] | None = None
    files: tuple[Path, ...] | None = None
    dataset: tuple[str, str] | None = None  # name, configuration
    header: tuple[str, ...] = ()  # of TSV files whose first line does not name the columns

    @property
    def pairs(self) -> bool:
        return len(self.columns) == 3

    def check(self) -> None:
        """Refuses files that are not there, or of another kind."""
        for path, what in zip(self.files or (), ("training", "test"), strict=False):
            if not path.is_file():
                raise FileNotFoundError(f"no {what} file at {path}")
            kind_of(path)

    def fingerprint(self) -> str:
        """Of what is in the files, wherever they lie and whatever they are called."""
        digests: list[str] = [str(self.columns), str(self.labels), str(self.dataset)]
        for path in self.files or ():
            with open(path, "rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]

    def read(self) -> tuple[list[Labelled], list[Labelled], tuple[str, ...]]:
        """The examples to train on, those to score, and the labels in order."""
        if self.dataset is not None:
            name, task = self.dataset
            parts = [_from_dataset(name, task, self.columns, split) for split in ("train", GLUE[task].dataset_split)]
            return parts[0], parts[1], GLUE[task].labels
        assert self.files is not None
        parts = [self._read_file(path) for path in self.files]
        labels = self.labels or _labels(self.files[0], parts[0])
        for path, examples in zip(self.files, parts, strict=True):
            check_labels(path, examples, labels)
        return parts[0], parts[1] if len(parts) == 2 else [], labels

    def _read_file(self, path: Path) -> list[Labelled]:
        unusable: list[int] = []
        found = read_labelled(path, self.columns, header=self.header, unusable=unusable if self.labels else None)
        _say_unusable(path, unusable, len(found))
        return found


def _say_unusable(where: str | Path, rows: list[int], kept: int) -> None:
    if rows:
        what = f"{len(rows):,} of {len(rows) + kept:,} rows of {where} cannot be used and are left out"
        print(f"abc-attn: {what}: {shown_lines(rows)}", file=sys.stderr, flush=True)


def glue_source(task: str, folder: Path | None, dataset_name: str | None) -> LabelledSource:
    """A GLUE task: from a folder that holds a folder for each task, or from the `datasets` library."""
    if task not in GLUE:
        raise ValueError(f"glue must be one of {', '.join(GLUE)}, got {task!r:.40}")
    known = GLUE[task]
    columns = (*known.texts, known.label_columns)
    if dataset_name is not None:
        return LabelledSource(columns, known.labels, dataset=(dataset_name, task))
    assert folder is not None
    inside = folder / known.folder
    if not inside.is_dir():
        raise FileNotFoundError(f"no folder {inside}: data_dir must hold GLUE's folders, such as {known.folder}")
    files = sorted(path for path in inside.iterdir() if _ending(path) == ".tsv")
    scored = _one(inside, files, known.scored)
    train = _one(inside, [path for path in files if path != scored and not path.name.startswith("dev")], "train")
    return LabelledSource(columns, known.labels, (train, scored), header=known.header)


def _one(folder: Path, files: Sequence[Path], name: str) -> Path:
    """The file that is called so, begins so, or has the word in its name; or the only one that is left."""
    exact = [path for path in files if path.name.partition(".")[0] == name]
    begins = [path for path in files if path.name.startswith(name)]
    words = [path for path in files if name in path.name.replace(".", "_").split("_")]
    for found in (exact, begins, words, files):
        if len(found) == 1:
            return found[0]
    shown = ", ".join(path.name for path in files) or "no .tsv file"
    raise FileNotFoundError(f"no {name} text in {folder}: one {name}.tsv is needed; there are {shown}")


def kind_of(path: Path) -> str:
    """.tsv, .csv or .jsonl"""
    if (ending := _ending(path)) not in KINDS:
        raise ValueError(f"{path} must be one of {', '.join(KINDS)}, possibly with .xz or .gz behind it")
    return ending


def _ending(path: Path) -> str:
    name = path.name.lower()
    for packed in PACKED:
        if packed and name.endswith(packed):
            name = name.removesuffix(packed)
    return Path(name).suffix


def read_labelled(
    path: Path, columns: Sequence[Sequence[str]], *, header: Sequence[str] = (), unusable: list[int] | None = None
) -> list[Labelled]:
    """The examples of a file, in order. columns: of the first text, of the second if there is one, and of the label;
    header: those of a TSV file whose first line may not name them; unusable: takes the lines of rows with too few or
    too many cells, or an empty one, which are errors without it."""
    found = []
    chosen: list[str] = []
    for line, row in _rows(path, header, unusable):
        if not chosen:
            chosen = [_column(path, row, names) for names in columns]
        try:
            found.append(_labelled([_text(name, row.get(name)) for name in chosen], line))
        except ValueError as error:
            if unusable is None:
                raise ValueError(f"{path}, line {line}{error}") from None
            unusable.append(line)
    if not found:
        raise ValueError(f"{path} has no labelled texts")
    return found


def _text(name: str, cell: Any) -> str:
    if not isinstance(cell, str):
        raise ValueError(f" has no text in {name!r}")
    if not cell.strip():
        raise ValueError(f": {name!r} is empty")
    return cell.strip()


def _labelled(cells: list[str], line: int) -> Labelled:
    return Labelled(cells[0], cells[1] if len(cells) == 3 else None, cells[-1], line)


def _column(path: Path, row: dict[str, Any], names: Sequence[str]) -> str:
    there = next((name for name in names if name in row), None)
    if there is None:
        has = ", ".join(map(repr, row))
        raise ValueError(f"{path} has no column {' or '.join(map(repr, names))}; it has {has:.300}")
    return there


def _rows(path: Path, known: Sequence[str], unusable: list[int] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines and what stands in them, by column."""
    kind = kind_of(path)
    if kind == ".jsonl":
        yield from _json_rows(path)
        return
    rows = _csv_rows(path) if kind == ".csv" else _tsv_rows(path)
    first, header = next(rows, (0, []))
    if known and len(header) == len(known) and not {*header} & {*known}:
        rows, header = chain([(first, header)], rows), list(known)
    if len({*header}) != len(header):
        raise ValueError(f"{path}, line 1 must name the columns, each once; it has {', '.join(header):.200}")
    for line, cells in rows:
        if len(cells) == len(header):
            yield line, dict(zip(header, cells, strict=True))
        elif unusable is not None:
            unusable.append(line)
        else:
            raise ValueError(f"{path}, line {line} has {len(cells)} columns, and the first line {len(header)}")


def _tsv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Cells between tabs, without quotes, as in GLUE."""
    for line, text in enumerate(text_lines(path), 1):
        if text.strip():
            yield line, text.removesuffix("\r").split("\t")


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(text_lines(path, keep_ends=True), strict=True)
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {start} is not CSV: {error}") from None
        if cells is None:
            return
        if cells:
            yield start, cells


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        members = json_object(path, line, text).items()
        yield line, {name: str(value) if type(value) in (int, bool) else value for name, value in members}


def _labels(path: Path, examples: Sequence[Labelled]) -> tuple[str, ...]:
    """Every label of a file, in order: numbers by size, words by the alphabet."""
    found = {example.label for example in examples}
    if broken := next((example for example in examples if {"\t", "\n", "\r"} & {*example.label}), None):
        raise ValueError(f"{path}, line {broken.line}: label {broken.label!r:.60} has a tab or a line end in it")
    if not 2 <= len(found) <= MOST_LABELS:
        count = f"{len(found)} different labels" if len(found) > 1 else f"one label alone, {min(found)!r:.60}"
        raise ValueError(f"{path} has {count}; from 2 to {MOST_LABELS} can be learned")
    numbers = all(label.isdecimal() for label in found)
    return tuple(sorted(found, key=(lambda label: (int(label), label)) if numbers else None))


def check_labels(path: Path, examples: Sequence[Labelled], labels: Sequence[str]) -> None:
    known = {*labels}
    for example in examples:
        if example.label not in known:
            shown = ", ".join(map(repr, labels[:10])) + ", ..." * (len(labels) > 10)
            raise ValueError(f"{path}, line {example.line}: label {example.label!r:.60} is not one of {shown}")


def _from_dataset(name: str, task: str, columns: Sequence[Sequence[str]], split: str) -> list[Labelled]:
    from datasets import load_dataset

    rows, labels = load_dataset(name, task, split=split), GLUE[task].labels
    chosen = [_column(Path(name), dict.fromkeys(rows.column_names), names) for names in columns]
    found, unusable = [], []
    for number, row in enumerate(rows, 1):
        *texts, label = (row[column] for column in chosen)
        if type(label) is not int or not 0 <= label < len(labels):
            raise ValueError(f"{name}, {split}, row {number}: label {label!r:.60} is not from 0 to {len(labels) - 1}")
        try:
            cells = [_text(column, cell) for column, cell in zip(chosen, texts, strict=False)]
            found.append(_labelled([*cells, labels[label]], number))
        except ValueError:
            unusable.append(number)
    _say_unusable(f"{name}, {split}", unusable, len(found))
    if not found:
        raise ValueError(f"{name}, {split} has no labelled texts")
    return found


def without_shared(train: Sequence[Labelled], scored: Sequence[Labelled]) -> list[Labelled]:
    """The training examples whose texts, in either order, are not among those that are scored."""
    seen = {frozenset((example.text, example.pair)) for example in scored}
    return [example for example in train if frozenset((example.text, example.pair)) not in seen]


def split_off(examples: Sequence[Labelled], share: float) -> tuple[list[Labelled], list[Labelled]]:
    """The examples without a share of them, and that share: always the same one, of at least one example each."""
    order = np.random.default_rng(0).permutation(len(examples))
    count = min(max(1, round(share * len(examples))), len(examples) - 1)
    held = {*order[:count].tolist()}
    kept = [example for place, example in enumerate(examples) if place not in held]
    return kept, [examples[place] for place in sorted(held)]


class LabelledBatches(Dataset[dict[str, Any]]):
    """Encoded examples in a new order in every pass; those of a batch are about equally long.

    Item i is a fixed function of (seed, i).
    """

    def __init__(self, encoded: Sequence[dict[str, Any]], batch_size: int, total: int, seed: int) -> None:
        self.encoded, self.batch_size, self.total, self.seed = encoded, batch_size, total, seed
        self.lengths = np.array([len(example["input_ids"]) for example in encoded])
        self._pass, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, within = divmod(index, len(self.encoded))
        if number != self._pass:
            self._pass, self._order = number, self._shuffled(number)
        return self.encoded[self._order[within]]

    def _shuffled(self, number: int) -> np.ndarray:
        """Whole batches first, in any order; the rest of the examples at the end."""
        random = np.random.default_rng([self.seed, number])
        order = random.permutation(len(self.encoded))
        together = self.batch_size * _BATCHES_SORTED
        stretches = [order[start : start + together] for start in range(0, len(order), together)]
        order = np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in stretches])
        whole = len(order) // self.batch_size * self.batch_size
        batches = random.permutation(order[:whole].reshape(-1, self.batch_size))
        return np.concatenate([batches.reshape(-1), order[whole:]])
