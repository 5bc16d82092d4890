"""Every test starts from the same seed, and memory that torch has not written yet reads as NaN."""

import os
import re
from collections import Counter

import pytest
import torch


@pytest.fixture(autouse=True)
def reproducible():
    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_terminal_summary(terminalreporter):
    """Why transformers' own tests (`make test-hf`) were skipped: how many of them for each reason."""
    if "TRANSFORMERS_TESTS" not in os.environ:
        return
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if not hasattr(report, "context"):  # a subtest is part of a test that ran
            reason = report.longrepr[2].removeprefix("Skipped: ")
            reasons[re.sub(r"<class '[^']*'>|\bBounded\w+", "the class", reason)] += 1
    terminalreporter.section("skipped, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4}  {reason}")
