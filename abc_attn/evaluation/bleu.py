"""BLEU and chrF of translations by sacrebleu: of a whole text, of its short and its long sentences, by document."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU, CHRF

from abc_attn.data import ParallelSource

THIRDS = ("short", "middle", "long")


class Document(NamedTuple):
    """Sentences in their order, and their references."""

    source: list[str]
    target: list[str]


Translations = Sequence[Sequence[str]]  # of each document's sentences


def measured_documents(source: ParallelSource, split: str, context: int, most: int | None) -> list[Document]:
    """The first `most` documents of a split; without context every pair is one by itself."""
    pairs = list(source.pairs(split))
    if context:
        groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair.document)]
    else:
        groups = [[pair] for pair in pairs]
    return [Document([pair.source for pair in group], [pair.target for pair in group]) for group in groups[:most]]


def measure(name: str, documents: Sequence[Document], made: Translations) -> float:
    """The measure of this name, one of MEASURES, from 0 to 100."""
    return MEASURES[name](documents, made)


def signatures() -> dict[str, str]:
    """How sacrebleu computed its figures, in its own words."""
    found = {}
    for name, metric in (("BLEU", _bleu()), ("chrF", _chrf())):
        metric.corpus_score(["a"], [["a"]])  # the number of references is known after the first use
        found[name] = str(metric.get_signature())
    return found


@cache
def _bleu() -> Any:
    return BLEU()  # 13a, mixed case, exponential smoothing


@cache
def _chrf() -> Any:
    return CHRF()


def _of_all(metric: Callable[[], Any]) -> Callable[[Sequence[Document], Translations], float]:
    def score(documents: Sequence[Document], made: Translations) -> float:
        return _score(metric(), *_flat(documents, made)[1:])

    return score


def _of_third(number: int) -> Callable[[Sequence[Document], Translations], float]:
    """BLEU of the sentences whose source is among the shortest third, the middle or the longest third by words."""

    def score(documents: Sequence[Document], made: Translations) -> float:
        sources, hypotheses, references = _flat(documents, made)
        order = sorted(range(len(sources)), key=lambda index: (len(sources[index].split()), index))
        chosen = order[number * len(order) // 3 : (number + 1) * len(order) // 3]
        return _score(_bleu(), [hypotheses[index] for index in chosen], [references[index] for index in chosen])

    return score


def _by_document(documents: Sequence[Document], made: Translations) -> float:
    """The mean over documents of each one's own corpus BLEU."""
    return statistics.fmean(
        _score(_bleu(), list(ours), document.target) for document, ours in zip(documents, made, strict=True)
    )


def _score(metric: Any, hypotheses: list[str], references: list[str]) -> float:
    return float(metric.corpus_score(hypotheses, [references]).score) if hypotheses else 0.0


def _flat(documents: Sequence[Document], made: Translations) -> tuple[list[str], list[str], list[str]]:
    sources = [sentence for document in documents for sentence in document.source]
    hypotheses = [sentence for ours in made for sentence in ours]
    references = [sentence for document in documents for sentence in document.target]
    if not len(sources) == len(hypotheses) == len(references):
        raise ValueError(f"{len(sources)} sentences, {len(hypotheses)} translations, {len(references)} references")
    return sources, hypotheses, references


MEASURES: dict[str, Callable[[Sequence[Document], Translations], float]] = {
    "BLEU": _of_all(_bleu),
    "chrF": _of_all(_chrf),
    **{f"BLEU {third}": _of_third(number) for number, third in enumerate(THIRDS)},
    "BLEU by document": _by_document,
}
