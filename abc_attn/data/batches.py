"""Batches of pairs by a budget of tokens: sentences of like length together, in an order that the seed decides.

Item i is a whole batch and a fixed function of (seed, i), so to resume is to go on at i.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from abc_attn.data.pairs import Examples
from abc_attn.data.synthetic import IGNORED


class TokenBatches(Dataset[dict[str, Tensor]]):
    """Batches of at most `max_tokens` tokens a side, padding included.

    Examples are sorted by length, and where lengths are equal in a new order in every pass; so the batches of a pass
    have the same shapes as those of any other, but not the same examples. Their order is a new one in every pass.
    """

    def __init__(
        self, examples: Examples, max_tokens: int, total: int, seed: int, *, pad: int, separator: int, start: int
    ) -> None:
        self.examples, self.total, self.seed = examples, total, seed
        self.pad, self.separator, self.start = pad, separator, start
        self.lengths = examples.lengths()
        longest = int(self.lengths.max())
        if longest > max_tokens:
            raise ValueError(f"max_tokens={max_tokens} is less than the longest example, which has {longest} tokens")
        source, target = self.lengths
        # By target, then by source: up and down in turns, so that neighbours are alike on both sides.
        self._key = np.where(target % 2 == 0, source, -source)
        self._cuts = _cuts(self.lengths[:, np.lexsort((self._key, target))], max_tokens)
        self.per_pass = len(self._cuts) - 1
        self._pass, self._order, self._batches = -1, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, within = divmod(index, self.per_pass)
        if number != self._pass:
            random = np.random.default_rng([self.seed, number])
            chance = random.permutation(len(self.examples))
            self._order = np.lexsort((chance, self._key, self.lengths[1]))
            self._pass, self._batches = number, random.permutation(self.per_pass)
        batch = self._batches[within]
        return self.batch(self._order[self._cuts[batch] : self._cuts[batch + 1]])

    def batch(self, chosen: np.ndarray) -> dict[str, Tensor]:
        """Some examples side by side, as a model with an encoder and a decoder takes them."""
        rows = [self.examples.tokens(index, self.separator) for index in chosen]
        source, target = (padded([row[side] for row in rows], self.pad) for side in (0, 1))
        real = torch.arange(target.shape[1]) < torch.tensor([len(row[1]) for row in rows])[:, None]
        return {
            "input_ids": source,
            "attention_mask": mask([len(row[0]) for row in rows]),
            "decoder_input_ids": torch.cat([target.new_full((len(rows), 1), self.start), target[:, :-1]], dim=1),
            "labels": target.masked_fill(~real, IGNORED),
        }


def padded(rows: list[np.ndarray], pad: int) -> Tensor:
    """Rows of tokens with padding on the right: `b t`."""
    found = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int64)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return torch.from_numpy(found)


def mask(lengths: list[int]) -> Tensor:
    """1 at real tokens of rows with padding on the right: `b t`."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def by_length(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Examples of like length together, within a budget of tokens: for scoring, where the order does not matter."""
    order = np.lexsort((lengths[0], lengths[1]))
    cuts = _cuts(lengths[:, order], max_tokens)
    return [order[start:end] for start, end in pairwise(cuts)]


def _cuts(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """Where to cut rows of these lengths, `2 n`, so that no side of a batch has more tokens, padding included."""
    cuts, start, longest = [0], 0, 0
    for place, length in enumerate(lengths.max(0).tolist()):
        longest = max(longest, length)
        if longest * (place + 1 - start) > max_tokens and place > start:
            cuts.append(place)
            start, longest = place, length
    return np.array([*cuts, lengths.shape[1]])
