"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """Gives a temporary name to write to, which is renamed to `path` at the end: a reader never finds half a file."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # the permissions of any new file: a temporary one is private to its owner
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, completely or not at all."""
    with whole_file(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")
