"""convert(): a Hugging Face model with its attention replaced and its weights kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from abc_attn.hf.int8 import INT8, to_int8
from abc_attn.hf.models import BOUNDED, BoundedModel, unsupported
from abc_attn.hf.sources import as_dtype, load_source


def convert(
    model: PreTrainedModel | str | os.PathLike[str],
    control: str | dict[str, str] = "mlp",
    slots: int | dict[str, int] | None = None,
    *,
    layers: Sequence[int] | str | None = None,
    where: Sequence[str] | str | None = None,
    tie_control: bool = True,
    positions: str | Sequence[int] = "absolute",
    gguf_file: str | None = None,
    dtype: torch.dtype | str | None = None,
    weights: str | None = None,
    **control_options: Any,
) -> BoundedModel:
    """The same model with bounded attention; its weights are kept. `model` is used up: continue with the result.

    model: a model of transformers; or where one is saved: a folder, a .gguf file, or a name on the hub (owner/name),
    which is then fetched if it is not on this machine.
    control, slots: as for BoundedAttention ("mlp", "global:4+window:508", ...); each may be a dict by site.
    layers: which layers become bounded, counted from 0. None means all, except those that are sliding windows in the
    source: they keep their window, which is a bounded memory already. "all" replaces those windows too.
    where: which sites become bounded: "self" (causal self-attention), "cross", "encoder"; None means all that the
    model has. Attention that is not chosen stays exact: "softmax", or the source's sliding window.
    tie_control: one control for all layers of a site, as in the paper; False gives each layer its own.
    positions: for rotary models. "absolute" rotates keys and then writes them; "slot" counts positions inside the
    memory (for "window", and for "global" beside any other), so that a text may be longer than the model's positions.
    gguf_file: the file of weights in the folder, or under the name, that `model` says; they are dequantised.
    dtype: of the weights, for instance "bfloat16"; by default as they are, and float32 from GGUF.
    weights: "int8" keeps the weights of linear layers and of the head in 8 bits, a scale for each output (hf/int8.py).
    Other options go to the control; self={"gate": True} (or cross=, encoder=) goes to that of one site alone.
    """
    if isinstance(model, str | os.PathLike):
        original = load_source(model, gguf_file=gguf_file, dtype=dtype)
    elif gguf_file is not None:
        raise ValueError(f"gguf_file={gguf_file!r} is for a folder or a name; a {type(model).__name__} was given")
    else:
        original = model if dtype is None else model.to(as_dtype(dtype))  # type: ignore[arg-type]
    if isinstance(original, BoundedModel):
        raise ValueError(f"this model is a {type(original).__name__} already; convert the original model")
    target = BOUNDED.get(type(original))
    if target is None:
        raise ValueError(
            unsupported(type(original).__name__, getattr(getattr(original, "config", None), "model_type", None))
        )
    if not isinstance(positions, str):  # control "global" has an option of the same name
        control_options["positions"], positions = list(positions), "absolute"
    if not all(parameter.is_floating_point() for parameter in original.parameters()):
        raise ValueError(
            f"this {type(original).__name__} is quantized: load it with floating-point weights and convert that"
        )
    # "quantization_config" may describe the file that the weights, now floats, were loaded from.
    left_out = ("model_type", "quantization_config")
    family = {name: value for name, value in original.config.to_dict().items() if name not in left_out}
    make_config: Any = target.config_class
    config = make_config(
        **family,
        control=control,
        slots=slots,
        control_options=control_options,
        tie_control=tie_control,
        layers=layers,
        where=where,
        positions=positions,
        source_model=original.name_or_path or None,
        weights=weights,
    )
    with torch.device("meta"):
        bounded = target(config)
    _move(original, bounded, config)
    if weights == INT8:
        to_int8(bounded)
    if original.can_generate():
        bounded.generation_config = original.generation_config
    return bounded.train(original.training)


def _move(model: PreTrainedModel, bounded: BoundedModel, config: PreTrainedConfig) -> None:
    """Give `bounded` all modules, weights and buffers of `model`, as they are; then replace its attention."""
    for name, part in bounded.named_children():
        if isinstance(part, BoundedModel):  # a body that transformers built by AutoModel
            _move(model.get_submodule(name), part, config)  # type: ignore[arg-type]
            model.add_module(name, part)
    left_out = bounded._modules.keys() - model._modules.keys()  # a pooler, if the model was built without it
    bounded._modules, bounded._parameters = dict(model._modules), dict(model._parameters)
    bounded._buffers = dict(model._buffers)
    for name in left_out:
        setattr(bounded, name, None)
    module: Any
    for module in bounded.modules():
        if hasattr(module, "config"):
            module.config = config
    bounded.bind_attention()
