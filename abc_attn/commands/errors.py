"""Errors that a user can fix: `abc_attn.cli.main` prints them as one line and exits with code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# What torch says when an allocation fails, or when a size does not even fit into a number.
_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "Storage size calculation overflowed",
    "invalid shape dimension",
)


class CommandError(Exception):
    """A mistake in the arguments or the files they name; the message says what to change."""


@contextmanager
def explained(extra: str | None = None) -> Iterator[None]:
    """A ValueError, TypeError or OSError of the library becomes a CommandError. A missing package becomes one that
    says which `extra` of this package brings it."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise CommandError(error) from error
    except (MemoryError, RuntimeError) as error:
        _explain_memory(error)
        raise
    except ImportError as error:  # a package that is missing or too old
        if extra is None or (error.name or "").startswith("abc_attn"):
            raise
        raise CommandError(f"{error}; this command needs: pip install 'abc-attn[{extra}]'") from error


@contextmanager
def resumable() -> Iterator[None]:
    """For training: an interrupted run can continue from its last checkpoint."""
    try:
        yield
    except FloatingPointError as error:  # the loss is not finite; the message says what to try
        raise CommandError(error) from error
    except (MemoryError, RuntimeError) as error:
        _explain_memory(error)
        raise
    except KeyboardInterrupt:
        print("\nabc-attn: interrupted; a run continues from its last checkpoint (train: --resume)", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _explain_memory(error: Exception) -> None:
    """Raise a CommandError if memory ran out, in whatever way torch says so."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        said = str(error).partition("\n")[0]
        raise CommandError(f"this machine has too little memory for these sizes: {said}") from error
