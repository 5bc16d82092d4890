"""Checks of paths that a user gives. They import nothing heavy, so a wrong path is reported at once.

Every error is an OSError or a ValueError whose message names the path and what is needed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def saved_model(folder: Path) -> dict[str, Any]:
    """The config.json of a model that `save_pretrained` wrote into `folder`."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no saved model at {folder}: a folder with config.json and weights is needed")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(config).__name__}")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise FileNotFoundError(f"{folder} has a config.json but no weights (*.safetensors)")
    return config


def new_folder(folder: Path) -> Path:
    """A folder to write: it does not exist yet or is empty, and can be made."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is not empty: name a new folder")
    return writable_folder(folder)


def writable_folder(folder: Path) -> Path:
    """A folder that exists and is writable, or that can be made."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(f"{folder} cannot be made: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written: {there} is not writable")
    return folder


def new_file(file: Path) -> Path:
    """A file to write, in a folder that exists and is writable."""
    if file.is_dir() or not os.access(file.absolute().parent, os.W_OK):
        raise OSError(f"{file} cannot be written: name a file in a folder that exists and is writable")
    return file


def text_file(file: Path) -> str:
    """The text of a UTF-8 file that is not empty."""
    if not file.is_file():
        raise FileNotFoundError(f"no text file at {file}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from None
    if not text.strip():
        raise ValueError(f"{file} has no text to score")
    return text
