"""Text for encoders: tokens of a pretrained tokenizer (or one that is learned), in blocks with some of them masked.

Every line ends with the separator (</s>), as in RoBERTa's text. A block is the first token (<s>), a stretch of the
text, and the separator. Masks are drawn by transformers' DataCollatorForLanguageModeling, each block's from a seed of
its own, so that item i is a fixed function of (seed, i).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, processors
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from abc_attn.data.segments import Cuts
from abc_attn.data.synthetic import IGNORED
from abc_attn.data.text import byte_level_bpe, find_file, json_object, log_frequencies
from abc_attn.files import check_checksums, whole_folder, write_checksums
from abc_attn.paths import text_lines

READ = ("train", "validation")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # numbers 0 to 4: the first three are RoBERTa's
FIXED_MASKS = 0x6D61736B  # the seed of masks in evaluation, whatever the seed of a run
_FORMAT = 1
_LINES_AT_A_TIME = 2000
_CHECKSUMS = "blocks.sha256"


@dataclass(frozen=True)
class EncodedText:
    """Token files, memory-mapped: `tokens[split]`, lines one after the other, each with the separator at its end."""

    tokens: dict[str, np.ndarray]
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str

    @classmethod
    def open(cls, folder: Path) -> EncodedText:
        check_checksums(_CHECKSUMS, folder)
        tokens = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in READ}
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return cls(tokens, tokenizer, folder.name)

    def log_frequencies(self) -> Tensor:
        """Of the training text."""
        return log_frequencies(self.tokens["train"], len(self.tokenizer))


def find_text(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """The files of some folders by split: train.txt, wiki.train.tokens, train.jsonl, ... possibly as .xz or .gz."""
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder}: data_dir must hold the text to train on")
    return {split: [find_file(folder, split, (".jsonl",)) for folder in folders] for split in READ}


def build_text(
    files: Mapping[str, Sequence[Path]], cache_dir: Path, tokenizer: Any | None, vocab_size: int | None
) -> EncodedText:
    """The text as token files under `cache_dir`, built now unless they are there already.

    tokenizer: a pretrained one; None learns `vocab_size` byte-level tokens from the training text.
    """
    digests = [_digest(path) for split in READ for path in files[split]]
    how = vocab_size if tokenizer is None else hashlib.sha256(_plain(tokenizer).to_str().encode()).hexdigest()
    made_of = json.dumps([_FORMAT, [len(files[split]) for split in READ], digests, how])
    folder = Path(cache_dir) / hashlib.sha256(made_of.encode()).hexdigest()[:16]
    if folder.is_dir():
        try:
            return EncodedText.open(folder)
        except (ValueError, OSError, EOFError) as error:
            said = " ".join(str(error).split())
            print(f"abc-attn: {said}: this tokenized text is made again", file=sys.stderr)
            shutil.rmtree(folder)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), whole_folder(folder) as partial:  # it exists if another process was quicker
        if tokenizer is None:
            assert vocab_size is not None
            tokenizer = learn_tokenizer(paragraphs(files["train"]), vocab_size)
        for split in READ:
            np.save(partial / f"{split}.npy", encode_files(files[split], split, tokenizer))
        tokenizer.save_pretrained(partial)
        write_checksums(_CHECKSUMS, partial, partial.iterdir())
    return EncodedText.open(folder)


def paragraphs(files: Sequence[Path]) -> Iterator[str]:
    """The lines with text of some files; of JSON lines, those of the member "text"."""
    for file in files:
        documents = ".jsonl" in file.suffixes
        for number, line in enumerate(text_lines(file), 1):
            parts = _document(file, number, line).split("\n") if documents and line.strip() else [line]
            yield from filter(None, map(str.strip, parts))


def _document(file: Path, number: int, line: str) -> str:
    text = json_object(file, number, line).get("text")
    if not isinstance(text, str):
        raise ValueError(f"{file}, line {number} must be a JSON object with a text in 'text'")
    return text


def learn_tokenizer(lines: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with RoBERTa's special tokens and template."""
    tokenizer = byte_level_bpe(lines, vocab_size, SPECIAL)
    first, pad, last, unknown, mask = SPECIAL
    tokenizer.post_processor = processors.RobertaProcessing((last, 2), (first, 0))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=first,
        cls_token=first,
        pad_token=pad,
        eos_token=last,
        sep_token=last,
        unk_token=unknown,
        mask_token=mask,
        model_input_names=["input_ids", "attention_mask"],
    )


