"""Checks of paths that a user gives. They import nothing heavy, so a wrong path is reported at once.

Every error is an OSError or a ValueError whose message names the path and what is needed.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from abc_attn.files import PARTIAL, may_write

# The JSON files of a saved model, each an object. transformers ignores some of them silently where they are damaged.
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)

_SHOWN = 5  # line numbers in a message
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def saved_model(folder: Path) -> dict[str, Any]:
    """The config.json of a model that `save_pretrained` wrote into `folder`, whose other JSON files can be read too."""
    if folder.suffix == ".gguf" and folder.is_file():
        raise NotADirectoryError(f"{folder} is a GGUF file: convert it first (abc-attn convert {folder} FOLDER)")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no saved model at {folder}: a folder with config.json and weights is needed")
    check_utf8(folder)
    found = {name: json_object(folder / name) for name in JSON_FILES if (folder / name).is_file()}
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise FileNotFoundError(f"{folder} has a config.json but no weights (*.safetensors)")
    return found["config.json"]


def check_chat_template(folder: Path) -> None:
    """Refuse a saved model whose tokenizer has no chat template."""
    config = folder / "tokenizer_config.json"
    found = any((folder / name).exists() for name in ("chat_template.jinja", "additional_chat_templates"))
    if not found and not (config.is_file() and json_object(config).get("chat_template")):
        raise ValueError(
            f"{folder} has no chat template: it was not made to chat; `abc-attn generate {folder} --prompt TEXT` "
            "continues a text"
        )


class Source(NamedTuple):
    """Where a model to convert is."""

    place: str  # a folder, or a name on the hub
    gguf_file: str | None  # the file of weights in it; None: those that save_pretrained wrote
    local: bool

    def __str__(self) -> str:
        return self.place if self.gguf_file is None else os.path.join(self.place, self.gguf_file)

    @property
    def name(self) -> str:
        """What a model card calls it: without the folders that it lies in."""
        if not self.local:
            return str(self)
        last = self.gguf_file or Path(self.place).resolve().name
        return os.fsencode(last).decode("utf-8", "replace")


def model_source(where: str | os.PathLike[str], gguf_file: str | None = None) -> Source:
    """Where the model is that a user names: a folder, a .gguf file, or owner/name on the hub.

    What is on this machine is checked; a hub is not asked.
    """
    path = Path(where)
    if path.is_file() and path.suffix == ".gguf":
        if gguf_file is not None:
            raise ValueError(f"{path} is a file already: leave out the second, {gguf_file}")
        path, gguf_file = path.parent, path.name
    if path.is_dir():
        check_utf8(path)
        if gguf_file is None and not (path / "config.json").is_file() and (found := sorted(path.glob("*.gguf"))):
            raise FileNotFoundError(f"{path} has no config.json, but {found[0].name}: name that file ({found[0]})")
        if gguf_file is None:
            saved_model(path)
        else:
            check_gguf(path / gguf_file)
        return Source(str(path), gguf_file, True)
    name = os.fspath(where)
    if not path.exists() and _HUB_NAME.fullmatch(name) and path.suffix != ".gguf" and not path.parent.is_dir():
        return Source(name, gguf_file, False)
    raise FileNotFoundError(
        f"no saved model at {where}: a folder with config.json and weights, a .gguf file, or a name on the hub "
        "(owner/name) is needed"
    )


def check_gguf(file: Path) -> None:
    """Refuse a file that is not there, or that is not GGUF."""
    if not file.is_file():
        raise FileNotFoundError(f"no GGUF file at {file}")
    with open(file, "rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file: it does not begin with GGUF")


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(found).__name__}")
    return found


def new_folder(folder: Path) -> Path:
    """A folder to write: it does not exist yet or is empty, and can be made."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: name a new folder")
    if folder.is_dir() and any(not part.name.endswith(PARTIAL) for part in folder.iterdir()):  # left by a kill
        raise FileExistsError(f"{folder} exists and is not empty: name a new folder")
    check_utf8(folder)
    return writable_folder(folder)


def check_utf8(path: Path) -> None:
    """Refuse a path that is not UTF-8, or has letters that the locale lacks: tokenizers and safetensors need both."""
    try:
        str(path.absolute()).encode("utf-8")
    except UnicodeEncodeError:
        try:
            os.fsencode(path.absolute()).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: this path is not UTF-8, and could not be opened everywhere: rename it") from None
        encoding = sys.getfilesystemencoding()
        raise ValueError(f"{path}: this path has letters that {encoding} lacks: set PYTHONUTF8=1") from None


def writable_folder(folder: Path) -> Path:
    """A folder that exists and is writable, or that can be made."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(f"{folder} cannot be made: {there} is not a folder")
    if not may_write(there):
        raise PermissionError(f"{folder} cannot be written: {there} is not writable")
    return folder


def new_file(file: Path) -> Path:
    """A file to write, in a folder that exists and is writable."""
    if file.is_dir() or not may_write(file.absolute().parent):
        raise OSError(f"{file} cannot be written: name a file in a folder that exists and is writable")
    return file


def text_file(file: Path) -> str:
    """The text of a UTF-8 file that is not empty; .xz and .gz files are unpacked."""
    if not file.is_file():
        raise FileNotFoundError(f"no text file at {file}")
    text = "".join(text_lines(file, keep_ends=True)).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise ValueError(f"{file} has no text to score")
    return text


def text_lines(file: Path, *, keep_ends: bool = False) -> Iterator[str]:
    """The lines of a UTF-8 file, without a byte-order mark before them; .xz and .gz files are unpacked."""
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
    number = 0
    with openers.get(file.suffix, open)(file, "rb") as opened:
        try:
            for line in opened:
                number += 1
                text = line.decode("utf-8").removeprefix("\ufeff" * (number == 1))
                yield text if keep_ends else text.removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8: line {number} has byte {error.object[error.start]:#04x} at column "
                f"{error.start}; convert it, for instance with `iconv -t UTF-8`"
            ) from None
        except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{file} is not a whole {file.suffix} file: {error}") from None


def shown_lines(numbers: Sequence[int]) -> str:
    """The first few of them, for a message: lines 12, 25, ..."""
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
    return f"line{'s' * (len(numbers) > 1)} {shown}"
