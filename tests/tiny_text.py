"""A little text and a recipe that trains on it in a second, for the tests of training and of tables."""

import random

import yaml

from abc_attn.tasks.language_modelling import LanguageModelling

TINY = LanguageModelling.tiny | {
    "div_val": 2, "max_steps": 12, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2, "logging_steps": 2, "save_steps": 4, "use_cpu": True,
}  # fmt: skip


def fill(folder):
    """Writes text/ and tiny.yaml into a folder; returns it."""
    (folder / "text").mkdir()
    words, chance = [f"w{i}" for i in range(40)], random.Random(0)
    for split, lines in (("train", 80), ("valid", 10), ("test", 10)):
        text = "\n".join(" ".join(chance.choices(words, range(40, 0, -1), k=9)) for _ in range(lines))
        for ending in ("txt", "en", "de", "es"):  # for translation: every language is the same
            (folder / "text" / f"{split}.{ending}").write_text(text + "\n")
        rows = (f"{line}\t{'even' if int(line.split()[0][1:]) % 2 == 0 else 'odd'}" for line in text.split("\n"))
        (folder / "text" / f"{split}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return folder
