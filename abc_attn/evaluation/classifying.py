"""Labels that a classifier gives to texts, and how good they are: accuracy, F1, Matthews' correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DataCollatorWithPadding, PreTrainedModel

MEASURES = ("accuracy", "f1", "matthews")


def encode(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, longest: int) -> list[dict[str, Any]]:
    """What a model takes for each text or pair; of two texts that are too long together, the longer is cut first."""
    found = tokenizer(list(texts), None if pairs is None else list(pairs), truncation=True, max_length=longest)
    names = [name for name in found if name in tokenizer.model_input_names]
    return [{name: found[name][row] for name in names} for row in range(len(texts))]


@torch.no_grad()
def predict(model: PreTrainedModel, tokenizer: Any, encoded: Sequence[dict[str, Any]], batch_size: int) -> Tensor:
    """The log-probabilities of the labels, a row for each example. Examples of like length are read together."""
    training = model.training
    model.eval()
    order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]["input_ids"]))
    collate = DataCollatorWithPadding(tokenizer)
    config: Any = model.config
    found = torch.empty(len(encoded), config.num_labels)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        inputs = [{name: part for name, part in encoded[row].items() if name != "labels"} for row in rows]
        batch = {name: part.to(model.device) for name, part in collate(inputs).items()}
        found[rows] = F.log_softmax(model(**batch).logits.float(), dim=-1).cpu()
    model.train(training)
    return found


def measure(name: str, predicted: Sequence[int], right: Sequence[int], labels: int) -> float:
    """accuracy; f1: of the last label where there are two, else the mean of all; matthews: the correlation."""
    table = np.zeros((labels, labels))  # right, predicted
    np.add.at(table, (np.asarray(right), np.asarray(predicted)), 1)
    if name == "accuracy":
        return float(table.trace() / table.sum())
    hits, given, true = table.diagonal(), table.sum(0), table.sum(1)
    if name == "f1":
        each = 2 * hits / np.maximum(given + true, 1)
        return float(each[-1] if labels == 2 else each.mean())
    assert name == "matthews"
    # Gorodkin (2004), which for two labels is Matthews' own.
    total = table.sum()
    spread = math.sqrt(total**2 - given @ given) * math.sqrt(total**2 - true @ true)
    return float((hits.sum() * total - given @ true) / spread) if spread else 0.0
