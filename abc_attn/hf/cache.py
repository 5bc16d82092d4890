"""The bounded state as a transformers Cache: one State per layer, whose size does not depend on the length."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from abc_attn.state import MOST_TOKENS, State, load_states, save_states


class BoundedLayer(CacheLayerMixin):
    """What one attention remembers between calls: its State, and how many columns of input it has seen."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.columns = 0  # padding included, as transformers counts; State.length counts real tokens, row by row

    def keep(self, state: State, columns: int) -> None:
        """Take over the state after `columns` more tokens a row."""
        self.state, self.columns, self.is_initialized = state, self.columns + columns, True

    @property
    def nbytes(self) -> int:
        return 0 if self.state is None else self.state.nbytes

    @property
    def batch_size(self) -> int:
        if self.state is None:
            raise AttributeError("an empty layer has no batch size")  # transformers asks with hasattr
        return len(self.state.length)

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1  # transformers' word for no maximum

    def reset(self) -> None:
        self.state, self.columns, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            if indices.dtype == torch.bool:
                indices = indices.nonzero()[:, 0]
            self.state = self.state.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(len(self.state.length), device=self.state.length.device)
            self.state = self.state.reorder(rows.repeat_interleave(repeats))

    def offload(self) -> None:
        if self.state is not None:
            self.device, self.state = self.state.length.device, self.state.to("cpu")

    def prefetch(self) -> None:
        if self.state is not None:
            self.state = self.state.to(self.device)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "a bounded memory cannot forget its last tokens: crop() is not supported, nor is assisted decoding, "
                "which needs it. Keep a copy of the cache (copy.deepcopy) from before those tokens instead"
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._refuse()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError(
            "a bounded cache was given to a model with ordinary attention, which needs every key and value: "
            "use transformers' DynamicCache there"
        )


class BoundedCache(DynamicCache):
    """A Cache of BoundedLayers, one for each attention layer, made as the layers ask for them."""

    def __init__(self) -> None:
        Cache.__init__(self, layer_class_to_replicate=BoundedLayer)

    @property
    def nbytes(self) -> int:
        """Bytes of storage that all states own."""
        return state_bytes(self)


def bounded_layer(cache: Cache, layer_idx: int, layers: int | None = None) -> BoundedLayer:
    """The layer of `cache` for attention number `layer_idx`. A DynamicCache that is still empty becomes bounded.

    A model that has `layers` of them is refused a cache that another number of layers has filled.
    """
    if not isinstance(cache, DynamicCache):
        raise TypeError(
            f"bounded attention keeps its state in a BoundedCache or an empty DynamicCache, got {type(cache).__name__}"
        )
    if layers is not None and layer_idx == 0:  # asked for first, before anything is written
        filled = sum(getattr(layer, "state", None) is not None for layer in cache.layers)
        if filled not in (0, layers):
            raise ValueError(f"this cache holds the states of {filled} layers, and this model has {layers}")
    while len(cache.layers) <= layer_idx:
        cache.layers.append(BoundedLayer())
    layer: Any = cache.layers[layer_idx]
    if not isinstance(layer, BoundedLayer):
        if layer.get_seq_length():
            raise TypeError(
                f"layer {layer_idx} of this cache holds the keys and values of another model's ordinary attention; "
                "pass an empty cache, or one that this model has returned"
            )
        layer = cache.layers[layer_idx] = BoundedLayer()
    return layer


def check_columns(cache: Cache, more: int, most: int) -> None:
    """Refuse a cache from a file that, with `more` columns of input, goes beyond the positions that a model has.

    transformers would look positions up beyond the table, or build a mask of so many columns.
    """
    part: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layer = part.layers[0] if getattr(part, "layers", None) else None
    if (
        isinstance(layer, BoundedLayer)
        and layer.state is not None
        and layer.state.loaded
        and layer.columns + more > most
    ):
        raise ValueError(
            f"this cache has seen {layer.columns} columns of input and {more} more are given; "
            f"this model has positions for {most}"
        )


