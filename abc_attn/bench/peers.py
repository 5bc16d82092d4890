"""The benchmark `generate --peer`: SmolLM2 token by token, by llama.cpp and by ours as it is, compiled and in int8.

All have the same weights, threads and contexts, and are timed in turn. llama.cpp reads the GGUF file that ours were
converted from (4 bits a weight), and its cache holds every token of the context. Ours is the loop of `abc-attn
generate`: a step, a look at the logits, the likeliest token.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from abc_attn.bench.measure import Times, Work, error, interleave
from abc_attn.bench.report import PEERS, Row, compare_rows
from abc_attn.progress import Progress

READ = 1024  # tokens that fill the memory: longer contexts have the same state with another length
CHECKED = 24  # steps, compiled and not, whose logits and tokens are compared
TRAINED = 8192  # tokens that SmolLM2 was trained to read: llama.cpp's context ends there
LLAMA = "llama_cpp"


def peer(control: str, contexts: list[int], tokens: int, repetitions: int) -> tuple[list[Row], dict[str, float]]:
    """Steps of decoding from each context, one sequence: tokens per second. ValueError if none can be compiled."""
    from abc_attn.bench import models as caches  # brings transformers
    from abc_attn.hf.compiled import check_compiler

    caches.check_control(control)
    with _refused():
        check_compiler()
    contexts = sorted(contexts)
    rows: list[Row] = []
    ours: dict[str, dict[Work, Callable[[], object]]] = {method: {} for method in PEERS if method != LLAMA}
    with Progress("bench generate", 5 + len(PEERS) * len(contexts) + len(ours)) as progress:
        models: dict[str, Any] = {}
        summary: dict[str, float] = {}
        checks: dict[str, float] = {}
        for method in PEERS[:-1]:
            weights, _, compiled = method.partition("_")
            given: dict[str, Any] = {"positions": "slot", "weights": "int8" if weights == "int8" else None}
            models[method] = caches.convert(caches.load_original(None), control, **given).eval()
            progress(f"the model for {method}")
            if compiled:
                expected = _logits(models[method])
                summary |= {f"{what}, {weights}": seconds for what, seconds in _compile(models[method]).items()}
                checks[method] = _difference(_logits(models[method]), expected)
                kept = {tensor.data_ptr(): tensor.nbytes for tensor in models[method].state_dict().values()}
                summary[f"bytes of the weights, {weights}"] = float(sum(kept.values()))
                progress(f"check of {method}")
        folder, file = caches.smollm2()
        summary["bytes of the weights, GGUF"] = float((folder / file).stat().st_size)
        llama = _Llama(folder / file, min(max(contexts), TRAINED) + 2 * tokens)
        config, slots = models["fp32"].config, models["fp32"].controls["self"].slots
        size: dict[str, Any] = {"batch": 1, "heads": config.num_attention_heads, "width": config.head_dim}
        for context in contexts:
            runs: dict[Work, Callable[[], object]] = {}
            of_work: dict[Work, Row] = {}
            for method in PEERS:
                work = Work(method, tokens=context, slots=None if method == LLAMA else slots, **size)
                row = of_work[work] = Row.of(work)
                if method == LLAMA:
                    if context <= TRAINED:
                        llama.read(context - 1)
                        runs[work] = lambda: llama.write(tokens)
                        row.state_bytes = 2 * 2 * context * config.num_key_value_heads * config.head_dim  # fp16
                        row.state_bytes *= config.num_hidden_layers
                    else:
                        row.note = f"skipped: the model has positions for {TRAINED:,} tokens there"
                elif row.passes(checks.get(method, 0.0)):
                    runs[work], row.state_bytes = _writing(models[method], context, tokens)
                    ours[method][work] = runs[work]
                if work not in runs:
                    progress(f"{row.label}, {context:,} tokens")
            gc.collect()
            times, sgemm = interleave(
                runs, repetitions, lambda work: progress(f"{work.method}, {work.tokens:,} tokens")
            )
            for work, row in of_work.items():
                if work in times:
                    row.fill(Times([seconds / tokens for seconds in times[work].seconds]), None, sgemm)
                    row.tokens_per_second = tokens / times[work].median
            rows += of_work.values()
        # The contexts of a method once more, in turn: above, minutes of a shared machine lie between them.
        for method, runs in ours.items():
            times, _ = interleave(runs, repetitions, lambda work: None)
            taken = [of_work.median for of_work in times.values()]
            if taken:
                summary[f"slowest / fastest context, {method}"] = max(taken) / min(taken)
            progress(f"{method} at all contexts")
    compare_rows(rows, (LLAMA, "fp32"))
    return rows, summary


@contextmanager
def _refused() -> Iterator[None]:
    """What cannot be compiled is a refusal: most of what is to be measured would be missing."""
    from abc_attn.hf.compiled import NotCompiled

    try:
        yield
    except NotCompiled as reason:
        raise ValueError(f"the steps cannot be compiled: {reason}") from reason


@contextmanager
def _empty_caches() -> Iterator[None]:
    """Our cache of graphs and inductor's of compiled code are empty, as on a machine that has compiled nothing."""
    from torch._inductor.utils import fresh_cache

    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder, fresh_cache():
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def _compile(model: Any) -> dict[str, float]:
    """Compile a model's step, and load it once more: the seconds of both."""
    from abc_attn.hf.compiled import compile_decoding, stop_compiled

    taken = {}
    with _empty_caches(), _refused():
        for what in ("seconds to a compiled step, first", "seconds to a compiled step, from disk"):
            stop_compiled(model)
            started = time.perf_counter()
            compile_decoding(model, 1)
            taken[what] = time.perf_counter() - started
    return taken


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """The logits of some steps from a full memory, each with the likeliest token of the one before: t v."""
    cache, token, found = _full_cache(model, READ), torch.full((1, 1), 3), []
    for _ in range(CHECKED):
        found.append(model(input_ids=token, past_key_values=cache).logits[:, -1])
        token = found[-1].argmax(-1, keepdim=True)
    return torch.cat(found)


