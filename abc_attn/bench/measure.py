"""What is measured and how: the methods, the check before every figure, interleaved times, peak memory.

Axes: b batch, h heads, t tokens, n slots, d width of keys and values.
"""

from __future__ import annotations

import gc
import random
import re
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn import Write, mlp_attention, read, write
from abc_attn.allocator import give_back_memory, return_freed_memory
from abc_attn.controls.gates import starting_biases, starting_logits
from abc_attn.kernels import BACKENDS
from abc_attn.memory_limit import FLOAT, free_bytes, in_words
from abc_attn.normaliser import log_sigmoid

TOLERANCE = 1e-4  # largest error of outputs and gradients, relative to the largest value, for which a time is shown
BUDGET = 3.0  # seconds for each method: once spent, only the minimum of repetitions is still made
LEAST = 3  # minimum of repetitions of our methods
LEAST_BASELINE = 2  # ... and of a baseline: one call may take half a minute
REPETITION = 0.02  # seconds: calls quicker than this are timed several at a time
WARM = 0.5  # seconds: calls quicker than this are made once, untimed, before each repetition
SGEMM_SIZE = 2048  # large enough for the full rate
BASELINES = ("sdpa", "eager")
HALF_LIFE, EXPONENT = 512.0, 8.0  # of gates for slots, as they are by default
GATES = ("head", "slot", "slots")  # mlp with gate="head", with gate="slot", and the control `slots`


@dataclass(frozen=True)
class Work:
    """One attention call without projections: which method, of which size, with or without its backward pass; or a
    generation of a whole model."""

    method: str  # of METHODS; of a generation, its cache
    batch: int
    heads: int
    tokens: int
    width: int
    slots: int | None = None  # None for the baselines, which have no memory
    causal: bool = True
    backward: bool = False
    gate: str = ""  # of GATES

    @property
    def ours(self) -> bool:
        return self.slots is not None

    @property
    def flops(self) -> int | None:
        """Of the forward pass: n*d multiply-adds each to write k, to write v, to score and to read, so 8*n*d a token
        and head. A backward pass is not counted, nor is a baseline."""
        if self.slots is None or self.backward:
            return None
        return 8 * self.slots * self.width * self.batch * self.heads * self.tokens


# The methods.


def _mlp(backend: str) -> Callable[..., Tensor]:
    def run(work: Work, q: Tensor, k: Tensor, v: Tensor, control: Tensor, *gate: Tensor) -> Tensor:
        logits, log_keep = _decide(work, control, *gate)
        return mlp_attention(q, k, v, logits, log_keep=log_keep, causal=work.causal, backend=backend)[0]

    return run


