"""The demo: five small language models that differ in their attention only, trained, compared and drawn.

Nothing is fetched: the text is the documentation that ships with Python. Axes: b batch, h heads, t tokens, d width.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

from abc_attn import BoundedAttention, State, make_control

SPECS = ("softmax", "mlp", "window:16+mlp:16", "linformer", "random")  # softmax first: the others are compared with it


@dataclass(frozen=True)
class Settings:
    """What the five models share."""

    seed: int = 0
    steps: int = 500
    batch: int = 8
    length: int = 128  # tokens of a training sequence, and all that the linformer has positions for
    slots: int = 32
    layers: int = 2
    width: int = 128
    heads: int = 4
    vocabulary: int = 1024
    learning_rate: float = 5e-3
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)  # where decoding is measured, for the curves
    columns: tuple[int, ...] = (128, 1024, 8192)  # those of them that the table shows
    decode_batch: int = 16
    decode_steps: int = 8  # timed together, ending at the context measured
    rounds: int = 5


@dataclass
class Result:
    """What was measured of one model. Decoding is by context; a context beyond the control's end is absent."""

    spec: str
    perplexity: float
    seconds: dict[int, float] = field(default_factory=dict)  # to decode one token of one sequence
    state_bytes: dict[int, int] = field(default_factory=dict)  # of one sequence


# The text.


