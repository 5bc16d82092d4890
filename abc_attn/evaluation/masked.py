"""Masked language models: predictions for masked tokens alone, and their loss and accuracy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, default_data_collator

from abc_attn.data.synthetic import IGNORED

_HEADS = ("lm_head", "cls")  # RoBERTa's and BERT's


def head_of(model: PreTrainedModel) -> nn.Module:
    """The head that predicts tokens."""
    found = next((getattr(model, name) for name in _HEADS if isinstance(getattr(model, name, None), nn.Module)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no head that predicts masked tokens")
    return found


def has_new_head(model: PreTrainedModel) -> bool:
    """Whether what a model was loaded from had no such head, or not all of it."""
    own = {name for name, _ in head_of(model).named_parameters()}
    new: Any = model.new_weights
    return any(weight.partition(".")[0] in _HEADS and weight.partition(".")[2] in own for weight in new)


@torch.no_grad()
def start_new_head(model: PreTrainedModel, log_frequencies: Tensor) -> None:
    """Let a head that was never trained start with the frequencies of tokens, and logits of deviation 1 about them."""
    embeddings: Any = model.get_input_embeddings()
    deviation = float(embeddings.weight.std()) * embeddings.weight.shape[1] ** 0.5
    for module in head_of(model).modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.fill_(1 / deviation)
    output: Any = model.get_output_embeddings()
    output.bias[: len(log_frequencies)] = log_frequencies


class MaskedOnly:
    """Lets a model's head see the tokens that have a label, and no other: about a seventh of them, for the same loss.

    With labels `b t`, logits are then `n v` for the n labels in order. Without labels nothing changes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._labelled: Tensor | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._take_labels, with_kwargs=True),
            head_of(model).register_forward_pre_hook(self._select),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _take_labels(self, module: nn.Module, arguments: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        labels = given.get("labels")
        self._labelled = None if labels is None else labels != IGNORED
        return arguments, given if labels is None else given | {"labels": labels[labels != IGNORED]}

    def _select(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        labelled, self._labelled = self._labelled, None
        return arguments if labelled is None else (arguments[0][labelled], *arguments[1:])


@torch.no_grad()
def masked_scores(model: PreTrainedModel, blocks: Dataset[dict[str, Tensor]], batch_size: int) -> dict[str, float]:
    """The mean -log p of the masked tokens of some blocks, and the share of them that the model finds."""
    training = model.training
    model.eval()
    only = MaskedOnly(model)
    nll, right, count = 0.0, 0, 0
    try:
        for batch in DataLoader(blocks, batch_size, collate_fn=default_data_collator):
            labels = batch["labels"][batch["labels"] != IGNORED].to(model.device)
            logits = model(**{name: part.to(model.device) for name, part in batch.items()}).logits.float()
            nll += float(F.cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(-1) == labels).sum())
            count += len(labels)
    finally:
        only.remove()
        model.train(training)
    return {"loss": nll / count, "accuracy": right / count}
