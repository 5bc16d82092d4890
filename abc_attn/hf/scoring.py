"""-log p of every token of a text: as one stream with the state carried on, or in windows that are read anew."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from abc_attn.hf.adaptive_lm import AdaptiveLM
from abc_attn.hf.cache import BoundedCache
from abc_attn.hf.models import BoundedModel


@torch.no_grad()
def token_nll(
    model: PreTrainedModel, tokens: Tensor, *, context: int | None = None, stride: int | None = None, chunk: int = 512
) -> Tensor:
    """-log p, in nats, of each of `tokens` `t`; the first follows the token that a text begins with.

    context=None reads the text once, in chunks, and carries the bounded state through it. With `context` every token is
    predicted from a window of at most so many tokens, which is read anew after every `stride` (context / 4) of them.
    """
    tokens = torch.as_tensor(tokens, dtype=torch.int64, device=model.device)
    if tokens.dim() != 1 or not len(tokens):
        raise ValueError(f"tokens must be a row of at least one token, got shape {tuple(tokens.shape)}")
    config = model.config
    start = config.eos_token_id if config.bos_token_id is None else config.bos_token_id
    if start is None:
        raise ValueError("the model's config has neither bos_token_id nor eos_token_id, one of which begins a text")
    inputs = torch.cat([tokens.new_tensor([start]), tokens[:-1]])
    found = []
    if context is None:
        if not isinstance(model, BoundedModel | AdaptiveLM):
            raise ValueError(
                f"a {type(model).__name__} keeps every token it has read, so it cannot be streamed: give a context, or "
                "convert the model"
            )
        cache = BoundedCache()
        for read, scored in zip(inputs.split(chunk), tokens.split(chunk), strict=True):
            found.append(_nll(model(read[None], past_key_values=cache, use_cache=True).logits[0], scored))
    else:
        stride = max(1, context // 4) if stride is None else stride
        if not 1 <= stride <= context:
            raise ValueError(f"stride must be from 1 to the context, {context}, got {stride}")
        end = 0
        while end < len(tokens):
            begin = max(0, end + stride - context)
            first, end = end, min(len(tokens), begin + context)
            kept = end - first
            logits = model(inputs[None, begin:end], use_cache=False, logits_to_keep=kept).logits[0]
            found.append(_nll(logits, tokens[first:end]))
    return torch.cat(found)


def _nll(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), tokens, reduction="none").double()
