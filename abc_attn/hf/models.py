"""Bounded<Family>Config and Bounded<Family>For...: transformers' own classes with their attention replaced.

They are made from the records in `families/`; nothing here is about one family.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache

from abc_attn.attention import MemoryAttention
from abc_attn.controls import Control, make_control
from abc_attn.controls.keeping import Keeping
from abc_attn.hf.attention import IMPLEMENTATION, ConvertedAttention
from abc_attn.hf.cache import BoundedCache, check_columns
from abc_attn.hf.families import FAMILIES, Family
from abc_attn.hf.int8 import INT8, to_int8
from abc_attn.hf.positions import POSITIONS, DecoderPositions, SlotRotary
from abc_attn.hf.stateful import Stateful, known_by_name, model_card
from abc_attn.memory_limit import check_fits

SITES = ("self", "cross", "encoder")
ALL = "all"  # layers=: those that are sliding windows in the source, too


@dataclass(kw_only=True)
class BoundedConfig:
    """The fields of a bounded model's config besides its family's; `convert` explains them."""

    control: str | dict[str, str] = "mlp"
    slots: int | dict[str, int] | None = None
    control_options: dict[str, Any] = field(default_factory=dict)
    tie_control: bool = True
    layers: list[int] | str | None = None
    where: list[str] | None = None
    positions: str = "absolute"
    source_model: str | None = None
    weights: str | None = None

    def __post_init__(self, **given: Any) -> None:
        if isinstance(self.where, str):
            self.where = [self.where]
        if isinstance(self.layers, str) and self.layers != ALL:
            raise ValueError(f"layers must be numbers of layers, or {ALL!r}, got {self.layers!r}")
        for name in ("layers", "where"):
            if getattr(self, name) not in (None, ALL):
                setattr(self, name, list(getattr(self, name)))  # as JSON will give it back
                if not getattr(self, name):
                    raise ValueError(
                        f"{name}=[] selects nothing, and no attention would be bounded: leave {name} out to select "
                        "all, or use control='softmax' for exact attention"
                    )
        by_site = [*(self.where or ())]
        by_site += [site for given in (self.slots, self.control) if isinstance(given, dict) for site in given]
        for site in by_site:
            if site not in SITES:
                raise ValueError(f"unknown site {site!r} of attention; accepted: {', '.join(SITES)}")
        for site in SITES:
            if not isinstance(self.control_options.get(site, {}), dict):
                raise ValueError(
                    f"control_options of site {site!r} must be a mapping, got {self.control_options[site]!r:.100}"
                )
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(map(repr, POSITIONS))}, got {self.positions!r}")
        if self.weights not in (None, INT8):
            raise ValueError(f"weights must be {INT8!r}, or None for floats, got {self.weights!r}")
        super().__post_init__(**given)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing, as for the models: see Stateful."""


