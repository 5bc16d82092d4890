"""What wrote the files of this folder, once, with version 0.1. Do not run it with any other: tests read the files.

Weights and states are fp32, as a user saves them; what is expected of them was computed in fp64, so that a comparison
means the same on every CPU.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import abc_attn
from abc_attn import BoundedAttention, State
from abc_attn.hf import AdaptiveLM, AdaptiveLMConfig, convert, load_state, save_state

FOLDER = Path(__file__).parent
SIZES = {
    "vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
ATTENTIONS = {"mlp:4": {}, "global:2+window:4": {}, "cluster:4": {}, "window:3+mlp:3": {"gate": True}}

assert abc_attn.__version__ == "0.1.0"
torch.manual_seed(0)
expected = {"ids": torch.randint(3, 29, (2, 20))}
ids, more = expected["ids"].split([15, 5], dim=1)


def louder(model):
    """Weights four times as large, so that the logits are far from uniform."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return model.eval()


with torch.no_grad():
    llama = louder(LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1)))
    llama = convert(llama, "global:2+window:6", positions="slot")
    llama.save_pretrained(FOLDER / "llama")
    save_state(llama(ids).past_key_values, FOLDER / "llama-state.safetensors")
    cache = load_state(FOLDER / "llama-state.safetensors")
    for layer in cache.layers:
        layer.state = layer.state.to(torch.float64)
    expected["llama"] = llama.double()(ids, use_cache=False).logits
    expected["llama-state"] = llama(more, past_key_values=cache).logits

    bert = convert(louder(BertForMaskedLM(BertConfig(**SIZES))), "mlp", 4)
    bert.save_pretrained(FOLDER / "bert")
    expected["bert"] = bert.double()(ids).logits

    sizes = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    model = louder(AdaptiveLM(AdaptiveLMConfig(**sizes, cutoffs=(10, 20), div_val=2, control="mlp:4")))
    model.save_pretrained(FOLDER / "adaptive_lm")
    expected["adaptive_lm"] = model.double()(ids).logits

    expected["x"] = torch.randn(2, 20, 8)
    x, more = expected["x"].split([15, 5], dim=1)
    for control, options in ATTENTIONS.items():
        attention = louder(BoundedAttention(8, 2, control, causal=True, **options))
        expected |= {f"{control}/{name}": weight.clone() for name, weight in attention.state_dict().items()}
        path = FOLDER / f"attention-{control.replace(':', '')}.safetensors"
        attention(x, return_state=True)[1].save(path)
        state = State.load(path).to(torch.float64)
        expected[f"{control}/output"] = attention.double()(more.double(), state=state)

save_file(expected, FOLDER / "expected.safetensors")
