"""Attention transfer: bounded attention learns to give what exact attention gives on the same input, layer by layer.

The inputs are those that the exact model's layers see, so that no layer has to make up for the errors of those below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from abc_attn.hf.models import BoundedModel


class Transfer:
    """Takes the place of a model's forward while it is trained: the loss is the error of its attentions.

    teacher: the same model with exact attention; it stays as it is. In evaluation mode the model is itself.
    """

    def __init__(self, model: BoundedModel, teacher: BoundedModel) -> None:
        self.model, self.teacher, self.forward = model, teacher.eval().requires_grad_(False), model.forward
        self._seen: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]] = []
        for mine, theirs in zip(model.attentions(), teacher.attentions(), strict=True):
            theirs.register_forward_hook(self._note(mine), with_kwargs=True)
        model.forward = self

    def _note(self, mine: nn.Module) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any], found: Any) -> None:
            self._seen.append((mine, arguments, given, found[0]))

        return hook

    def __call__(self, *arguments: Any, **given: Any) -> Any:
        if not self.model.training:
            return self.forward(*arguments, **given)
        self._seen.clear()
        teacher = self.teacher.to(self.model.device)
        inputs = {name: part for name, part in given.items() if name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            teacher.base_model(**inputs)
        errors = []
        for mine, read, options, right in self._seen:
            found = mine(*read, **options)[0]
            errors.append((found - right).square().sum() / right.square().sum())
        self._seen.clear()
        loss: Any = torch.stack(errors).mean()
        return MaskedLMOutput(loss=loss)


def exact_twin(model: PreTrainedModel, start: Any) -> BoundedModel:
    """The model in folder `start` with exact attention, of the class of `model`."""
    config = model.config.__class__(
        **{name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "architectures")}
        | {"control": "softmax", "slots": None, "control_options": {}, "layers": None, "where": None}
    )
    kind: Any = type(model)
    return kind.from_pretrained(start, config=config, allow_new_controls=True)
