"""The mean of the weights of several saved models or checkpoints, tensor by tensor, in fp64."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from abc_attn.files import whole_folder, write_checksums
from abc_attn.hf.loading import CHECKSUMS, WEIGHTS, check_weights, read_header, some

MODEL = "model.safetensors"
# What a checkpoint has beyond a model.
_OF_TRAINING = ("optimizer.", "scheduler.", "rng_state", "trainer_state.", "training_args.", "checkpoint.", CHECKSUMS)


def check_alike(folders: Sequence[Path]) -> None:
    """Refuses (ValueError, OSError) folders that do not hold weights of the same names, shapes and types."""
    first: dict[str, object] = {}
    for folder in folders:
        files = sorted(folder.glob(WEIGHTS))
        if not files:
            raise FileNotFoundError(f"no weights (*.safetensors) in {folder}: a saved model or a checkpoint is needed")
        check_weights(folder)
        found = {name: weight for file in files for name, weight in read_header(file).items()}
        first = first or dict(found)
        if different := sorted(name for name in {*first, *found} if first.get(name) != found.get(name)):
            raise ValueError(f"{folders[0]} and {folder} have other weights: {some(different)}")


def mean_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each weight over saved models; of whole numbers, that of the last."""
    check_alike(folders)
    mean: dict[str, Tensor] = {}
    for file in sorted(folders[-1].glob(WEIGHTS)):
        for name in read_header(file):
            several = [_tensor(folder, name) for folder in folders]
            last = several[-1]
            if last.is_floating_point():
                last = (sum((one.double() for one in several), torch.zeros(())) / len(several)).to(last.dtype)
            mean[name] = last.contiguous()
    return mean


def save_mean(folders: Sequence[Path], target: Path) -> None:
    """Write a new folder with the mean of the models' weights; the config and all else are the last one's."""
    mean = mean_weights(folders)
    with whole_folder(target) as partial:
        for file in sorted(folders[-1].iterdir()):
            weights = file.match(WEIGHTS) or file.name.endswith(".safetensors.index.json")
            if file.is_file() and not weights and not file.name.startswith(_OF_TRAINING):
                shutil.copyfile(file, partial / file.name)
        save_file(mean, partial / MODEL, metadata={"format": "pt"})
        write_checksums(CHECKSUMS, partial, partial.glob(WEIGHTS))


def _tensor(folder: Path, name: str) -> Tensor:
    for file in folder.glob(WEIGHTS):
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118 (not a dict)
                return opened.get_tensor(name)
    raise ValueError(f"{folder} lacks the weight {name}")
