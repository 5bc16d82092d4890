"""Every test starts from the same seed, and memory that torch has not written yet reads as NaN."""

import os
import re
import signal
import sys
from collections import Counter

import pytest
import torch

# The background of a shell ignores Ctrl-C, and processes that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def reproducible():
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes 3 ms: it writes down who called it, for CUDA
    torch.utils.deterministic.fill_uninitialized_memory = True
    if not torch.are_deterministic_algorithms_enabled():  # which takes a millisecond to say once more
        torch.use_deterministic_algorithms(True)


# What the contract compared, for each backend and vector width; pytest-xdist's workers send theirs when they end.


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput") and "contract" in sys.modules:
        forms = sys.modules["contract"].TALLY.forms
        session.config.workeroutput["contract"] = {form: list(entry) for form, entry in forms.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    from contract import TALLY

    for form, entry in getattr(node, "workeroutput", {}).get("contract", {}).items():
        TALLY.add(form, *entry)


def pytest_terminal_summary(terminalreporter):
    if "contract" in sys.modules and sys.modules["contract"].TALLY.forms:
        terminalreporter.section("contract")
        for line in sys.modules["contract"].TALLY.lines():
            terminalreporter.write_line(line)
    if "TRANSFORMERS_TESTS" in os.environ:
        _write_skipped(terminalreporter)


def _write_skipped(terminalreporter):
    """Why transformers' own tests (`make test-hf`) were skipped: how many of them for each reason."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if not hasattr(report, "context"):  # a subtest is part of a test that ran
            reason = report.longrepr[2].removeprefix("Skipped: ")
            reasons[re.sub(r"<class '[^']*'>|\bBounded\w+", "the class", reason)] += 1
    terminalreporter.section("skipped, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4}  {reason}")
