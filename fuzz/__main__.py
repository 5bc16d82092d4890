"""Runs the fuzzers: `python -m fuzz states --seconds 60 --seed 0`; `python -m fuzz states --case 12345` repeats one.

A part is a module of this folder with

    NAME                               as on the command line
    run(case, folder) -> str | None    raises AssertionError with what went wrong; what it returns is counted
    PROCESSES = True                   (optional) each case needs a process of its own

A case is a function of its number alone; `folder` is empty and its own. Cases run in worker processes: one that dies,
or takes longer than a case may, is a failure of the case that it was on.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz._workers import Worker, parts

CASES_OF_A_SEED = 10**9  # seed s has the cases from s times this
MOST_FAILURES = 10  # after so many a part is given up


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", nargs="*", help=f"what to run, of {', '.join(parts())}; all of them if left out")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long to run each part")
    parser.add_argument("--cases", type=int, help="how many cases to run instead, however long it takes")
    parser.add_argument("--seed", type=int, default=0, help="which cases to run")
    parser.add_argument("--case", type=int, help="run this one case, here, and show where it fails")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    known = parts()
    for name in options.part:
        if name not in known:
            parser.error(f"unknown part {name!r}; accepted: {', '.join(known)}")
    chosen = options.part or list(known)
    if options.case is not None:
        if len(chosen) != 1:
            parser.error("--case repeats a case of one part: name it")
        with _room() as room:
            print(importlib.import_module(known[chosen[0]]).run(options.case, Path(room)))
        return 0
    failed = [name for name in chosen if not run_part(name, options)]
    return 1 if failed else 0


def run_part(name: str, options: argparse.Namespace) -> bool:
    """Run a part in several processes; report, and return whether all went well."""
    first = options.seed * CASES_OF_A_SEED
    context = multiprocessing.get_context("spawn")
    failures: list[int] = []
    began, outcomes, done = time.monotonic(), Counter[str](), 0
    deadline = began + (options.seconds if options.cases is None else float("inf"))
    stop = first + (CASES_OF_A_SEED if options.cases is None else options.cases)
    print(f"fuzz {name}: seed {options.seed}, cases from {first}, {options.processes} processes", flush=True)
    with _room() as room:
        workers = []
        for number in range(options.processes):
            workers.append(Worker(context, name, Path(room) / str(number), first + number, options.processes, stop))
        while any(worker.running for worker in workers):
            time.sleep(0.05)
            for worker in workers:
                for case, outcome in worker.news(deadline, len(failures) >= MOST_FAILURES):
                    if isinstance(outcome, Counter):
                        outcomes, done = outcomes + outcome, done + outcome.total()
                        continue
                    failures.append(case)
                    done += 1
                    print(f"FAILED {outcome.strip()}\n  repeat: python -m fuzz {name} --case {case}\n", flush=True)
    seconds = time.monotonic() - began
    print(f"fuzz {name}: {done} cases in {seconds:.0f} s ({done / seconds:.0f} a second), {len(failures)} failed")
    for outcome, count in outcomes.most_common():
        print(f"  {count:9}  {outcome}")
    sys.stdout.flush()
    return not failures


def _room() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="fuzz.", dir=memory if os.access(memory, os.W_OK) else None)


if __name__ == "__main__":
    sys.exit(main())
