"""Checkpoints of a run: written under another name and moved when whole, with checksums that find damage later."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from abc_attn.files import check_checksums, sync, write_checksums
from abc_attn.paths import json_object

CHECKSUMS = "checkpoint.sha256"
STATE = "trainer_state.json"


def publish(partial: Path, final: Path) -> None:
    """Give a checkpoint its name, once what is in it has reached the disk."""
    write_checksums(CHECKSUMS, partial, [file for file in partial.rglob("*") if file.is_file()])
    sync(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the first one first."""
    numbered = {path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-"): path for path in folder.iterdir() if path.is_dir()}
    return [numbered[step] for step in sorted(filter(str.isdecimal, numbered), key=int)]


def remove_checkpoints(folder: Path) -> None:
    """For a run whose result is kept elsewhere: they are for resuming, and several times as large as its model."""
    for checkpoint in all_checkpoints(folder):
        shutil.rmtree(checkpoint)


def last_whole_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The last checkpoint of a run that is whole, and what is wrong with those after it; None if there is none.

    ValueError if there are checkpoints and none of them is whole.
    """
    damaged = []
    for checkpoint in reversed(all_checkpoints(folder)):
        try:
            check_checkpoint(checkpoint)
        except (ValueError, OSError) as error:
            damaged.append(str(error))
            continue
        return checkpoint, damaged
    if damaged:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {damaged[0]}. To start anew, give another output_dir or remove "
            f"{folder}"
        )
    return None, []


def check_checkpoint(checkpoint: Path) -> None:
    """Refuse (ValueError) a checkpoint that is damaged, with the name of the file."""
    state = json_object(checkpoint / STATE) if (checkpoint / STATE).is_file() else {}
    if not isinstance(state.get("global_step"), int):
        raise ValueError(f"{checkpoint / STATE} is damaged or missing: it has no global_step")
    if check_checksums(CHECKSUMS, checkpoint):
        return
    # Version 0.1 wrote no checksums; torch's files are archives that have their own.
    needed = {"optimizer.pt", "scheduler.pt"} - {file.name for file in checkpoint.iterdir()}
    if needed:
        raise ValueError(f"{checkpoint / min(needed)} is missing")
    for file in sorted(checkpoint.rglob("*")):
        if file.suffix in (".pt", ".pth"):
            try:
                with zipfile.ZipFile(file) as archive:
                    bad = archive.testzip()
            except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
                raise ValueError(f"{file} is damaged: {error}") from None
            if bad is not None:
                raise ValueError(f"{file} is damaged: its part {bad} has another checksum")
        elif file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is damaged: {error}") from None
