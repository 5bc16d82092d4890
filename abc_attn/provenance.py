"""Where figures come from: what is needed to measure them again and to judge them."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def installed(distribution: str) -> str:
    """The version of an installed distribution."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def command(words: str, options: Mapping[str, Any]) -> str:
    """The command line that gives the figures: `words`, and every option that has one or more values."""
    line = ["abc-attn", *words.split()]
    for option, value in options.items():
        if value is not None:
            line += [f"--{option.replace('_', '-')}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return shlex.join(line)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def commit() -> str | None:
    """The commit of this clone; None for an installed package, which may lie inside somebody else's repository.

    It ends in "-dirty" if files differ from the commit, results excepted: one run's results do not change the next.
    """
    source = Path(__file__).parents[1]
    if not (source / ".git").exists() or not shutil.which("git"):
        return None
    git = ["git", "-C", str(source)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    results = [":(exclude)results", ":(exclude)benchmarks/results"]
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", *results], capture_output=True, check=False)
    return found.strip() + ("-dirty" if differs.returncode == 1 else "") if found else None


def cpu() -> str:
    """The name of the processor, where the system tells it."""
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def backends() -> list[tuple[str, bool, str]]:
    """Name, whether it can be used here, and what it is or why it cannot; in the order in which "auto" tries them."""
    from abc_attn.kernels import describe_backends  # imports torch

    return describe_backends()
