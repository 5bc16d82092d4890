"""Training sequences out of one long row of tokens.

Item i is a fixed function of (seed, i), so to resume is to go on at i. The data set is as long as the training,
however often that goes through the text.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Cuts:
    """Where a text of `size` tokens is cut into segments of `length`: in a new order in every pass.

    Every pass also cuts at other places, so that no token is always the first of its segment.
    """

    def __init__(self, size: int, length: int, seed: int) -> None:
        if size < 2 * length:
            raise ValueError(
                f"the training text has {size} tokens, fewer than two segments of {length}; "
                "use more text or a smaller block_size"
            )
        self.length, self.seed = length, seed
        self.per_pass = (size - length) // length
        self._pass, self._starts = -1, np.empty(0, dtype=np.int64)

    def start(self, index: int) -> int:
        """Where segment `index` begins, counted through all passes."""
        number, within = divmod(index, self.per_pass)
        if number != self._pass:
            random = np.random.default_rng([self.seed, number])
            shift = random.integers(self.length)
            self._pass, self._starts = number, shift + random.permutation(self.per_pass) * self.length
        return int(self._starts[within])


class Segments(Dataset[dict[str, Tensor]]):
    """Segments of `length` tokens, each with the next token as label."""

    def __init__(self, tokens: np.ndarray, length: int, total: int, seed: int) -> None:
        self.tokens, self.length, self.total = tokens, length, total
        self.cuts = Cuts(len(tokens), length, seed)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.cuts.start(index)
        both = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return {"input_ids": both[:-1], "shift_labels": both[1:]}
