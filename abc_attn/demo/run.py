"""The demo: five small language models that differ in their attention only, trained, compared and drawn.

Nothing is fetched: the text is the documentation that ships with Python. Axes: b batch, h heads, t tokens, d width.
"""

from __future__ import annotations

import math
import platform
import re
import signal
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from abc_attn import BoundedAttention, State, make_control, provenance
from abc_attn.demo.report import Result, note_text, page, table, table_text
from abc_attn.files import whole_file
from abc_attn.progress import Progress

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
    rounds: int = 7


# The text.


class Vocabulary:
    """Frequent words and runs of spaces are one token each; anything rarer is spelled in characters."""

    _words = re.compile(r" ?\w+|\s+|[^\w\s]")

    def __init__(self, text: str, size: int) -> None:
        characters = sorted(set(text))
        words = [word for word, _ in Counter(self._words.findall(text)).most_common() if len(word) > 1]
        self.tokens = characters + words[: size - len(characters)]
        self._index = {token: i for i, token in enumerate(self.tokens)}

    def encode(self, text: str) -> Tensor:
        """The tokens of a text, int64 t."""
        words = (([word] if word in self._index else word) for word in self._words.findall(text))
        return torch.tensor([self._index[token] for word in words for token in word])

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
        torch.manual_seed(settings.seed)
        control = make_control(spec, slots, embed_dim=width, num_heads=heads, causal=True, **options)
        torch.manual_seed(settings.seed)  # again, so that a control with weights does not change how the rest starts
        self.embedding = nn.Embedding(settings.vocabulary, width)
        nn.init.normal_(
            self.embedding.weight, std=0.5 * width**-0.5
        )  # positions have twice the norm and are learned first
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
    """The work of one process: trains each model it is asked for, sends a note after each step, then the result."""
    torch.set_num_threads(1)
    _, training, validation = load_text(settings)
    with suppress(EOFError, BrokenPipeError):  # the parent has no more work, or has ended
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
    """Decoding with a bounded memory: the past is one state for each layer."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.past: list[State] | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        logits, self.past = self.model(tokens, self.past, return_states=True)
        return logits

    def repeated(self, batch: int, steps: int) -> BoundedDecoder:
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

    def repeated(self, batch: int, steps: int) -> SoftmaxDecoder:
        """Its one sequence `batch` times over, with room for `steps` more tokens."""
        other = SoftmaxDecoder(self.model, batch, self.past + steps)
        other.cache[..., : self.past, :] = self.cache[..., : self.past, :]
        other.past = self.past
        return other

    @property
    def nbytes(self) -> int:
        """Of the part in use: unused capacity is not a cost of the method."""
        return self.cache[..., : self.past, :].numel() * self.cache.element_size()


def check_decoder(decoder: BoundedDecoder | SoftmaxDecoder, tokens: Tensor) -> None:
    """Refuse to measure a decoder whose logits differ from the model's own over the whole sequence."""
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
    """Fill in the speed and the state of every model at every context.

    In each round every model has its turn at every context, so that a slow moment of the machine affects all alike.
    """
    steps, longest = settings.decode_steps, settings.contexts[-1]
    text = tokens.repeat(longest // len(tokens) + 1)[None, :longest]
    decoders = {
        spec: SoftmaxDecoder(model, 1, longest) if spec == "softmax" else BoundedDecoder(model)
        for spec, model in models.items()
    }
    for decoder in decoders.values():
        check_decoder(decoder, text[:, : min(settings.length, 2 * steps)])

    turns = {}
    position = 0
    for context in settings.contexts:
        if context > settings.length:
            decoders.pop("linformer", None)  # it has weights for that many positions only
        for spec, decoder in decoders.items():
            for some in text[:, position : context - steps].split(512, dim=1):
                decoder(some)
            turns[spec, context] = decoder.repeated(settings.decode_batch, steps)
        position = context - steps
        report(f"prefilled {context:,}")

    seconds: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    for _ in range(settings.rounds):
        for (spec, context), decoder in turns.items():
            tokens = text[:, context - steps : context].expand(settings.decode_batch, -1)
            past, started = decoder.past, time.perf_counter()
            for token in tokens.split(1, dim=1):
                decoder(token)
            seconds[spec, context].append((time.perf_counter() - started) / tokens.numel())
            results[spec].state_bytes[context] = decoder.nbytes // settings.decode_batch
            decoder.past = past  # a state is never changed in place, so every round starts from the same one
        report("timing")
    for (spec, context), each in seconds.items():
        results[spec].seconds[context] = statistics.median(each)


@torch.inference_mode()
def generate(model: LanguageModel, prompt: Tensor, count: int, seed: int) -> Tensor:
    """Sample `count` tokens after a prompt t, carrying the bounded state from one to the next."""
    generator = torch.Generator().manual_seed(seed)
    decoder, tokens = BoundedDecoder(model), prompt[None]
    logits = decoder(tokens)
    for _ in range(count):
        chances = (logits[:, -1] / 0.7).softmax(
            -1
        )  # a temperature a little below 1: fewer odd words from so small a model
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
        logits = decoder(tokens[:, -1:])
    return tokens[0]


# The whole.


def facts_of(settings: Settings, output: Path) -> dict[str, str]:
    """What is needed to measure these numbers again."""
    options = {"seed": settings.seed, "steps": settings.steps, "output": output}
    facts = {
        "command": provenance.command("demo", options),
        "versions": f"abc-attn {provenance.installed('abc-attn')}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "machine": f"{provenance.cpu()}, {torch.get_num_threads()} threads",
        "date": provenance.now(),
    }
    commit = provenance.commit()
    return facts | ({"commit": commit} if commit else {})


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
    with Progress("decoding", len(settings.contexts) + settings.rounds) as progress:
        measure_decoding(models, validation, results, settings, progress)

    measured = list(results.values())
    rows = table(measured, settings.columns)
    note = note_text(settings.decode_batch, settings.length)
    best = min(measured[1:], key=lambda result: result.perplexity).spec
    prompt = vocabulary.encode(PROMPT)
    sample = vocabulary.decode(generate(models[best], prompt, min(80, settings.length - len(prompt)), settings.seed))
    print(f"\n{table_text(rows)}\n\n{textwrap.fill(note, 110)}")
    print(f"\nA sample from {best}, whose memory stayed the same size throughout:\n\n{textwrap.indent(sample, '    ')}")
    with whole_file(output) as temporary:
        text = page(measured, rows, note, f"{best}:\n\n{sample}", facts_of(settings, output))
        Path(temporary).write_text(text, encoding="utf-8")
    print(f"\nThe curves are in {output} ({time.monotonic() - started:.0f} s in all).")
    return measured
