"""Checks of a recipe's values: each has the type that its key declares, and lies in the key's range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

LARGEST = 2**31 - 1  # of whole numbers: steps, sizes and counts beyond it are mistakes
# Whole numbers that do not start at 0 or end at LARGEST.
_WHOLE: dict[str, tuple[int, int]] = {
    **dict.fromkeys(
        (
            "max_steps", "logging_steps", "save_steps", "eval_steps", "per_device_train_batch_size",
            "per_device_eval_batch_size", "gradient_accumulation_steps", "eval_accumulation_steps", "save_total_limit",
            "torch_empty_cache_steps", "ddp_timeout", "ddp_bucket_cap_mb", "dataloader_prefetch_factor",
        ),
        (1, LARGEST),
    ),
    "seed": (0, 2**32 - 1),  # numpy's
    "data_seed": (0, 2**32 - 1),
    "dataloader_num_workers": (0, 1024),
    "local_rank": (-1, LARGEST),
}  # fmt: skip
_MODEL_WHOLE: dict[str, tuple[int, int]] = {"local_heads": (0, LARGEST), "position_period": (2, LARGEST)}
# Numbers that do not start at 0 or have an end. `above` and `below` are not reached themselves.
_NUMBERS: dict[str, tuple[str, float, float]] = {
    "learning_rate": ("above 0", math.nextafter(0, 1), math.inf),
    "adam_beta1": ("from 0 and below 1", 0.0, math.nextafter(1, 0)),
    "adam_beta2": ("from 0 and below 1", 0.0, math.nextafter(1, 0)),
    "label_smoothing_factor": ("from 0 to 1", 0.0, 1.0),
}
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}


def check_training_values(hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse values that TrainingArguments, whose type hints these are, do not declare."""
    for name, value in given.items():
        kinds = {int} | ({NoneType} & kinds_of(hints[name])) if name in _WHOLE else kinds_of(hints[name])
        _check(name, value, kinds, _WHOLE.get(name, (0, LARGEST)))


def check_model_values(hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse values that the config of a model, whose type hints these are, does not declare."""
    for name, value in given.items():
        _check(name, value, kinds_of(hints[name]), _MODEL_WHOLE.get(name, (1, LARGEST)))


def kinds_of(hint: Any) -> set[type]:
    """The types of YAML values that a type hint allows; nothing for what YAML cannot say."""
    origin = get_origin(hint) or hint
    if hint is Any:
        return {*_NAMES, NoneType}
    if origin in (Union, UnionType):
        return {kind for part in get_args(hint) for kind in kinds_of(part)}
    if origin is Literal:
        return {type(value) for value in get_args(hint)}
    if origin is tuple:
        return {list}
    if isinstance(origin, type) and issubclass(origin, Enum):
        return {str}
    return {origin} & {*_NAMES, NoneType}


def _check(name: str, value: Any, kinds: set[type], whole: tuple[int, int]) -> None:
    if isinstance(value, (list, tuple)):
        if list not in kinds:
            raise ValueError(f"{name} must be {_described(name, kinds, whole)}, got {value!r:.100}")
        return
    if type(value) in kinds - {int, float}:
        return
    if type(value) is int and int in kinds:
        least, most = whole
        if value > most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r:.100}")
        if value >= least:
            return
    elif type(value) in (int, float) and float in kinds:
        _, least_number, most_number = _NUMBERS.get(name, ("", 0.0, math.inf))
        if least_number <= value <= most_number and value != math.inf:
            return
    raise ValueError(f"{name} must be {_described(name, kinds, whole)}, got {value!r:.100}")


def _described(name: str, kinds: set[type], whole: tuple[int, int]) -> str:
    words = {kind: _NAMES[kind] for kind in _NAMES if kind in kinds}
    if int in words:
        words[int] = f"a whole number from {whole[0]}"
    if float in words:
        words[float] = f"a number {_NUMBERS.get(name, ('from 0',))[0]}"
    return " or ".join(words.values()) or "left out: a recipe cannot give it"
