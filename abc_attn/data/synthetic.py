"""Sequences that ask for memory and nothing else. Item i is a fixed function of (seed, i); labels stand at answers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100  # the label that transformers leaves out of the loss
FILLERS = 8  # words of the vocabulary, the last ones, that mean nothing


class Sequences(Dataset[dict[str, Tensor]]):
    """`items` words to remember, out of `vocab_size`, at random places among `filler` words that mean nothing.

    Without filler an item is always at the same place, and a control can tell items by their positions.
    """

    def __init__(self, items: int, vocab_size: int, total: int, seed: int, filler: int = 0) -> None:
        if items < 1:
            raise ValueError(f"items must be at least 1, got {items}")
        if filler < 0:
            raise ValueError(f"filler must be at least 0 words, got {filler}")
        self.items, self.vocab_size, self.total, self.seed, self.filler = items, vocab_size, total, seed, filler
        self.meaningful = vocab_size - (FILLERS if filler else 0)
        self._check()

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng([self.seed, index])
        words, asked, apart = self.sample(random)
        if self.filler:
            places = random.choice(np.flatnonzero(apart), self.filler)
            words = np.insert(words, places, random.integers(self.meaningful, self.vocab_size, size=self.filler))
            asked = np.insert(asked, places, False)
        both = torch.from_numpy(words.astype(np.int64))
        labels = both[1:].masked_fill(~torch.from_numpy(asked)[1:], IGNORED)
        return {"input_ids": both[:-1], "shift_labels": labels}

    def _check(self) -> None:
        raise NotImplementedError

    def sample(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A sequence, which of its words are answers, and before which of them there may be filler."""
        raise NotImplementedError


class Recall(Sequences):
    """Multi-query associative recall: `items` pairs of key and value, then all keys in another order: which value?"""

    def _check(self) -> None:
        if self.meaningful < 2 * self.items:
            extra = f", and {FILLERS} more for filler" if self.filler else ""
            raise ValueError(
                f"{self.items} pairs of key and value need a vocab_size of at least {2 * self.items} (keys are one "
                f"half of the words, values the other){extra}, got {self.vocab_size}"
            )

    def sample(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        half = self.meaningful // 2
        keys = random.choice(half, self.items, replace=False)
        pairs = np.stack([keys, half + random.integers(half, size=self.items)], axis=1)
        words = np.concatenate([pairs, random.permutation(pairs)]).reshape(-1)
        value = np.arange(len(words)) % 2 == 1  # which follows its key at once
        return words, (np.arange(len(words)) >= 2 * self.items) & value, ~value


class Copy(Sequences):
    """`items` random words, a mark, and the same words once more."""

    def _check(self) -> None:
        if self.meaningful < 3:
            extra = f", and {FILLERS} more for filler" if self.filler else ""
            raise ValueError(
                f"copying needs a vocab_size of at least 3 (a mark and two words){extra}, got {self.vocab_size}"
            )

    def sample(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        text = random.integers(1, self.meaningful, size=self.items)
        words = np.concatenate([text, [0], text])
        answers = np.arange(len(words)) > self.items
        return words, answers, ~answers  # the answers follow each other: which is due is not told by its place