def check_vocabulary(vocab_size: int | None) -> None:
    """Refuses a size that `learn_tokenizer` cannot make."""
    least = 256 + len(SPECIAL)
    if vocab_size is None or vocab_size < least:
        raise ValueError(
            f"without init_from a tokenizer is learned, which needs a vocab_size of at least {least} (the bytes and "
            f"{', '.join(SPECIAL)}), got {vocab_size}"
        )


def encode_files(files: Sequence[Path], split: str, tokenizer: Any) -> np.ndarray:
    """The tokens of some files, in a row. split: what they are called in an error."""
    small = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    end, parts, lines = tokenizer.sep_token_id, [], paragraphs(files)
    while batch := list(islice(lines, _LINES_AT_A_TIME)):
        encoded = _plain(tokenizer).encode_batch_fast(batch, add_special_tokens=False)
        parts.append(np.array([i for line in encoded for i in (*line.ids, end)], dtype=small))
    if not parts:
        raise ValueError(f"the {split} text has no words: {', '.join(map(str, files))}")
    return np.concatenate(parts)


def _plain(tokenizer: Any) -> Tokenizer:
    return tokenizer.backend_tokenizer


class MaskedBlocks(Dataset[dict[str, Tensor]]):
    """Blocks of `length` tokens in a new order, cut at other places and masked anew in every pass."""

    def __init__(
        self, tokens: np.ndarray, length: int, total: int, seed: int, tokenizer: Any, probability: float
    ) -> None:
        self.tokens, self.inside, self.total, self.seed = tokens, length - 2, total, seed
        self.collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)
        self.ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
        self.special = np.array(tokenizer.all_special_ids)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.block(self.cuts.start(index), [self.seed, *divmod(index, self.cuts.per_pass)])

    @cached_property
    def cuts(self) -> Cuts:
        return Cuts(len(self.tokens), self.inside, self.seed)

    def block(self, start: int, seeds: Sequence[int]) -> dict[str, Tensor]:
        """The block of the text from `start` on, with masks drawn from `seeds`: at least one."""
        ids = _framed(self.tokens[start : start + self.inside], self.ends)
        special = torch.from_numpy(np.isin(ids.numpy(), self.special))
        if bool(special.all()):  # a stretch of unknown words: its first is as good as any
            special[1] = False
        seed = int(np.random.SeedSequence(list(seeds)).generate_state(1, np.uint64)[0] >> np.uint64(1))
        self.collator.generator = torch.Generator().manual_seed(seed)
        while True:
            read, labels = self.collator.torch_mask_tokens(ids.clone()[None], special_tokens_mask=special[None])
            if bool((labels != IGNORED).any()):
                return {"input_ids": read[0], "labels": labels[0]}


class FixedBlocks(MaskedBlocks):
    """Blocks for evaluation: the same ones with the same masks whatever the run, spread over the text."""

    def __init__(self, tokens: np.ndarray, length: int, count: int | None, tokenizer: Any, probability: float) -> None:
        super().__init__(tokens, length, 0, FIXED_MASKS, tokenizer, probability)
        every = len(tokens) // self.inside
        if not every:
            raise ValueError(
                f"the text to score has {len(tokens)} tokens, fewer than a block of {self.inside}; use more text or a "
                "smaller block_size"
            )
        self.total = min(every, count or every)
        self._chosen = np.linspace(0, every - 1, self.total).round().astype(np.int64)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.total:
            raise IndexError(index)
        place = int(self._chosen[index])
        return self.block(place * self.inside, [self.seed, place])


def plain_blocks(tokens: np.ndarray, length: int, count: int, tokenizer: Any) -> Tensor:
    """Blocks of `length` tokens without masks, spread over the text: `b t`."""
    inside, ends = length - 2, (tokenizer.cls_token_id, tokenizer.sep_token_id)
    starts = np.linspace(0, len(tokens) - inside, count).astype(np.int64)
    return torch.stack([_framed(tokens[start : start + inside], ends) for start in starts])


def _framed(middle: np.ndarray, ends: tuple[int, int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[ends[0]], middle.astype(np.int64), [ends[1]]]))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
