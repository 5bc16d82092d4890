"""The attention of converted models: a family's own projections, under their own names, around the bounded memory.

What differs between families is in `families/`, one file each.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from abc_attn.attention import MemoryAttention
from abc_attn.controls import Control
from abc_attn.hf.cache import BoundedLayer, bounded_layer
from abc_attn.hf.positions import Angles, Rotation
from abc_attn.hf.stateful import use_control

# Under this name transformers asks us for a mask. Every model here has it as config._attn_implementation.
IMPLEMENTATION = "bounded"


def padding_mask(
    *,
    q_length: int,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **unused: Any,
) -> Tensor | None:
    """What a bounded attention needs of a mask: `b t`, True at padding among the tokens of this call; None without any.

    transformers calls this in place of building a mask of every query against every key. attention_mask is `b s`, True
    at real tokens, with all earlier tokens in front if there is a cache.
    """
    # A sliding window, with nothing but padding on top: transformers lets no mask be skipped where there is more. The
    # window itself is the control of the layers that have one.
    sliding = local_size is not None and allow_is_causal_skip
    if not sliding and mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "bounded attention supports causal and bidirectional attention, with padding. Several sequences packed "
            "into a row (position_ids that start again) and other patterns are not supported: give each sequence its "
            "own row"
        )
    if attention_mask is None:
        return None
    if sliding or mask_function is causal_mask_function:
        attention_mask = attention_mask[:, -q_length:]
    if not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return None
    return ~attention_mask


def _never(*args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        f"attn_implementation={IMPLEMENTATION!r} belongs to the models of abc_attn.hf, and this model's attention is "
        "an ordinary one: convert the model with abc_attn.hf.convert"
    )


AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
AttentionInterface.register(IMPLEMENTATION, _never)


class ConvertedAttention(MemoryAttention):
    """Stands where a family's attention stood: called the same way, with the same parameters, returns (output, None).

    A family's subclass (its adapter) says how to read the sizes and the site of the module that it replaces and, where
    that differs, how to make heads and what becomes of the output.
    """

    projections: ClassVar[tuple[str, str, str]] = ("q_proj", "k_proj", "v_proj")  # as most families call them
    out_proj: nn.Module
    in_place = True  # a state belongs to the cache that it came from
    own_window: int | None = None  # the sliding window of the source, where it was kept

    def __init__(self, original: Any, control: Control, layer_idx: int, layers: int) -> None:
        sizes = self.sizes(original)
        super().__init__(**sizes, causal=self.site(original) == "self", scale=original.scaling)
        for name, child in original.named_children():
            if name != "dropout":  # BERT's is a module; only its rate is needed, and sizes() has read it
                self.add_module(name, child)
        self.train(original.training)
        self.layer_idx, self.layers = layer_idx, layers  # of so many at this site of the model
        use_control(self, control)
        self.describe_states()

    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        """num_heads, num_kv_heads, head_dim and dropout of the module that is replaced."""
        raise NotImplementedError

    @classmethod
    def site(cls, original: Any) -> str:
        """Where in a model it stands: "self" (causal), "cross" or "encoder"."""
        raise NotImplementedError

    @classmethod
    def width(cls, original: Any) -> int:
        """The width of what keys are made from."""
        return getattr(original, cls.projections[1]).in_features

    @classmethod
    def window(cls, original: Any) -> int | None:
        """How many tokens it sees in the source, its own included; None if it sees all."""
        return getattr(original, "sliding_window", None)

    def heads(
        self, x: Tensor, source: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """q of x, and k and v of `source`, by heads: `b h t d`; and q as it reads the sinks, if that differs.

        Without a source (a cross-attention whose memory is written already) k and v are None. Rotary families get a
        rotation; norms of single heads come before it, and fused projections are taken apart here.
        """
        to_q, to_k, to_v = (getattr(self, name) for name in self.projections)
        q = self.split(to_q(x))
        if source is None:
            return q, None, None, None
        k, v = self.split(to_k(source)), self.split(to_v(source))
        if rotation is None:
            return q, k, v, None
        q, k, to_sinks = rotation.of(q, k)
        return q, k, v, to_sinks

    def split(self, x: Tensor) -> Tensor:
        """`b t (h d)` -> `b h t d`."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def output(self, merged: Tensor) -> Tensor:
        """What the layer gets from the heads' outputs side by side, `b t (h d)`."""
        return self.out_proj(merged)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        encoder_hidden_states: Tensor | None = None,
        position_embeddings: Rotation | tuple[Tensor, Tensor] | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"bounded attention takes an attention_mask of shape (batch, tokens), got {tuple(attention_mask.shape)}"
            )
        cross = encoder_hidden_states is not None
        layer = self._layer(past_key_values, cross)
        state = None if layer is None else layer.state
        if state is not None:
            self.check_state(state, hidden_states.shape[0], cross)
            if state.loaded:  # a cross-attention reads the same state at every step: it is checked once
                assert layer is not None
                layer.state = state = state._replace(loaded=False)
        if cross and state is not None:  # the memory of the encoder's output is written once
            q, _, _, _ = self.heads(hidden_states, None, None)
            out = self.recall(q, state)
        else:
            source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
            rotation: Rotation | None = None
            if position_embeddings is not None:
                given = position_embeddings
                rotation = given if isinstance(given, Rotation) else Rotation(Angles.of(*given))
                if not self._sinks:  # one of several layers, and others have sinks
                    rotation = rotation._replace(to_sinks=None)
            q, k, v, to_sinks = self.heads(hidden_states, source, rotation)
            assert k is not None
            assert v is not None
            out, state = self.attend(
                source, q, k, v, key_padding_mask=attention_mask, state=state, cross=cross, to_sinks=to_sinks
            )
            if layer is not None:
                layer.keep(state, source.shape[1])
                if cross:
                    assert isinstance(past_key_values, EncoderDecoderCache)
                    past_key_values.is_updated[self.layer_idx] = True
        return self.output(out.transpose(1, 2).flatten(2)), None

    def _layer(self, cache: Cache | None, cross: bool) -> BoundedLayer | None:
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.cross_attention_cache if cross else cache.self_attention_cache
        elif cross:
            return None  # a plain cache has room for the self-attention alone
        return None if cache is None else bounded_layer(cache, self.layer_idx, self.layers)

    def extra_repr(self) -> str:
        return f"{self._described}, causal={self.causal}"
