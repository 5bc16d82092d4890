"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Progress:
    """A bar on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.count = label, total, 0
        self.started = self.printed = time.monotonic()
        columns, lines = shutil.get_terminal_size()  # unlike tqdm's own, it has a default for terminals without a size
        self.bar = tqdm(total=total, desc=label, ncols=min(columns, 100), nrows=lines, disable=not sys.stderr.isatty())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def __call__(self, note: str) -> None:
        """One step is done."""
        self.count += 1
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and (now - self.printed > 10 or self.count == self.total):
            self.printed = now
            seconds = f"{now - self.started:.0f} s"
            print(f"{self.label}: {self.count}/{self.total}, {note}, {seconds}", file=sys.stderr, flush=True)


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """For work that cannot say how far it is: a line as it starts, one every ten seconds, and one when it is done."""
    started, done = time.monotonic(), threading.Event()

    def say(what: str = "") -> None:
        print(f"{label}: {what}{time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def report() -> None:
        while not done.wait(10):
            say()

    print(f"{label} ...", file=sys.stderr, flush=True)
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
        say("done in ")
    finally:
        done.set()
        reporter.join()
