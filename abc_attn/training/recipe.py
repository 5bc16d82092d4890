"""Recipes: flat YAML files whose keys are transformers' names wherever it has one.

A key is a field of TrainingArguments, a field of the config of the task's model, or one of the task's own settings.
`extends: other.yaml` takes all keys of another recipe first. Any other key is an error that suggests close ones.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import torch
from transformers import TrainingArguments

from abc_attn import recipes
from abc_attn.recipes.reading import parse_value, read_recipe
from abc_attn.tasks import DEFAULT, TASKS, Task, get_task
from abc_attn.tasks.base import Settings
from abc_attn.training.values import check_model_values, check_training_values

__all__ = ["Recipe", "load_recipe", "parse_value"]

# What this project decides itself, with the reason that a recipe is told.
_FIXED = {
    "train_sampling_strategy": "the order of the data is a function of the seed",
    "load_best_model_at_end": "the last model is the result",
    "push_to_hub": "nothing is sent anywhere",
    "auto_find_batch_size": "a run must be the same on every machine",
    "ignore_data_skip": "a resumed run goes on where it stopped",
    "logging_nan_inf_filter": "a loss that is not finite stops the run",
    "resume_from_checkpoint": "use --resume",
    "dataloader_drop_last": "every batch is whole",
    "num_train_epochs": "max_steps says how long a run is",
    "save_strategy": "a checkpoint is saved every save_steps",
    "remove_unused_columns": "there are none",
    "disable_tqdm": "the bar is shown on a terminal and nowhere else",
}
# May change between a run and its continuation, beside what the task's settings call a place.
_HARMLESS = {"output_dir", "report_to", "save_total_limit", "logging_dir"}
OF_TRAINING = {known.name for known in fields(TrainingArguments) if known.init} - _FIXED.keys()


@dataclass(frozen=True)
class Recipe:
    """A recipe as written, after `extends` and overrides."""

    name: str
    values: dict[str, Any]
    task: type[Task] = field(init=False)
    settings: Settings = field(init=False)

    # Where ours differ from transformers' defaults.
    defaults: ClassVar[dict[str, Any]] = {
        "report_to": "none",
        "logging_steps": 50,
        "save_steps": 500,
        "save_total_limit": 2,
        "seed": 0,
        "dataloader_pin_memory": False,
    }

    def __post_init__(self) -> None:
        task = get_task(self.values.get("task", DEFAULT))
        kind = task.settings_class
        chosen = {name: value for name, value in self.values.items() if name in kind.names()}
        object.__setattr__(self, "task", task)
        object.__setattr__(self, "settings", kind(**chosen))
        self._check()

    def _check(self) -> None:
        training = self.training()
        if "max_steps" not in training:
            raise ValueError("a recipe needs max_steps, the number of updates")
        check_training_values(get_type_hints(TrainingArguments), training)
        check_model_values(get_type_hints(self.task.config_class(), localns={"torch": torch}), self.model())
        if not training.get("output_dir"):
            raise ValueError(f"output_dir must name a folder, got {training.get('output_dir')!r}")
        sizes = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
        if math.prod(training.get(name, 8) for name in sizes) >= 2**62:
            raise ValueError(f"{', '.join(sizes)}: their product is the number of sequences, and must be below 2**62")
        averaged, kept = self.settings.average_checkpoints, training["save_total_limit"]
        if kept is not None and kept < averaged:
            raise ValueError(f"average_checkpoints={averaged} needs a save_total_limit of as many, got {kept}")
        if training["max_steps"] <= training["save_steps"] * (averaged - 1):
            raise ValueError(
                f"average_checkpoints={averaged}: there are fewer in max_steps={training['max_steps']} with save_steps="
                f"{training['save_steps']}"
            )
        if training["save_steps"] % training["logging_steps"]:
            raise ValueError(
                f"save_steps={training['save_steps']} must be a multiple of logging_steps={training['logging_steps']}: "
                "a resumed run then logs what the uninterrupted one would have"
            )

    def make_task(self) -> Task:
        """The task with this recipe's values."""
        return self.task(self.settings, self.model(), self.training())

    def training(self) -> dict[str, Any]:
        """The arguments for TrainingArguments that the recipe, its task or our defaults give."""
        given = {name: value for name, value in self.values.items() if name in OF_TRAINING}
        kept = {"save_total_limit": max(self.defaults["save_total_limit"], self.settings.average_checkpoints)}
        decided = {key: value for key, (value, _) in self.task.decided.items()}
        return self.defaults | kept | self.task.defaults | given | decided

    def model(self) -> dict[str, Any]:
        """The arguments for the model's config."""
        return {name: value for name, value in self.values.items() if name in self.task.model_keys()}

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """The keys in which a run that was started with `recorded` is another run."""
        keys = (self.values.keys() | recorded.keys()) - _HARMLESS - self.settings.names("place")
        return sorted(key for key in keys if self.values.get(key) != recorded.get(key))

    def without_places(self) -> dict[str, Any]:
        """The values less where files lay on the machine, which says nothing about a result."""
        places = self.settings.names("place") | {"output_dir"}
        return {key: value for key, value in self.values.items() if key not in places}


def load_recipe(path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe, by its path or by a name such as table1a/small/mlp-64; `overrides` win over what it says."""
    path, overrides = recipes.find(path), overrides or {}
    values = read_recipe(path)
    task = get_task((values | overrides).get("task", DEFAULT))
    sources = task.settings_class.names("source")
    if overrides.keys() & sources:  # other data takes the place of the recipe's
        values = {key: value for key, value in values.items() if key not in sources}
    values |= overrides
    reasons = _FIXED | {key: reason for key, (_, reason) in task.decided.items()}
    known = task.settings_class.names() | task.model_keys() | OF_TRAINING
    for key in values:
        if key in reasons:
            raise ValueError(f"{path}: a recipe cannot choose {key}: {reasons[key]}")
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}; {_hint(key, known)}")
    values.setdefault("output_dir", str("runs" / _name(path.resolve())))
    return Recipe(_name(path.resolve()).as_posix(), values)


def _name(path: Path) -> Path:
    """table/scale/row of a recipe in a table's folder, wherever that is; folder/file of any other."""
    in_table = path.parent.name in recipes.SCALES and (path.parent.parent / "table.yaml").is_file()
    return Path(*path.with_suffix("").parts[-3 if in_table else -2 :])


def _hint(key: str, known: set[str]) -> str:
    if others := [name for name in TASKS if key in get_task(name).settings_class.names()]:
        return f"it is a key of task {' and '.join(others)}"
    if close := difflib.get_close_matches(key, known, n=3):
        return f"did you mean {' or '.join(close)}?"
    return "see `abc-attn train --help` for where keys come from"
