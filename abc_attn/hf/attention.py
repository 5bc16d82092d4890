"""The attention of converted models: a family's own projections, under their own names, around the bounded memory."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.bert.modeling_bert import BertCrossAttention, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.marian.modeling_marian import MarianAttention
from transformers.models.roberta.modeling_roberta import RobertaCrossAttention, RobertaSelfAttention

from abc_attn.attention import MemoryAttention
from abc_attn.controls import Control
from abc_attn.hf.cache import BoundedLayer, bounded_layer
from abc_attn.hf.positions import Rotation, Turn

# Under this name transformers asks us for a mask. Every model here has it as config._attn_implementation.
IMPLEMENTATION = "bounded"


def padding_mask(
    *, q_length: int, mask_function: Any, attention_mask: Tensor | None = None, **unused: Any
) -> Tensor | None:
    """What a bounded attention needs of a mask: `b t`, True at padding among the tokens of this call; None without any.

    transformers calls this in place of building a mask of every query against every key. attention_mask is `b s`, True
    at real tokens, with all earlier tokens in front if there is a cache.
    """
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "bounded attention knows causal and bidirectional attention with padding. Several sequences packed into a "
            "row (position_ids that start again) and other patterns are not supported: give each sequence its own row"
        )
    if attention_mask is None:
        return None
    if mask_function is causal_mask_function:
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

    A subclass says which modules it replaces, how to read their sizes, and how to project.
    """

    replaces: ClassVar[tuple[type[nn.Module], ...]]
    in_place = True  # a state belongs to the cache that it came from
    projections: ClassVar[tuple[str, str, str]] = ("q_proj", "k_proj", "v_proj")  # as most families call them
    out_proj: nn.Module

    def __init__(self, original: Any, control: Control, layer_idx: int) -> None:
        sizes = self.sizes(original)
        super().__init__(**sizes, causal=self.site(original) == "self", scale=original.scaling)
        for name, child in original.named_children():
            if name != "dropout":  # BERT's is a module; of it the rate is needed, which there is already
                self.add_module(name, child)
        self.train(original.training)
        self.layer_idx = layer_idx
        # Not registered here: the model owns its controls, once each, however many layers share them.
        self.__dict__["control"] = control
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
        """Of what the keys are made from."""
        return getattr(original, cls.projections[1]).in_features

    def project(self, x: Tensor, source: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """q from x; k and v from `source`, or None without one. All `b t (heads d)`."""
        q, k, v = (getattr(self, name) for name in self.projections)
        return (q(x), None, None) if source is None else (q(x), k(source), v(source))

    def output(self, merged: Tensor) -> Tensor:
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
            self.check_state(state, len(hidden_states), cross)
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if cross and state is not None:  # the memory of the encoder's output is written once
            q, _, _ = self.project(hidden_states, None)
            out = self.recall(self._heads(q), state)
        else:
            q, k, v = (self._heads(x) for x in self.project(hidden_states, source))  # type: ignore[arg-type]
            q, k, to_sinks = self.rotate(q, k, position_embeddings)
            out, state = self.attend(
                source, q, k, v, key_padding_mask=attention_mask, state=state, cross=cross, to_sinks=to_sinks
            )
            if layer is not None:
                layer.keep(state, source.shape[1])
                if cross:
                    assert isinstance(past_key_values, EncoderDecoderCache)
                    past_key_values.is_updated[self.layer_idx] = True
        return self.output(out.transpose(1, 2).flatten(2)), None

    def rotate(self, q: Tensor, k: Tensor, rotation: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k with their positions; and q as it reads the sinks, if that differs."""
        return q, k, None

    def _layer(self, cache: Cache | None, cross: bool) -> BoundedLayer | None:
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.cross_attention_cache if cross else cache.self_attention_cache
        elif cross:
            return None  # a plain cache has room for the self-attention alone
        return None if cache is None else bounded_layer(cache, self.layer_idx)

    def extra_repr(self) -> str:
        return f"{self._described}, causal={self.causal}"


class BoundedLlamaAttention(ConvertedAttention):
    """Grouped key and value heads, and rotary positions."""

    replaces = (LlamaAttention,)
    o_proj: nn.Module

    @classmethod
    def sizes(cls, original: LlamaAttention) -> dict[str, Any]:
        config = original.config
        heads = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
        return heads | {"head_dim": original.head_dim, "dropout": original.attention_dropout}

    @classmethod
    def site(cls, original: LlamaAttention) -> str:
        return "self"

    def output(self, merged: Tensor) -> Tensor:
        return self.o_proj(merged)

    def rotate(self, q: Tensor, k: Tensor, rotation: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        turn, to_sinks = rotation if isinstance(rotation, Rotation) else Rotation(Turn.by(*rotation))
        return turn.of(q), turn.of(k), None if to_sinks is None else to_sinks.of(q)


class BoundedGPT2Attention(ConvertedAttention):
    """q, k and v of a self-attention come from one projection."""

    replaces = (GPT2Attention,)
    c_attn: nn.Module
    q_attn: nn.Module  # of a cross-attention
    c_proj: nn.Module
    resid_dropout: nn.Module

    @classmethod
    def sizes(cls, original: GPT2Attention) -> dict[str, Any]:
        heads = {"num_heads": original.num_heads, "num_kv_heads": original.num_heads}
        return heads | {"head_dim": original.head_dim, "dropout": original.attn_dropout.p}

    @classmethod
    def site(cls, original: GPT2Attention) -> str:
        return "cross" if original.is_cross_attention else "self"

    @classmethod
    def width(cls, original: GPT2Attention) -> int:
        return original.embed_dim

    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        if given.get("encoder_hidden_states") is not None:
            given["attention_mask"] = given.get("encoder_attention_mask")
        return super().forward(hidden_states, **given)

    def project(self, x: Tensor, source: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.causal:
            q, k, v = self.c_attn(x).chunk(3, dim=-1)
            return q, k, v
        k, v = (None, None) if source is None else self.c_attn(source).chunk(2, dim=-1)
        return self.q_attn(x), k, v

    def output(self, merged: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(merged))


class BoundedBertAttention(ConvertedAttention):
    """BERT and RoBERTa; their output projection is a module of its own."""

    replaces = (BertSelfAttention, BertCrossAttention, RobertaSelfAttention, RobertaCrossAttention)
    projections = ("query", "key", "value")

    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        heads = {"num_heads": original.num_attention_heads, "num_kv_heads": original.num_attention_heads}
        return heads | {"head_dim": original.attention_head_size, "dropout": original.dropout.p}

    @classmethod
    def site(cls, original: Any) -> str:
        if isinstance(original, (BertCrossAttention, RobertaCrossAttention)):
            return "cross"
        return "self" if original.is_causal else "encoder"

    def output(self, merged: Tensor) -> Tensor:
        return merged


class BoundedBartAttention(ConvertedAttention):
    """BART and Marian."""

    replaces = (BartAttention, MarianAttention)

    @classmethod
    def sizes(cls, original: Any) -> dict[str, Any]:
        heads = {"num_heads": original.num_heads, "num_kv_heads": original.num_heads}
        return heads | {"head_dim": original.head_dim, "dropout": original.dropout}

    @classmethod
    def site(cls, original: Any) -> str:
        if original.is_causal:
            return "self"
        return "cross" if original.is_decoder else "encoder"

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, None]:
        return super().forward(hidden_states, encoder_hidden_states=key_value_states, **given)


ADAPTERS: tuple[type[ConvertedAttention], ...] = (
    BoundedLlamaAttention,
    BoundedGPT2Attention,
    BoundedBertAttention,
    BoundedBartAttention,
)


def adapter_of(module: nn.Module) -> type[ConvertedAttention] | None:
    """Which attention takes the place of `module`; None if it is no attention of a known family."""
    return next((adapter for adapter in ADAPTERS if isinstance(module, adapter.replaces)), None)
