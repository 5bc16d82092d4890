"""Whatever the shapes, dtypes, decays, padding and memories: the loop, the chunks, write and read are one thing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from contract import error, gradient_error
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from abc_attn import Memory, Write, read, scan, write
from abc_attn.kernels import describe_backends

always_the_same = settings(deadline=None, derandomize=True, database=None, max_examples=70)
FAST = [name for name, available, _ in describe_backends() if available and name != "reference"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Case(NamedTuple):
    q: Tensor  # b (h groups) t d, or f(q) of width n
    k: Tensor
    v: Tensor
    write: Write
    memory: Memory | None
    padding: Tensor | None
    options: dict[str, Any]

    def scan(self, backend: str = "auto", part: slice = slice(None), memory: Memory | None = None):
        q, k, v = (x[:, :, part] for x in self[:3])
        padding = None if self.padding is None else self.padding[:, part]
        decided = Write(*(x if x is None else x[:, :, part] for x in self.write))
        return scan(q, k, v, decided, memory or self.memory, key_padding_mask=padding, backend=backend, **self.options)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.q.dtype]

    @property
    def backends(self) -> list[str]:
        """Those that take the case: the native one declines fp64, and linear reads that leave out empty slots."""
        declines = self.q.dtype == torch.float64 or (self.options["linear"] and self.options["mask_empty"])
        return [backend for backend in FAST if backend != "native" or not declines]


@st.composite
def cases(draw, dtypes=tuple(TOLERANCE), readable=True) -> Case:
    b, h, groups, n, d, e = (draw(st.integers(1, most)) for most in (3, 3, 3, 6, 5, 5))
    t = draw(st.one_of(st.integers(1, 9), st.integers(60, 140)))  # inside a chunk, and over several
    dtype, linear = draw(st.sampled_from(dtypes)), draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def chance(probability: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < probability

    def shared(size: int) -> int:  # an axis of a Write may be 1
        return draw(st.sampled_from([1, size]))

    phi = normal(shared(b), shared(h), t, n) * t**-0.5  # so that memories do not grow, nor scores with them
    phi = phi.abs() if linear else phi  # denominators of any sign may come close to zero, where nothing is accurate
    if draw(st.booleans()):
        phi = phi.masked_fill(chance(0.6, *phi.shape), 0)  # slots that stay empty for a while
    log_decay = None
    if draw(st.booleans()):
        sizes = [1e-3, 0.3] if linear else [1e-3, 0.3, 30.0]  # a denominator that underflows has no digits to compare
        log_decay = -normal(shared(b), shared(h), t, n).abs() * draw(st.sampled_from(sizes))
        if draw(st.booleans()):
            log_decay = log_decay.masked_fill(chance(0.1, *log_decay.shape), -torch.inf)
    seen = chance(0.7, shared(b), shared(h), t, n) if readable and draw(st.booleans()) else None
    memory = None
    if draw(st.booleans()):
        used = chance(0.7, b, h, n)
        stored = (normal(b, h, n, d), normal(b, h, n, e), normal(b, h, n, 1).abs())
        k, v, mass = (x.to(torch.promote_types(dtype, torch.float32)) * used[..., None] for x in stored)
        memory = Memory(k, v, mass[..., 0], used)
    padding = chance(0.3, b, t) if draw(st.booleans()) else None
    q = normal(b, h * groups, t, n).abs() if linear else normal(b, h * groups, t, d)
    options = {"linear": linear, "mask_empty": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.5]))}
    return Case(q, normal(b, h, t, d), normal(b, h, t, e), Write(phi, log_decay, seen), memory, padding, options)


def distance(a: Tensor, reference: Tensor) -> float:
    """The error; where all has decayed to less than 1e-30, fp32 has no digits left, and none are asked for."""
    return error(a, reference, max(1e-30, float(reference.abs().max())))


def assert_same_memory(memory: Memory, expected: Memory, tolerance: float) -> None:
    for part, other in zip(memory[:3], expected[:3], strict=True):
        assert part.dtype == other.dtype
        assert distance(part, other) <= tolerance
    assert torch.equal(memory.used, expected.used)


def memory_tolerance(case: Case) -> float:
    """Memories are fp32 at least, whatever the inputs."""
    return min(case.tolerance, 1e-5)


@always_the_same
@given(cases())
def test_every_backend_is_the_loop(case):
    expected, last = case.scan("reference")
    for backend in case.backends:
        out, memory = case.scan(backend)
        assert out.dtype == case.q.dtype
        assert distance(out, expected) <= case.tolerance
        assert_same_memory(memory, last, memory_tolerance(case))


@always_the_same
@given(cases())
def test_write_is_where_the_loop_ends(case):
    memory = write(case.k, case.v, case.write, case.memory, key_padding_mask=case.padding)
    assert_same_memory(memory, case.scan("reference")[1], memory_tolerance(case))


@always_the_same
@given(cases(readable=False))
def test_read_of_the_last_memory_is_the_last_output(case):
    case = case._replace(padding=None)
    out, memory = case.scan()
    assert distance(read(case.q[:, :, -1:], memory, **case.options), out[:, :, -1:]) <= case.tolerance


@always_the_same
@given(cases(), st.data())
def test_split_anywhere_is_whole(case, data):
    t = case.q.shape[2]
    cut = data.draw(st.integers(0, t))
    parts, memory = [], case.memory
    for part in (slice(cut), slice(cut, None)):
        if part == slice(0) or part == slice(t, None):
            continue
        out, memory = case.scan(part=part, memory=memory)
        parts.append(out)
    whole, last = case.scan()
    assert distance(torch.cat(parts, dim=2), whole) <= case.tolerance
    assert_same_memory(memory, last, memory_tolerance(case))


@always_the_same
@given(cases())
def test_padding_is_as_good_as_absent(case):
    """Row by row: the outputs of the real tokens are those of a sequence that never had the others, which get zeros."""
    assume(case.padding is not None)
    out, _ = case.scan()
    b, h, t, _ = case.k.shape
    for row, padded in enumerate(case.padding):
        assert (out[row][:, padded] == 0).all()
        if padded.all():
            continue
        q, k, v = (x[row : row + 1][:, :, ~padded] for x in case[:3])
        decided = Write(*(x if x is None else x.expand(b, h, t, -1)[row : row + 1][:, :, ~padded] for x in case.write))
        memory = None if case.memory is None else Memory(*(x[row : row + 1] for x in case.memory))
        alone, _ = scan(q, k, v, decided, memory, **case.options)
        assert distance(out[row : row + 1][:, :, ~padded], alone) <= case.tolerance


@always_the_same
@given(cases(dtypes=(torch.float64, torch.float32)))
def test_gradients_are_those_of_the_loop(case):
    inputs = [x.requires_grad_() for x in (*case[:3], *case.write[:2]) if x is not None]

    def gradients(backend: str):
        out, memory = case.scan(backend)
        return torch.autograd.grad(sum(x.sin().sum() for x in (out, *memory[:3])), inputs, materialize_grads=True)

    for backend in case.backends:
        assert gradient_error(gradients(backend), gradients("reference")) <= 10 * case.tolerance
