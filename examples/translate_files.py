"""Train a translator on two files of your own, line by line translations of each other, and translate with it.

python examples/translate_files.py text.en text.de [folder to write]

Without files, it makes a toy language up, whose sentences are read backwards. On the command line the same is
`abc-attn train my-recipe.yaml`, `abc-attn translate runs/my-recipe < in > out`: see docs/translation.md.
"""

import random
import sys
import tempfile
from pathlib import Path

import yaml

from abc_attn.evaluation.translating import Translator
from abc_attn.models.saved import load_model, load_tokenizer
from abc_attn.paths import text_lines
from abc_attn.training import load_recipe, train

RECIPE = {
    "task": "translation", "source_lang": "source", "target_lang": "target", "vocab_size": 300,
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 128, "max_length": 128, "dropout": 0.0,
    # As in the paper, memories of fixed size for what is read and for what is written, and an exact encoder; the
    # controls are the best of those tried here.
    "control": {"cross": "placed", "self": "slots"}, "slots": {"cross": 16, "self": 8}, "where": ["self", "cross"],
    "max_tokens": 1024, "learning_rate": 3e-3, "warmup_steps": 10, "logging_steps": 10, "save_steps": 10,
    "average_checkpoints": 2, "use_cpu": True,
}  # fmt: skip


def toy(count: int = 600) -> list[tuple[str, str]]:
    chance = random.Random(0)
    sentences = [chance.choices("abcdefghij", k=chance.randint(2, 8)) for _ in range(count)]
    return [(" ".join(words), " ".join(reversed(words)).upper()) for words in sentences]


def split(pairs: list[tuple[str, str]], folder: Path) -> None:
    """The last lines are kept for validation and for a test, 5 in 100 each."""
    held = max(1, len(pairs) // 20)
    parts = {"train": pairs[: -2 * held], "valid": pairs[-2 * held : -held], "test": pairs[-held:]}
    for name, part in parts.items():
        for side, ending in enumerate(("source", "target")):
            (folder / f"{name}.{ending}").write_text("".join(f"{pair[side]}\n" for pair in part), encoding="utf-8")


def main(source: str | None = None, target: str | None = None, folder: str | None = None, steps: int = 100) -> float:
    pairs = toy()
    if source is not None:
        if target is None:
            sys.exit(f"two files are needed, line by line translations of each other; {source} is one")
        texts = [list(text_lines(Path(file))) for file in (source, target)]
        if len(texts[0]) != len(texts[1]):
            counts = f"{source} has {len(texts[0]):,} lines, {target} {len(texts[1]):,}"
            sys.exit(f"{counts}: each line must be the translation of the other's")
        pairs = list(zip(*texts, strict=True))
    with tempfile.TemporaryDirectory() as scratch:
        data, run = Path(scratch, "data"), Path(folder or scratch, "run")
        data.mkdir()
        split(pairs, data)
        values = RECIPE | {"data_dir": str(data), "cache_dir": str(Path(scratch, "cache")), "max_steps": steps}
        (data / "recipe.yaml").write_text(yaml.safe_dump(values))
        done = train(load_recipe(data / "recipe.yaml", {"output_dir": str(run)}))
        translator = Translator(load_model(run), load_tokenizer(run))
        given = [source for source, _ in pairs[-3:]]
        for one, other in zip(given, translator.sentences(given), strict=True):
            print(one, "->", other)
    print(f"state of a translation: {translator.work.state_bytes:,} bytes, whatever its length")
    return float(done["validation"]["loss"])


if __name__ == "__main__":
    main(*sys.argv[1:4])
