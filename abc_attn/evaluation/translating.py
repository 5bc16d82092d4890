"""Translation by transformers' beam search: sentences in batches, and documents sentence by sentence.

A translation does not depend on what else is in its batch: rows have limits of their own, and a decoder that is forced
through what it has translated before counts real tokens. Where a decoder cannot, rows are grouped by that length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from abc_attn.data.batches import TokenBatches, by_length, mask, padded
from abc_attn.data.synthetic import IGNORED
from abc_attn.evaluation.scoring import evaluating
from abc_attn.hf import state_bytes
from abc_attn.hf.models import BoundedModel, most_tokens
from abc_attn.progress import Progress

MORE_THAN_SOURCE = 50  # tokens of a translation beyond those of its source, as in Vaswani et al. (2017)
TOGETHER = 8192  # tokens of all beams of a batch, when the longest is finished


class SmoothedLoss:
    """Cross-entropy with label smoothing, a mean over the labels: transformers' LabelSmoother in fewer passes."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        if num_items_in_batch is None:
            num_items_in_batch = (labels != IGNORED).sum()
        logits = outputs["logits"].flatten(0, 1).float()
        total = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=self.smoothing)
        return total / num_items_in_batch


def mean_nll(model: PreTrainedModel, batches: TokenBatches) -> float:
    """-log p of a target's token after the reference so far: the mean over all examples, in nats."""
    total, count = 0.0, 0
    with evaluating(model):
        for chosen in by_length(batches.lengths, max(TOGETHER, int(batches.lengths.max()))):
            batch = {name: tensor.to(model.device) for name, tensor in batches.batch(chosen).items()}
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits.flatten(0, 1).float()
            total += float(F.cross_entropy(logits, labels.flatten(), reduction="sum"))
            count += int((labels != IGNORED).sum())
    return total / count


class TooLong(ValueError):
    """A sentence has more tokens than the model can read."""


@dataclass
class Work:
    """What was done so far."""

    sentences: int = 0
    tokens: int = 0  # written, of the translations that were chosen
    state_bytes: int = 0  # of one sentence with all its beams, when it was largest


class Row(NamedTuple):
    """A sentence to translate: what is read, what the decoder is forced through, and how much it may write."""

    source: list[int]
    prefix: list[int]
    limit: int


