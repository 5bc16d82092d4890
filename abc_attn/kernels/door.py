"""The door to the backends: the only place where one is chosen.

A backend is a module. It may offer any of these operations, and declines a call that it does not support:

    scan(q, k, v, write, memory, reading)     core.reference: causal attention from a Write
    mean(q, k, v, log_weights, log_keep, memory, log_total, reading, causal)
                                              attention over weighted means of the tokens: see mean_attention
    mean_step(... as mean, but for causal, in_place)
                                              one token of `mean`, from unchecked inputs; may write into the memory
    band(stretch), band_step(token)           tokens kept as they are: see banded.py
    exact(q, memory, seen, reading)           softmax over every token: the baseline
    rotate(x, cos, sin)                       rotary positions

`scan` is what every backend must offer for the calls it wants to serve; the others are shortcuts. It may also say why
it cannot be used here (`unavailable`) and what it is (`describe`). The first line of its docstring,
"The ... backend: what it takes", is its row in the README.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

# By name, in the order that "auto" tries them; filled by the package's __init__.
BACKENDS: dict[str, ModuleType] = {}


class Declined(NamedTuple):
    """A backend's answer to a call that it does not support."""

    reason: str


def call(operation: str, backend: str, *arguments: Any) -> Any:
    """What `backend` gives, or for "auto" the first that takes the call; Declined if none does."""
    reasons = []
    for name in BACKENDS if backend == "auto" else (backend,):
        run = getattr(BACKENDS[name], operation, None)
        answer = Declined(f"it has no {operation!r}") if run is None else run(*arguments)
        if not isinstance(answer, Declined):
            return answer
        reasons.append(answer.reason)
    return Declined("; ".join(reasons))


def check_backend(backend: str) -> None:
    """An unknown backend is an error that lists the known ones; so is one that is unavailable."""
    if backend == "auto":
        return
    if backend not in BACKENDS:
        accepted = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"unknown backend {backend!r}; accepted: {accepted}")
    if reason := _unavailable(backend):
        raise ValueError(f"backend {backend!r} is unavailable: {reason}. Use 'auto' to take the fastest that is there")


def refused(backend: str, answer: Declined) -> ValueError:
    """The error for a call that the backend asked for declined."""
    hint = "Use backend='auto', which takes torch for such calls"
    return ValueError(f"backend {backend!r} does not support this call: {answer.reason}. {hint}")


def describe_backends() -> list[tuple[str, bool, str]]:
    """Name, whether it can be used here, and what it is or why it cannot; in the order that "auto" tries them."""
    described = []
    for name, module in BACKENDS.items():
        reason = _unavailable(name)
        described.append((name, reason is None, reason or module.describe()))
    return described


def describe_backend() -> tuple[str, str]:
    """The backend that "auto" takes for fp32 on the CPU; what it is, and why none before it."""
    missing: list[str] = []
    for name, available, text in describe_backends():
        if available:
            return name, "; ".join([text, *missing])
        missing.append(f"{name} is unavailable: {text}")
    raise AssertionError("the torch backend is always available")


def _unavailable(backend: str) -> str | None:
    say = getattr(BACKENDS[backend], "unavailable", None)
    return None if say is None else say()