def _decide(work: Work, control: Tensor, *gate: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What the controls of these names compute from what they project: logits, and the logarithm of what is kept."""
    match work.gate:
        case "":
            return control, None
        case "head":
            return control, log_sigmoid(gate[0])
        case "slot":
            return control, log_sigmoid(gate[0], EXPONENT)
    return None, log_sigmoid(control, EXPONENT)  # slots


def _linformer(work: Work, q: Tensor, k: Tensor, v: Tensor, control: Tensor) -> Tensor:
    return read(q, write(k, v, Write(control)))


def _sdpa(work: Work, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=work.causal)


def _eager(work: Work, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q * work.width**-0.5 @ k.mT
    if work.causal:
        scores = scores.masked_fill_(future(work.tokens), -torch.inf)  # in place: no second copy of t x t
    return scores.softmax(-1) @ v


@cache
def future(tokens: int) -> Tensor:
    """The causal mask t t, True where a key is later than the query. Made once, as a model would."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


METHODS: dict[str, Callable[..., Tensor]] = {
    **{backend: _mlp(backend) for backend in BACKENDS},
    "mlp": _mlp("auto"),
    "linformer": _linformer,
    "sdpa": _sdpa,
    "eager": _eager,
}


def make_inputs(work: Work) -> tuple[list[Tensor], Tensor]:
    """q, k, v `b h t d` and, for ours, the control: logits `b h t n`, or the linformer's phi `1 1 t n`; then the
    gradient of the output. The same q, k, v for every method of a size."""
    generator = torch.Generator().manual_seed(0)
    shape = (work.batch, work.heads, work.tokens, work.width)
    q, k, v, d_out = (torch.randn(shape, generator=generator) for _ in range(4))
    inputs = [q, k, v]
    if work.method == "linformer":
        inputs.append(torch.randn(1, 1, work.tokens, work.slots or 0, generator=generator) * work.tokens**-0.5)
    elif work.ours:
        inputs.append(torch.randn(*shape[:3], work.slots or 0, generator=generator))
    # Gates are as a layer starts them: some slots forget within a token, which is what costs most.
    if work.gate == "head":
        start = starting_biases(work.heads)[:, None, None]
        inputs.append(torch.randn(*shape[:3], 1, generator=generator) + start)
    elif work.gate:
        start = starting_logits(work.slots or 0, HALF_LIFE, EXPONENT).float()
        logit = torch.randn(*shape[:3], work.slots or 0, generator=generator) + start
        inputs = [*inputs, logit] if work.gate == "slot" else [q, k, v, logit]
    return [x.requires_grad_(work.backward) for x in inputs], d_out


def runner(work: Work) -> Callable[[], tuple[Tensor, ...]]:
    """A call that does the work once, on inputs made here: the output and, with `backward`, every gradient."""
    inputs, d_out = make_inputs(work)

    def run() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(work.backward):
            out = METHODS[work.method](work, *inputs)
        return (out.detach(), *torch.autograd.grad(out, inputs, d_out)) if work.backward else (out,)

    return run


# The check before any figure.


def check(work: Work, run: Callable[[], tuple[Tensor, ...]]) -> float:
    """The error of what `run` gives, against fp64: max|a - ref| / max|ref|, the largest over output and gradients.

    It checks the same call that is timed. Causal: its last row and head, against the loop over t up to 512 tokens and
    the torch backend beyond. Non-causal: all of it, against the paper's equations as they stand.
    """
    inputs, d_out = make_inputs(work)
    part = (slice(-1, None), slice(-1, None)) if work.causal else ()
    with torch.enable_grad():
        exact = [x.detach()[part].double().requires_grad_(work.backward) for x in inputs]
        q, k, v, control, *gate = exact
        if work.causal:
            out = _mlp("reference" if work.tokens <= 512 else "torch")(work, q, k, v, control, *gate)
        else:
            phi = control if work.method == "linformer" else control.softmax(2)
            out = (q * work.width**-0.5 @ (phi.mT @ k).mT).softmax(-1) @ (phi.mT @ v)
        expected = (out, *torch.autograd.grad(out, exact, d_out[part].double())) if work.backward else (out,)
    errors = [error(x[part], y) for x, y in zip(run(), expected, strict=True)]
    return torch.tensor(errors).max().item()  # NaN if one of them is; Python's max may miss it


def error(found: Tensor, expected: Tensor) -> float:
    """max|found - expected| / max|expected|."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


# Time.


@dataclass(frozen=True)
class Times:
    """The seconds of one call, once for each repetition."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third


def interleave(
    runs: Mapping[Work, Callable[[], object]],
    repetitions: int,
    report: Callable[[Work], None],
    budget: float = BUDGET,
) -> tuple[dict[Work, Times], float]:
    """Time all in turn, A B C, B A C, ..., so that a slow moment of the machine affects all of them alike. The order
    changes each time, because what ran just before has filled the caches.

    Returns their times and, measured among them, the flops per second of a product of two large matrices. A contender
    is done after `repetitions`, or earlier once it has its minimum and has spent `budget` seconds; then `report` is
    called. Each is called once or twice before, untimed, unless one call takes longer than BUDGET; and once more before
    each repetition, unless that takes long: of several calls in a row all except the first find their inputs in the
    caches, so a method timed one call at a time would be at a disadvantage.
    """
    a, b, product = (torch.rand(SGEMM_SIZE, SGEMM_SIZE) for _ in range(3))
    contenders: dict[Work | None, Callable[[], object]] = dict(
        [*runs.items(), (None, lambda: torch.mm(a, b, out=product))]
    )
    taken: dict[Work | None, list[float]] = {}
    calls, warm = {}, {}
    for key, run in contenders.items():
        seconds = _timed(run, 1)
        taken[key] = [seconds] if seconds > BUDGET else []  # in so long a call, the cost of a first one is negligible
        if seconds < REPETITION:  # ... in so short a one it is not
            seconds = _timed(run, 1)
        calls[key], warm[key] = max(1, min(100, int(REPETITION / seconds))), seconds < WARM
    shuffle = random.Random(0).shuffle
    while contenders:
        gc.collect()
        order = list(contenders.items())
        shuffle(order)
        for key, run in order:
            if warm[key]:
                run()
            taken[key].append(_timed(run, calls[key]))
            least = LEAST if key is None or key.ours else LEAST_BASELINE
            spent, allowed = sum(taken[key]) * calls[key], BUDGET if key is None else budget
            enough = spent >= allowed and len(taken[key]) >= least
            if enough or len(taken[key]) >= repetitions:
                del contenders[key]
                if key is not None:
                    report(key)
    rate = 2 * SGEMM_SIZE**3 / statistics.median(taken.pop(None))
    return {work: Times(seconds) for work, seconds in taken.items() if work is not None}, rate


def _timed(run: Callable[[], object], calls: int) -> float:
    """Seconds per call, over several calls without garbage collection."""
    gc.disable()
    try:
        started = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - started) / calls
    finally:
        gc.enable()