class BoundedModel(Stateful):
    """Mixed into a model class of transformers: builds it, then puts bounded attention in place of its own."""

    family: ClassVar[Family]
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False

    def __init__(self, config: PreTrainedConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.bind_attention()
        if self.config.weights == INT8:  # a saved model's are loaded into these
            to_int8(self)
        if (most := most_tokens(self)) is not None:
            self.register_forward_pre_hook(functools.partial(_check_positions, most), with_kwargs=True)
        self.init_weights()  # of what is new: a control starts the same way here and where a checkpoint lacks it

    def bind_attention(self) -> None:
        """Replace every attention of the model. Those that the config does not choose become exact ("softmax")."""
        config: Any = self.config
        places: dict[str, list[tuple[nn.Module, str, type[ConvertedAttention]]]] = {}
        for parent in self.modules():
            for name, child in parent.named_children():
                adapter = next((ours for cls, ours in self.family.attention.items() if isinstance(child, cls)), None)
                if adapter is not None:
                    places.setdefault(adapter.site(child), []).append((parent, name, adapter))
        if not places:  # transformers built the body of this model with AutoModel: it is bounded already
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
        for name, what in (("slots", "a number"), ("control", "a control")):
            given = getattr(config, name)
            if isinstance(given, dict) and {*given} != {*chosen}:
                raise ValueError(
                    f"{name}={given} must give {what} for each bounded site, and for no other; in this "
                    f"{type(self).__name__} these are: {', '.join(chosen)}"
                )
        if unused := [site for site in SITES if site in config.control_options and site not in chosen]:
            raise ValueError(
                f"control_options has options of site {unused[0]!r}, which is not bounded here; bounded: "
                f"{', '.join(chosen)}"
            )
        depth = max(map(len, places.values()))
        named = range(depth) if config.layers == ALL else config.layers
        if not {*(named or ())} <= {*range(depth)}:
            raise ValueError(f"layers={config.layers}: this model's layers are 0 to {depth - 1}")
        used: list[Control] = []  # by each attention
        self.controls = nn.ModuleDict()  # each control once: by site, and by layer where they are not tied
        for site, found in places.items():
            for index, (parent, name, adapter) in enumerate(found):
                original = getattr(parent, name)
                own = adapter.sizes(original)
                sizes = {"embed_dim": adapter.width(original), "num_heads": own["num_kv_heads"]}
                sizes |= {"head_dim": own["head_dim"], "causal": site == "self"}
                key = site if config.tie_control else f"{site}_{index}"
                window = adapter.window(original)
                if window is not None and window >= config.max_position_embeddings:  # Phi-3.5: it never hides anything
                    window = None
                keeps = site not in chosen or (named is not None and index not in named)
                keeps = keeps or (window is not None and (named is None or config.control == "softmax"))
                if keeps:
                    control = make_control("softmax" if window is None else f"window:{window}", **sizes)
                elif key in self.controls:
                    control = self.controls[key]  # type: ignore[assignment]
                else:
                    weight = next(original.parameters())
                    control = self._make_control(site, sizes).to(weight.device, weight.dtype)
                    self.controls[key] = control
                used.append(control)
                attention = adapter(original, control, index, len(found))
                attention.own_window = window if keeps else None
                setattr(parent, name, attention)
        if not self.controls and config.control != "softmax":
            warnings.warn(
                f"every layer of this {type(self).__name__} is a sliding window of its own and stays as it is: control "
                f"{config.control!r} is used nowhere. layers={ALL!r} replaces the windows",
                stacklevel=2,
            )
        bounded = [control.state_bytes for control in used if not control.grows]
        check_fits(f"the states of {len(bounded)} attentions with control {config.control!r}", sum(bounded))
        if "position_ids" in inspect.signature(self.base_model.forward).parameters:  # not in Marian and BART
            first = self.family.positions_without_token(config)
            self.base_model.register_forward_pre_hook(partial(count_real_tokens, first), with_kwargs=True)
        for module in self.modules() if config.is_encoder_decoder else ():
            if self.family.decoder is not None and isinstance(module, self.family.decoder):
                DecoderPositions(module)
        if config.positions == "slot":
            self._count_positions_in_slots()

    def _reads_encoder(self) -> bool:
        config: Any = self.config
        return config.is_encoder_decoder or getattr(config, "add_cross_attention", False)

    def _make_control(self, site: str, sizes: dict[str, Any]) -> Control:
        config: Any = self.config
        slots = config.slots[site] if isinstance(config.slots, dict) else config.slots
        control = config.control[site] if isinstance(config.control, dict) else config.control
        common = {name: value for name, value in config.control_options.items() if name not in SITES}
        options = common | config.control_options.get(site, {})
        with torch.device("cpu"):  # never on the meta device, where random directions cannot be drawn from a seed
            return make_control(control, slots, **sizes, **options)

    def _count_positions_in_slots(self) -> None:
        config: Any = self.config
        owners: list[Any] = [module for module in self.modules() if hasattr(module, "rotary_emb")]
        if not owners:
            raise ValueError(f"positions='slot' needs rotary positions, which {type(self).__name__} does not have")
        controls: list[Any] = [*self.controls.values(), *(attention.control for attention in self.attentions())]
        if not controls[0].grows and any(control.grows for control in controls):
            raise ValueError("positions='slot' is one rotation for all layers: leave out layers=")
        for part in (part for control in self.controls.values() for part in control.modules()):
            if isinstance(part, Keeping) and part.longest is None:  # what is kept has its true distance, and these end
                part.longest = max(1, config.max_position_embeddings - part.rows)
        for owner in owners:
            owner.rotary_emb = SlotRotary(owner.rotary_emb, controls[0])

    def attentions(self) -> list[ConvertedAttention]:
        """Every attention of the model."""
        return [module for module in self.modules() if isinstance(module, ConvertedAttention)]

    def own_windows(self) -> dict[int, int]:
        """The layers that have kept the sliding window that they have in the source: how many tokens, by layer."""
        kept = {attention.layer_idx: attention.own_window for attention in self.attentions()}
        return {layer: window for layer, window in kept.items() if window is not None}

    def named_controls(self) -> Mapping[str, Control]:
        controls: Any = self._modules.get("controls")  # None while transformers' own constructor runs
        return {} if controls is None else dict(controls.items())

    def new_control(self, name: str) -> Control:
        control = self.named_controls()[name]
        sizes = {size: getattr(control, size) for size in ("embed_dim", "num_heads", "head_dim", "causal")}
        return self._make_control(name.partition("_")[0], sizes)

    def _init_weights(self, module: nn.Module) -> None:
        # A control that a checkpoint lacks starts as its constructor starts it, not as the family starts a Linear.
        if not self.init_control(module):
            super()._init_weights(module)

    def new_cache(self) -> Cache:
        cache = super().new_cache()
        return EncoderDecoderCache(cache, BoundedCache()) if self._reads_encoder() else cache

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention not in (None, IMPLEMENTATION):
            raise ValueError(
                f"attn_implementation={requested_attention!r} is not available: {type(self).__name__} has bounded "
                "attention only; leave attn_implementation out"
            )
        return IMPLEMENTATION

    @classmethod
    def auto_classes(cls) -> dict[str, type]:
        names = {"AutoConfig": "Config"} | {auto.__name__: kind for kind, auto in AUTO.items()}
        found = {auto: CLASSES.get(f"Bounded{cls.family.name}{kind}") for auto, kind in names.items()}
        return {auto: own for auto, own in found.items() if own is not None}

    def card(self) -> str:
        config: Any = self.config
        auto = next(auto.__name__ for kind, auto in AUTO.items() if type(self).__name__.endswith(kind))
        bounded = {}
        if config.where is not None or config.layers is not None:
            bounded = {"bounded": "reads a memory of fixed size at the sites and layers below, and is exact elsewhere"}
        facts = {
            "sites of attention": ", ".join(config.where) if config.where else "all",
            "layers": ", ".join(map(str, config.layers)) if config.layers not in (None, ALL) else "all",
            "positions": f"`{config.positions}`",
            "weights": "int8, with a scale for each output" if config.weights == INT8 else "floats",
            "source model": f"`{config.source_model}`" if config.source_model else "none: it was built from its config",
        }
        if windows := self.own_windows():
            widths = ", ".join(map(str, sorted({*windows.values()})))
            facts["sliding windows of the source"] = (
                f"kept in {len(windows)} of {config.num_hidden_layers} layers: {widths} tokens"
            )
        return model_card(self, f"{config.model_type.removeprefix('bounded_')} model", auto, **bounded, **facts)


def count_real_tokens(
    first: int, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]
) -> tuple[Any, Any]:
    """A forward pre-hook: without position_ids, positions count real tokens from `first` on, by the attention mask.

    transformers counts columns, so that padding on the left moves a text to positions that it does not have alone.
    """
    if given.get("position_ids") is not None:  # generate() gives them at every step; binding a signature is slow
        return arguments, given
    signature = inspect.signature(module.forward)
    bound = signature.bind(*arguments, **given).arguments
    mask = bound.get("attention_mask")
    in_order = list(signature.parameters).index("position_ids") < len(arguments)  # given without its name
    if mask is None or mask.dim() != 2 or in_order:
        return arguments, given
    tokens = bound["inputs_embeds"] if bound.get("input_ids") is None else bound["input_ids"]
    real = mask != 0
    position = torch.where(real, first + real.cumsum(1) - 1, max(0, first - 1))  # padding: as RoBERTa has it
    return arguments, given | {"position_ids": position[:, -tokens.shape[1] :]}


