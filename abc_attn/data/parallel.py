"""Parallel text: two files a split, line by line; documents as JSON lines; or a data set of the `datasets` library.

Sides that do not belong together are errors that name the line. Nothing is dropped here: see pairs.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from abc_attn.data.text import SPLITS, json_object
from abc_attn.paths import text_lines

_NAMES = {"train": ("train",), "validation": ("valid", "validation", "val", "dev"), "test": ("test",)}
_PACKED = ("", ".xz", ".gz")


class Pair(NamedTuple):
    """A sentence and its translation, each in one line, without spaces at the ends."""

    source: str
    target: str
    document: int  # which document of the split it belongs to
    line: int  # of the file, counted from 1; that of its document, where that is one line


@dataclass(frozen=True)
class ParallelSource:
    """Where parallel text comes from.

    files: by split, the files of both languages, or one file of documents (JSON lines). languages: from, to.
    dataset_column: of the data set, the column with a text for each language.
    blank_lines_end_documents: in plain files, a line that is empty on both sides is no pair, but ends a document.
    """

    languages: tuple[str, str]
    files: dict[str, tuple[Path, ...]] | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    dataset_column: str = ""
    blank_lines_end_documents: bool = False

    def check(self) -> None:
        """Refuses files that are not there."""
        for split, paths in (self.files or {}).items():
            for path in paths:
                if not path.is_file():
                    raise FileNotFoundError(f"no {split} text at {path}")

    def fingerprint(self) -> str:
        """Of what is in the files, wherever they lie and whatever they are called."""
        how = f"{self.languages} {self.blank_lines_end_documents}"
        if self.files is None:
            return f"{how} {self.dataset_name}/{self.dataset_config_name}"
        digests = []
        for split in SPLITS:
            for path in self.files[split]:
                with open(path, "rb") as file:
                    digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        return f"{how} {' '.join(digests)}"

    def name(self, split: str) -> str:
        """What the text of a split is called in messages."""
        if self.files is None:
            return f"{self.dataset_name}, {split}"
        return " and ".join(map(str, self.files[split]))

    def pairs(self, split: str) -> Iterator[Pair]:
        """The pairs of a split in order, those with an empty side included."""
        if self.files is None:
            yield from self._dataset_pairs(split)
        elif len(self.files[split]) == 1:
            yield from _documents(self.files[split][0], self.languages)
        else:
            yield from self._lines(*self.files[split])

    def _lines(self, source: Path, target: Path) -> Iterator[Pair]:
        document, ended = 0, True
        line, sides = 0, zip_longest(text_lines(source), text_lines(target))
        for line, (one, other) in enumerate(sides, 1):
            if one is None or other is None:
                shorter = source if one is None else target
                longer = target if one is None else source
                lines = line + sum(1 for _ in sides)
                raise ValueError(
                    f"{source} and {target} are not aligned: {shorter} ends after {line - 1} lines, and {longer} has "
                    f"{lines}"
                )
            pair = Pair(_one_line(one), _one_line(other), document, line)
            if self.blank_lines_end_documents:
                if not pair.source and not pair.target:
                    document, ended = document + (not ended), True
                    continue
                ended = False
            yield pair

    def _dataset_pairs(self, split: str) -> Iterator[Pair]:
        from datasets import load_dataset

        rows = load_dataset(self.dataset_name, self.dataset_config_name, split=split)
        if self.dataset_column not in rows.column_names:
            has = ", ".join(rows.column_names)
            raise ValueError(f"{self.dataset_name} has columns {has}; a column {self.dataset_column!r} is needed")
        for line, row in enumerate(rows, 1):
            sides = [row[self.dataset_column].get(language) for language in self.languages]
            if not all(isinstance(side, str) for side in sides):
                raise ValueError(f"{self.dataset_name}, row {line} has no text in {' and '.join(self.languages)}")
            yield Pair(_one_line(sides[0]), _one_line(sides[1]), 0, line)


def _documents(path: Path, languages: tuple[str, str]) -> Iterator[Pair]:
    document = 0
    for line, text in enumerate(text_lines(path), 1):
        if not text.strip():
            continue
        for one, other in zip(*_sides(path, line, text, languages), strict=True):
            yield Pair(_one_line(one), _one_line(other), document, line)
        document += 1


def _sides(path: Path, line: int, text: str, languages: tuple[str, str]) -> list[list[str]]:
    """The sentences of a document in both languages, as many in one as in the other."""
    found, sides = json_object(path, line, text), []
    for language in languages:
        side = found.get(language)
        if not isinstance(side, list) or not all(isinstance(sentence, str) for sentence in side):
            has = ", ".join(map(repr, found)) or "nothing"
            raise ValueError(f"{path}, line {line} needs {language!r}, a list of sentences; it has {has:.200}")
        sides.append(side)
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{path}, line {line} is not aligned: {len(sides[0])} sentences in {languages[0]!r}, {len(sides[1])} in "
            f"{languages[1]!r}"
        )
    return sides


def _one_line(text: str) -> str:
    return " ".join(text.split())


def find_parallel_files(folder: str | os.PathLike[str], languages: tuple[str, str]) -> dict[str, tuple[Path, ...]]:
    """The files of a folder by split: train.jsonl, or train.en and train.de; each possibly as .xz or .gz.

    What follows the name of a split is free, if one file alone fits: test_2016_flickr.en.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: data_dir must hold the text to train on")
    found: dict[str, tuple[Path, ...]] = {}
    for split, names in _NAMES.items():
        documents = _find(folder, names, "jsonl")
        sides = [_find(folder, names, language) for language in languages]
        if documents is not None:
            found[split] = (documents,)
        elif sides[0] is not None and sides[1] is not None:
            found[split] = (sides[0], sides[1])
        else:
            lacks = next(language for language, side in zip(languages, sides, strict=True) if side is None)
            raise FileNotFoundError(
                f"no {split} text in {folder}: looked for {names[0]}.{lacks}, {names[0]}.jsonl and the like, also as "
                ".xz and .gz"
            )
    return found


def _find(folder: Path, names: tuple[str, ...], ending: str) -> Path | None:
    for name in names:
        for packed in _PACKED:
            if (path := folder / f"{name}.{ending}{packed}").is_file():
                return path
    ends = tuple(f".{ending}{packed}" for packed in _PACKED)
    close = sorted(path for path in folder.iterdir() if path.name.startswith(names) and path.name.endswith(ends))
    if len(close) > 1:
        shown = ", ".join(path.name for path in close)
        raise ValueError(f"{folder} has several files that fit: {shown}; name the files one by one in the recipe")
    return close[0] if close else None
