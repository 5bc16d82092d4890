"""-log p of every token of a text, by any causal language model: as one stream, or in windows that are read anew.

Every token is scored exactly once. The first follows the token that a text begins with (<eos> in WikiText's manner).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from abc_attn.data.synthetic import IGNORED, Sequences
from abc_attn.hf.cache import BoundedCache
from abc_attn.hf.models import has_bounded_state, most_tokens
from abc_attn.models.adaptive_lm import AdaptiveLM

PAPERS_WINDOW = 512  # tokens that are read at once
CHUNK = 512  # tokens of a stream that are read at once
TOGETHER = 8192  # tokens of windows that are read at once, as many windows as that makes


def perplexity(nll: Tensor, words: int | None = None) -> float:
    """Of what `token_nll` found: per word if `words` says how many the tokens stand for, otherwise per token."""
    mean = float(nll.sum()) / (len(nll) if words is None else words)
    return math.exp(mean) if mean < 700 else math.inf


def token_nll(
    model: PreTrainedModel,
    tokens: np.ndarray | Tensor,
    *,
    window: int | None = None,
    context: int = 0,
    batch_size: int | None = None,
) -> Tensor:
    """-log p, in nats and fp64, of each of `tokens` `t`.

    window=None reads the text once, from end to end, in constant memory: the bounded state is carried throughout.
    Otherwise it is read in windows of `window` tokens, of which the first `context` are read and not scored: a token is
    predicted from at least `context` + 1 tokens (fewer only where the text begins), and from at most `window`.
    """
    inputs, targets = _shifted(model, tokens)
    limit, longest = most_tokens(model), min(len(targets), window or len(targets))
    if limit is not None and longest > limit:
        raise ValueError(
            f"the positions of this {type(model).__name__} end after {limit} tokens, and {longest} would be read in a "
            f"row: give a window of at most {limit}"
        )
    found = torch.empty(len(targets), dtype=torch.float64)
    with evaluating(model), tqdm(total=len(targets), unit=" tokens", desc="scoring", **_bar()) as bar:
        cache = None
        if window is None:
            if not has_bounded_state(model):
                raise ValueError(
                    f"this {type(model).__name__} has softmax attention, whose memory grows with the text, so it "
                    "cannot be streamed: give a window, or convert the model"
                )
            cache = BoundedCache()
            groups = [[(start, start, min(start + CHUNK, len(targets)))] for start in range(0, len(targets), CHUNK)]
        else:
            groups = _windows(len(targets), window, context, batch_size or max(1, TOGETHER // window))
        for group in groups:
            read = torch.stack([inputs[begin:end] for begin, _, end in group])
            scored = torch.stack([targets[start:end] for _, start, end in group])
            nll = _nll(model, read, scored, cache).view_as(scored)
            for (_, start, end), row in zip(group, nll, strict=True):
                found[start:end] = row
            bar.update(scored.numel())
    return found


def answer_accuracy(model: PreTrainedModel, items: Sequences, batch_size: int) -> float:
    """The share of answers in `items` that are the likeliest word after what was read."""
    right = asked = 0
    with evaluating(model):
        for start in range(0, len(items), batch_size):
            batch = [items[i] for i in range(start, min(len(items), start + batch_size))]
            words, labels = (torch.stack([item[key] for item in batch]) for key in ("input_ids", "shift_labels"))
            answers = model(words.to(model.device), use_cache=False).logits.argmax(-1).cpu()
            right += int((answers == labels).sum())
            asked += int((labels != IGNORED).sum())
    return right / asked


def _windows(length: int, window: int, context: int, batch_size: int) -> list[list[tuple[int, int, int]]]:
    """(begin, first to be scored, end) of each window, in groups of equal length."""
    if not 0 <= context < window:
        raise ValueError(f"context must be from 0 to window - 1 = {window - 1}, got {context}")
    step = window - context
    first = min(length, context // step * step + step)  # so far, all that a window would hold begins with the text
    starts = range(first, length, step)
    whole = [(start - context, start, start + step) for start in starts if start + step <= length]
    groups = [[(0, 0, first)], *(whole[i : i + batch_size] for i in range(0, len(whole), batch_size))]
    return groups + [[(start - context, start, length)] for start in starts[len(whole) :]]


def _shifted(model: PreTrainedModel, tokens: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
    """What is read and what is to be predicted, token by token."""
    if isinstance(tokens, np.ndarray):
        tokens = torch.from_numpy(tokens.astype(np.int64))
    if tokens.dim() != 1 or not len(tokens):
        raise ValueError(f"tokens must be a row of at least one token, got shape {tuple(tokens.shape)}")
    config = model.config
    start = config.eos_token_id if config.bos_token_id is None else config.bos_token_id
    if start is None:
        raise ValueError("the model's config has neither bos_token_id nor eos_token_id, one of which begins a text")
    return torch.cat([tokens.new_tensor([start]), tokens[:-1]]), tokens


def _nll(model: PreTrainedModel, inputs: Tensor, targets: Tensor, cache: Cache | None = None) -> Tensor:
    """-log p of targets b s, which follow the last s of inputs b t; in fp64."""
    inputs, targets = inputs.to(model.device), targets.to(model.device)
    kept = targets.shape[1]
    if isinstance(model, AdaptiveLM):  # only the bands that are needed
        hidden = model.hidden_states(inputs, None, cache)[:, -kept:]
        return model.vocabulary.nll(hidden.flatten(0, 1), targets.flatten()).double()
    logits = model(inputs, past_key_values=cache, use_cache=cache is not None, logits_to_keep=kept).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").double()


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No gradients, no dropout; the model's mode as it was afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _bar() -> dict[str, Any]:
    return {"leave": False, "disable": not sys.stderr.isatty()}