def state_bytes(cache: Cache) -> int:
    """Bytes of storage that the states in a cache own, those of the cross-attention included."""
    return sum(layer.nbytes for layer in _bounded_layers(cache).values())


def save_state(cache: Cache, path: str | os.PathLike[str]) -> None:
    """Write what a model remembers (its `past_key_values`) into one safetensors file.

    The size of the file does not depend on the length of the prompt, except where layers are exact ("softmax") and keep
    every token. The memory of a cross-attention is included.
    """
    layers = _bounded_layers(cache)
    if not layers:
        raise ValueError("this cache is empty: nothing has been read yet, so there is no state to save")
    columns = {f"{name}columns": str(layer.columns) for name, layer in layers.items()}
    save_states({name: layer.state for name, layer in layers.items() if layer.state is not None}, path, **columns)


def load_state(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Cache:
    """The cache that `save_state` wrote, to continue from: `model(..., past_key_values=load_state(path))`.

    A file that is damaged, or holds what no model can have left, is refused.
    """
    states, facts = load_states(path, device)
    if "" in states:
        raise ValueError(f"{path} holds the state of a single attention; abc_attn.State.load reads it")
    caches = {"self": BoundedCache(), "cross": BoundedCache()}
    names = {site: [name for name in states if name.startswith(f"{site}.")] for site in caches}
    for site, cache in caches.items():
        expected = [f"{site}.{layer_idx}." for layer_idx in range(len(names[site]))]
        if sorted(names[site]) != sorted(expected):
            raise ValueError(
                f"{path} must hold the layers {site}.0. to {site}.{len(expected) - 1}. without a gap, "
                f"and it holds {_shown(names[site])}"
            )
        for layer_idx, name in enumerate(expected):
            columns = _columns(facts.get(f"{name}columns", ""), states[name], f"{path}: {name}columns")
            length, first = states[name].length, states[expected[0]].length
            if not torch.equal(length, first) or columns != int(facts[f"{expected[0]}columns"]):
                raise ValueError(
                    f"{path}: {expected[0]} and {name} must have read the same tokens: their lengths differ"
                )
            bounded_layer(cache, layer_idx).keep(states[name], columns)
    if unknown := [name for name in states if not name.startswith(("self.", "cross."))]:
        raise ValueError(f"{path} names layers {_shown(unknown)}; 'self.0.' and so on, and 'cross.0.', are accepted")
    if not caches["self"].layers:
        raise ValueError(f"{path} holds no layer of a self-attention, only {_shown(names['cross'])}")
    return EncoderDecoderCache(caches["self"], caches["cross"]) if len(caches["cross"]) else caches["self"]


def _columns(said: str, state: State, where: str) -> int:
    """How many columns of input a layer has seen: at least as many as its longest row has real tokens."""
    columns = int(said) if said.isascii() and said.isdecimal() and len(said) < 20 else -1
    least = int(state.length.max()) if state.length.numel() else 0
    if not least <= columns < MOST_TOKENS:
        raise ValueError(
            f"{where} must be a whole number from {least} (the tokens read) to 2**53 - 1, got {said[:40]!r}"
        )
    return columns


def _shown(names: list[str]) -> str:
    shown = ", ".join(repr(name[:40]) for name in sorted(names)[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _bounded_layers(cache: Cache) -> dict[str, BoundedLayer]:
    """The layers that hold a state, by name ("self.3.")."""
    if not isinstance(cache, Cache):
        raise TypeError(f"a transformers Cache is needed, got {type(cache).__name__}")
    parts = {"self": cache}
    if isinstance(cache, EncoderDecoderCache):
        parts = {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    found: dict[str, BoundedLayer] = {}
    layer: Any
    for site, part in parts.items():
        for layer_idx, layer in enumerate(part.layers):
            if not isinstance(layer, BoundedLayer):
                if layer.get_seq_length():
                    raise TypeError(f"layer {layer_idx} of this cache is a {type(layer).__name__}, not a bounded state")
            elif layer.state is not None:
                found[f"{site}.{layer_idx}."] = layer
    return found
