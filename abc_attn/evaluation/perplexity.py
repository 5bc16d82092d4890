"""Perplexity per word, of any causal language model: in windows after a context, or with the state carried throughout.

Every token is scored exactly once. The first follows the token that a text begins with (<eos> in WikiText's manner).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from abc_attn.hf.adaptive_lm import AdaptiveLM
from abc_attn.hf.cache import BoundedCache


class Score(NamedTuple):
    """What was found, over a whole text."""

    nll: float  # sum of -log p, in nats
    tokens: int
    words: int

    @property
    def perplexity(self) -> float:
        """Per word, however many tokens a word is cut into."""
        return math.exp(self.nll / self.words)


def perplexity(
    model: PreTrainedModel,
    tokens: np.ndarray,
    words: int | None = None,
    *,
    context: int = 0,
    window: int = 512,
    batch_size: int = 16,
) -> Score:
    """Score a text in windows of `window` tokens, of which the first `context` are read and not scored.

    So a scored token is predicted from at least `context` + 1 tokens (fewer only where the text begins), and from at
    most `window`. words: how many words the tokens stand for; as many as tokens if not given.
    """
    if not 0 <= context < window:
        raise ValueError(f"context must be from 0 to window - 1 = {window - 1}, got {context}")
    inputs, targets = _shifted(model, tokens)
    starts = list(range(0, len(targets), window - context))
    # Windows that are cut short, by either end of the text, are scored alone.
    whole = [start for start in starts if start >= context and start - context + window <= len(targets)]
    groups = [[start] for start in starts if start not in set(whole)]
    groups += [whole[i : i + batch_size] for i in range(0, len(whole), batch_size)]
    nll = 0.0
    with _evaluating(model), tqdm(total=len(targets), unit=" tokens", desc="scoring", **_bar()) as bar:
        for group in groups:
            begin = [max(0, start - context) for start in group]
            end = [min(len(targets), start - context + window) for start in group]
            read = torch.stack([inputs[a:b] for a, b in zip(begin, end, strict=True)])
            scored = torch.stack([targets[a:b] for a, b in zip(group, end, strict=True)])
            nll += _nll(model, read, scored).sum().item()
            bar.update(scored.numel())
    return Score(nll, len(targets), len(targets) if words is None else words)


def streaming_perplexity(
    model: PreTrainedModel, tokens: np.ndarray, words: int | None = None, *, chunk: int = 512
) -> Score:
    """Score a text from end to end as one sequence, in constant memory: the bounded state is carried throughout."""
    if getattr(model.config, "control", None) == "softmax":
        raise ValueError("the memory of softmax attention grows with the text; only a bounded model can be streamed")
    inputs, targets = _shifted(model, tokens)
    cache, nll = BoundedCache(), 0.0
    with _evaluating(model), tqdm(total=len(targets), unit=" tokens", desc="streaming", **_bar()) as bar:
        for read, scored in zip(inputs.split(chunk), targets.split(chunk), strict=True):
            nll += _nll(model, read[None], scored[None], cache).sum().item()
            bar.update(len(scored))
    return Score(nll, len(targets), len(targets) if words is None else words)


def _shifted(model: PreTrainedModel, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    """What is read and what is to be predicted, token by token."""
    if len(tokens) == 0:
        raise ValueError("there are no tokens to score")
    config = model.config
    start = config.eos_token_id if config.bos_token_id is None else config.bos_token_id
    if start is None:
        raise ValueError("the model's config has neither bos_token_id nor eos_token_id, one of which begins a text")
    targets = torch.from_numpy(np.asarray(tokens).astype(np.int64))
    return torch.cat([targets.new_tensor([start]), targets[:-1]]), targets


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
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
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
