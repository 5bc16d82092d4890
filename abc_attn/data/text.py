"""Text to token files: read once, tokenized once, memory-mapped from then on.

As in WikiText, a text is lines of words between spaces, and every line, an empty one too, ends with <eos>. Perplexity
is per word: the words and line ends of the text, whatever tokens they were cut into.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from abc_attn.files import check_checksums, whole_folder, write_checksums
from abc_attn.paths import text_lines

SPLITS = ("train", "validation", "test")
TOKENIZERS = ("word", "bpe")
UNKNOWN, END = "<unk>", "<eos>"
_FORMAT = 1
_NAMES = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}
PACKED = ("", ".xz", ".gz")
_ENDINGS = [f"{ending}{packed}" for packed in PACKED for ending in (".tokens", ".txt", ".raw")]
_LINES_AT_A_TIME = 10_000
_CHECKSUMS = "corpus.sha256"
_BYTES = 256  # tokens of a byte-level alphabet


@dataclass(frozen=True)
class Source:
    """Where a corpus comes from: three files, or a data set of the `datasets` library."""

    files: dict[str, Path] | None = None  # by split
    dataset_name: str | None = None
    dataset_config_name: str | None = None

    def check(self) -> None:
        """Refuses files that are not there."""
        for split, path in (self.files or {}).items():
            if not path.is_file():
                raise FileNotFoundError(f"no {split} text at {path}")

    def fingerprint(self) -> str:
        """Of what is in the files, wherever they lie and whatever they are called."""
        if self.files is None:
            return f"{self.dataset_name}/{self.dataset_config_name}"
        digests = []
        for split in SPLITS:
            with open(self.files[split], "rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        return " ".join(digests)

    def lines(self, split: str) -> Iterator[str]:
        """The lines of a split, without their ends."""
        return self._dataset_lines(split) if self.files is None else text_lines(self.files[split])

    def _dataset_lines(self, split: str) -> Iterator[str]:
        from datasets import load_dataset

        rows = load_dataset(self.dataset_name, self.dataset_config_name, split=split)
        if "text" not in rows.column_names:
            raise ValueError(
                f"{self.dataset_name} has columns {', '.join(rows.column_names)}; a column 'text' is needed"
            )
        for row in rows:
            yield from row["text"].removesuffix("\n").split("\n")


@dataclass(frozen=True)
class Corpus:
    """Token files, memory-mapped: `tokens[split]`; `words[split]` is what perplexity divides by."""

    folder: Path
    tokens: dict[str, np.ndarray]
    words: dict[str, int]
    tokenizer: PreTrainedTokenizerFast
    fingerprint: str

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        check_checksums(_CHECKSUMS, folder)  # caches of version 0.1 have none
        about = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        return cls(
            folder=folder,
            tokens={split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in SPLITS},
            words=about["words"],
            tokenizer=_pretrained(Tokenizer.from_file(str(folder / "tokenizer.json")), about["eos_token"]),
            fingerprint=about["fingerprint"],
        )

    def beginning(self, split: str, count: int | None) -> tuple[np.ndarray, int]:
        """The first `count` tokens of a split (all if None), and how many words they stand for."""
        tokens = self.tokens[split][:count]
        if len(tokens) == len(self.tokens[split]):
            return tokens, self.words[split]
        lines = str(self.tokenizer.decode(tokens.tolist())).replace(END, "\n").split("\n")
        return tokens, sum(len(line.split()) for line in lines) + len(lines) - 1


def find_files(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """The files of a WikiText-style folder by split: wiki.train.tokens, train.txt, ... each possibly as .xz or .gz."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: data_dir must hold the text to train on")
    return {split: find_file(folder, split) for split in SPLITS}


def find_file(folder: Path, split: str, more_endings: Sequence[str] = ()) -> Path:
    """The text of one split in a folder. more_endings: of files beside those that `find_files` knows, such as .jsonl"""
    names = _NAMES[split]
    endings = [*_ENDINGS, *(f"{ending}{packed}" for packed in PACKED for ending in more_endings)]
    wanted = [f"{prefix}{name}{ending}" for name in names for prefix in ("wiki.", "") for ending in endings]
    for name in wanted:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"no {split} text in {folder}; looked for {wanted[0]}, {names[0]}.txt and the like")


def check_tokenizer(tokenizer: str, vocab_size: int | None) -> None:
    """Refuses a tokenizer that `build_corpus` cannot make."""
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer must be one of {', '.join(TOKENIZERS)}, got {tokenizer!r}")
    if tokenizer == "bpe" and vocab_size is None:
        raise ValueError("tokenizer 'bpe' needs a vocab_size, for instance 8192")
    if vocab_size is not None and vocab_size < (least := 3 if tokenizer == "word" else _BYTES + 1):
        holds = f"{UNKNOWN}, {END} and a word" if tokenizer == "word" else "the bytes and a line's end"
        raise ValueError(f"tokenizer {tokenizer!r} needs a vocab_size of at least {least} ({holds}), got {vocab_size}")