class Vocabulary:
    """Frequent words and runs of spaces are one token each; anything rarer is spelled in characters."""

    _pieces = re.compile(r" ?\w+|\s+|[^\w\s]")

    def __init__(self, text: str, size: int) -> None:
        characters = sorted(set(text))
        words = [word for word, _ in Counter(self._pieces.findall(text)).most_common() if len(word) > 1]
        self.tokens = characters + words[: size - len(characters)]
        self._index = {token: i for i, token in enumerate(self.tokens)}

    def encode(self, text: str) -> Tensor:
        """The tokens of a text, int64 t."""
        pieces = (([piece] if piece in self._index else piece) for piece in self._pieces.findall(text))
        return torch.tensor([self._index[token] for piece in pieces for token in piece])

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens t."""
        return "".join(self.tokens[i] for i in tokens.tolist())


def batches(tokens: Tensor, settings: Settings) -> Iterator[Tensor]:
    """Training sequences b t+1, the same for every model."""
    generator = torch.Generator().manual_seed(settings.seed)
    offsets = torch.arange(settings.length + 1)
    for _ in range(settings.steps):
        starts = torch.randint(len(tokens) - settings.length, (settings.batch, 1), generator=generator)
        yield tokens[starts + offsets]


# The model.


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, attention: BoundedAttention, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )


class LanguageModel(nn.Module):
    """A causal language model whose layers share one control."""

    def __init__(self, spec: str, settings: Settings) -> None:
        super().__init__()
        width, heads = settings.width, settings.heads
        options = {"max_length": settings.length} if spec == "linformer" else {}
        slots = None if spec in ("softmax", "window:16+mlp:16") else settings.slots
        control = make_control(spec, slots, embed_dim=width, num_heads=heads, causal=True, **options)
        torch.manual_seed(settings.seed)  # here, so that a control with weights does not change how the rest starts
        self.embedding = nn.Embedding(settings.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.5 * width**-0.5)  # positions, twice as loud, are learned first
        self.blocks: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(BoundedAttention(width, heads, control=control, causal=True), width) for _ in range(settings.layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(
        self, tokens: Tensor, states: Sequence[State] | None = None, return_states: bool = False
    ) -> Tensor | tuple[Tensor, list[State]]:
        """Logits b t vocabulary of tokens b t that follow what `states`, one for each layer, have seen."""
        start = 0 if states is None else states[0].length[:, None]
        new_states = []

        def attend(layer: int, x: Tensor) -> Tensor:
            out, state = self.blocks[layer].attention(x, state=states and states[layer], return_state=True)
            new_states.append(state)
            return out

        logits = self.run(tokens, start, attend)
        return (logits, new_states) if return_states else logits

    def run(self, tokens: Tensor, start: int | Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The model around its attention: `attend` maps a layer's number and its normed input to its output."""
        width = self.embedding.embedding_dim
        position = start + torch.arange(tokens.shape[1])
        # Sinusoids, because decoding goes far beyond the training length.
        angle = position[..., None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        x = self.embedding(tokens) * width**0.5 + torch.cat([angle.sin(), angle.cos()], -1)
        for layer, block in enumerate(self.blocks):
            x = x + attend(layer, block.attention_norm(x))
            x = x + block.feed_forward(x)
        return self.norm(x) @ self.embedding.weight.T


def train(model: LanguageModel, tokens: Tensor, settings: Settings, report: Callable[[str], None]) -> None:
    """AdamW with warm-up and cosine decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = max(1, settings.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / settings.steps))
    )
    for batch in batches(tokens, settings):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(f"loss {loss.item():.2f}")


@torch.inference_mode()
def perplexity(model: LanguageModel, tokens: Tensor, settings: Settings) -> float:
    """Over consecutive sequences of the training length, each starting without a memory."""
    count = (len(tokens) - 1) // settings.length * settings.length
    inputs, targets = (tokens[shift : shift + count].view(-1, settings.length) for shift in (0, 1))
    losses = [
        F.cross_entropy(model(some).flatten(0, 1), wanted.flatten(), reduction="sum")
        for some, wanted in zip(inputs.split(16), targets.split(16), strict=True)
    ]
    return math.exp(torch.stack(losses).sum().item() / count)


def load_text(settings: Settings) -> tuple[Vocabulary, Tensor, Tensor]:
    """The vocabulary, and the tokens to train on and, the last tenth, to validate on."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    vocabulary = Vocabulary(text, settings.vocabulary)
    tokens = vocabulary.encode(text)
    training, validation = tokens.tensor_split([len(tokens) * 9 // 10])
    return vocabulary, training, validation


def train_some(settings: Settings, parent: Connection) -> None:
    """The work of one process: trains each model it is told to, sends a note after each step, then what came of it."""
    torch.set_num_threads(1)
    _, training, validation = load_text(settings)
    with suppress(EOFError, BrokenPipeError):  # the parent has no more to do, or is gone
        while True:
            model = LanguageModel(parent.recv(), settings)
            train(model, training, settings, parent.send)
            reached = perplexity(model, validation, settings)
            parent.send((parameters_to_vector(model.parameters()).detach().numpy(), reached))


def train_all(settings: Settings, report: Callable[[str], None]) -> dict[str, tuple[LanguageModel, float]]:
    """The models, trained, and their perplexities: as many at a time as torch has threads, one process for each.

    Models this small gain little from a second thread; with one, the numbers do not depend on how many cores there are.
    """
    context, waiting, trained = get_context("spawn"), list(SPECS), {}
    running: dict[Connection, str] = {}  # what each process, known by its connection, trains
    for _ in range(min(torch.get_num_threads(), len(SPECS))):
        ours, theirs = context.Pipe()
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is answered here, once
        context.Process(target=train_some, args=(settings, theirs), daemon=True).start()
        signal.signal(signal.SIGINT, handler)
        theirs.close()  # so that the connection ends when the process does
        running[ours] = waiting.pop(0)
        ours.send(running[ours])
    while running:
        ready = connection.wait(running)
        for process, spec in list(running.items()):
            if process not in ready:
                continue
            try:
                message = process.recv()
            except EOFError:
                raise RuntimeError(f"the process that trained {spec} ended without a result") from None
            if isinstance(message, str):
                report(f"{spec} {message}")
                continue
            weights, reached = message
            model = LanguageModel(spec, settings).eval()
            vector_to_parameters(torch.from_numpy(weights), model.parameters())
            trained[spec] = model, reached
            del running[process]
            if waiting:
                running[process] = waiting.pop(0)
                process.send(running[process])
    return {spec: trained[spec] for spec in SPECS}


# Decoding.


class BoundedDecoder:
    """Decoding with a bounded memory: what is past is one state for each layer."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.past: list[State] | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        logits, self.past = self.model(tokens, self.past, return_states=True)
        return logits

    def repeated(self, batch: int) -> BoundedDecoder:
        """Its one sequence `batch` times over."""
        other = BoundedDecoder(self.model)
        other.past = [state.reorder(torch.zeros(batch, dtype=torch.long)) for state in self.past or ()]
        return other

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.past or ())


class SoftmaxDecoder:
    """The baseline, as good as torch makes it: SDPA over keys and values in buffers allocated once, nothing copied."""

    def __init__(self, model: LanguageModel, batch: int, capacity: int) -> None:
        self.model = model
        self.past = 0
        attention = model.blocks[0].attention
        self.cache = torch.zeros(len(model.blocks), 2, batch, attention.num_heads, capacity, attention.head_dim)

    def __call__(self, tokens: Tensor) -> Tensor:
        start, end = self.past, self.past + tokens.shape[1]
        mask = None  # one query sees everything
        if tokens.shape[1] > 1:
            mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)

        def attend(layer: int, x: Tensor) -> Tensor:
            attention = self.model.blocks[layer].attention
            q, k, v = (
                projection(x).unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys, values = self.cache[layer]
            keys[:, :, start:end], values[:, :, start:end] = k, v
            out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
            return attention.out_proj(out.transpose(1, 2).flatten(2))

        logits = self.model.run(tokens, start, attend)
        self.past = end
        return logits

    def repeated(self, batch: int) -> SoftmaxDecoder:
        """Its one sequence `batch` times over."""
        other = SoftmaxDecoder(self.model, batch, self.cache.shape[-2])
        other.cache.copy_(self.cache)
        other.past = self.past
        return other

    @property
    def nbytes(self) -> int:
        """Of the part in use: the capacity set aside is no cost of the method."""
        return self.cache[..., : self.past, :].numel() * self.cache.element_size()


def check_decoder(decoder: BoundedDecoder | SoftmaxDecoder, tokens: Tensor) -> None:
    """No speed is measured of a decoder whose logits differ from the model's own over the whole sequence."""
    whole = decoder.model(tokens)
    past, middle = decoder.past, tokens.shape[1] // 2
    parts = [decoder(tokens[:, :middle]), *(decoder(token) for token in tokens[:, middle:].split(1, dim=1))]
    decoder.past = past
    error = ((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max()).item()
    if not error < 1e-4:
        raise RuntimeError(
            f"{type(decoder).__name__}: decoded logits differ by {error:.1e} of the largest, 1e-4 is allowed"
        )


@torch.inference_mode()
def measure_decoding(
    models: dict[str, LanguageModel],
    tokens: Tensor,
    results: dict[str, Result],
    settings: Settings,
    report: Callable[[str], None],
) -> None:
    """Fill in the speed and the state of every model at every context, the models taking turns in each round."""
    steps, batch, longest = settings.decode_steps, settings.decode_batch, settings.contexts[-1]
    text = tokens.repeat(longest // len(tokens) + 1)[None, :longest]
    decoders = {
        spec: SoftmaxDecoder(model, 1, longest) if spec == "softmax" else BoundedDecoder(model)
        for spec, model in models.items()
    }
    for decoder in decoders.values():
        check_decoder(decoder, text[:, : min(settings.length, 2 * steps)])
    position = 0
    for context in settings.contexts:
        if context > settings.length:
            decoders.pop("linformer", None)  # it has weights for that many positions, and no more
        for decoder in decoders.values():
            for some in text[:, position : context - steps].split(512, dim=1):
                decoder(some)
        position = context - steps
        timed = {spec: decoder.repeated(batch) for spec, decoder in decoders.items()}
        seconds: dict[str, list[float]] = {spec: [] for spec in timed}
        for _ in range(settings.rounds):
            for spec, decoder in timed.items():
                past, started = decoder.past, time.perf_counter()
                for token in text[:, position:context].expand(batch, -1).split(1, dim=1):
                    decoder(token)
                seconds[spec].append((time.perf_counter() - started) / (steps * batch))
                results[spec].state_bytes[context] = decoder.nbytes // batch
                decoder.past = past  # a state is never changed in place, so every round starts from the same one
        for spec in timed:
            results[spec].seconds[context] = statistics.median(seconds[spec])
        report(f"context {context:,}")


@torch.inference_mode()
def generate(model: LanguageModel, prompt: Tensor, count: int, seed: int) -> Tensor:
    """Sample `count` tokens after a prompt t, carrying the bounded state from one to the next."""
    generator = torch.Generator().manual_seed(seed)
    decoder, tokens = BoundedDecoder(model), prompt[None]
    logits = decoder(tokens)
    for _ in range(count):
        chances = (logits[:, -1] / 0.7).softmax(-1)  # a little below 1: fewer odd words from so small a model
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
        logits = decoder(tokens[:, -1:])
    return tokens[0]


# The report.


class Progress:
    """A bar on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.count = label, total, 0
        self.started = self.printed = time.monotonic()
        columns, lines = shutil.get_terminal_size()  # unlike tqdm, this knows of terminals that tell no size
        self.bar = tqdm(total=total, desc=label, ncols=min(columns, 100), nrows=lines, disable=not sys.stderr.isatty())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()

    def __call__(self, note: str) -> None:
        """One step is done."""
        self.count += 1
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and (now - self.printed > 10 or self.count == self.total):
            self.printed = now
            seconds = f"{now - self.started:.0f} s"
            print(f"{self.label}: {self.count}/{self.total}, {note}, {seconds}", file=sys.stderr, flush=True)


NOTE = (
    "softmax is shown in absolute numbers (SDPA over a preallocated key/value cache, {batch} sequences at once), the "
    "others as multiples of it: more is better for speed, less for state. n/a: the linformer has weights for {length} "
    "positions and ends there."
)


def table(results: Sequence[Result], columns: Sequence[int]) -> list[list[str]]:
    """Rows of cells, a heading first: softmax, the first result, in absolute numbers, the others as multiples of it."""
    softmax = results[0]
    rows = [["control", "perplexity", *(f"{context:,}" for context in (*columns, *columns))]]
    for result in results:
        speed = {c: softmax.seconds[c] / seconds for c, seconds in result.seconds.items()}
        state = {c: size / softmax.state_bytes[c] for c, size in result.state_bytes.items()}
        if result is softmax:
            cells = [f"{1 / result.seconds[c]:,.0f}/s" for c in columns]
            cells += [f"{result.state_bytes[c] / 1000:,.0f} kB" for c in columns]
        else:
            cells = [f"{speed[c]:.2f}x" if c in speed else "n/a" for c in columns]
            cells += [f"{state[c]:.3f}x" if c in state else "n/a" for c in columns]
        rows.append([result.spec, f"{result.perplexity:.2f}", *cells])
    return rows


HEADINGS = ("decoded tokens at context", "state per sequence at context")


def table_text(rows: list[list[str]]) -> str:
    """The table for a terminal."""
    half = len(rows[0]) // 2 + 1  # where the columns of the second heading begin
    widths = [max(9, *map(len, column)) for column in zip(*rows, strict=True)]
    spans = [sum(some) + 2 * len(some) - 2 for some in (widths[:2], widths[2:half], widths[half:])]
    lines = ["  ".join(f"{heading:^{span}}" for heading, span in zip(("", *HEADINGS), spans, strict=True)).rstrip()]
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
    return "\n".join(lines)


def provenance(settings: Settings, output: Path) -> dict[str, str]:
    """What is needed to get these numbers again."""
    options = {"--seed": settings.seed, "--steps": settings.steps, "--output": output}
    facts = {
        "command": shlex.join(["abc-attn", "demo", *(str(word) for option in options.items() for word in option)]),
        "versions": f"abc-attn {version('abc-attn')}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{_cpu()}, {torch.get_num_threads()} threads",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    source = Path(__file__).parents[1]
    if (source / ".git").exists():  # an installed package may lie inside somebody else's repository
        git = ["git", "-C", str(source), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        facts |= {"commit": commit} if commit else {}
    return facts


def _cpu() -> str:
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 5")  # beside colour, so that the lines can be told apart without it


def chart(title: str, results: Sequence[Result], values: Callable[[Result], dict[int, float]], unit: str) -> str:
    """A log-log line chart as inline SVG: context across, one line for each control."""
    left, right, top, bottom = 76, 620, 16, 300
    contexts = sorted(results[0].seconds)
    numbers = [value for result in results for value in values(result).values()]
    steps = [step * 10.0**power for power in range(-9, 13) for step in (1, 2, 5)]
    ticks = [tick for tick in steps if tick * 2.5 > min(numbers) and tick < max(numbers) * 2.5]

    def across(context: int) -> float:
        return left + (right - left) * math.log(context / contexts[0]) / (math.log(contexts[-1] / contexts[0]) or 1)

    def up(value: float) -> float:
        return bottom - (bottom - top) * math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])

    parts = [f'<svg viewBox="0 0 640 350" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>']
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{left} {up(tick):.1f}H{right}"/>')
        parts.append(f'<text x="{left - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:,.10g} {unit}</text>')
    for context in contexts:
        parts.append(f'<path class="grid" d="M{across(context):.1f} {top}V{bottom}"/>')
        parts.append(f'<text x="{across(context):.1f}" y="{bottom + 18}" text-anchor="middle">{context:,}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 40}" text-anchor="middle">context, tokens</text>')
    for number, result in enumerate(results):
        points = [(across(context), up(value), context, value) for context, value in sorted(values(result).items())]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        parts.append(f'<g class="line c{number}"><polyline points="{path}" stroke-dasharray="{DASHES[number]}"/>')
        for x, y, context, value in points:
            label = f"{result.spec} at {context:,} tokens: {value:,.4g} {unit}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(label)}</title></circle>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --faint: #0002;
  --c0: #1c1e21; --c1: #0067b3; --c2: #c44601; --c3: #00795a; --c4: #a3398b; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e8e6e3; --faint: #fff3;
  --c0: #e8e6e3; --c1: #62b3f5; --c2: #ff9152; --c3: #3cc79c; --c4: #e58fd3; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--faint); white-space: nowrap; }
th:first-child { text-align: left; } thead th { font-weight: 600; } tbody th { font-weight: 400; }
.wide { overflow-x: auto; } figure { margin: 1rem 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; font-size: 12px; } .grid { stroke: var(--faint); }
.line polyline { fill: none; stroke: currentColor; stroke-width: 2; } .line circle { fill: currentColor; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; list-style: none; }
.key svg { width: 2.6rem; height: .8rem; vertical-align: middle; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); }
pre { white-space: pre-wrap; padding: .8rem; border: 1px solid var(--faint); border-radius: .4rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


def page(results: Sequence[Result], rows: list[list[str]], note: str, sample: str, facts: dict[str, str]) -> str:
    """The whole report as one HTML file that needs nothing else."""
    half = (len(rows[0]) - 2) // 2
    groups = "".join(f'<th colspan="{half}" scope="colgroup">{heading}</th>' for heading in HEADINGS)
    heading = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
        for name, *cells in rows[1:]
    )
    key = "".join(
        f'<li><svg class="line c{i}" viewBox="0 0 42 12" aria-hidden="true"><polyline points="0,6 42,6" '
        f'stroke-dasharray="{DASHES[i]}"/><circle cx="21" cy="6" r="4"/></svg> {escape(result.spec)}</li>'
        for i, result in enumerate(results)
    )
    figures = [
        ("Time to decode one token", lambda result: {c: 1e6 * s for c, s in result.seconds.items()}, "µs"),
        ("State of one sequence", lambda result: {c: size / 1000 for c, size in result.state_bytes.items()}, "kB"),
    ]
    drawn = "".join(
        f"<figure><figcaption>{title}</figcaption>\n{chart(f'{title}, by context', results, values, unit)}\n"
        f'<ul class="key">{key}</ul></figure>\n'
        for title, values, unit in figures
    )
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>abc-attn demo</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Attention with bounded memory</h1>
<p>Five small language models that differ in their attention only, trained alike on the documentation that ships with
Python.</p>
<div class="wide"><table>
<thead><tr><th colspan="2"></th>{groups}</tr><tr>{heading}</tr></thead>
<tbody>{body}</tbody>
</table></div>
<p>{escape(note)}</p>
{drawn}
<h2>A sample</h2>
<pre>{escape(sample)}</pre>
<h2>How this was measured</h2>
<dl>{listed}</dl>
</body>
</html>
"""


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name first, so that nobody finds half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp lets nobody else read it
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


PROMPT = 'The "while" statement'


def run_demo(settings: Settings, output: Path) -> list[Result]:
    """Train, measure, print the table and a sample, and write the page to `output`."""
    started = time.monotonic()
    vocabulary, training, validation = load_text(settings)
    print(
        f"Training five {settings.layers}-layer language models that differ in their attention only, "
        f"on {len(training):,} tokens\nof Python's own documentation: {settings.steps} steps each, "
        f"{settings.slots} slots where the memory is bounded, {torch.get_num_threads()} CPU threads.",
        flush=True,
    )
    with Progress("training", len(SPECS) * settings.steps) as progress:
        trained = train_all(settings, progress)
    models = {spec: model for spec, (model, _) in trained.items()}
    results = {spec: Result(spec, reached) for spec, (_, reached) in trained.items()}
    with Progress("decoding", len(settings.contexts)) as progress:
        measure_decoding(models, validation, results, settings, progress)

    measured = list(results.values())
    rows = table(measured, settings.columns)
    note = NOTE.format(batch=settings.decode_batch, length=settings.length)
    best = min(measured[1:], key=lambda result: result.perplexity).spec
    prompt = vocabulary.encode(PROMPT)
    sample = vocabulary.decode(generate(models[best], prompt, min(80, settings.length - len(prompt)), settings.seed))
    write_whole(output, page(measured, rows, note, f"{best}:\n\n{sample}", provenance(settings, output)))
    print(f"\n{table_text(rows)}\n\n{textwrap.fill(note, 110)}")
    print(f"\nA sample from {best}, whose memory stayed the same size throughout:\n\n{textwrap.indent(sample, '    ')}")
    print(f"\nThe curves are in {output} ({time.monotonic() - started:.0f} s in all).")
    return measured
