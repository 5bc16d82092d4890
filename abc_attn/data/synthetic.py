"""Sequences that ask for memory and nothing else. Item i is a fixed function of (seed, i); labels stand at answers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100  # the label that transformers leaves out of the loss


class Sequences(Dataset[dict[str, Tensor]]):
    """`items` words to remember, out of `vocab_size`."""

    def __init__(self, items: int, vocab_size: int, total: int, seed: int) -> None:
        if items < 1:
            raise ValueError(f"items must be at least 1, got {items}")
        self.items, self.vocab_size, self.total, self.seed = items, vocab_size, total, seed
        self._check()

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words, asked = self.sample(np.random.default_rng([self.seed, index]))
        both = torch.from_numpy(words.astype(np.int64))
        labels = both[1:].masked_fill(~torch.from_numpy(asked)[1:], IGNORED)
        return {"input_ids": both[:-1], "shift_labels": labels}

    def _check(self) -> None:
        raise NotImplementedError

    def sample(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A sequence, and which of its words are answers."""
        raise NotImplementedError


class Recall(Sequences):
    """Multi-query associative recall: `items` pairs of key and value, then all keys in another order: which value?"""

    def _check(self) -> None:
        if self.vocab_size < 2 * self.items:
            raise ValueError(
                f"{self.items} pairs of key and value need a vocab_size of at least {2 * self.items} (keys are one "
                f"half of the words, values the other), got {self.vocab_size}"
            )

    def sample(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        half = self.vocab_size // 2
        keys = random.choice(half, self.items, replace=False)
        pairs = np.stack([keys, half + random.integers(half, size=self.items)], axis=1)
        words = np.concatenate([pairs, random.permutation(pairs)]).reshape(-1)
        asked = (np.arange(len(words)) >= 2 * self.items) & (np.arange(len(words)) % 2 == 1)
        return words, asked


class Copy(Sequences):
    """`items` random words, a mark, and the same words once more."""

    def _check(self) -> None:
        if self.vocab_size < 3:
            raise ValueError(f"copying needs a vocab_size of at least 3 (a mark and two words), got {self.vocab_size}")

    def sample(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        text = random.integers(1, self.vocab_size, size=self.items)
        words = np.concatenate([text, [0], text])
        return words, np.arange(len(words)) > self.items
