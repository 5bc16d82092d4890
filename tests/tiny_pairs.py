"""A little parallel text, a recipe that trains on it in a second, and a tiny translator."""

import json
import random

import torch
import transformers

from abc_attn.tasks.translation import Translation

TINY = Translation.tiny | {
    "task": "translation", "data_dir": "pairs", "max_steps": 12, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2, "warmup_steps": 2, "logging_steps": 2, "save_steps": 4,
    "average_checkpoints": 2, "dropout": 0.1, "use_cpu": True,
}  # fmt: skip


def sentences(count, seed=0):
    """Pairs of 2 to 8 words, of which the second is the first, word by word in another language and backwards."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        words = chance.choices(range(30), k=chance.randint(2, 8))
        found.append((" ".join(f"e{word}" for word in words), " ".join(f"d{word}" for word in reversed(words))))
    return found


def write_pairs(folder):
    """train, valid and test as .en and .de, in a new folder `pairs`; the same as documents in `documents`."""
    (folder / "pairs").mkdir()
    (folder / "documents").mkdir()
    for split, count in (("train", 120), ("valid", 15), ("test", 15)):
        pairs = sentences(count, count)
        for side, language in enumerate(("en", "de")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / "pairs" / f"{split}.{language}").write_text(text)
        with open(folder / "documents" / f"{split}.jsonl", "w") as file:
            for start in range(0, count, 5):
                sides = zip(*pairs[start : start + 5], strict=True)
                file.write(json.dumps(dict(zip(("en", "de"), map(list, sides), strict=True))) + "\n")
    return folder


def marian(seed=0, **changes):
    """transformers' own Marian, tiny, with weights large enough that its translations differ."""
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 128}
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    config = transformers.MarianConfig(
        **{"vocab_size": 40, "init_std": 0.4, "dropout": 0.0} | sizes | special | changes
    )
    return transformers.MarianMTModel(config).eval()
