"""A tiny RoBERTa with a tokenizer, the same in a .hmsemb file, and a little labelled text."""

import json
import random
import struct

import numpy as np
import torch
import transformers

from abc_attn.data.blocks import learn_tokenizer

WORDS = [f"w{i}" for i in range(40)]
ARCH = {
    "hidden": 16, "layers": 2, "heads": 2, "intermediate": 32, "vocab": 320, "max_positions": 40, "type_vocab": 2,
    "layer_norm_eps": 1e-12, "position_offset": 2,
}  # fmt: skip


def lines(count, seed=0):
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, range(40, 0, -1), k=9)) for _ in range(count)]


def tokenizer():
    return learn_tokenizer(iter(lines(50)), ARCH["vocab"])


def roberta(kind="RobertaForMaskedLM", seed=0, **changes):
    """transformers' own, with weights large enough that its outputs differ."""
    torch.manual_seed(seed)
    config = transformers.RobertaConfig(
        **{
            "vocab_size": ARCH["vocab"], "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 32, "max_position_embeddings": 40, "initializer_range": 0.3,
        } | changes
    )  # fmt: skip
    return getattr(transformers, kind)(config).eval()


def save(folder, **changes):
    """A RoBERTa and its tokenizer in a folder; returns the model."""
    model = roberta(**changes)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


def quantised(tensor, group=16):
    """(bytes of an int8 tensor and its scales, the values that they stand for)"""
    flat = tensor.detach().numpy().reshape(-1, group)
    scales = np.abs(flat).max(1, keepdims=True).astype(np.float32) / 127 + 1e-8
    values = np.round(flat / scales).astype(np.int8)
    raw = values.tobytes() + scales.astype("<f4").tobytes()
    return raw, torch.from_numpy((values * scales).astype(np.float32)).reshape(tensor.shape)


def pack(file, changes=None):
    """Write a tiny .hmsemb file; `changes(header, blobs)` may damage it. Returns the model that it stands for."""
    model = _body()
    weights = model.state_dict()
    names = {"word_emb": "embeddings.word_embeddings.weight", "pos_emb": "embeddings.position_embeddings.weight"}
    names |= {"type_emb": "embeddings.token_type_embeddings.weight"}
    names |= {"emb_ln.w": "embeddings.LayerNorm.weight", "emb_ln.b": "embeddings.LayerNorm.bias"}
    for layer in range(ARCH["layers"]):
        at = f"encoder.layer.{layer}"
        parts = {"ao": "attention.output.dense", "aln": "attention.output.LayerNorm", "f1": "intermediate.dense"}
        parts |= {"f2": "output.dense", "fln": "output.LayerNorm"}
        for end, full in (("w", "weight"), ("b", "bias")):
            names[f"l{layer}.qkv.{end}"] = [f"{at}.attention.self.{one}.{full}" for one in ("query", "key", "value")]
            names |= {f"l{layer}.{short}.{end}": f"{at}.{long}.{full}" for short, long in parts.items()}
    order = ["word_emb", "pos_emb", "type_emb", "emb_ln.w", "emb_ln.b"]
    order += [f"l{n}.{p}.{e}" for n in range(2) for p in ("qkv", "ao", "aln", "f1", "f2", "fln") for e in "wb"]
    tensors, blobs = [], []
    for name in order:
        places = names[name] if isinstance(names[name], list) else [names[name]]
        tensor = torch.cat([weights[place] for place in places])
        small = tensor.dim() == 2 and name not in ("pos_emb", "type_emb")
        raw = tensor.numpy().astype("<f4").tobytes()
        if small:
            raw, kept = quantised(tensor)
            for place, part in zip(places, kept.chunk(len(places)), strict=True):
                weights[place].copy_(part)
        kind = {"dtype": "i8", "group": 16} if small else {"dtype": "f32", "group": 0}
        tensors.append({"name": name, "shape": list(tensor.shape), "len": len(raw)} | kind)
        blobs.append(raw)
    words = tokenizer().backend_tokenizer.to_str().encode()
    header = {"format": 1, "arch": dict(ARCH), "tokenizer_len": len(words), "tensors": tensors}
    if changes is not None:
        changes(header, blobs)
    raw = json.dumps(header).encode()
    file.write_bytes(b"HMSEMB01" + struct.pack("<Q", len(raw)) + raw + words + b"".join(blobs))
    return model


def _body():
    model = roberta("RobertaForMaskedLM").roberta
    for weight in model.parameters():
        weight.requires_grad_(False)
    return model


def labelled(file, count, seed=0, pair=False):
    """A TSV file: label `more` where there are more even words than odd ones, `fewer` elsewhere."""
    rows = ["text\tother\tlabel" if pair else "text\tlabel"]
    for line in lines(count, seed):
        even = sum(int(word[1:]) % 2 == 0 for word in line.split())
        rows.append("\t".join([line, *(["w1 w2"] if pair else []), "more" if even > 4 else "fewer"]))
    file.write_text("\n".join(rows) + "\n")
    return file
