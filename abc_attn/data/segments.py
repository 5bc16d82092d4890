"""Training sequences out of one long row of tokens.

Item i is a fixed function of (seed, i), so to resume is to go on at i. The data set is as long as the training,
however often that goes through the text.
"""

from __future__ import annotations

from typing import Any

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


class TextSegments:
    """Segments of `length` tokens from random places of a text, each from the beginning of a word and after the token
    that begins a text. The text is not tokenized as a whole: a short training on a long text begins at once."""

    def __init__(self, text: str, tokenizer: Any, start: int, length: int, seed: int) -> None:
        self.text, self.tokenizer, self.start, self.length, self.seed = text, tokenizer, start, length, seed
        self[0]  # a text that is too short is noticed now

    def __getitem__(self, index: int) -> Tensor:
        """The tokens of segment `index`, `t`."""
        random, needed = np.random.default_rng([self.seed, index]), self.length - 1
        characters = 8 * needed
        while True:  # few texts have as many characters to a token, some have one
            begin = int(random.integers(max(1, len(self.text) - characters)))
            piece = self.text[begin : begin + characters].partition(" ")[2] if begin else self.text[:characters]
            ids = self.tokenizer(piece, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
            if len(ids) >= needed:
                return torch.cat([ids.new_tensor([self.start]), ids[:needed]])
            if begin == 0 and characters >= len(self.text):
                raise ValueError(f"the text has {len(ids)} tokens, fewer than a segment of {self.length}")
            characters *= 2
