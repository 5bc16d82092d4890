"""A start for learned slots from a pretrained model itself: slots that look for positions, without any training.

An encoder's hidden states tell where their tokens stand: positions were added to them. So W of the paper's control can
start as a linear reading of positions, by ridge regression. A slot is then nearly a single token, where a text has no
more than n and as far as positions can be read, in place of a mean of all. The control stays the paper's: no part of it
is told a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from abc_attn.controls.learned import MLP
from abc_attn.hf.models import BoundedModel
from abc_attn.progress import Progress

# By so much the logit of a slot's own token is the largest, if x told positions exactly. At 1,000 the gradients of 64
# slots in blocks of 512 exploded (LOG.md).
SHARPNESS = 300.0
SECOND_CHOICE = 0.2  # ... and that of the token that a slot takes in a text that ends before its own, as a share of it
RIDGE = 1e-3  # of the mean square of x


def wanted(slots: int, length: int) -> Tensor:
    """What each slot prefers, `n t`: 1 at its own token, t mod n = i; in texts without that, token i mod n/2, n/4, ...

    So a text of any length is held by all slots, and no token by three times as many as another.
    """
    found = torch.zeros(slots, length, dtype=torch.float64)
    slot, weight, period = torch.arange(slots), 1.0, slots
    while period:
        token = slot % period
        here = (token < length).nonzero().flatten()
        found[here, token[here]] = found[here, token[here]].clamp(min=weight)
        weight, period = weight * SECOND_CHOICE, period // 2
    beyond = torch.arange(slots, max(slots, length))
    found[beyond % slots, beyond] = 1.0
    return found


def check_starts(model: BoundedModel) -> None:
    """Refuse a model with a control that cannot start at positions."""
    controls: Any = model.controls.values()
    for control in controls:
        if not isinstance(control, MLP) or control.activation != "exp":
            raise ValueError(f"control_start=positions is for mlp with activation 'exp', not for {control.title()}")


@torch.no_grad()
def start_at_positions(model: BoundedModel, teacher: BoundedModel, batches: Sequence[Tensor]) -> None:
    """Let every `mlp` of a model look for positions. teacher: the same model with exact attention, which reads
    `batches` of tokens `b t`, without padding and of several lengths."""
    check_starts(model)
    sums: dict[Any, _Regression] = {control: _Regression(control) for control in model.controls.values()}
    hooks = [
        theirs.register_forward_pre_hook(sums[mine.control].add, with_kwargs=True)
        for mine, theirs in zip(model.attentions(), teacher.attentions(), strict=True)
        if mine.control in sums  # others stay exact
    ]
    teacher.eval()
    with Progress("reading positions from hidden states", len(batches)) as progress:
        for batch in batches:
            teacher.base_model(batch.to(teacher.device))
            progress(f"{batch.shape[1]} tokens")
    for hook in hooks:
        hook.remove()
    for regression in sums.values():
        regression.write()


class _Regression:
    """From the x that an `mlp` reads, of all layers that share it, to what its slots prefer."""

    def __init__(self, control: Any) -> None:
        self.control, width = control, control.embed_dim + 1  # x, and 1
        self.squares = torch.zeros(width, width, dtype=torch.float64)
        self.products = torch.zeros(width, control.slots, dtype=torch.float64)

    def add(self, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        """A hook of an attention of the teacher."""
        x = (arguments[0] if arguments else given["hidden_states"]).cpu().double()
        x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1)
        self.squares += torch.einsum("btd,bte->de", x, x)
        self.products += x.sum(0).T @ wanted(self.control.slots, x.shape[1]).T

    def write(self) -> None:
        ridge = RIDGE * self.squares.diagonal().mean() * torch.eye(len(self.squares), dtype=torch.float64)
        found = torch.linalg.solve(self.squares + ridge, self.products)[:-1]  # the rest is the same for all tokens
        weight = self.control.proj.weight
        scaled = SHARPNESS * self.control.temperature * found.T
        weight.copy_(scaled.to(weight).repeat(self.control.num_heads, 1))
