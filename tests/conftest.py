"""Every test starts from the same seed, and memory that torch has not written yet reads as NaN."""

import pytest
import torch


@pytest.fixture(autouse=True)
def reproducible():
    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
