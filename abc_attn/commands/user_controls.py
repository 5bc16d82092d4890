"""Controls that a command names or a saved model needs, of this package or of the user's own modules (`--import`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from abc_attn import control_names, plugins
from abc_attn.commands.errors import CommandError, explained


def import_controls(arguments: argparse.Namespace) -> None:
    """Import what `--import` names."""
    with explained():
        plugins.import_control_modules(arguments.imports)


def check_controls(control: object) -> None:
    """Refuse a control like "window:32+clock:8", or a list of them, if a name or a number of slots is wrong."""
    if unknown := _unknown(control):
        raise CommandError(
            f"unknown control {unknown[0]!r} in {control!r}; accepted: {', '.join(_known())}. A control of your own "
            "needs --import with its module or file" + "".join(f"; {line}" for line in plugins.load_entry_points())
        )
    with explained():
        for part in control_names.parts(control):
            control_names.name_and_slots(part)


def _unknown(control: object) -> list[str]:
    """The names that nobody has registered. torch is imported only where somebody else's controls may be known."""
    names = control_names.names(control)
    if {*names} <= {*control_names.BUILT_IN}:
        return []
    if not _registered() and not plugins.announced():
        return [name for name in names if name not in control_names.BUILT_IN]
    from abc_attn.controls.base import unknown_controls

    return unknown_controls(control)


def _known() -> Iterable[str]:
    if not _registered():
        return control_names.BUILT_IN
    from abc_attn.controls import CONTROLS

    return CONTROLS


def _registered() -> bool:
    """Whether the registry has been imported, which every module with controls of its own does."""
    return "abc_attn.controls" in sys.modules


def check_saved_controls(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a saved model whose control is unknown, and say which module it was defined in.

    The name of the module is only shown: nothing that a model's files name is ever imported.
    """
    if "control" not in config:  # a model that is not converted
        return
    if unknown := _unknown(config["control"]):
        modules = [name for name in config.get("control_modules") or () if _is_module_name(name)]
        flags = " ".join(f"--import {name}" for name in modules) or "--import MODULE"
        raise CommandError(
            f"{folder} needs the control {unknown[0]!r}, which is not part of abc-attn: add {flags} (a module, or the "
            "path of its file)" + "".join(f"; {line}" for line in plugins.load_entry_points())
        )


def _is_module_name(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
