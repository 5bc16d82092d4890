"""Controls from outside this package: a user's own module or file, and installed packages that announce theirs.

`--import my_controls` (a module) or `--import ./my_controls.py` (a file) runs the user's `@register_control` lines. A
package announces its controls in its pyproject.toml, and needs no flag:

    [project.entry-points."abc_attn.controls"]
    clock = "my_package.controls"
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

GROUP = "abc_attn.controls"


def import_control_modules(names: Sequence[str]) -> list[ModuleType]:
    """Import modules, by name ("my_controls", "package.controls") or by file ("./my_controls.py"), in order.

    A module is looked for among the installed packages, then in the current folder. All names are checked before the
    first is imported. Whatever goes wrong is a ValueError of one line.
    """
    for name in names:
        if _is_file(name):
            _check_file(Path(name))
        else:
            _check_module(name)
    return [_import_file(Path(name)) if _is_file(name) else _run(name, name) for name in names]


def announced() -> bool:
    """Whether an installed package announces controls; they are not imported."""
    return bool(entry_points(group=GROUP))


@cache
def load_entry_points() -> tuple[str, ...]:
    """Import what installed packages announce under `abc_attn.controls`, once; returns a line for each that failed."""
    failed = []
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # somebody else's package: whatever it raises must not stop the other controls
            package = entry.dist.name if entry.dist else "an unknown package"
            failed.append(f"entry point {entry.name} = {entry.value} of {package} failed: {_one_line(error)}")
    return tuple(failed)


def _is_file(name: str) -> bool:
    return name.endswith(".py") or os.sep in name


def _check_file(file: Path) -> None:
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"--import {file}: there is no such Python file (tried {file.absolute()})")
    if not file.stem.isidentifier():
        raise ValueError(f"--import {file}: {file.stem!r} cannot be a module's name; rename the file")
    known = _find(file.stem)
    if known is not None:
        _refuse_another(file, known.origin)


def _refuse_another(file: Path, origin: str | None) -> None:
    """Refuse a file whose name belongs to another module, that of `origin`."""
    if origin is None or Path(origin).resolve() != file.resolve():
        where = origin or "a folder"
        raise ValueError(f"--import {file}: Python has another module named {file.stem!r} ({where}); rename the file")


def _check_module(name: str) -> None:
    _look_in(Path.cwd())
    if _find(name.partition(".")[0]) is None:
        raise ValueError(
            f"--import {name}: no such module among the installed packages or in {Path.cwd()}; "
            "a file elsewhere is given by its path, as in ./folder/my_controls.py"
        )


def _import_file(file: Path) -> ModuleType:
    known = sys.modules.get(file.stem)
    if known is not None:
        _refuse_another(file, getattr(known, "__file__", None))
        return known
    _look_in(file.resolve().parent)  # for what the file itself imports
    return _run(file.stem, str(file), file.resolve())


def _run(module: str, given: str, file: Path | None = None) -> ModuleType:
    """Import a module; `given` is what the user wrote."""
    try:
        if file is None:
            return import_module(module)
        spec = spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        made = sys.modules[module] = module_from_spec(spec)
        try:
            spec.loader.exec_module(made)
        except BaseException:
            del sys.modules[module]
            raise
        return made
    except (Exception, SystemExit) as error:  # anything that a user's code may raise
        raise ValueError(f"--import {given}: {_one_line(error)}") from error


def _look_in(folder: Path) -> None:
    """Last of all places, so that a file there does not hide an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _find(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except ValueError:  # an empty name, or a module that was not imported from anywhere
        return None


def _one_line(error: BaseException) -> str:
    """What was raised, and where."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    last = frames[-1] if frames else None
    return said if last is None or last.filename == __file__ else f"{said} ({last.filename}, line {last.lineno})"
