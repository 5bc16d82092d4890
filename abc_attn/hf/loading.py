"""What must be true of a saved model's weights: files that are whole, and every weight of the model among them.

transformers starts weights that a file lacks at random, with a warning. Here that is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from abc_attn.files import check_checksums

WEIGHTS = "*.safetensors"
CHECKSUMS = "weights.sha256"
_CONTROLS = {"control", "controls"}  # of AdaptiveLM, and of converted models
_POOLER = "pooler"  # BERT's: a head, though transformers has it in the body
_SHOWN = 4  # names in an error


def check_weights(folder: Any) -> None:
    """Refuse (ValueError) a folder whose weights are damaged. A name on a hub, and weights of old formats, pass."""
    if not isinstance(folder, (str, os.PathLike)) or not Path(folder).is_dir():
        return
    folder = Path(folder)
    try:
        check_checksums(CHECKSUMS, folder)
    except ValueError as error:
        raise ValueError(f"{error}; remove {CHECKSUMS} if the change was meant") from None
    for file in sorted(folder.glob(WEIGHTS)):
        read_header(file)


class Weight(NamedTuple):
    """What a file says of a weight."""

    dtype: str
    shape: list[int]


def read_header(file: Path) -> dict[str, Weight]:
    """The type and shape of every weight in a safetensors file; ValueError if it is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            return {name: Weight(str(part.get_dtype()), part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {' '.join(str(error).split())}") from None


def check_loaded(
    model: PreTrainedModel, info: Mapping[str, Any], where: Any, *, new_controls: bool = False, new_heads: bool = False
) -> None:
    """Refuse (ValueError) a model that was not loaded whole. `info` is what from_pretrained reports of it.

    new_heads: those may be missing. new_controls: those may be missing, and the file may have others. Weights of
    another head in the file are never an error.
    """
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if new_heads:
        missing = [name for name in missing if _in_body(model, name)]
    lacking = [name for name in missing if not _of_control(name)]
    if lacking:
        raise ValueError(f"{where} lacks weights that its config.json asks for: {some(lacking)}")
    if missing and not new_controls:
        raise ValueError(
            f"{where} lacks the weights of its control: {some(missing)}; if it was never converted, convert it, or "
            "load it with from_pretrained(..., allow_new_controls=True)"
        )
    if left := [name for name in unexpected if _in_body(model, name) and not (new_controls and _of_control(name))]:
        raise ValueError(f"{where} has weights that its config.json has no place for: {some(left)}")


def check_sizes(info: Mapping[str, Any], where: Any) -> None:
    """Refuse (ValueError) weights of other sizes than the config's."""
    wrong = [f"{name} is {tuple(found)}, not {tuple(needed)}" for name, found, needed in info["mismatched_keys"]]
    if wrong:
        raise ValueError(f"{where} has weights of other sizes than its config.json asks for: {some(sorted(wrong))}")


def _in_body(model: PreTrainedModel, name: str) -> bool:
    """Whether a weight belongs to the body of a model: its layers, embeddings and controls."""
    prefix = model.base_model_prefix
    body = getattr(model, prefix, model)
    first = name.removeprefix(f"{prefix}.").partition(".")[0]
    return first in {child for child, _ in body.named_children()} - {_POOLER} or _of_control(name)


def _of_control(name: str) -> bool:
    return not _CONTROLS.isdisjoint(name.split("."))


def some(names: Iterable[str]) -> str:
    """The first of many names."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