class _RowLimits(StoppingCriteria):
    """Ends each row of a batch at a length of its own, padding and prefix included."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        each = len(input_ids) // len(self.lengths)  # candidates of a row
        return self.lengths.to(input_ids.device).repeat_interleave(each) <= input_ids.shape[1]


class Translator:
    """A model with an encoder and a decoder, its tokenizer, and how to search.

    length_penalty: log p of a translation is divided by (its tokens, the end included) to this power.
    longest: tokens of a translation at most; None: those of its source and 50 more.
    cut: a sentence that is too long for the model is read as far as it can be, instead of an error.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        beams: int = 5,
        length_penalty: float = 0.6,
        longest: int | None = None,
        cut: bool = False,
        together: int = TOGETHER,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.beams, self.length_penalty, self.longest, self.together = beams, length_penalty, longest, together
        self.cut = cut
        self.start: int = model.generation_config.decoder_start_token_id
        self.pads_left = isinstance(model, BoundedModel) and model.family.decoder is not None
        self.most = _most_tokens(model)
        self.work = Work()

    def check(self, sentence: str) -> None:
        """Refuses (TooLong) a sentence that the model cannot read."""
        self._limit_source(self.tokenizer(sentence).input_ids)

    def _limit_source(self, ids: list[int]) -> None:
        if self.most is not None and len(ids) > self.most:
            raise TooLong(f"has {len(ids):,} tokens, and this model reads {self.most:,} at most")

    def sentences(self, sources: Sequence[str]) -> list[str]:
        """The translations of sentences, each by itself; of an empty one, an empty one."""
        return [made for (made,) in self.documents([[source] for source in sources])]

    def documents(
        self,
        documents: Sequence[Sequence[str]],
        context: int = 0,
        references: Sequence[Sequence[str]] | None = None,
        *,
        label: str | None = None,
    ) -> list[list[str]]:
        """The translations of documents' sentences, in order.

        A sentence is read after `context` sentences before it, and the decoder is forced through their translations:
        its own, or the references if there are any. Fewer, where all of them would be too long for the model. With a
        label, standard error shows how far it is.
        """
        found: list[list[str]] = [[""] * len(document) for document in documents]
        with Progress(label, sum(map(len, documents))) if label else nullcontext() as done:
            for document, sentence, text in self.stream(documents, context, references):
                found[document][sentence] = text
                if done:
                    done(f"{self.work.tokens:,} tokens")
        return found

    def stream(
        self, documents: Sequence[Sequence[str]], context: int = 0, references: Sequence[Sequence[str]] | None = None
    ) -> Iterator[tuple[int, int, str]]:
        """As `documents`: each translation with the numbers of its document and sentence, as soon as it is made."""
        texts = [[self._tokens(sentence) for sentence in document] for document in documents]
        made: list[list[list[int]]] = [[] for _ in documents]
        given = [[self._tokens(sentence) for sentence in one] for one in references or ()]
        for number in range(max(map(len, documents), default=0)):  # the first sentences of all, then the second ...
            due = [document for document, text in enumerate(texts) if number < len(text)]
            for document in due:
                made[document].append([])
                if not texts[document][number]:
                    yield document, number, ""
            due = [document for document in due if texts[document][number]]
            before = given or made
            rows = [self._row(texts[one][: number + 1], before[one][:number], context) for one in due]
            for places, found in self.search(rows):
                for place, row in zip(places, found, strict=True):
                    made[due[place]][number] = row
                    yield due[place], number, self._text(row)

    def _text(self, row: list[int]) -> str:
        self.work.sentences += 1
        self.work.tokens += len(row) + 1  # the end, too
        return " ".join(self.tokenizer.decode(row, skip_special_tokens=True).split())

    def _tokens(self, sentence: str) -> list[int]:
        """Without the end; nothing for an empty sentence."""
        ids = self.tokenizer(sentence).input_ids if sentence.strip() else []
        if self.cut and self.most is not None:
            return ids[: self.most - 1][: len(ids) - 1]
        self._limit_source(ids)
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _row(self, texts: list[list[int]], made: list[list[int]], context: int) -> Row:
        """The last of `texts`, after so many before it as the model has room for."""
        end, separator = self.tokenizer.eos_token_id, self.tokenizer.sep_token_id
        limit = len(texts[-1]) + 1 + MORE_THAN_SOURCE if self.longest is None else self.longest
        for first in range(max(0, len(texts) - 1 - context), len(texts)):
            source = _joined(texts[first:], separator, end)
            prefix = [self.start, *(token for one in made[first:] for token in (*one, separator))]
            if self.most is None or max(len(source), len(prefix) + len(texts[-1]) + 1) <= self.most:
                break
        if self.most is not None:
            limit = min(limit, self.most + 1 - len(prefix))  # the last token is written and not read
        return Row(source, prefix, max(1, limit))

    def search(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], list[list[int]]]]:
        """The tokens that follow each row's prefix, without the end; batch by batch, with the places of its rows."""
        if not rows:
            return
        sizes = np.array([(len(row.source), len(row.prefix) + row.limit) for row in rows]).T * self.beams
        groups: list[list[int]] = []
        if self.pads_left:
            groups = [chosen.tolist() for chosen in by_length(sizes, max(self.together, int(sizes.max())))]
        else:
            lengths = np.array([len(row.prefix) for row in rows])
            for length in np.unique(lengths):
                same = np.flatnonzero(lengths == length)
                budget = max(self.together, int(sizes[:, same].max()))
                groups += [same[chosen].tolist() for chosen in by_length(sizes[:, same], budget)]
        for group in groups:
            for places in self._within_positions(rows, group):
                with evaluating(self.model):
                    found = self._generate([rows[place] for place in places])
                yield places, found

    def _within_positions(self, rows: Sequence[Row], group: list[int]) -> Iterator[list[int]]:
        """A group in parts in which a row that is done still has positions while the others go on."""
        prefixes, limits = ([len(rows[place].prefix) for place in group], [rows[place].limit for place in group])
        if self.most is None or len(group) == 1 or max(prefixes) + max(limits) <= self.most + 1:
            yield group
            return
        group = sorted(group, key=lambda place: rows[place].limit)
        for half in (group[: len(group) // 2], group[len(group) // 2 :]):
            yield from self._within_positions(rows, half)

    def _generate(self, rows: Sequence[Row]) -> list[list[int]]:
        tokenizer, device = self.tokenizer, self.model.device
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        source = padded([np.array(row.source) for row in rows], pad).to(device)
        read = mask([len(row.source) for row in rows]).to(device)
        # The prefix is padded on the left, so that all rows write their next token at once.
        prefix = padded([np.array(row.prefix[::-1]) for row in rows], self.start).flip(1).to(device)
        forced = mask([len(row.prefix) for row in rows]).flip(1).to(device)
        width = prefix.shape[1]
        limits = torch.tensor([width + row.limit for row in rows])
        never = [token for token in {pad, tokenizer.sep_token_id} if token is not None and token != end]
        found: Any = self.model.generate(  # type: ignore[operator]
            input_ids=source,
            attention_mask=read,
            decoder_input_ids=prefix,
            decoder_attention_mask=forced,
            max_new_tokens=int(limits.max()) - width,
            max_length=None,
            stopping_criteria=StoppingCriteriaList([_RowLimits(limits)]),
            do_sample=False,
            **({"num_beams": self.beams, "length_penalty": self.length_penalty} if self.beams > 1 else {}),
            suppress_tokens=never,
            return_dict_in_generate=True,
        )
        held = _held_bytes(found.past_key_values) // len(rows)
        self.work.state_bytes = max(self.work.state_bytes, held)
        written = zip(found.sequences.tolist(), limits.tolist(), strict=True)
        return [_until(end, row[width:limit]) for row, limit in written]


def _joined(sentences: Sequence[list[int]], separator: int, end: int) -> list[int]:
    row = [token for sentence in sentences for token in (*sentence, separator)]
    return [*row[:-1], end]


def _until(end: int, row: list[int]) -> list[int]:
    return row[: row.index(end)] if end in row else row


def _most_tokens(model: PreTrainedModel) -> int | None:
    """What a model can read and write: its positions, and those of controls that have so many weights."""
    lengths = [most_tokens(model), *(getattr(module, "max_length", None) for module in model.modules())]
    return min((length for length in lengths if isinstance(length, int)), default=None)


def _held_bytes(cache: Any) -> int:
    """What a search keeps between steps: bounded states, or the keys and values of exact attention."""
    try:
        return state_bytes(cache)
    except TypeError:  # a model that was not converted
        parts = (cache.self_attention_cache, cache.cross_attention_cache)
        return sum(layer.keys.nbytes + layer.values.nbytes for part in parts for layer in part.layers)
