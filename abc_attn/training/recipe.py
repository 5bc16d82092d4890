"""Recipes: flat YAML files whose keys are transformers' names wherever it has one.

A key is a field of TrainingArguments, of AdaptiveLMConfig, or one of `Settings`. `extends: other.yaml` takes all keys
of another recipe first. Anything else is an error that says what was perhaps meant.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml
from transformers import PreTrainedConfig, TrainingArguments

from abc_attn.models.adaptive_lm import AdaptiveLMConfig

TASKS = ("language-modelling", "recall", "copy")


@dataclass(frozen=True)
class Settings:
    """What neither TrainingArguments nor AdaptiveLMConfig has a name for; after run_clm.py where that has one."""

    task: str = "language-modelling"
    block_size: int = 512  # tokens of a training segment
    data_dir: str | None = None  # a folder with train, valid and test text
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    cache_dir: str = "~/.cache/abc-attn"
    tokenizer: str = "word"  # or "bpe"
    eval_tokens: int | None = None  # the final scores are of the first so many tokens of validation and test text
    carry_state: bool = False  # each batch goes on where the last one stopped, with the memory it left
    init_from: str | None = None  # a trained model to start from, its control aside
    items: int = 32  # of the synthetic tasks: how much there is to remember


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
_SOURCES = {"data_dir", "train_file", "validation_file", "test_file", "dataset_name", "dataset_config_name"}
# May change between a run and its continuation.
_HARMLESS = {"output_dir", "cache_dir", "report_to", "save_total_limit", "data_dir", "logging_dir", "init_from"}
_HARMLESS |= {"train_file", "validation_file", "test_file"}


def _names(kind: type) -> set[str]:
    return {known.name for known in fields(kind) if known.init}


_OF_SETTINGS = _names(Settings)
_OF_MODEL = _names(AdaptiveLMConfig) - _names(PreTrainedConfig) - {"tie_word_embeddings", "use_cache"}
_OF_MODEL -= {"bos_token_id", "eos_token_id", "pad_token_id"}  # these the tokenizer decides
_OF_TRAINING = _names(TrainingArguments) - _FIXED.keys()


@dataclass(frozen=True)
class Recipe:
    """A recipe as written, after `extends` and overrides."""

    name: str
    values: dict[str, Any]
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
        chosen = {name: value for name, value in self.values.items() if name in _OF_SETTINGS}
        object.__setattr__(self, "settings", Settings(**chosen))
        self._check()

    def _check(self) -> None:
        settings, training = self.settings, self.training()
        if settings.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {settings.task!r}")
        for name in ("block_size", "items"):
            if not isinstance(count := getattr(settings, name), int) or count < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {count!r}")
        if settings.eval_tokens is not None and settings.eval_tokens < 1:
            raise ValueError(f"eval_tokens must be at least 1, got {settings.eval_tokens}; leave it out for all")
        if settings.carry_state and self.values.get("layerdrop"):
            raise ValueError("carry_state needs every layer to read every token: leave out layerdrop")
        if settings.carry_state and settings.task != "language-modelling":
            raise ValueError(f"carry_state is for running text, not for task {settings.task!r}")
        for name in ("logging_steps", "save_steps"):
            if training[name] != int(training[name]) or training[name] < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {training[name]!r}")
        if training["save_steps"] % training["logging_steps"]:
            raise ValueError(
                f"save_steps={training['save_steps']} must be a multiple of logging_steps={training['logging_steps']}: "
                "a resumed run then logs what the uninterrupted one would have"
            )
        if training.get("max_steps", 0) < 1:
            raise ValueError("a recipe needs max_steps, the number of updates")

    def training(self) -> dict[str, Any]:
        """The arguments for TrainingArguments that the recipe or our defaults give."""
        return self.defaults | {name: value for name, value in self.values.items() if name in _OF_TRAINING}

    def model(self) -> dict[str, Any]:
        """The arguments for AdaptiveLMConfig."""
        return {name: value for name, value in self.values.items() if name in _OF_MODEL}

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """The keys in which a run that was started with `recorded` is another run."""
        keys = (self.values.keys() | recorded.keys()) - _HARMLESS
        return sorted(key for key in keys if self.values.get(key) != recorded.get(key))


class _Loader(yaml.SafeLoader):
    """YAML as everybody expects it: 1e-3 is a number, and `no` is a word (eval_strategy: no)."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (yaml declares it so)
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:bool"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def parse_value(text: str) -> Any:
    """A value of `key=value`, read as YAML."""
    return yaml.load(text, _Loader)


def load_recipe(path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe; `overrides` win over what it says."""
    path, overrides = Path(path), overrides or {}
    values = _read(path, ())
    if overrides.keys() & _SOURCES:  # another text takes the place of the recipe's
        values = {key: value for key, value in values.items() if key not in _SOURCES}
    values |= overrides
    for key in values:
        if key in _FIXED:
            raise ValueError(f"{path}: {key} is not for a recipe to choose: {_FIXED[key]}")
        if key not in (known := _OF_SETTINGS | _OF_MODEL | _OF_TRAINING):
            close = difflib.get_close_matches(key, known, n=3)
            hint = (
                f"did you mean {' or '.join(close)}?"
                if close
                else "see `abc-attn train --help` for where keys come from"
            )
            raise ValueError(f"{path}: unknown key {key!r}; {hint}")
    values.setdefault("output_dir", str(Path("runs", path.resolve().parent.name, path.stem)))
    return Recipe(f"{path.parent.name}/{path.stem}", values)


def _read(path: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no recipe at {path}")
    if path.resolve() in extending:
        raise ValueError(f"{path} extends itself")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must be a mapping of keys to values, one `key: value` a line")
    parent = values.pop("extends", None)
    return values if parent is None else _read(path.parent / parent, (*extending, path.resolve())) | values
