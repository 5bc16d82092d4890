"""One training run: from a recipe to a folder with the model, its metrics and where they come from."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, set_seed
from transformers.utils import logging as hf_logging

from abc_attn.files import FolderLock, write_whole
from abc_attn.models.averaging import mean_weights
from abc_attn.paths import json_object
from abc_attn.provenance import commit, cpu
from abc_attn.tasks import Task
from abc_attn.training.checkpoints import all_checkpoints, last_whole_checkpoint
from abc_attn.training.recipe import Recipe
from abc_attn.training.trainer import METRICS, PARTIAL, Report, RunTrainer, read_metrics

STARTED, FINISHED = "run.json", "finished.json"


def train(recipe: Recipe, *, resume: bool = False) -> dict[str, Any]:
    """Train as the recipe says, into its output_dir; returns what finished.json says. A finished run stays as it is."""
    return prepare(recipe, resume=resume)()


def prepare(recipe: Recipe, *, resume: bool = False) -> Callable[[], dict[str, Any]]:
    """Everything that can be wrong with a recipe or its data is found here, most of it before the data is read.

    Returns what trains.
    """
    folder = Path(recipe.values["output_dir"])
    try:
        args = TrainingArguments(**_arguments(recipe))
        args.get_process_log_level()
    except Exception as error:  # whatever it raises, it is about these values
        raise ValueError(f"transformers' TrainingArguments: {type(error).__name__}: {error}") from error
    if args.n_gpu > 1:
        raise ValueError(
            f"one process is to train on {args.n_gpu} GPUs: start one for each with torchrun --nproc_per_node "
            f"{args.n_gpu} -m abc_attn.cli train ..., or choose one with CUDA_VISIBLE_DEVICES"
        )
    if "tensorboard" in (args.report_to or ()) and find_spec("tensorboard") is None:
        raise ValueError("report_to=tensorboard needs tensorboard: pip install tensorboard")
    done = _finished(folder, recipe)
    if done is not None:
        _check_source(folder, recipe.make_task())
        if args.process_index == 0:
            print(f"{folder} holds this run, finished after {done['steps']} steps: nothing to do", file=sys.stderr)
        return lambda: done
    started = _started(folder, recipe, resume)
    task = recipe.make_task()
    task.check()
    start = task.start()
    if args.process_index == 0:
        folder.mkdir(parents=True, exist_ok=True)  # now: that it cannot be made is said before the data is read
    lock = FolderLock(folder) if args.process_index == 0 else None
    checkpoint = None if started is None else _last_checkpoint(folder, args.process_index == 0)
    run = _Run(recipe, task, start, folder, args)
    if checkpoint is not None and started is not None:
        _check_same(folder, started, {"corpus": task.fingerprint, "start": weights_of(start)})

    def train() -> dict[str, Any]:
        try:
            return run.train(checkpoint)
        finally:
            if lock is not None:
                lock.release()

    return train


class _Run:
    """Everything that training needs, built and checked."""

    def __init__(self, recipe: Recipe, task: Task, start: Path | None, folder: Path, args: TrainingArguments) -> None:
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        self.recipe, self.task, self.start, self.folder, self.args = recipe, task, start, folder, args
        with args.main_process_first(desc="reading the data"):
            task.open()
        set_seed(args.seed)
        self.model = task.build_model(start)
        self.batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.data = task.training_set(self.batch * args.max_steps, args.seed)

    def score(self) -> dict[str, float]:
        """What is reported of the held-out data during training."""
        return self.task.quick_score(self.model, self.args.per_device_eval_batch_size)

    def train(self, checkpoint: str | None) -> dict[str, Any]:
        args, folder, data = self.args, self.folder, self.data
        per_step = self.batch * data.tokens_per_item
        steps_per_pass = args.max_steps if data.items_per_pass is None else data.items_per_pass / self.batch
        trainer = RunTrainer(
            self.model,
            args,
            train_dataset=data.items,
            eval_dataset=data.items,  # never read: `score` has its own
            data_collator=data.collate,
            processing_class=self.task.tokenizer,
            callbacks=[Report(folder, per_step, steps_per_pass, self.task.perplexity)],
            score=self.score,
            compute_loss_func=self.task.loss_function(),
        )
        main = trainer.is_world_process_zero()
        if main:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)  # left by a run that was killed in a save
            if checkpoint is None:
                about = provenance(self.recipe) | {
                    "parameters": sum(weight.numel() for weight in self.model.parameters()),
                    "corpus": self.task.fingerprint,
                }
                if self.start is not None:
                    about["start"] = weights_of(self.start)
                write_whole(folder / STARTED, json.dumps(about, indent=2) + "\n")
        trainer.train(resume_from_checkpoint=checkpoint)
        self._average()
        scores = self.score()
        done: dict[str, Any] = {}
        trainer.save_model(str(folder / PARTIAL / "model"))
        trainer.accelerator.wait_for_everyone()
        if main:
            for file in (folder / PARTIAL / "model").iterdir():
                file.replace(folder / file.name)
            shutil.rmtree(folder / PARTIAL)
            records = read_metrics(folder / METRICS)
            done = {
                "steps": args.max_steps,
                "tokens": round(args.max_steps * per_step),
                "seconds": max((record["seconds"] for record in records), default=0.0),
                "validation": scores,
            }
            if history := _history(records, per_step):
                done["history"] = history
            write_whole(folder / FINISHED, json.dumps(done, indent=2) + "\n")
        trainer.accelerator.wait_for_everyone()
        return done or json.loads((folder / FINISHED).read_text(encoding="utf-8"))

    def _average(self) -> None:
        """Give the model the mean of the weights of its last checkpoints, if the recipe says so."""
        count = self.recipe.settings.average_checkpoints
        if count > 1:
            missing = self.model.load_state_dict(mean_weights(all_checkpoints(self.folder)[-count:]), strict=False)
            assert not missing.unexpected_keys


def _history(records: list[dict[str, Any]], tokens_per_step: float) -> list[dict[str, float]]:
    """What was scored on held-out data during training, by the tokens trained on until then."""
    scored = {record["step"]: record for record in records if "eval_loss" in record}  # once, if resumed just there
    return [
        {"tokens": round(step * tokens_per_step)}
        | {name.removeprefix("eval_"): value for name, value in record.items() if name.startswith("eval_")}
        for step, record in scored.items()
    ]


def weights_of(start: Path | None) -> str | None:
    """A fingerprint of the weights that a run starts from, wherever they lie; None if it starts anew."""
    if start is None:
        return None
    digests = []
    for file in sorted(start.glob("*.safetensors")) or sorted(start.glob("*.bin")):
        with open(file, "rb") as opened:
            digests.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def provenance(recipe: Recipe) -> dict[str, Any]:
    """What is needed to get a result again."""
    return {
        "recipe": recipe.name,
        "values": recipe.values,
        "seed": recipe.training()["seed"],
        "commit": commit(),
        "machine": {"cpu": cpu(), "threads": torch.get_num_threads(), "platform": platform.platform()},
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _arguments(recipe: Recipe) -> dict[str, Any]:
    fixed = {
        "train_sampling_strategy": "sequential",
        "dataloader_drop_last": True,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "save_strategy": "steps",
    }
    return recipe.training() | fixed


def _finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    if not (folder / FINISHED).is_file():
        return None
    _same_run(folder, recipe)
    hint = f"remove it and resume: what is left of the run in {folder} is used"
    return _record(folder / FINISHED, {"steps": int, "validation": dict}, hint)


def _check_source(folder: Path, task: Task) -> None:
    """Refuse a finished run that was of other data, or from another model, where those are there to be looked at."""
    try:
        task.check()
        start = task.start()
        task.open()
    except OSError:
        return
    found = {"corpus": task.fingerprint, "start": weights_of(start)}
    _check_same(folder, json_object(folder / STARTED), found)


def _check_same(folder: Path, started: dict[str, Any], found: dict[str, str | None]) -> None:
    for key, what in (("corpus", "data"), ("start", "weights in init_from")):
        if key in started and started[key] != found[key]:
            raise ValueError(
                f"the run in {folder} was of other {what}; give another output_dir, or remove {folder} to train again"
            )


def _started(folder: Path, recipe: Recipe, resume: bool) -> dict[str, Any] | None:
    """What run.json says of a run that is to be resumed."""
    if not (folder / STARTED).is_file():
        return None
    if not resume:
        raise ValueError(f"{folder} holds a run that was not finished: go on with --resume, or give another output_dir")
    return _same_run(folder, recipe)


def _last_checkpoint(folder: Path, say: bool) -> str | None:
    checkpoint, damaged = last_whole_checkpoint(folder)
    for damage in damaged if say else ():
        assert checkpoint is not None
        print(f"abc-attn: {damage}; going on from {checkpoint.name} before it", file=sys.stderr)
    return None if checkpoint is None else str(checkpoint)


def _record(file: Path, needed: dict[str, type], hint: str) -> dict[str, Any]:
    """The record in a JSON file of a run."""
    try:
        found = json_object(file)
        wrong = [key for key, kind in needed.items() if not isinstance(found.get(key), kind)]
        if wrong:
            raise ValueError(f"{file} is damaged: it has no {wrong[0]!r}")
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; {hint}") from None
    return found


def _same_run(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """run.json, if it is of a run with the values of this recipe."""
    hint = f"to start anew, give another output_dir or remove {folder}"
    started = _record(folder / STARTED, {"values": dict}, hint)
    if "corpus" not in started:
        raise ValueError(f"{folder / STARTED} is damaged: it has no 'corpus'; {hint}")
    recorded = started["values"]
    if different := recipe.differences(recorded):
        shown = ", ".join(f"{key} ({recorded.get(key)} there, {recipe.values.get(key)} here)" for key in different)
        raise ValueError(f"{folder} holds another run, with other values of {shown}; give another output_dir")
    return started
