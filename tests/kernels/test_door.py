"""The door to backends: a backend is a module and one line of the registry; the order decides; reasons are given."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from contract import Form, as_parameters, each_backend, forms

from abc_attn import BoundedAttention, Write, scan
from abc_attn.kernels import BACKENDS, describe_backends
from abc_attn.kernels.door import Declined


@pytest.fixture
def dummy():
    """A backend of one function, first in the registry: it takes calls of few tokens, with half of the right answer."""
    module, calls = ModuleType("dummy"), []

    def half(q, k, v, write, memory, reading):
        if q.shape[2] > 5:
            return Declined("it takes five tokens at most")
        calls.append(q.shape[2])
        out, memory = BACKENDS["torch"].scan(q, k, v, write, memory, reading)
        return out / 2, memory

    module.scan, module.describe = half, lambda: "a test"
    others = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS.update({"dummy": module} | others)
    yield calls
    BACKENDS.clear()
    BACKENDS.update(others)


def inputs(t: int):
    q, k, v, phi = torch.randn(4, 1, 2, t, 8)
    return q, k, v, Write(phi)


def test_a_backend_is_one_module_and_one_line(dummy):
    for t, served in ((5, True), (6, False)):
        given = inputs(t)
        expected, _ = scan(*given, backend="torch")
        out, _ = scan(*given)
        torch.testing.assert_close(out, expected / 2 if served else expected)
    assert dummy == [5]
    assert describe_backends()[0] == ("dummy", True, "a test")
    # An attention that asks for it by name is served by it, though it offers no shortcut for windows or means.
    for control in ("mlp:4", "window:4", "elu"):
        BoundedAttention(16, 2, control, causal=True, backend="dummy")(torch.randn(1, 3, 16))
    assert dummy == [5, 3, 3, 3]


def test_a_backend_that_declines_is_an_error_by_name(dummy):
    with pytest.raises(ValueError, match="'dummy' does not support this call: it takes five tokens at most"):
        scan(*inputs(6), backend="dummy")
    with pytest.raises(ValueError, match="does not support this call"):
        BoundedAttention(16, 2, "window:4", causal=True, backend="dummy")(torch.randn(1, 6, 16))


def test_an_unavailable_backend_says_why(monkeypatch):
    monkeypatch.setattr(BACKENDS["torch"], "unavailable", lambda: "a test", raising=False)
    with pytest.raises(ValueError, match="'torch' is unavailable: a test"):
        scan(*inputs(3), backend="torch")
    assert ("torch", False, "a test") in describe_backends()


def test_a_registered_backend_is_held_to_the_contract(dummy, monkeypatch):
    """By being registered; where it is unavailable its cases are skipped, with the reason."""
    assert Form("dummy") in forms()
    assert not any(mark.name == "skip" for mark in marks("dummy"))
    monkeypatch.setattr(BACKENDS["dummy"], "unavailable", lambda: "no such machine", raising=False)
    assert [mark.kwargs["reason"] for mark in marks("dummy") if mark.name == "skip"] == ["no such machine"] * 2


def marks(backend: str) -> list[pytest.Mark]:
    """Of its parameters in the contract and in the tests of each backend."""
    parameters = [*as_parameters([Form(backend)]), *each_backend(backend)]
    return [mark.mark if hasattr(mark, "mark") else mark for each in parameters for mark in each.marks]
