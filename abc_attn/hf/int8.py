"""Weights in int8: a scale for each output of a linear layer and for each row of an embedding; activations stay floats.

    W[o, i]  ~  scale[o] q[o, i],     q whole numbers from -127 to 127,     scale[o] = max_i |W[o, i]| / 127
    y[o]     =  scale[o] (x . q[o]) + bias[o]

Sums are formed in the dtype of the activations (fp32, or what torch sums bf16 in), and whole numbers up to 127 are
exact in both: the only error is that of rounding W, at most scale[o] / 2 for each weight.

The gain is memory, and with it the time of a decoding step, which is the time to read the weights: see compiled.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from abc_attn.kernels import native_linear

INT8 = "int8"
MOST = 127
# In a compiled graph, rows up to which a linear layer is a loop over the int8 weights as they lie. Each row reads them
# again, so with more rows a matrix product over converted weights is faster.
FEW_ROWS = 4


class Int8Linear(nn.Module):
    """Takes the place of a Linear, or of GPT-2's Conv1D, whose weights lie the other way round."""

    bias: Tensor | None

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        weight: Any = original.weight
        weight = weight.T if isinstance(original, Conv1D) else weight
        self.weight, self.scale = _quantised(weight.detach())
        self.register_parameter("bias", original.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.scale)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"


class Int8Embedding(nn.Module):
    """Takes the place of an Embedding, with its rows in int8: those of a head that is tied to it."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.scale = _quantised(original.weight.detach())
        self.dtype, self.padding_idx = original.weight.dtype, original.padding_idx
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim
        factor = getattr(original, "scalar_embed_scale", getattr(original, "embed_scale", 1.0))  # Gemma's, BART's
        self.factor = float(torch.tensor(factor, dtype=self.dtype, device="cpu"))

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight).to(self.dtype) * F.embedding(ids, self.scale[:, None]).to(self.dtype)
        return rows if self.factor == 1.0 else rows * self.factor

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x `... i` times weight `o i`, of any type, times scale, plus bias: `... o`, in the dtype of x."""
    rows = x.numel() // x.shape[-1]
    if torch.compiler.is_compiling() and isinstance(rows, int) and rows <= FEW_ROWS:
        # One loop of inductor's: the converted weights stay in registers, and what stands around joins it.
        y = (x.unsqueeze(-2) * weight.to(x.dtype)).sum(-1)
    elif (fused := native_linear.linear(x, weight, scale, bias)) is not None:
        return fused
    else:
        y = F.linear(x, weight.to(x.dtype))
    y = y if scale is None else y * scale.to(x.dtype)
    return y if bias is None else y + bias


def to_int8(model: PreTrainedModel) -> None:
    """Replace the linear layers and the head of a model, and the embeddings that a head is tied to. Controls stay."""
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    places = [
        (parent, name, child, f"{prefix}.{name}.weight".removeprefix("."))
        for prefix, parent in model.named_modules()
        if "controls" not in prefix.split(".")
        for name, child in parent.named_children()
        if name != "controls"
    ]
    made: dict[nn.Module, nn.Module] = {}  # a module may stand in several places
    for parent, name, child, weight in places:
        if isinstance(child, (nn.Linear, Conv1D)):
            made.setdefault(child, Int8Linear(child))
        elif isinstance(child, nn.Embedding) and weight in tied:
            made.setdefault(child, Int8Embedding(child))
        if child in made:
            setattr(parent, name, made[child])
    _tie_scales(model)


def _tie_scales(model: PreTrainedModel) -> None:
    """Where weights are tied their scales are, for transformers' saving and loading too."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part._tied_weights_keys:
            keys: dict[str, str] = dict(part._tied_weights_keys)
            for target, source in part.get_expanded_tied_weights_keys().items():
                if target.endswith(".weight") and isinstance(
                    part.get_submodule(target.removesuffix(".weight")), (Int8Linear, Int8Embedding)
                ):
                    keys |= {target.removesuffix("weight") + "scale": source.removesuffix("weight") + "scale"}
            part._tied_weights_keys = keys
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights(recompute_mapping=False)


def _quantised(weight: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """weight `o i` as whole numbers, and the scale of each of its rows."""
    scale = weight.float().abs().amax(1) / MOST
    whole = (weight.float() / scale.where(scale > 0, 1)[:, None]).round()
    return nn.Parameter(whole.to(torch.int8).contiguous(), requires_grad=False), nn.Parameter(
        scale, requires_grad=False
    )
