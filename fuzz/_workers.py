"""The processes that fuzz cases run in. A module of its own: a process that is spawned does not import __main__."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import pkgutil
import shutil
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import fuzz

LONGEST_CASE = 120.0  # seconds


def parts() -> dict[str, str]:
    """The modules of all parts, by name."""
    return {name: f"fuzz.{name}" for _, name, _ in pkgutil.iter_modules(fuzz.__path__) if not name.startswith("_")}


class Worker:
    """A process that runs every `step`-th case from `first`, started anew after the case if one kills it."""

    def __init__(self, context: Any, name: str, folder: Path, first: int, step: int, stop: int) -> None:
        self.context, self.name, self.folder, self.step, self.stop = context, name, folder, step, stop
        self.current = context.Value("q", first, lock=False)  # the case it is on
        self.running = first < stop
        self.last_report = (first, time.monotonic())
        if self.running:
            self._start(first)

    def _start(self, first: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.inbox, outbox = self.context.Pipe(duplex=False)
        self.finish = self.context.Event()
        self.current.value, self.last_report = first, (first, time.monotonic())
        given = (self.name, self.folder, first, self.step, self.stop, self.current, outbox, self.finish)
        self.process = self.context.Process(target=_work, args=given)
        self.process.start()
        outbox.close()

    def news(self, deadline: float, enough: bool) -> list[tuple[int, Any]]:
        """What has happened since: Counters of outcomes, and the failures' texts by case."""
        if not self.running:
            return []
        if enough or time.monotonic() > deadline:
            self.finish.set()
        alive = self.process.is_alive()  # asked first: what it said before it ended is then read below
        found: list[tuple[int, Any]] = []
        ended = False
        while self.inbox.poll():
            try:
                said = self.inbox.recv()
            except (EOFError, OSError):
                break
            ended = ended or said is None
            found += [] if said is None else [said]
        case = int(self.current.value)
        if case != self.last_report[0]:
            self.last_report = (case, time.monotonic())
        elif alive and not ended and time.monotonic() - self.last_report[1] > LONGEST_CASE:
            self.process.kill()
            self.process.join()
            found.append((case, f"case {case} took longer than {LONGEST_CASE:.0f} s"))
            self._next(case, enough)
        elif not alive and not ended:
            found.append((case, f"case {case} ended its process: exit code {self.process.exitcode}"))
            self._next(case, enough)
        if ended:
            self.process.join()
            self.running = False
        return found

    def _next(self, case: int, enough: bool) -> None:
        self.running = case + self.step < self.stop and not enough and not self.finish.is_set()
        if self.running:
            self._start(case + self.step)


def _work(
    name: str, folder: Path, first: int, step: int, stop: int, current: Any, outbox: Connection, finish: Any
) -> None:
    part = importlib.import_module(parts()[name])
    run = _in_a_process if getattr(part, "PROCESSES", False) else _here
    gc.freeze()  # what is imported stays: accelerate collects garbage after each training, a quarter of a second
    outcomes, told = Counter[str](), time.monotonic()
    for case in range(first, stop, step):
        if finish.is_set():
            break
        current.value = case
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        failure, outcome = run(part, case, folder)
        if failure is not None:
            outbox.send((case, failure))
        else:
            outcomes[outcome] += 1
        if time.monotonic() - told > 1:
            outbox.send((case, outcomes))
            outcomes, told = Counter[str](), time.monotonic()
    outbox.send((current.value, outcomes))
    outbox.send(None)


def _here(part: ModuleType, case: int, folder: Path) -> tuple[str | None, str]:
    try:
        return None, str(part.run(case, folder) or "held")
    except Exception:  # whatever it is, it is what the fuzzer looks for
        return f"case {case}\n{traceback.format_exc()}", ""


def _in_a_process(part: ModuleType, case: int, folder: Path) -> tuple[str | None, str]:
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.Pipe(duplex=False)
    process = context.Process(target=lambda: outbox.send(_here(part, case, folder)))
    process.start()
    outbox.close()
    try:
        found = inbox.recv()
    except EOFError:
        found = None
    process.join()
    return found or (f"case {case} ended its process: exit code {process.exitcode}", "")
