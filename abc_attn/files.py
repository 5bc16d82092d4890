"""Files and folders that are written completely or not at all, and checksums that find what has changed since."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks: there two runs in one folder are not noticed
    fcntl = None  # type: ignore[assignment]

PARTIAL = ".partial"  # ends the name of a folder that is still being written


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """Gives a temporary name to write to, which is renamed to `path` at the end: a reader never finds half a file."""
    path = Path(path).absolute()
    with _partial(path.parent, path.name) as folder:
        temporary = folder / path.name
        temporary.touch()
        yield str(temporary)
        temporary.chmod(0o666 & ~_umask())  # as any new file: some writers make theirs private
        os.replace(temporary, path)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, completely or not at all."""
    with whole_file(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a new folder to write into, which gets the name `path` at the end: all of it is there, or nothing.

    `path` does not exist or is an empty folder; FileExistsError if something is there by the end.
    """
    path = Path(path).absolute()
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    # An empty folder that cannot be replaced (a mounted volume, or a parent that is read-only) is filled instead.
    inside = path.is_dir() and (os.path.ismount(path) or not may_write(path.parent))
    try:
        with _partial(path if inside else path.parent, path.name) as partial:
            folder = partial / path.name
            folder.mkdir()
            yield folder
            sync(folder)
            if inside:
                parts = sorted(folder.iterdir(), key=lambda part: part.name == "config.json")  # what makes it a model
                for part in parts:
                    part.rename(path / part.name)
            else:
                _rename(folder, path)
    except BaseException:
        for parent in made:
            with suppress(OSError):  # another process has put something there
                parent.rmdir()
        raise


def _rename(folder: Path, path: Path) -> None:
    try:
        folder.rename(path)  # takes the place of an empty folder, too
    except OSError:
        if path.exists():
            raise FileExistsError(f"{path} exists by now: another process wrote it") from None
        raise


@contextmanager
def _partial(beside: Path, name: str) -> Iterator[Path]:
    """A temporary folder `.name.*.partial`, removed at the end. What a killed process left of that name is removed."""
    prefix = f".{name[:100]}."  # a name may be 255 bytes long
    for left in beside.glob(f"{glob.escape(prefix)}*{PARTIAL}"):
        _remove_abandoned(left)
    while True:
        folder = Path(tempfile.mkdtemp(dir=beside, prefix=prefix, suffix=PARTIAL))
        handle = None if fcntl is None else os.open(folder, os.O_RDONLY)
        if handle is None or (_lock(handle) and folder.exists()):
            break
        os.close(handle)  # another process took it for abandoned before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _remove_abandoned(partial: Path) -> None:
    if fcntl is None:
        return
    with suppress(OSError):
        handle = os.open(partial, os.O_RDONLY)
        try:
            if _lock(handle):  # its writer is gone
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            os.close(handle)


def may_write(folder: Path) -> bool:
    """Whether this process can make files in a folder. It is tried: /proc allows root to write, and takes nothing."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def sync(folder: Path) -> None:
    """Wait until everything in a folder has reached the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())


class FolderLock:
    """Held by the one process that may write into a folder; the system releases it when that process ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock; BlockingIOError if another process has it."""
        self._handle: int | None = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(self._handle):
            holder = os.read(self._handle, 20).decode("ascii", "replace").strip()
            self.release()
            by = f"process {holder}" if holder.isdecimal() else "another process"
            raise BlockingIOError(f"{folder} is in use by {by}: wait for it to end, or name another folder")
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.release()


def _lock(handle: int) -> bool:
    """Lock an open file or folder; False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


# Checksums, in the format that `sha256sum --check` reads.


def write_checksums(name: str, folder: Path, files: Iterable[Path]) -> None:
    """Write `folder/name` with the SHA-256 of some of the folder's files."""
    lines = [f"{_digest(file)}  {file.relative_to(folder).as_posix()}\n" for file in sorted(files)]
    write_whole(folder / name, "".join(lines))


def check_checksums(name: str, folder: Path) -> bool:
    """Refuse (ValueError) a folder whose files are not those that `folder/name` describes; False if there is none."""
    try:
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    except UnicodeDecodeError:
        raise ValueError(f"{folder / name} is damaged: it is not text") from None
    for line in lines:
        digest, _, file = line.partition("  ")
        path = folder / file
        if len(digest) != 64 or not file or not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder / name} is damaged: its line {line[:80]!r} is not a SHA-256 and a file")
        if not path.is_file():
            raise ValueError(f"{path} is missing; {folder / name} lists it")
        if _digest(path) != digest:
            raise ValueError(
                f"{path} is damaged or was changed since it was saved: its SHA-256 is not the one in {folder / name}"
            )
    return True


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
