"""Reads recipe files: YAML, where `extends: other.yaml` takes all keys of another file first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML as most people expect it: 1e-3 is a number, and `no` is a word (eval_strategy: no)."""

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
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date that does not exist
        raise ValueError(f"{text!r:.100} is not a YAML value: {' '.join(str(error).split())}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must be a mapping of keys to values, one `key: value` a line")
    return values


def read_recipe(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The keys and values of a recipe, those it extends included."""
    if not path.is_file():
        by = f", which {extending[-1]} extends" if extending else ""
        raise FileNotFoundError(f"no recipe at {path}{by}")
    if path.resolve() in extending:
        raise ValueError(f"{path} extends itself")
    values = read_mapping(path)
    parent = values.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ValueError(f"{path}: extends must name another recipe, got {parent!r:.100}")
    return values if parent is None else read_recipe(path.parent / parent, (*extending, path.resolve())) | values
