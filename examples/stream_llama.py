"""Convert a Llama and stream: a text of any length is read and continued with a state of constant size.

python examples/stream_llama.py [folder of a LlamaForCausalLM, with its tokenizer]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TextStreamer

from abc_attn.hf import BoundedCache, convert, load_state, save_state, state_bytes


def main(folder: str | None = None, file: str = "state.safetensors") -> list[int]:
    if folder is not None:
        # Four sinks and the last 508 tokens; no training is needed.
        model = convert(AutoModelForCausalLM.from_pretrained(folder), "global:4+window:508", positions="slot")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        given = tokenizer("Once upon a time", return_tensors="pt")
        model.generate(**given, max_new_tokens=2000, streamer=TextStreamer(tokenizer))
        return []
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_key_value_heads=2, max_position_embeddings=64, **sizes))
    model = convert(model.eval(), "global:4+window:28", positions="slot")
    cache, bytes_held = BoundedCache(), []
    with torch.no_grad():
        for _ in range(8):  # 800 tokens, for a model with 64 positions
            model(torch.randint(3, 100, (1, 100)), past_key_values=cache)
            bytes_held.append(state_bytes(cache))
            print(f"{cache.get_seq_length():4} tokens read, {bytes_held[-1]:,} bytes held")
    save_state(cache, file)  # then, perhaps in another process on another day:
    cache = load_state(file)
    new = torch.tensor([[5, 6, 7]])
    mask = torch.ones(1, cache.get_seq_length() + new.shape[1], dtype=torch.int64)  # it counts what was read before
    made = model.generate(new, attention_mask=mask, past_key_values=cache, max_new_tokens=10, pad_token_id=0)
    print("continues with", made[0, 3:].tolist())
    return bytes_held


if __name__ == "__main__":
    main(*sys.argv[1:2])
