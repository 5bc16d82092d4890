"""kill -9 at random moments of training, converting, saving a state and tokenizing: nothing is ever half written.

What is there afterwards is whole, the second try works and gives the bytes of one that was never killed, and training
has lost no more than the steps since its last checkpoint.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import LlamaForCausalLM

from abc_attn.cli import main
from abc_attn.data import Source, build_corpus
from abc_attn.files import check_checksums
from abc_attn.hf import BoundedCache, convert, load_state, save_state
from abc_attn.training.checkpoints import check_checkpoint
from abc_attn.training.trainer import read_metrics
from fuzz.folders import folders, small

NAME = "kills"
SAVE_STEPS = 2
RECIPE = {
    "task": "copy", "items": 4, "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "control": "mlp:4", "max_steps": 12, "per_device_train_batch_size": 2, "logging_steps": 1,
    "save_steps": SAVE_STEPS, "save_total_limit": 2, "use_cpu": True,
}  # fmt: skip


class Work(NamedTuple):
    """Something that is killed, and the judge of what it leaves. Both work in the current folder."""

    do: Callable[[], object]
    check: Callable[[], object]  # what is there is whole
    again: Callable[[], object]  # the second try


def run(case: int, folder: Path) -> str:
    """Kill the work of this case at a random moment of the time that it takes."""
    kind = list(WORKS)[case % len(WORKS)]
    moment = random.Random(case).uniform(0, 1) * duration(kind)
    before = Path.cwd()
    os.chdir(folder)
    try:
        finished = not killed(WORKS[kind].do, moment)
        WORKS[kind].check()
        WORKS[kind].again()
        WORKS[kind].check()
        found = contents(folder)
    finally:
        os.chdir(before)
    assert found.keys() == contents(whole(kind)).keys(), f"{kind}: {found.keys() ^ contents(whole(kind)).keys()}"
    for name, content in contents(whole(kind)).items():
        assert found[name] == content, f"{kind}: {name} is another than without the kill"
    return f"{kind}: {'finished before' if finished else 'killed'}"


def killed(do: Callable[[], object], moment: float | None) -> bool:
    """Do it in another process, which is killed after `moment` seconds, if any; False if it has ended by then."""
    process = os.fork()
    if not process:
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            do()
        finally:
            os._exit(0)
    if moment is not None:
        time.sleep(moment)
        os.kill(process, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@functools.cache
def whole(kind: str) -> Path:
    """A folder in which the work was never killed."""
    folder = Path(tempfile.mkdtemp(prefix="whole."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        WORKS[kind].again()
    finally:
        os.chdir(before)
    return folder


@functools.cache
def duration(kind: str) -> float:
    """How long the work takes at least, in a process of its own."""
    whole(kind)  # what is loaded once is loaded now
    return min(_timed(WORKS[kind].do) for _ in range(3))


def _timed(do: Callable[[], object]) -> float:
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="timed.") as folder:
        os.chdir(folder)
        started = time.perf_counter()
        killed(do, None)
        os.chdir(before)
    return time.perf_counter() - started


# Times and dates differ from run to run, and so do the number of a process and the order of facts in a state's file.
VARYING = {"run.json", "metrics.jsonl", "finished.json", ".lock", "state.safetensors"}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, temporary ones too; without the content of those that say when."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {
        file.relative_to(folder).as_posix(): b"" if file.name in VARYING else file.read_bytes()
        for file in sorted(files)
    }


# Training.


def train() -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    assert main(["train", "recipe.yaml", "output_dir=run", "--resume"]) == 0


def check_training() -> None:
    folder = Path("run")
    if not folder.is_dir():
        return
    saved = [path for path in folder.glob("checkpoint-*") if path.is_dir()]
    for checkpoint in saved:
        check_checkpoint(checkpoint)
    steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    reached = max(steps, default=0)
    last = max((int(path.name.partition("-")[2]) for path in saved), default=0)
    assert last >= max(0, reached - 1) // SAVE_STEPS * SAVE_STEPS, f"step {reached} was reached, {last} is what is left"
    if (folder / "finished.json").is_file():
        check_checksums("weights.sha256", folder)
        assert steps == list(range(1, RECIPE["max_steps"] + 1)), steps  # type: ignore[operator]


# Converting.


def convert_model() -> None:
    assert main(["convert", str(folders()["llama"]), "target", "--control", "window:4"]) == 0


def check_converted() -> None:
    if Path("target").exists():
        assert check_checksums("weights.sha256", Path("target"))
        assert {"config.json", "tokenizer.json", "README.md"} <= {file.name for file in Path("target").iterdir()}


def convert_again() -> None:
    if not Path("target").exists():
        convert_model()


# States.


@functools.cache
def caches() -> tuple[BoundedCache, BoundedCache]:
    """What a model remembers of two texts."""
    model: Any = convert(small(LlamaForCausalLM), "mlp:32")
    made = []
    for seed in (0, 1):
        cache = BoundedCache()
        with torch.no_grad():
            model(torch.randint(3, 40, (8, 30), generator=torch.Generator().manual_seed(seed)), past_key_values=cache)
        made.append(cache)
    return made[0], made[1]


def save_states() -> None:
    for number in range(100):
        save_state(caches()[number % 2], "state.safetensors")


def check_state() -> None:
    if Path("state.safetensors").exists():
        found: Any = load_state("state.safetensors")
        values = [cache.layers[0].state.memory.v for cache in caches()]  # type: ignore[union-attr]
        assert any(torch.equal(found.layers[0].state.memory.v, value) for value in values)


# Tokenizing.


def tokenize() -> None:
    Path("text").mkdir(exist_ok=True)
    files = {split: Path("text", f"{split}.txt") for split in ("train", "validation", "test")}
    for number, file in enumerate(files.values()):
        file.write_text("".join(_lines(number)))
    build_corpus(Source(files), "cache", "bpe", 300)


def _lines(seed: int) -> Iterator[str]:
    chance = random.Random(seed)
    for _ in range(400):
        yield " ".join(chance.choices([f"word{i}" for i in range(50)], k=12)) + "\n"


def check_cache() -> None:
    for folder in Path("cache").glob("[!.]*"):
        assert check_checksums("corpus.sha256", folder)


WORKS = {
    "train": Work(train, check_training, train),
    "convert": Work(convert_model, check_converted, convert_again),
    "save_state": Work(save_states, check_state, save_states),
    "cache": Work(tokenize, check_cache, tokenize),
}
