"""Hostile command lines and recipes: every one exits with 0, 1, 2 or 130, and says what is wrong without a traceback.

Command lines are made from the parser's own options, recipes from the keys that they may have. Values are plausible,
absurd, or of another kind. What would take minutes and is no matter of input (the demo's training, the benchmarks'
timing) is left out; small models are trained, converted and read for real.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from transformers import TrainingArguments

from abc_attn.cli import main, make_parser
from abc_attn.hf import AdaptiveLMConfig
from abc_attn.tasks import TASKS, get_task
from abc_attn.training.recipe import OF_TRAINING
from abc_attn.training.values import kinds_of
from fuzz.folders import folders

NAME = "commands"

NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "1.5",
    "1e99",
    "nan",
    "inf",
    "-0",
    "٣",
    "1_000",
    "0x10",
    "999999999999999999999",
    "2147483648",
    "9223372036854775808",
    "x",
    "true",
    "1e-45",
    "5e-324",
    "1e-3",
    "",
    " ",
    "9" * 5000,
]
TEXTS = [
    "x",
    "-",
    "--",
    "ü",
    "../x",
    "./nowhere",
    "=",
    "a=b",
    "{",
    "*a",
    "!!python/object:os.system",
    "2020-01-01",
    "2020-99-99",
    "null",
    "~",
    "{a:1}",
    "1:30",
]
TEXTS += ["", " ", "\udcff", "\0", "a\nb", "w5 w9", "x" * 5000, "[" * 2000, "&a [*a]", "[1, 2]"]
CONTROLS = [
    "mlp:4",
    "mlp",
    "window:4",
    "global:2+window:2",
    "softmax",
    "elu",
    "luna",
    "mlp:0",
    "mlp:-1",
    "mlp:x",
    "mlp:",
    ":4",
    "+",
    "mlp+",
    "mlp:1000000000000",
    "linformer:1000000000",
    "favor:10000000000",
    "window:1000000000",
    "softmax:3",
    "window:1180591620717411303424",
    "rfa:3",
    "dpfp:7",
    "window:1000000000000",
    "random:10000000000",
    "window:4+elu",
    "ü:4",
    "mlp:٣",
]
CONTROLS += ["mlp:4" * 500, "+".join(["window:1"] * 300)]
# Keys whose values are not made up: they would start processes, compile, or write somewhere else.
CAREFUL: dict[str, list[Any]] = {
    "output_dir": ["runs/x", "", 5, None, [], "text.txt", "text.txt/x"],
    "cache_dir": ["cache", "", 5, "text.txt", "text.txt/x"],
    "data_dir": ["text", "nowhere", "", 5, "text.txt", "."],
    "init_from": ["nowhere", "llama", "adaptive", 5, "", "."],
    "train_file": ["text.txt", "nowhere", 5],
    "validation_file": ["text.txt", "nowhere"],
    "test_file": ["text.txt", "nowhere"],
    "dataset_name": [5, None],
    "dataloader_num_workers": [0, -1, "x", 1.5, 10**9],
    "torch_compile": [False, "x", 5],
    "torch_compile_backend": [5],
    "torch_compile_mode": [5],
    "max_steps": [1, 2, 0, -1, "x", 1.5, 1e99, None, True, 2**40, []],
    "items": [1, 2, 4, 0, -1, "x", 2**31, None],
    "block_size": [1, 4, 16, 0, -1, "x", 2**31 - 1, 2**40],
    "eval_tokens": [1, 4, 0, -1, "x", None],
    "local_rank": [-1, "x"],
    "deepspeed": [5, "nowhere.json", {}],
    "debug": ["x", 5, []],
    "ddp_backend": [5, "x"],
    "num_hidden_layers": [1, 2, 0, -1, "x", 1.5, 10**9, None, True],
    "enable_jit_checkpoint": [False, "x"],
}
WORDS = [
    "x",
    "no",
    "ü",
    "mlp:4",
    "adamw_torch",
    "sgd",
    "cosine",
    "steps",
    "epoch",
    "bf16",
    "all",
    "none",
    "wandb",
    "tensorboard",
    "3",
    "1e-3",
]
WHOLE = [0, 1, 2, 3, 7, 33, -1, 10**9, 2**31, 2**63, 10**30]
REAL = [0.5, -0.5, 1e-30, 1e30, 1e308, float("nan"), float("inf")]
VALUES: list[Any] = [None, True, False, "", [], [1, 2], ["x"], [None], {}, {"x": 1}, *WORDS, *WHOLE, *REAL]


def run(case: int, folder: Path) -> str:
    """Make the command line of this case and run it."""
    chance = random.Random(case)
    torch.set_num_threads(1)  # a case before may have asked for more, which wait for each other on a busy machine
    with _at(folder):
        fill(chance, folder)
        words = command_line(chance)
        if "--tokens" in words[:-1] and words[words.index("--tokens") + 1] in map(str, WHOLE[-4:-2]):
            return "a text without end, as asked for"
        code, shown = call(words, chance)
    told = f"{' '.join(map(repr, words)):.2000}\n{_recipe_of(words, folder)}"
    assert code in (0, 1, 2, 130), f"exit code {code} of {told}: {shown}"
    assert "Traceback" not in shown, f"{told}: {shown}"
    if code == 2:
        last = shown.strip().splitlines()[-1] if shown.strip() else ""
        assert last.startswith("abc-attn: error: "), f"{told} ends with {shown!r:.1000}"
    return f"{words[0] if words else 'nothing':.12}: {code}"


# The folder that a command runs in.


@contextlib.contextmanager
def _at(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def fill(chance: random.Random, folder: Path) -> None:
    """Text, recipes good and bad, a table, results, and models by name."""
    (folder / "text").mkdir()
    words = [f"w{i}" for i in range(3, 40)]
    for split, lines in (("train", 12), ("valid", 3), ("test", 3)):
        text = "\n".join(" ".join(chance.choices(words, k=8)) for _ in range(lines))
        (folder / "text" / f"{split}.txt").write_text(text + "\n")
    (folder / "text.txt").write_text("w5 w9 w12\n")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "empty.txt").touch()
    for name in ("llama", "bounded llama", "adaptive"):
        (folder / name.replace(" ", "-")).symlink_to(folders()[name], target_is_directory=True)
    (folder / "recipe.yaml").write_text(recipe(chance))
    table = folder / "tables" / "small" / "small"
    table.mkdir(parents=True)
    (table / "row.yaml").write_text(recipe(chance))
    (table.parent / "table.yaml").write_text(_maybe_broken(chance, yaml.safe_dump(_changed(chance, TABLE, VALUES))))
    (folder / "bad.py").write_text("def")
    (folder / "results" / "small").mkdir(parents=True)
    (folder / "results" / "small" / "runs.jsonl").write_text(
        chance.choice([""] * 9 + ["{}\n", "[1]\n", "x\n", "null\n"])
    )


TABLE = {"title": "t", "task": "copy", "reading": "r", "columns": {"accuracy": "a"}, "decimals": 2}
TINY = {
    "task": "copy", "items": 2, "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "control": "mlp:2", "max_steps": 1, "per_device_train_batch_size": 2, "logging_steps": 1,
    "save_steps": 1, "use_cpu": True, "learning_rate": 1e-3,
}  # fmt: skip
TEXT = {"data_dir": "text", "cache_dir": "cache", "block_size": 4, "cutoffs": [10], "div_val": 2}


def keys() -> list[str]:
    """Every key that a recipe may have, and some that it may not."""
    own = {name for task in TASKS for name in get_task(task).settings_class.names()}
    known = {known.name for known in fields(TrainingArguments)} | {known.name for known in fields(AdaptiveLMConfig)}
    return sorted(known | own | {"extends", "x", "", "learning_rat"})


KEYS = keys()
HINTS = typing.get_type_hints(TrainingArguments) | typing.get_type_hints(AdaptiveLMConfig, localns={"torch": torch})
CHOOSABLE = sorted({*OF_TRAINING, *get_task("copy").model_keys(), *TEXT, "items", "task", "init_from"})
OF_KIND: dict[type, list[Any]] = {
    bool: [True, False],
    int: [1, 2, 3, 8],
    float: [0.0, 0.1, 0.5, 1.0, 2],
    str: ["steps", "epoch", "no", "linear", "cosine", "sgd", "adamw_torch", "adafactor", "none", "info", "mlp:2", "x"],
    list: [[], ["x"], [1, 2], ["loss"], [4]],
    dict: [{}, {"x": 1}, {"num_cycles": 1}],
}


def recipe(chance: random.Random) -> str:
    """A recipe, most often with some keys that are hostile."""
    values: dict[str, Any] = dict(TINY)
    if chance.random() < 0.4:
        del values["task"], values["items"], values["vocab_size"]
        values |= TEXT
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        key = a_key(chance)
        values[key] = a_value(chance, key)
    return _maybe_broken(chance, yaml.safe_dump(values, allow_unicode=True))


def a_key(chance: random.Random) -> str:
    """Most often one that a recipe may choose."""
    return chance.choice(CHOOSABLE if chance.random() < 0.8 else KEYS)


def a_value(chance: random.Random, key: str) -> Any:
    """Half of them of the kind that the key takes."""
    if key in CAREFUL:
        return chance.choice(CAREFUL[key])
    if key in HINTS and chance.random() < 0.5:
        fitting = [value for kind in sorted(kinds_of(HINTS[key]), key=str) for value in OF_KIND.get(kind, [None])]
        return chance.choice(fitting or [None])
    if key == "control" and chance.random() < 0.8:
        return chance.choice(CONTROLS)
    return chance.choice(VALUES)


def _changed(chance: random.Random, document: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    changed = dict(document)
    if chance.random() < 0.3:
        key = chance.choice([*document, "x", "paper", "more", "plot", "grid", "notes", "scales"])
        changed[key] = chance.choice(values)
    return changed


def _maybe_broken(chance: random.Random, text: str) -> str:
    if chance.random() > 0.05:
        return text
    at = chance.randrange(len(text))
    return chance.choice(
        [text[:at], text[:at] + chance.choice("{[]}:&*!%@`\t\0") + text[at:], "[" * 5000, "- 1", "5", ""]
    )


# Command lines.


def command_line(chance: random.Random) -> list[str]:
    """A command with its own options and, most often, something wrong with one of them."""
    commands = subcommands(make_parser())
    name = chance.choices(list(commands), [WEIGHTS.get(name, 1) for name in commands])[0]
    words = [name]
    parser = commands[name]
    if (inner := subcommands(parser)) and chance.random() < 0.95:
        words.append(chance.choice(list(inner)))
        parser = inner[words[-1]]
    actions = [action for action in parser._actions if action.dest != "help"]
    for action in actions:
        needed = action.required or not action.option_strings or action.dest == "recipes"
        if chance.random() < (0.98 if needed else 0.15):
            words += an_option(chance, name, action)
    if chance.random() < 0.05:
        words.insert(chance.randrange(len(words) + 1), chance.choice([*TEXTS, "--x", "-h", "--help", "--version", "-"]))
    if chance.random() < 0.03:
        del words[chance.randrange(len(words))]
    return words


WEIGHTS = {
    "train": 14,
    "convert": 8,
    "generate": 6,
    "evaluate": 6,
    "reproduce": 6,
    "bench": 3,
    "report": 2,
    "recipes": 2,
}


def subcommands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def an_option(chance: random.Random, command: str, action: argparse.Action) -> list[str]:
    """The words of an option, most often with a value that it takes."""
    flag = action.option_strings[:1]
    if action.nargs == 0:
        return flag
    count = chance.choice([0, 1, 1, 1, 2]) if action.nargs in ("+", "*") else 1
    return [*flag, *(a_word(chance, command, action) for _ in range(count))]


# What options take: first what is good, then what is not.
GOOD = {
    "recipe": ["recipe.yaml", "tables/small/small/row.yaml", "nowhere.yaml", "text.txt", "latin.txt", "text"],
    "table": ["small", "nowhere"],
    "scale": ["small", "full"],
    "rows": ["row", "nowhere"],
    "recipes": ["tables", "nowhere", "text.txt"],
    "source": ["llama", "bounded-llama", "adaptive", "text", "nowhere", "text.txt"],
    "target": ["new", "a/b/c", "text", "text.txt", "text.txt/x", "ü", "x" * 300],
    "model": ["bounded-llama", "llama", "adaptive", "text", "nowhere", "text.txt"],
    "file": ["text.txt", "latin.txt", "empty.txt", "nowhere", "text"],
    "output": ["out", "text.txt", "text.txt/x", "results"],
    "results": ["results", "nowhere", "text.txt"],
    "copy": ["new", "text", "text.txt"],
    "imports": ["json", "nowhere", "bad.py", "./bad.py", "", "..", "a.b", "ü"],
    "prompt": ["w5 w9", "w5", "", "-", "ü", "\udcff", "w5 " * 200],
    "tokens": ["2", "1", "5"],
    "layers": ["0", "1"],
    "slots": ["4"],
    "temperature": ["0", "1", "1e-45", "5e-324", "1e-300", "1e300"],
    "control": CONTROLS,
}
SAFE = {"output", "target", "copy"}  # are written to: only names in this folder


def a_word(chance: random.Random, command: str, action: argparse.Action) -> str:
    hostile = chance.random() < 0.08
    if action.dest in ("overrides", "set"):
        key = a_key(chance)
        if chance.random() < 0.05:
            return chance.choice(TEXTS)
        if key not in CAREFUL and chance.random() < 0.3:
            return f"{key}={chance.choice([*NUMBERS, *TEXTS])}"
        return f"{key}={yaml.safe_dump(a_value(chance, key), default_flow_style=True).splitlines()[0]}"
    if action.dest in GOOD and (not hostile or action.dest in SAFE):
        return GOOD[action.dest][0] if chance.random() < 0.85 else chance.choice(GOOD[action.dest])
    if action.choices and not hostile:
        return str(chance.choice(list(action.choices)))
    if callable(action.type) and action.type is not Path:
        return chance.choice(NUMBERS if hostile else ["1", "2", "3"])
    return chance.choice(TEXTS)


def call(words: list[str], chance: random.Random) -> tuple[Any, str]:
    """The exit code of a command line and what it says on stderr."""
    errors = io.StringIO()
    prompt = io.StringIO(chance.choice(["w5 w9", "", "ü"]))
    nothing: Any = mock.MagicMock(return_value=True)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
        mock.patch.object(sys, "stdin", prompt),
        mock.patch("abc_attn.demo.run_demo", nothing),
        mock.patch("abc_attn.bench.compare", mock.MagicMock(return_value=[])),
        mock.patch("abc_attn.bench._too_slow", mock.MagicMock(return_value={})),
        mock.patch.dict(
            "abc_attn.bench.BENCHMARKS",
            {name: lambda **_: ([], {}) for name in ("decode", "generate", "translate", "encode-model")},
        ),
    ):
        try:
            code: Any = main(words)
        except SystemExit as end:
            code = end.code
    return 0 if code is None else code, errors.getvalue()


def _recipe_of(words: list[str], folder: Path) -> str:
    used = [folder / word for word in words if word.endswith(".yaml")]
    return "".join(file.read_text() for file in used if file.is_file())[:3000]
