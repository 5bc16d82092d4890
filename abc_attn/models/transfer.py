"""Attention transfer: bounded attention learns to give what exact attention gives on the same input, layer by layer.

The inputs are those that the exact model's layers see, so that no layer has to make up for the errors of those below.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from abc_attn.core import group_heads, query_scale
from abc_attn.hf.attention import ConvertedAttention
from abc_attn.hf.models import BoundedModel
from abc_attn.hf.positions import Angles, Rotation

# An unchosen token's weight counts as no more than e^30 times that of the heaviest chosen one.
_HEAVIEST = 30.0


class Compared(NamedTuple):
    """An attention, what the exact one in its place read, and what that gave: `right`."""

    attention: ConvertedAttention
    arguments: tuple[Any, ...]
    given: dict[str, Any]
    right: Tensor

    def error(self, query: Tensor | None = None) -> Tensor:
        """|found - right|^2 / |right|^2, with a gradient; of a control that chooses tokens (`Control.chosen`) at the
        positions `query` alone, if they are given."""
        found = None if query is None else read_chosen(self.attention, query, *self.arguments, **self.given)
        if found is None:
            found, right = self.attention(*self.arguments, **self.given)[0], self.right
        else:
            right = self.right[:, query]
        return (found - right).square().sum() / right.square().sum()


class Comparison:
    """The attentions of a model beside exact ones, on the inputs of the exact ones.

    teacher: the same model with exact attention; it stays as it is. autocast: the dtype of its own pass.
    """

    def __init__(self, model: BoundedModel, teacher: BoundedModel, autocast: torch.dtype | None = None) -> None:
        self.teacher, self.autocast = teacher.eval().requires_grad_(False), autocast
        self._seen: list[Compared] = []
        for mine, theirs in zip(model.attentions(), teacher.attentions(), strict=True):
            theirs.register_forward_hook(self._note(mine), with_kwargs=True)

    def _note(self, mine: ConvertedAttention) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any], found: Any) -> None:
            self._seen.append(Compared(mine, arguments, given, found[0]))

        return hook

    def __call__(self, **inputs: Any) -> list[Compared]:
        """Every attention of the model, the lowest layer first, after the exact model has read `inputs`."""
        self._seen.clear()
        device = self.teacher.device.type
        with torch.no_grad(), torch.autocast(device, self.autocast) if self.autocast else nullcontext():
            self.teacher.base_model(**inputs)
        seen, self._seen = self._seen, []
        return seen


def read_chosen(
    attention: ConvertedAttention,
    query: Tensor,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **unused: Any,
) -> Tensor | None:
    """What a causal attention gives at the positions `query`, `b q D`, from the tokens that its control chooses, whose
    choice has a gradient. None if its control chooses none."""
    chosen = attention.control.chosen(hidden_states, query) if attention.causal else None
    if chosen is None:
        return None
    rotation = None if position_embeddings is None else Rotation(Angles.of(*position_embeddings))
    q, k, v, _ = attention.heads(hidden_states, hidden_states, rotation)
    assert k is not None
    assert v is not None
    scores = group_heads(q[:, :, query] * query_scale(q, attention.scale), k.shape[1]) @ k[:, :, None].mT
    chosen = chosen[:, :, None]  # the queries of a group read the same tokens
    top = scores.detach().masked_fill(chosen == 0, -torch.inf).amax(-1, keepdim=True)
    weights = (scores - top).clamp(max=_HEAVIEST).exp() * chosen
    out = (weights @ v[:, :, None]) / weights.sum(-1, keepdim=True)
    return attention.output(out.flatten(1, 2).transpose(1, 2).flatten(2))


class Transfer:
    """Takes the place of a model's forward while it is trained: the loss is the error of its attentions.

    In evaluation mode the model is itself.
    """

    def __init__(self, model: BoundedModel, teacher: BoundedModel) -> None:
        self.model, self.forward = model, model.forward
        self.comparison = Comparison(model, teacher)
        model.forward = self

    def __call__(self, *arguments: Any, **given: Any) -> Any:
        if not self.model.training:
            return self.forward(*arguments, **given)
        self.comparison.teacher.to(self.model.device)
        inputs = {name: part for name, part in given.items() if name in ("input_ids", "attention_mask")}
        loss: Any = torch.stack([compared.error() for compared in self.comparison(**inputs)]).mean()
        return MaskedLMOutput(loss=loss)


def exact_twin(model: PreTrainedModel, start: Any) -> BoundedModel:
    """The model in folder `start` with exact attention, of the class of `model`."""
    config = model.config.__class__(
        **{name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "architectures")}
        | {"control": "softmax", "slots": None, "control_options": {}, "layers": None, "where": None}
    )
    kind: Any = type(model)
    return kind.from_pretrained(start, config=config, allow_new_controls=True)
