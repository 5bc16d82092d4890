"""Parallel text as token files: tokenized once by a joint BPE, memory-mapped from then on.

Every sentence is stored with its end. An example is a pair, or a window of a document: a sentence with a few before it,
which lie beside it in the file. The end of all but the last sentence of a window is <sep>.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, normalizers, processors
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from abc_attn.data.parallel import Pair, ParallelSource
from abc_attn.data.text import SPLITS, byte_level_bpe, log_frequencies
from abc_attn.files import check_checksums, whole_folder, write_checksums
from abc_attn.paths import shown_lines

PAD, END, SEPARATOR = "<pad>", "</s>", "<sep>"
SPECIAL = (PAD, END, SEPARATOR)
SMALLEST_VOCABULARY = len(SPECIAL) + 256 + 1  # the bytes, and something to learn
SIDES = ("source", "target")
_FORMAT = 2
_PAIRS_AT_A_TIME = 10_000
_CHECKSUMS = "corpus.sha256"


class Tokens(NamedTuple):
    """The sentences of one side of a split: number i is ids[ends[i] : ends[i + 1]], its end </s> included."""

    ids: np.ndarray
    ends: np.ndarray

    def lengths(self) -> np.ndarray:
        return np.diff(self.ends)


@dataclass(frozen=True)
class Examples:
    """Pairs, or windows of documents: from sentence `first` to sentence `last`, both included."""

    source: Tokens
    target: Tokens
    first: np.ndarray
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def lengths(self) -> np.ndarray:
        """Tokens of each example, `2 n`: of the source and of the target."""
        return np.stack([side.ends[self.last + 1] - side.ends[self.first] for side in (self.source, self.target)])

    def select(self, chosen: np.ndarray) -> Examples:
        return replace(self, first=self.first[chosen], last=self.last[chosen])

    def tokens(self, index: int, separator: int) -> tuple[np.ndarray, np.ndarray]:
        """Both sides of an example: sentences with <sep> between them and </s> at the end."""
        found = []
        for side in (self.source, self.target):
            first, last = self.first[index], self.last[index]
            row = side.ids[side.ends[first] : side.ends[last + 1]].astype(np.int64)
            row[side.ends[first + 1 : last + 1] - side.ends[first] - 1] = separator
            found.append(row)
        return found[0], found[1]


@dataclass(frozen=True)
class PairCorpus:
    """Token files of three splits, memory-mapped."""

    folder: Path
    sides: dict[str, tuple[Tokens, Tokens]]  # by split
    documents: dict[str, np.ndarray]  # by split: of each pair, the number of its document
    lines: dict[str, np.ndarray]  # by split: of each pair, its line in the file
    tokenizer: PreTrainedTokenizerFast
    fingerprint: str

    @classmethod
    def open(cls, folder: Path) -> PairCorpus:
        if not check_checksums(_CHECKSUMS, folder):
            raise ValueError(f"{folder / _CHECKSUMS} is missing")
        about = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))

        def load(split: str, what: str) -> np.ndarray:
            return np.load(folder / f"{split}.{what}.npy", mmap_mode="r")

        def side(split: str, name: str) -> Tokens:
            return Tokens(load(split, f"{name}.ids"), load(split, f"{name}.ends"))

        return cls(
            folder=folder,
            sides={split: (side(split, SIDES[0]), side(split, SIDES[1])) for split in SPLITS},
            documents={split: load(split, "documents") for split in SPLITS},
            lines={split: load(split, "lines") for split in SPLITS},
            tokenizer=load_tokenizer_file(folder / "tokenizer.json"),
            fingerprint=about["fingerprint"],
        )

    def examples(self, split: str, context: int = 0) -> Examples:
        """Each pair of a split after `context` pairs before it in its document, fewer where the document begins."""
        source, target = self.sides[split]
        last = np.arange(len(source.ends) - 1)
        documents = self.documents[split]
        starts = np.searchsorted(documents, documents)  # of each pair's document
        return Examples(source, target, np.maximum(starts, last - context), last)

    def target_log_frequencies(self) -> torch.Tensor:
        """Of the target side of the training text."""
        return log_frequencies(self.sides["train"][1].ids, len(self.tokenizer))

    def usable(self, split: str, context: int, longest: int) -> tuple[Examples, list[str]]:
        """The examples that can be trained on, and what is said of the others: empty sides, and too many tokens."""
        examples = self.examples(split, context)
        ends = np.stack([side.lengths() for side in self.sides[split]])
        empty = (ends == 1).any(0)
        long = (examples.lengths() > longest).any(0) & ~empty
        said = []
        for bad, what in ((empty, "with an empty side"), (long, f"with more than {longest} tokens on a side")):
            if count := int(bad.sum()):
                shown = shown_lines(list(dict.fromkeys(self.lines[split][bad].tolist())))
                said.append(
                    f"{count:,} of {len(bad):,} {'windows' if context else 'pairs'} of the {split} text {what} are "
                    f"left out: {shown}"
                )
        kept = examples.select(np.flatnonzero(~(empty | long)))
        if not len(kept):
            raise ValueError(f"nothing is left of the {split} text: {'; '.join(said) or 'it is empty'}")
        return kept, said


def build_pairs(
    source: ParallelSource, cache_dir: str | os.PathLike[str], vocab_size: int, tokenizer: Tokenizer | None = None
) -> PairCorpus:
    """The corpus as token files under `cache_dir`, built now unless they are there already.

    vocab_size: of the byte-level BPE that is learned from both sides of the training text together, unless there is a
    `tokenizer`: that of the translator to start from.
    """
    check_vocabulary(vocab_size)
    source.check()
    how = vocab_size if tokenizer is None else hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    recipe = json.dumps(["pairs", _FORMAT, source.fingerprint(), how])
    fingerprint = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    folder = Path(cache_dir) / fingerprint
    if folder.is_dir():
        try:
            return PairCorpus.open(folder)
        except (ValueError, OSError, KeyError, EOFError, TypeError) as error:
            said = " ".join(str(error).split())
            print(f"abc-attn: {type(error).__name__}: {said}: this tokenized text is made again", file=sys.stderr)
            shutil.rmtree(folder)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), whole_folder(folder) as partial:  # it exists if another process was quicker
        _write(source, tokenizer or _joint_bpe(source, vocab_size), partial, fingerprint)
    return PairCorpus.open(folder)


def check_vocabulary(vocab_size: int | None) -> None:
    """Refuses a vocabulary that `build_pairs` cannot make."""
    if vocab_size is None or vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"translation needs a vocab_size of at least {SMALLEST_VOCABULARY} (the bytes, {', '.join(SPECIAL)}, and a "
            f"token to learn), for instance 8000; got {vocab_size}"
        )


def load_tokenizer_file(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer as it is saved with a model."""
    return PreTrainedTokenizerFast(
        tokenizer_object=read_tokenizer_file(file),
        pad_token=PAD,
        eos_token=END,
        sep_token=SEPARATOR,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "</s>" in a text is text
    )


