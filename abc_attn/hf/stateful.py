"""What converted models and AdaptiveLM share: their controls, the state as a cache, and a model card."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache

from abc_attn.attention import MemoryAttention
from abc_attn.controls import Control
from abc_attn.controls.base import unknown_controls
from abc_attn.files import write_checksums, write_whole
from abc_attn.hf.cache import BoundedCache
from abc_attn.hf.compiled import compiled_call, run_compiled
from abc_attn.hf.loading import CHECKSUMS, WEIGHTS, check_loaded, check_weights

# A module that save_pretrained writes beside a model. transformers runs it for those who trust_remote_code, and finds
# the model's classes in it. We never run what stands in a folder.
SHIM = "abc_attn_model.py"
BOUNDED = "reads a memory of fixed size instead of every key and value"


def use_control(attention: MemoryAttention, control: Control) -> None:
    """Let an attention use a control that the model owns.

    The control is no submodule of the attention: shared by many layers, its weights have one name in a checkpoint.
    """
    attention._modules.pop("control", None)
    attention.__dict__["control"] = control


class Stateful(PreTrainedModel):
    """Mixed into a model whose memory is a bounded state."""

    _is_stateful = True  # generate() then refuses assisted decoding, which would have to take tokens back

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        modules = getattr(config, "control_modules", None)  # of a saved model: what save_pretrained found
        if modules and (unknown := unknown_controls(config.control)):
            raise ValueError(
                f"this model needs the control {unknown[0]!r}, which is not part of abc-attn: import the module that "
                f"defines it first (when the model was saved, its controls came from: {', '.join(map(str, modules))})"
            )
        super().__init__(config, *arguments, **options)

    def named_controls(self) -> Mapping[str, Control]:
        """Every control of the model once, by a name that `new_control` takes."""
        raise NotImplementedError

    def new_control(self, name: str) -> Control:
        """Another control like the one of this name, as its constructor starts it."""
        raise NotImplementedError

    @torch.no_grad()
    def init_control(self, module: nn.Module) -> bool:
        """Start `module` as its control's constructor does. False, and nothing done, if it is no part of a control."""
        for name, control in self.named_controls().items():
            for path, part in control.named_modules():
                if part is module:
                    fresh = self.new_control(name).get_submodule(path)
                    values = dict((*fresh.named_parameters(recurse=False), *fresh.named_buffers(recurse=False)))
                    for own, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                        init.copy_(tensor, values[own])
                    return True
        return False

    def __call__(self, *arguments: Any, **given: Any) -> Any:
        answer = run_compiled(self, arguments, given)
        return super().__call__(*arguments, **given) if answer is None else answer

    def generate(self, *arguments: Any, compiled: bool = False, **options: Any) -> Any:
        """As in transformers; `compiled`: steps of decoding run as one graph (see compile_decoding) in this call, where
        they can."""
        if not compiled:
            return super().generate(*arguments, **options)  # type: ignore[misc]
        with compiled_call(self) as reasons:
            for reason in reasons:
                warnings.warn(f"generate(compiled=True) goes on uncompiled: {reason}", stacklevel=2)
            return super().generate(*arguments, **options)  # type: ignore[misc]

    def new_cache(self) -> Cache:
        """An empty cache of the kind that generate() needs."""
        return BoundedCache()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any, **options: Any
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} holds keys and values, and a bounded "
                "model has a state of fixed size instead: leave cache_implementation out"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = self.new_cache()
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments, **options)  # type: ignore[misc]

    def _prepare_model_inputs(self, *arguments: Any, **options: Any) -> tuple[Tensor, str, dict[str, Any]]:
        """As in transformers. A cache that is continued by new tokens gets the mask of what it has read in front."""
        prepared: Any = super()._prepare_model_inputs(*arguments, **options)  # type: ignore[misc]
        ids, name, given = prepared
        mask = given.get("attention_mask")
        if name == "input_ids" and not ids.shape[1] and isinstance(given.get("past_key_values"), BoundedCache):
            raise ValueError("no token is given: a state holds no outputs, so generate() needs a token to read first")
        if name == "input_ids" and mask is not None and mask.shape == ids.shape:  # a tokenizer's
            given["attention_mask"] = self._mask_with_past(ids, given, mask)
        return ids, name, given

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)  # type: ignore[misc]
        return self._mask_with_past(inputs_tensor, model_kwargs, mask) if inputs_tensor.dim() == 2 else mask

    def _mask_with_past(self, ids: Tensor, given: dict[str, Any], mask: Tensor) -> Tensor:
        """The mask of all that a cache has read, and of ids `b t`.

        transformers takes ids that are longer than the cache for the whole text, and cuts off what was read.
        """
        cache = given.get("past_key_values")
        layer: Any = cache.layers[0] if isinstance(cache, BoundedCache) and cache.layers else None
        if self.config.is_encoder_decoder or layer is None or layer.state is None:
            return mask
        if ids.shape[1] > layer.columns and not layer.state.loaded:
            return mask
        if ids.shape[1] > layer.columns:
            raise ValueError(
                f"the loaded state has read {layer.columns} tokens and {ids.shape[1]} are given: if all of these are "
                f"new, say so by attention_mask of {layer.columns + ids.shape[1]} columns; if they begin with what was "
                "read, leave that out"
            )
        real = layer.state.length.to(ids.device)[:, None]
        read = torch.arange(layer.columns, device=ids.device) >= layer.columns - real  # padding stood on the left
        return torch.cat([read.expand(len(ids), -1).to(mask.dtype), mask], dim=1)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *arguments: Any,
        allow_new_controls: bool = False,
        output_loading_info: bool = False,
        **options: Any,
    ) -> Any:
        """As in transformers, except that weights of the body that are missing, or that no module takes, are an error.

        allow_new_controls: controls that the checkpoint lacks start anew, and those that it has beyond the config's are
        left out; to load a model that was never converted, or to replace its control.
        A new head (of a classifier, for instance) is no error, as in transformers: it is to be trained. The names of
        weights that start anew are in the model's `new_weights`.
        output_loading_info: what is missing is reported instead, as in transformers. With state_dict nothing is.
        """
        where = pretrained_model_name_or_path
        if output_loading_info or options.get("state_dict") is not None:
            return super().from_pretrained(where, *arguments, output_loading_info=output_loading_info, **options)
        check_weights(where)
        loaded: Any = super().from_pretrained(where, *arguments, output_loading_info=True, **options)
        model, info = loaded
        check_loaded(model, info, where, new_controls=allow_new_controls, new_heads=True)
        model.new_weights = frozenset(info["missing_keys"])
        return model

    @classmethod
    def auto_classes(cls) -> dict[str, type]:
        """What loads models of this kind, and the class that it loads: {"AutoConfig": ..., "AutoModel...": ...}."""
        raise NotImplementedError

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: save_pretrained would otherwise copy the file that defines this class into the model's folder."""

    def card(self) -> str:
        """The text of README.md."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        """As in transformers; and beside the weights their checksums, a module that imports this package, by which
        transformers loads the model with trust_remote_code=True, and, if there is none, a model card (README.md).

        The config says which modules to import first, where controls are not of this package.
        """
        config: Any = self.config
        classes = {auto: found.__name__ for auto, found in self.auto_classes().items()}
        config.auto_map = {auto: f"{Path(SHIM).stem}.{name}" for auto, name in classes.items()}
        if modules := control_modules(self):
            config.control_modules = modules
        folder = Path(save_directory)
        if folder.is_dir() and options.get("is_main_process", True):
            (folder / CHECKSUMS).unlink(missing_ok=True)  # of weights that are about to be replaced
        try:
            saved = super().save_pretrained(save_directory, *arguments, **options)
        except SafetensorError as error:
            raise OSError(f"the weights cannot be written into {folder}: {error}") from error
        if folder.is_dir() and options.get("is_main_process", True):
            write_checksums(CHECKSUMS, folder, folder.glob(WEIGHTS))
            write_whole(folder / SHIM, shim(classes.values()))
            if not (folder / "README.md").exists():
                write_whole(folder / "README.md", self.card())
        return saved

    def generate_batch(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse_continuous_batching()

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse_continuous_batching()

    def continuous_batching_context_manager(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse_continuous_batching()

    def _refuse_continuous_batching(self) -> NoReturn:
        raise ValueError(
            "continuous batching pages keys and values, which a bounded model does not keep: "
            "use generate() with a padded batch"
        )


def known_by_name(cls: type[PreTrainedModel]) -> None:
    """Makes a class an attribute of transformers: `transformers serve` (5.22) looks there for the name that config.json
    gives, and does not ask the Auto classes.

    transformers imports itself once more on the way (processing_utils.py), so the module that serve holds may be an
    older one than that in sys.modules.
    """
    serving = sys.modules.get("transformers.cli.serving.model_manager")
    for module in (sys.modules["transformers"], getattr(serving, "transformers", None)):
        if module is not None:
            setattr(module, cls.__name__, cls)


def shim(names: Iterable[str]) -> str:
    """The text of SHIM."""
    needs = "it needs: pip install 'abc-attn[hf]'"
    imported = f"from abc_attn.hf import {', '.join(sorted({*names}))}  # noqa"
    return f'"""Lets transformers load this model with trust_remote_code=True; {needs}."""\n\n{imported}\n'


def control_modules(model: nn.Module) -> list[str]:
    """The modules outside this package that define the controls of a model; a script by the name of its file."""
    found = {type(module).__module__ for module in model.modules() if isinstance(module, Control)}
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "__main__").stem
    return sorted(script if name == "__main__" else name for name in found if name.partition(".")[0] != "abc_attn")


def model_card(model: PreTrainedModel, kind: str, auto: str, *, bounded: str = BOUNDED, **facts: str) -> str:
    """A README.md that says what a model is, in the form that model hubs read. `auto` is the class that loads it."""
    config: Any = model.config
    reads = "is exact and keeps every key and value" if config.control == "softmax" else bounded
    facts = {
        "control": f"`{config.control}`",
        "slots": f"`{config.slots}`" if config.slots is not None else "as the control says (64 if it does not)",
        "options": f"`{config.control_options}`" if config.control_options else "none",
        "control tied across layers": "yes" if config.tie_control else "no",
    } | facts
    rows = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items())
    return f"""---
library_name: transformers
tags:
- abc-attn
- bounded-memory
---

# {type(model).__name__}

A {kind} whose attention {reads}
([ABC: Attention with Bounded-memory Control](https://aclanthology.org/2022.acl-long.515)).

| | |
|---|---|
{rows}

It needs the package: `pip install 'abc-attn[hf]'`.

```python
import abc_attn.hf  # makes the Auto classes and pipelines know this model
from transformers import {auto}

model = {auto}.from_pretrained("path/to/this/folder")
```

Without that import, `from_pretrained(..., trust_remote_code=True)` does the same: `{SHIM}` holds the import alone.
"""
