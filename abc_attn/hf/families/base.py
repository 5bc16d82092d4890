"""What is to be known of a family of transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from abc_attn.hf.attention import ConvertedAttention


@dataclass(frozen=True, kw_only=True)
class Family:
    """The record of a family. Its Bounded<name>Config and Bounded<name>For... are made from it (hf/models.py).

    name: as in the names of transformers' classes: "Llama" of LlamaConfig, LlamaModel, LlamaForCausalLM.
    title: as people write it, in messages.
    attention: transformers' attention classes, and which of ours takes the place of each.
    tiny: the sizes of a config for tests: two layers, width 32, four heads, 128 positions, without a vocabulary.
    class_names: classes that transformers names otherwise than name + "Config", "Model", "ForCausalLM", ...
    decoder: the class of the decoder beside an encoder, if its positions can be given: ours counts real tokens where a
    forced prefix is padded on the left.
    positions_without_token: how many rows at the start of a table of positions no token ever has, from the config.
    """

    name: str
    title: str
    attention: Mapping[type[nn.Module], type[ConvertedAttention]]
    tiny: Mapping[str, Any]
    class_names: Mapping[str, str] = field(default_factory=dict)
    decoder: type[nn.Module] | None = None
    positions_without_token: Callable[[Any], int] = lambda config: 0

    def class_name(self, kind: str) -> str:
        """transformers' name of the family's "Config", "Model", "ForCausalLM", ..."""
        return self.class_names.get(kind, self.name + kind)
