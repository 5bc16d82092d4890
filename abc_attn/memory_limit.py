"""How much memory this machine can give, and the refusal of sizes beyond it before anything is built."""

from __future__ import annotations

import os
import re
from pathlib import Path

FLOAT = 4  # bytes: weights start in fp32, and a memory is never narrower
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


def free_bytes() -> int:
    """Memory that can be allocated now without swapping, within the limit of a container."""
    try:
        free = int(re.findall(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    except (OSError, IndexError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        free = min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no such file, or the limit is "max"
        pass
    return free


def check_fits(what: str, needed: int) -> None:
    """Refuse (ValueError) what needs more bytes than are free."""
    if needed > (free := free_bytes()):
        raise ValueError(f"{what} would take {in_words(needed)} of memory, and this machine has {in_words(free)} free")


def in_words(size: int) -> str:
    """A number of bytes in the largest unit that it fills: 272 GB."""
    if size >= 10**30:
        return "more than 10^30 bytes"
    power = min(len(_UNITS) - 1, max(0, (len(str(size)) - 1) // 3))
    return f"{size} bytes" if not power else f"{size / 1000**power:.3g} {_UNITS[power]}"
