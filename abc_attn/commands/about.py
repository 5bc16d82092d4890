"""The commands that say what is here: env, controls."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

from abc_attn import plugins
from abc_attn.commands.errors import explained
from abc_attn.commands.user_controls import import_controls
from abc_attn.provenance import backends, installed

PACKAGES = ("abc-attn", "torch", "safetensors", "transformers")


def env(arguments: argparse.Namespace) -> None:
    """Print what a bug report needs: versions, platform, CPU threads, and each backend with whether it can be used."""
    import torch

    facts = {name: installed(name) for name in PACKAGES}
    facts |= {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "CPU threads": str(torch.get_num_threads()),
    }
    with explained():  # a mistake in ABC_ATTN_BACKEND or ABC_ATTN_SIMD
        for name, available, text in backends():
            facts[f"backend {name}"] = text if available else f"unavailable: {text}"
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")


def controls(arguments: argparse.Namespace) -> None:
    """Print every registered control: its section of the paper, whether it can be causal, its read and its options.
    Controls of installed packages (entry points abc_attn.controls) and of --import are among them."""
    import_controls(arguments)

    from abc_attn.controls import CONTROLS

    for failed in plugins.load_entry_points():
        print(f"abc-attn: {failed}", file=sys.stderr)
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "paper": control.paper,
            "causal": control.online,
            "read": "linear" if control.linear else "softmax",
            "options": control.options(),
            "summary": (control.__doc__ or "").strip().partition("\n")[0],
            "module": control.__module__,
        }
        for name, control in CONTROLS.items()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2, default=str))
        return
    table = [("control", "paper", "causal", "read", "what it is, and its options")]
    for row in rows:
        table.append((row["name"], row["paper"], "yes" if row["causal"] else "no", row["read"], row["summary"]))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line, row in zip(table, [{}, *rows], strict=True):
        print("  ".join(map(str.ljust, line, widths)).rstrip())
        if row.get("options"):
            options = ", ".join(f"{name}={default!r}" for name, default in row["options"].items())
            print(" " * (sum(widths[:-1]) + 8) + options)
