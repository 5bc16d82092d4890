"""Bounded<Family>Config and Bounded<Family>For...: transformers' own classes with their attention replaced."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache

from abc_attn.attention import MemoryAttention
from abc_attn.controls import Control, make_control
from abc_attn.hf.attention import IMPLEMENTATION, ConvertedAttention, adapter_of
from abc_attn.hf.cache import BoundedCache
from abc_attn.hf.positions import POSITIONS, SlotRotary
from abc_attn.hf.stateful import Stateful, model_card

SITES = ("self", "cross", "encoder")


@dataclass(kw_only=True)
class BoundedConfig:
    """What a bounded model's config has besides its family's fields; `convert` explains them."""

    control: str = "mlp"
    slots: int | dict[str, int] | None = None
    control_options: dict[str, Any] = field(default_factory=dict)
    tie_control: bool = True
    layers: list[int] | None = None
    where: list[str] | None = None
    positions: str = "absolute"
    source_model: str | None = None

    def __post_init__(self, **given: Any) -> None:
        for name in ("layers", "where"):
            if getattr(self, name) is not None:
                setattr(self, name, list(getattr(self, name)))  # as JSON will give it back
                if not getattr(self, name):
                    raise ValueError(
                        f"{name}=[] selects nothing, so that no attention would be bounded: leave {name} out for all, "
                        "or use control='softmax' for exact attention"
                    )
        for site in (*(self.where or ()), *(self.slots if isinstance(self.slots, dict) else ())):
            if site not in SITES:
                raise ValueError(f"unknown site {site!r} of attention; accepted: {', '.join(SITES)}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(map(repr, POSITIONS))}, got {self.positions!r}")
        super().__post_init__(**given)  # type: ignore[misc]


class BoundedModel(Stateful):
    """Mixed into a model class of transformers: builds it as ever, then puts bounded attention in place of its own."""

    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def __init__(self, config: PreTrainedConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.bind_attention()
        self.init_weights()  # of what is new: a control starts in the same way here and where a checkpoint lacks it

    def bind_attention(self) -> None:
        """Replace every attention of the model. Those that the config leaves out become exact: control "softmax"."""
        config: Any = self.config
        places: dict[str, list[tuple[nn.Module, str, type[ConvertedAttention]]]] = {}
        for parent in self.modules():
            for name, child in parent.named_children():
                adapter = adapter_of(child)
                if adapter is not None:
                    places.setdefault(adapter.site(child), []).append((parent, name, adapter))
        if not places:  # transformers built the body of this model by AutoModel, so that it is bounded already
            return
        # Marian's and BART's decoders have the modules of a cross-attention even where there is no encoder to read.
        sites = [site for site in places if site != "cross" or self._reads_encoder()]
        for site in config.where or ():
            if site not in sites:
                has = ", ".join(sites)
                raise ValueError(
                    f"where={config.where}: {type(self).__name__} has no {site!r} attention; it has: {has}"
                )
        chosen = sites if config.where is None else config.where
        if isinstance(config.slots, dict) and {*config.slots} != {*chosen}:
            raise ValueError(
                f"slots={config.slots} must give a number for each site of attention that is bounded, and for no "
                f"other; in this {type(self).__name__} these are: {', '.join(chosen)}"
            )
        depth = max(map(len, places.values()))
        if not {*(config.layers or ())} <= {*range(depth)}:
            raise ValueError(f"layers={config.layers}: this model's layers are 0 to {depth - 1}")
        self.controls = nn.ModuleDict()  # each control once: by site, and by layer where they are not tied
        for site, found in places.items():
            for index, (parent, name, adapter) in enumerate(found):
                original = getattr(parent, name)
                sizes = adapter.sizes(original)
                shape = {"embed_dim": adapter.width(original), "num_heads": sizes["num_kv_heads"]}
                shape |= {"head_dim": sizes["head_dim"], "causal": site == "self"}
                key = site if config.tie_control else f"{site}_{index}"
                if site not in chosen or (config.layers is not None and index not in config.layers):
                    control = make_control("softmax", **shape)
                elif key in self.controls:
                    control = self.controls[key]  # type: ignore[assignment]
                else:
                    weight = next(original.parameters())
                    control = self._make_control(site, shape).to(weight.device, weight.dtype)
                    self.controls[key] = control
                setattr(parent, name, adapter(original, control, index))
        if config.positions == "slot":
            self._count_positions_in_slots()

    def _reads_encoder(self) -> bool:
        config: Any = self.config
        return config.is_encoder_decoder or getattr(config, "add_cross_attention", False)

    def _make_control(self, site: str, shape: dict[str, Any]) -> Control:
        config: Any = self.config
        slots = config.slots[site] if isinstance(config.slots, dict) else config.slots
        with torch.device("cpu"):  # never on the meta device, where random directions cannot be drawn from a seed
            return make_control(config.control, slots, **shape, **config.control_options)

    def _count_positions_in_slots(self) -> None:
        owners: list[Any] = [module for module in self.modules() if hasattr(module, "rotary_emb")]
        if not owners:
            raise ValueError(f"positions='slot' is about rotary positions, which {type(self).__name__} does not have")
        if self.config.layers is not None:
            raise ValueError("positions='slot' is one rotation for all layers: leave out layers=")
        control: Any = next(iter(self.controls.values()))
        for owner in owners:
            owner.rotary_emb = SlotRotary(owner.rotary_emb, control)
            owner.register_forward_pre_hook(count_real_tokens, with_kwargs=True)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """A control that a checkpoint lacks starts as its constructor starts it, not as the family starts a Linear."""
        controls: Any = self._modules.get("controls") or {}  # none as yet while transformers' own constructor runs
        for key, control in controls.items():
            for name, part in control.named_modules():
                if part is module:
                    shape = {size: getattr(control, size) for size in ("embed_dim", "num_heads", "head_dim", "causal")}
                    fresh = self._make_control(key.partition("_")[0], shape).get_submodule(name)
                    values = dict((*fresh.named_parameters(recurse=False), *fresh.named_buffers(recurse=False)))
                    for own, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                        init.copy_(tensor, values[own])
                    return
        super()._init_weights(module)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention not in (None, IMPLEMENTATION):
            raise ValueError(
                f"attn_implementation={requested_attention!r} was asked for, and {type(self).__name__} has bounded "
                "attention alone: leave attn_implementation out"
            )
        return IMPLEMENTATION

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *arguments: Any, **options: Any
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} holds keys and values, and a bounded "
                "model has a state of fixed size instead: leave cache_implementation out"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            cache: Cache = BoundedCache()
            if self._reads_encoder():
                cache = EncoderDecoderCache(cache, BoundedCache())
            model_kwargs["past_key_values"] = cache
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *arguments, **options)  # type: ignore[misc]

    def card(self) -> str:
        config: Any = self.config
        auto = next(auto.__name__ for kind, auto in AUTO.items() if type(self).__name__.endswith(kind))
        bounded = {}
        if config.where is not None or config.layers is not None:
            bounded = {"bounded": "reads a memory of fixed size at the sites and layers below, and is exact elsewhere"}
        facts = {
            "sites of attention": ", ".join(config.where) if config.where else "all",
            "layers": ", ".join(map(str, config.layers)) if config.layers else "all",
            "positions": f"`{config.positions}`",
            "source model": f"`{config.source_model}`" if config.source_model else "none: it was built from its config",
        }
        return model_card(self, f"{config.model_type.removeprefix('bounded_')} model", auto, **bounded, **facts)


def count_real_tokens(module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any]:
    """A forward pre-hook: without position_ids, positions count real tokens, from the attention mask."""
    if given.get("position_ids") is not None:  # as generate() has it at every step: to bind a signature takes a while
        return arguments, given
    bound = inspect.signature(module.forward).bind(*arguments, **given).arguments
    mask = bound.get("attention_mask")
    if mask is not None and mask.dim() == 2 and bound.get("position_ids") is None and len(arguments) < 3:
        tokens = bound["inputs_embeds"] if bound.get("input_ids") is None else bound["input_ids"]
        given = given | {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]}
    return arguments, given


def has_bounded_state(model: PreTrainedModel) -> bool:
    """Whether what a model remembers of the text it reads has one size, whatever the length."""
    causal = [module for module in model.modules() if isinstance(module, MemoryAttention) and module.causal]
    return bool(causal) and not any(attention.control.grows for attention in causal)


def most_tokens(model: PreTrainedModel) -> int | None:
    """The length at which a model's positions end; None if they do not: rotary ones, or sinusoids made when needed."""
    config: Any = model.config
    table = getattr(config, "max_position_embeddings", None)
    if table is None or any(hasattr(module, "rotary_emb") for module in model.modules()):
        return None
    # RoBERTa's positions are counted from the number of its padding token on.
    return table - config.pad_token_id - 1 if config.model_type.endswith("roberta") else table