def _check_positions(most: int, module: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
    """A forward pre-hook: a cache that was loaded must not be beyond the model's table of positions."""
    cache = next((x for x in (given.get("past_key_values"), *arguments) if isinstance(x, Cache)), None)
    if cache is not None and given.get("position_ids") is None:
        names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
        tokens = next((given[name] for name in names if given.get(name) is not None), None)
        check_columns(cache, 1 if tokens is None else tokens.shape[1], most)


def has_bounded_state(model: PreTrainedModel) -> bool:
    """Whether the state of a model has the same size whatever the length of the text."""
    causal = [module for module in model.modules() if isinstance(module, MemoryAttention) and module.causal]
    return bool(causal) and not any(attention.control.grows for attention in causal)


def most_tokens(model: PreTrainedModel) -> int | None:
    """The length at which a model's positions end; None if they do not: rotary ones, or sinusoids made when needed."""
    config: Any = model.config
    table = getattr(config, "max_position_embeddings", None)
    if table is None or any(hasattr(module, "rotary_emb") for module in model.modules()):
        return None
    family = getattr(BOUNDED.get(type(model), type(model)), "family", None)
    return table if family is None else table - family.positions_without_token(config)


AUTO = {
    "Model": transformers.AutoModel,
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
}
CLASSES: dict[str, type] = {}  # Bounded<Family>Config and Bounded<Family>For..., by name
BOUNDED: dict[type[PreTrainedModel], type[BoundedModel]] = {}  # from transformers' class to ours


def register_family(family: Family) -> None:
    """Make Bounded<Family>Config and Bounded<Family>For..., known to `convert` and to the Auto classes."""
    plain = getattr(transformers, family.class_name("Config"))
    model_type = f"bounded_{plain.model_type}"
    body: dict[str, Any] = {"model_type": model_type, "__module__": __name__}
    body["__doc__"] = f"{plain.__name__}, and what a bounded memory needs: see abc_attn.hf.convert."
    config = type(f"Bounded{family.name}Config", (BoundedConfig, plain), body)
    transformers.AutoConfig.register(model_type, config)
    CLASSES[config.__name__] = config
    for kind, auto in AUTO.items():
        original = getattr(transformers, family.class_name(kind), None)
        if original is None:
            continue
        body = {"config_class": config, "family": family, "__module__": __name__}
        body["__doc__"] = f"{original.__name__} with bounded attention."
        # Where a forward takes **kwargs, Trainer lets it divide by the labels of all processes, unless told that it
        # does not. Only `loss_function` does; the loss of any other is a mean, doubled by two processes.
        body["accepts_loss_kwargs"] = "loss_function" in inspect.unwrap(original.forward).__code__.co_names
        bounded = type(f"Bounded{family.name}{kind}", (BoundedModel, original), body)
        auto.register(config, bounded)
        known_by_name(bounded)
        BOUNDED[original] = CLASSES[bounded.__name__] = bounded


def unsupported(name: str, model_type: str | None) -> str:
    """What to say to a model of transformers' class `name` that is not in BOUNDED: what is supported instead."""
    siblings = [cls.__name__ for cls in BOUNDED if cls.config_class.model_type == model_type]  # type: ignore[union-attr]
    if siblings:
        return f"{name} is not supported; of its family these are: {', '.join(siblings)}"
    families = ", ".join(dict.fromkeys(cls.family.title for cls in BOUNDED.values()))
    return (
        f"{name} is not supported; the supported families are {families}. "
        "How to add one: docs/huggingface.md, 'Adding a family'"
    )


for _family in FAMILIES:
    register_family(_family)

if not TYPE_CHECKING:  # to a type checker, any name would exist

    def __getattr__(name: str) -> type:
        if name in CLASSES:  # a pickle looks for them here
            return CLASSES[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
