"""What a task is: recipe keys of its own, data, a model, and scores.

A run calls a task in this order: `check` (cheap, finds every mistake it can), `open` (reads the data), `build_model`,
`training_set`, then `quick_score` during and after training. `scores` is for a finished model. `training/` calls these
and knows no task by its name.

A task's file imports torch and transformers inside its methods only: see tasks/__init__.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Figures = dict[str, float | None]  # by score, such as {"test/480": 19.5}; None where a model has no such score


def setting(
    default: Any,
    help: str,
    *,
    minimum: int | None = None,
    choices: Sequence[str] = (),
    source: bool = False,
    place: bool = False,
) -> Any:
    """A field of `Settings`: a recipe key with its default and one line of help.

    minimum: it is a whole number from there. choices: it is one of these. source: it names data, so that giving one
    source on the command line drops the recipe's others. place: it says where a file lies, which does not change what a
    run computes, and is not recorded with a result.
    """
    about = {"help": help, "minimum": minimum, "choices": tuple(choices), "source": source, "place": place}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Settings:
    """The recipe keys of every task. A task adds its own in a subclass."""

    task: str | None = setting(None, "what the model is trained on and scored by")
    init_from: str | None = setting(
        None, "a trained model to start from: a folder, or a run beside this one; its control is replaced", place=True
    )
    average_checkpoints: int = setting(
        1, "the final model is the mean of the weights of so many checkpoints, the last ones", minimum=1
    )

    def __post_init__(self) -> None:
        for known in fields(self):
            value, about = getattr(self, known.name), known.metadata
            if value is None and known.default is None:
                continue
            if (minimum := about["minimum"]) is not None:
                check_whole_number(known.name, value, minimum)
            elif about["choices"] and value not in about["choices"]:
                raise ValueError(f"{known.name} must be one of {', '.join(about['choices'])}, got {value!r:.100}")
            elif isinstance(known.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{known.name} must be true or false, got {value!r:.100}")
            elif isinstance(known.default, float):
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                    raise ValueError(f"{known.name} must be a number, got {value!r:.100}")
            elif not isinstance(known.default, bool) and not isinstance(value, str):
                raise ValueError(f"{known.name} must be text, got {value!r:.100}")

    @classmethod
    def names(cls, about: str | None = None) -> set[str]:
        """The names of all keys, or of those that are marked `source` or `place`."""
        return {known.name for known in fields(cls) if about is None or known.metadata[about]}

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each key means, and its default."""
        shown = {}
        for known in fields(cls):
            default = "" if known.default is None else f" (default: {known.default})"
            shown[known.name] = known.metadata["help"] + default
        return shown


def check_whole_number(name: str, value: Any, minimum: int) -> None:
    """Refuses a value of recipe key `name` that is not a whole number from `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be a whole number from {minimum}, got {value!r:.100}")
    if value >= 2**31:
        raise ValueError(f"{name} must be a whole number from {minimum} to {2**31 - 1}, got {value!r:.100}")


def trained_model(start: str, folder: Path) -> Path:
    """The folder of the model that `init_from` names: a path, or the name of a run beside `folder`."""
    for candidate in (Path(start).expanduser(), folder.parent / start):
        if (candidate / "config.json").is_file():
            return candidate
    raise FileNotFoundError(
        f"init_from={start!r}: no trained model there, nor beside {folder}; train it first, and give its output_dir"
    )


class TrainingSet(NamedTuple):
    """What a Trainer reads. Item i is a function of (seed, i) alone, so to resume is to go on at i."""

    items: Any  # a map-style torch Dataset; an item may be a whole batch, if the collator unpacks it
    collate: Callable[[list[Any]], dict[str, Any]]
    tokens_per_item: float  # for tokens/s: on average
    items_per_pass: float | None  # how many items go through the data once; None: there is no end to it


class Task(ABC):
    """A task with the values of one recipe."""

    settings_class: ClassVar[type[Settings]] = Settings
    # TrainingArguments that differ from the project's defaults; a recipe may change them.
    defaults: ClassVar[dict[str, Any]] = {}
    # TrainingArguments that the task decides itself: the value, and why a recipe may not.
    decided: ClassVar[dict[str, tuple[Any, str]]] = {}
    # What exp(training loss) is called in progress lines and metrics.jsonl; None where it means nothing.
    perplexity: ClassVar[str | None] = None
    # Recipe keys of a run that takes a second, for the tests: sizes of the model, and data. They run where there is a
    # folder `text` with train.txt, valid.txt and test.txt, of 40 different words, the same as .en, .de and .es, and
    # labelled texts: train.tsv and test.tsv.
    tiny: ClassVar[dict[str, Any]] = {}

    def __init__(self, settings: Any, model: Mapping[str, Any], training: Mapping[str, Any]) -> None:
        """settings: of `settings_class`; model, training: the recipe's values for the config and TrainingArguments."""
        self.settings, self.model_values, self.training_values = settings, dict(model), dict(training)

    @classmethod
    @abstractmethod
    def config_class(cls) -> type[PreTrainedConfig]:
        """Whose fields are recipe keys."""

    @classmethod
    def model_keys(cls) -> set[str]:
        """The recipe keys that go to the config: what it adds to transformers' own, less what the data decides."""
        from transformers import PreTrainedConfig

        own = {known.name for known in fields(cls.config_class()) if known.init}
        common = {known.name for known in fields(PreTrainedConfig) if known.init}
        decided = {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "use_cache"}
        return own - common - decided

    @abstractmethod
    def check(self) -> None:
        """Find what is wrong with the recipe without reading data: paths, values, the control and its sizes."""

    def start(self) -> Path | None:
        """The folder of the trained model that init_from names; FileNotFoundError if it is not there."""
        if self.settings.init_from is None:
            return None
        return trained_model(self.settings.init_from, Path(self.training_values["output_dir"]))

    @abstractmethod
    def check_scores(self, names: Sequence[str]) -> None:
        """Refuse the names of scores that `scores` does not know."""

    def open(self) -> None:  # noqa: B027 (a task whose data is made up has nothing to read)
        """Read the data. Where several processes train, the first has done so before the others begin."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Saved with the model."""
        return None

    @property
    def fingerprint(self) -> str | None:
        """Of the data that was opened: a run is not resumed on other data."""
        return None

    @abstractmethod
    def build_model(self, start: Path | None) -> PreTrainedModel:
        """The model as training starts: new, or from the trained one in folder `start` with its control replaced."""

    @abstractmethod
    def load_model(self, folder: Path) -> PreTrainedModel:
        """The model that a run has saved."""

    @abstractmethod
    def training_set(self, total: int, seed: int) -> TrainingSet:
        """`total` items to train on."""

    def loss_function(self) -> Callable[..., Any] | None:
        """The loss from (model's outputs, labels, num_items_in_batch); None: the model's own."""
        return None

    @abstractmethod
    def quick_score(self, model: PreTrainedModel, batch_size: int) -> dict[str, float]:
        """What is reported of held-out data during and after training."""

    @abstractmethod
    def scores(self, model: PreTrainedModel, names: Sequence[str]) -> Figures:
        """The figures of a finished model for a table's columns."""

    def signatures(self) -> dict[str, str]:
        """How figures were computed, by the name of the measure, where a library says it in a line."""
        return {}
