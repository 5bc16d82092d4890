"""Controls that a command names or a saved model needs, of this package or of the user's own modules (`--import`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from abc_attn import plugins
from abc_attn.commands.errors import CommandError, explained


def import_controls(arguments: argparse.Namespace) -> None:
    """Import what `--import` names."""
    with explained():
        plugins.import_control_modules(arguments.imports)


def check_controls(control: object) -> None:
    """Refuse a control like "window:32+clock:8", or a list of them, if a name is unknown. It takes torch, and not
    transformers."""
    from abc_attn.controls import CONTROLS
    from abc_attn.controls.base import unknown_controls

    if unknown := unknown_controls(control):
        raise CommandError(
            f"unknown control {unknown[0]!r} in {control!r}; accepted: {', '.join(CONTROLS)}. A control of your own "
            "needs --import with its module or file" + "".join(f"; {line}" for line in plugins.load_entry_points())
        )


def check_saved_controls(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a saved model whose control is unknown, and say which module it was defined in.

    The name of the module is only shown: nothing that a model's files name is ever imported.
    """
    if "control" not in config:  # a model that is not converted
        return
    from abc_attn.controls.base import unknown_controls

    if unknown := unknown_controls(config["control"]):
        modules = [name for name in config.get("control_modules") or () if _is_module_name(name)]
        flags = " ".join(f"--import {name}" for name in modules) or "--import MODULE"
        raise CommandError(
            f"{folder} needs the control {unknown[0]!r}, which is not part of abc-attn: add {flags} (a module, or the "
            "path of its file)" + "".join(f"; {line}" for line in plugins.load_entry_points())
        )


def _is_module_name(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