def _difference(ours: Tensor, expected: Tensor) -> float:
    """How far the logits of compiled steps are from those of uncompiled ones; infinity if a token differs."""
    return error(ours, expected) if torch.equal(ours.argmax(-1), expected.argmax(-1)) else float("inf")


@torch.no_grad()
def _full_cache(model: Any, context: int) -> Any:
    """A cache one token before `context`. Beyond READ tokens only the length is set: a full memory has the same shapes
    and costs the same at every length, which is what is measured."""
    from abc_attn.hf import BoundedCache

    cache, count = BoundedCache(), min(context, READ) - 1
    ids = torch.randint(3, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    more = context - 1 - count
    layer: Any
    for layer in cache.layers if more else ():
        state = layer.state
        inner = tuple(count + more for count in state.inner)
        layer.state, layer.columns = state._replace(length=state.length + more, inner=inner), context - 1
    return cache


def _writing(model: Any, context: int, tokens: int) -> tuple[Callable[[], object], int]:
    """A call that writes so many tokens, going on from where the call before ended; and the bytes of its state."""
    from abc_attn.hf import state_bytes
    from abc_attn.hf.streaming import Stream

    stream = Stream(model)
    stream.cache, stream.ends, stream.pending = _full_cache(model, context), set(), [3]
    return lambda: list(stream.write(tokens)), state_bytes(stream.cache)


class _Llama:
    """llama.cpp with a text that grows to each context, and is cut back to it after each call."""

    def __init__(self, file: Path, room: int) -> None:
        import llama_cpp

        threads = torch.get_num_threads()
        options: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self.model = llama_cpp.Llama(str(file), n_ctx=room, n_batch=512, logits_all=False, **options)
        self.logits = llama_cpp.llama_get_logits_ith
        self.context, self.random = 0, torch.Generator().manual_seed(1)

    def read(self, context: int) -> None:
        """Go on to so many tokens."""
        self.model.n_tokens = self.context
        ids = torch.randint(3, self.model.n_vocab(), (context - self.context,), generator=self.random).tolist()
        if ids:
            self.model.eval(ids)
        self.context = context

    def write(self, tokens: int) -> list[int]:
        self.model.n_tokens = self.context  # eval() drops what its cache holds beyond
        token, written = 3, []
        for _ in range(tokens):
            self.model.eval([token])
            logits = np.ctypeslib.as_array(self.logits(self.model.ctx, -1), (self.model.n_vocab(),))
            token = int(logits.argmax())  # less than its sampler would do, as in ours
            written.append(token)
        return written
