"""What a model still knows of a long text: facts hidden in a book and asked for at its end, and perplexity."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from abc_attn.hf.cache import BoundedCache
from abc_attn.hf.stateful import Stateful

READ = 512  # tokens at a time
DIGITS = 5
NAMES = ("Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Athens", "Quito", "Seoul", "Havana", "Warsaw", "Delhi", "Tunis")
KINDS = {  # the fact, and what is asked at the end; a name and a number stand in it
    "pass key": ("\nThe pass key is {number}. Remember it: {number} is the pass key.\n", "\nThe pass key is"),
    "pairs": ("\nThe code of {name} is {number}.\n", "\nThe code of {name} is"),
}


class Question(NamedTuple):
    depth: int  # per cent of the text that come before the fact
    asked: list[int]  # tokens
    answer: list[int]


class Needles(NamedTuple):
    """A text with facts in it."""

    kind: str
    text: list[int]
    questions: list[Question]


def hide(kind: str, book: Sequence[int], length: int, depths: Sequence[int], tokenizer: Any, seed: int) -> Needles:
    """A text of `length` tokens, questions not counted, with a fact at each depth."""
    draw = random.Random(seed)
    told, asked = KINDS[kind]
    names = draw.sample(NAMES, len(depths))
    facts, questions = [], []
    for depth, name in zip(depths, names, strict=True):
        number = "".join(draw.choice("0123456789") for _ in range(DIGITS))
        facts.append(_tokens(tokenizer, told.format(name=name, number=number)))
        question = _tokens(tokenizer, asked.format(name=name))
        questions.append(Question(depth, question, _tokens(tokenizer, f" {number}")))
    text, told_in_all = beginning(tokenizer), sum(map(len, facts))
    room = length - len(text) - told_in_all
    if room < 1:
        raise ValueError(
            f"--lengths: {length} tokens are too few for {len(facts)} facts, which take {told_in_all}: give longer "
            "texts, or fewer --depths"
        )
    start = draw.randrange(len(book) - room)
    around, end = book[start : start + room], 0
    for depth, fact in sorted(zip(depths, facts, strict=True)):
        begin, end = end, room * depth // 100
        text += [*around[begin:end], *fact]
    return Needles(kind, [*text, *around[end:]], questions)


def beginning(tokenizer: Any) -> list[int]:
    """The token that every text begins with, if the tokenizer puts one there: the model was trained with it."""
    first = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def new_cache(model: PreTrainedModel) -> Any:
    return BoundedCache() if isinstance(model, Stateful) else DynamicCache(config=model.config)


@torch.inference_mode()
def read(model: PreTrainedModel, tokens: Sequence[int], cache: Any) -> Iterator[Tensor]:
    """Read a text in chunks; the logits of each chunk, `t v`."""
    for chunk in torch.tensor([tokens]).split(READ, dim=1):
        yield model(chunk, past_key_values=cache, use_cache=True).logits[0]


@torch.inference_mode()
def recalls(model: PreTrainedModel, needles: Needles, cache: Any = None) -> dict[int, bool]:
    """By depth, whether the greedy answer is right, every digit of it.

    `cache` has read the text already, and may have dropped some of it since.
    """

    def positions(ids: Tensor) -> dict[str, Tensor]:
        """Where the question stands: after the text, whatever the cache still holds of it."""
        place = torch.arange(ids.shape[1]) + len(needles.text)
        return {"position_ids": place[None]} if given else {}

    given = cache is not None
    if not given:
        cache = new_cache(model)
        for chunk in torch.tensor([needles.text]).split(READ, dim=1):
            model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
    right = {}
    for depth, asked, answer in needles.questions:
        # Greedy decoding gives the answer if and only if each of its tokens is the likeliest after those before it.
        own = copy.deepcopy(cache) if len(needles.questions) > 1 else cache
        ids = torch.tensor([[*asked, *answer[:-1]]])
        logits = model(ids, past_key_values=own, use_cache=True, **positions(ids)).logits[0]
        right[depth] = logits[len(asked) - 1 :].argmax(-1).tolist() == answer
    return right


def loss_by_token(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Nats of every token but the first."""
    found, place = [], 1
    for logits in read(model, tokens, new_cache(model)):
        following = torch.tensor(tokens[place : place + len(logits)])
        found.append(F.cross_entropy(logits[: len(following)].float(), following, reduction="none"))
        place += len(logits)
    return torch.cat(found)


def perplexity(losses: Tensor) -> float:
    return math.exp(float(losses.double().mean()))
