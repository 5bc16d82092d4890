"""A GGUF file of a tiny model, written with the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

# Letters, and one pair of them.
TOKENS = ["<s>", "<pad>", "</s>", "Ġw", "Ġ", *"abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'()-+*/=@#$%&_"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order in which GGUF has those of a Llama's queries and keys: the halves of a head interleaved."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(model: Any, file: Path, architecture: str = "llama") -> None:
    """The weights of a Llama or a Qwen3 (without biases), most matrices in Q8_0, with a tokenizer of letters."""
    config = model.config
    assert len(TOKENS) == config.vocab_size
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ w"])
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_chat_template(TEMPLATE)
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        count = next((count for end, count in heads.items() if name.endswith(end)), None)
        if count is not None and architecture == "llama":
            weight = permuted(weight, count)
        array, given = weight.float().numpy(), names.get_name(name, try_suffixes=(".weight",))
        if array.ndim == 1 or array.shape[1] % 32:
            writer.add_tensor(given, array)
        else:
            quantized = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(given, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