AUTO = {
    "Model": transformers.AutoModel,
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
}
# What each family calls the models that it has. Those of GPT-2, BERT and Marian have names of their own.
FAMILIES: dict[str, dict[str, str]] = {
    "Llama": {},
    "GPT2": {"ForCausalLM": "GPT2LMHeadModel"},
    "Bert": {"ForCausalLM": "BertLMHeadModel"},
    "Roberta": {},
    "Marian": {"ForConditionalGeneration": "MarianMTModel"},
    "Bart": {},
}
BOUNDED: dict[type[PreTrainedModel], type[BoundedModel]] = {}  # from transformers' class to ours


def _make_classes() -> dict[str, type]:
    """Bounded<Family>Config and Bounded<Family>For..., by name; all known to the Auto classes."""
    made: dict[str, type] = {}
    for family, names in FAMILIES.items():
        plain = getattr(transformers, f"{family}Config")
        model_type = f"bounded_{plain.model_type}"
        body: dict[str, Any] = {"model_type": model_type, "__module__": __name__}
        body["__doc__"] = f"{family}Config, and what a bounded memory needs: see abc_attn.hf.convert."
        config = type(f"Bounded{family}Config", (BoundedConfig, plain), body)
        transformers.AutoConfig.register(model_type, config)
        made[config.__name__] = config
        for kind, auto in AUTO.items():
            original = getattr(transformers, names.get(kind, family + kind), None)
            if original is None:
                continue
            body = {"config_class": config, "__module__": __name__}
            body["__doc__"] = f"{original.__name__} with bounded attention."
            # Where a forward takes **kwargs, Trainer lets it divide by the labels of all processes, unless told that it
            # does not. Only `loss_function` does; the loss of any other is a mean, doubled by two processes.
            body["accepts_loss_kwargs"] = "loss_function" in inspect.unwrap(original.forward).__code__.co_names
            bounded = type(f"Bounded{family}{kind}", (BoundedModel, original), body)
            auto.register(config, bounded)
            BOUNDED[original] = made[bounded.__name__] = bounded
    return made


CLASSES = _make_classes()
globals().update(CLASSES)