def read_tokenizer_file(file: Path) -> Tokenizer:
    """The joint BPE of a corpus, or of a translator that was trained on one."""
    tokenizer = Tokenizer.from_file(str(file))
    if missing := [token for place, token in enumerate(SPECIAL) if tokenizer.token_to_id(token) != place]:
        raise ValueError(f"{file} is not the tokenizer of a translator of abc-attn: {', '.join(missing)} missing")
    return tokenizer


def _write(source: ParallelSource, tokenizer: Tokenizer, folder: Path, fingerprint: str) -> None:
    for split in SPLITS:
        _encode(source, split, tokenizer, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"fingerprint": fingerprint}
    (folder / "corpus.json").write_text(json.dumps(about), encoding="utf-8")
    write_checksums(_CHECKSUMS, folder, folder.iterdir())


def _encode(source: ParallelSource, split: str, tokenizer: Tokenizer, folder: Path) -> None:
    small = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    ids: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    lengths: tuple[list[int], list[int]] = ([], [])
    where: list[tuple[int, int]] = []
    tokenizer.encode_special_tokens = True  # "</s>" in a text is text
    with tqdm(desc=f"tokenizing {split}", unit=" pairs", disable=not sys.stderr.isatty()) as bar:
        for pairs in _batched(source.pairs(split), _PAIRS_AT_A_TIME):
            for side in (0, 1):
                encoded = tokenizer.encode_batch([pair[side] for pair in pairs])
                lengths[side].extend(len(one.ids) for one in encoded)
                ids[side].append(np.array([i for one in encoded for i in one.ids], dtype=small))
            where += [(pair.document, pair.line) for pair in pairs]
            bar.update(len(pairs))
    if not where:
        raise ValueError(f"the {split} text is empty: {source.name(split)}")
    for side, name in enumerate(SIDES):
        np.save(folder / f"{split}.{name}.ids.npy", np.concatenate(ids[side]))
        np.save(folder / f"{split}.{name}.ends.npy", np.concatenate([[0], np.cumsum(lengths[side], dtype=np.int64)]))
    documents, lines = np.array(where, dtype=np.int64).T
    np.save(folder / f"{split}.documents.npy", documents)
    np.save(folder / f"{split}.lines.npy", lines)


def _joint_bpe(source: ParallelSource, vocab_size: int) -> Tokenizer:
    words = 0

    def sentences() -> Iterator[str]:
        nonlocal words
        for pair in source.pairs("train"):
            words += bool(pair.source) + bool(pair.target)
            yield pair.source
            yield pair.target

    tokenizer = byte_level_bpe(sentences(), vocab_size, SPECIAL, normalizers.NFC())
    if not words:
        raise ValueError(f"the training text has no words: {source.name('train')}")
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    return tokenizer


def _batched(pairs: Iterator[Pair], size: int) -> Iterator[list[Pair]]:
    while batch := list(islice(pairs, size)):
        yield batch