# Memory.


def available_bytes() -> int:
    """Memory that can be allocated now without swapping, less a fifth for the rest of the machine."""
    return free_bytes() * 4 // 5


def needed_bytes(work: Work) -> int:
    """An estimate: inputs, output and their gradients; eager: scores, weights and both gradients, of which two are
    alive forward."""
    rows = work.batch * work.heads * work.tokens
    scores = rows * work.tokens * (4 if work.backward else 2) if work.method == "eager" else 0
    return FLOAT * (rows * (10 * work.width + 4 * (work.slots or 0)) + scores)


def does_not_fit(work: Work) -> str | None:
    """Why the work does not fit into memory; None if it does."""
    if (needed := needed_bytes(work)) <= (available := available_bytes()):
        return None
    return f"skipped: needs {needed / 1e9:.3g} GB, {available / 1e9:.3g} GB may be used"


def check_fit(works: Sequence[Work]) -> None:
    """Refuse sizes that could only fail in the middle of the run; baselines are skipped instead."""
    for work in works:
        needed, available = needed_bytes(work), available_bytes()
        if work.ours and needed > available:
            raise MemoryError(
                f"this machine is too small for these sizes: {work.tokens} tokens, {work.slots} slots, width "
                f"{work.width}, {work.heads} heads and a batch of {work.batch} take {in_words(needed)} of memory, and "
                f"{in_words(available)} may be used"
            )


def peak_memory(work: Work) -> int | None:
    """Bytes by which the work, its inputs included, raises the peak of a fresh process; None if that was killed."""
    return peak_of_process(_ready, work)


def preloaded(module: str) -> ForkServerContext:
    """Makes processes by forking one that has only imported `module`: seconds faster than new ones.

    It imports what the first call asks for.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def peak_of_process(prepare: Callable[..., Callable[[], object]], *arguments: object) -> int | None:
    """Bytes by which what `prepare(*arguments)` returns raises, when called, the peak of a fresh process."""
    context = preloaded(prepare.__module__)
    receiver, sender = context.Pipe(duplex=False)
    given = (torch.get_num_threads(), sender, prepare, *arguments)
    process = context.Process(target=_peak, args=given, daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is answered here, once
    process.start()
    signal.signal(signal.SIGINT, handler)
    sender.close()  # this end; when the process ends, so does the pipe
    try:
        return int(receiver.recv())
    except EOFError:
        return None
    finally:
        process.join()


def _peak(threads: int, sender: Connection, prepare: Callable[..., Callable[[], object]], *arguments: object) -> None:
    """The work of the fresh process."""
    torch.set_num_threads(threads)
    return_freed_memory()
    run = prepare(*arguments)
    give_back_memory()
    before = high_water(reset=True)
    run()
    sender.send(high_water() - before)


def _ready(work: Work) -> Callable[[], object]:
    runner(
        replace(work, batch=1, tokens=min(work.tokens, 32))
    )()  # starting threads and loading libraries is not part of the work
    return lambda: runner(work)()


def high_water(reset: bool = False) -> int:
    """Most bytes this process has held at once; `reset` starts from now (where the system can)."""
    # ru_maxrss only where there is nothing better: on Linux a process inherits it from its parent.
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
    try:
        return int(re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