def build_corpus(
    source: Source, cache_dir: str | os.PathLike[str], tokenizer: str = "word", vocab_size: int | None = None
) -> Corpus:
    """The corpus as token files under `cache_dir`, built now unless they are there already.

    tokenizer: "word" (every word between spaces that the training text has, or its `vocab_size` most frequent ones; any
    other is <unk>) or "bpe" (`vocab_size` byte-level tokens). Tokens are numbered by falling frequency.
    """
    check_tokenizer(tokenizer, vocab_size)
    source.check()
    recipe = json.dumps([_FORMAT, source.fingerprint(), tokenizer, vocab_size])
    fingerprint = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    folder = Path(cache_dir) / fingerprint
    if folder.is_dir():
        try:
            return Corpus.open(folder)
        except (ValueError, OSError, KeyError, EOFError, TypeError) as error:
            print(f"abc-attn: {_said(error)}: this tokenized text is made again", file=sys.stderr)
            shutil.rmtree(folder)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), whole_folder(folder) as partial:  # it exists if another process was quicker
        _write(source, tokenizer, vocab_size, partial, fingerprint)
    return Corpus.open(folder)


def _write(source: Source, kind: str, vocab_size: int | None, folder: Path, fingerprint: str) -> None:
    with tqdm(desc="reading the training text", unit=" lines", disable=not sys.stderr.isatty()) as bar:
        counts: Counter[str] = Counter()
        lines = 0
        for line in source.lines("train"):
            counts.update(line.split())
            lines += 1
            bar.update()
    if not counts:
        raise ValueError(f"the training text has no words: {_name(source, 'train')}")
    if kind == "word":
        tokenizer, end = _word_level(counts, lines, vocab_size), END
    else:
        assert vocab_size is not None
        tokenizer, end = _byte_pairs(source, vocab_size), "\n"
    words = {}
    for split in SPLITS:
        tokens, words[split] = _encode(source, split, tokenizer, kind, end)
        np.save(folder / f"{split}.npy", tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"words": words, "eos_token": end, "fingerprint": fingerprint}
    (folder / "corpus.json").write_text(json.dumps(about), encoding="utf-8")
    write_checksums(_CHECKSUMS, folder, folder.iterdir())


def _encode(source: Source, split: str, tokenizer: Tokenizer, kind: str, end: str) -> tuple[np.ndarray, int]:
    """The tokens of a split, and how many words (line ends included) they stand for."""
    vocabulary = tokenizer.get_vocab()
    unknown, end_id = vocabulary.get(UNKNOWN), vocabulary[end]
    small = np.uint16 if len(vocabulary) <= 2**16 else np.uint32
    parts, words = [], 0
    with tqdm(desc=f"tokenizing {split}", unit=" lines", disable=not sys.stderr.isatty()) as bar:
        for lines in _batched(source.lines(split), _LINES_AT_A_TIME):
            if kind == "word":  # what the tokenizer would give, many times faster
                ids = [vocabulary.get(word, unknown) for line in lines for word in (*line.split(), END)]
            else:
                ids = [i for encoded in tokenizer.encode_batch(lines) for i in (*encoded.ids, end_id)]
            words += sum(len(line.split()) + 1 for line in lines)
            parts.append(np.array(ids, dtype=small))
            bar.update(len(lines))
    if not parts:
        raise ValueError(f"the {split} text is empty: {_name(source, split)}")
    return np.concatenate(parts), words


def _word_level(counts: Counter[str], lines: int, vocab_size: int | None) -> Tokenizer:
    ordinary = [word for word, _ in counts.most_common() if word not in (UNKNOWN, END)]
    room = len(ordinary) if vocab_size is None else vocab_size - 2
    kept = {word: counts[word] for word in ordinary[:room]}
    kept[END] = counts[END] + lines
    kept[UNKNOWN] = counts[UNKNOWN] + sum(counts[word] for word in ordinary[room:])
    ranked = sorted(kept, key=lambda word: (-kept[word], word))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(ranked)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace("\n", f" {END} ")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def log_frequencies(tokens: np.ndarray, words: int) -> torch.Tensor:
    """log p of each token of a vocabulary of so many words. An unseen one counts half."""
    counts = np.bincount(tokens, minlength=words).clip(0.5)
    return torch.from_numpy(np.log(counts / counts.sum())).float()


def byte_level_bpe(lines: Iterable[str], vocab_size: int, special: Sequence[str], normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE learned from lines, whose first tokens are the special ones. A word begins with its space."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def json_object(file: Path, number: int, line: str) -> dict[str, Any]:
    """A line of a file of JSON lines."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, line {number} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}, line {number} must be a JSON object, and is a {type(found).__name__}")
    return found


def _byte_pairs(source: Source, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=sys.stderr.isatty()
    )
    tokenizer.train_from_iterator(source.lines("train"), trainer)
    # Number the tokens by frequency: the bands of an adaptive softmax depend on it.
    counts: Counter[int] = Counter()
    for lines in _batched(source.lines("train"), _LINES_AT_A_TIME):
        for encoded in tokenizer.encode_batch(lines):
            counts.update(encoded.ids)
    ranked = sorted(tokenizer.get_vocab().items(), key=lambda item: (-counts[item[1]], item[1]))
    about = json.loads(tokenizer.to_str())
    about["model"]["vocab"] = {token: i + 1 for i, (token, _) in enumerate(ranked)}
    end = AddedToken("\n", normalized=False)  # a line's end, and number 0: no line is without one
    about["model"]["vocab"][end.content] = 0
    tokenizer = Tokenizer.from_str(json.dumps(about))
    tokenizer.add_tokens([end])
    return tokenizer


def _pretrained(tokenizer: Tokenizer, end: str) -> PreTrainedTokenizerFast:
    special = {"eos_token": end, "bos_token": end}  # a text begins as a line does, after the end of another
    if UNKNOWN in tokenizer.get_vocab():
        special["unk_token"] = UNKNOWN
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def _batched(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _name(source: Source, split: str) -> str:
    return f"{source.dataset_name}, {split}" if source.files is None else str(source.files[split])
