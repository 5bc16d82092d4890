"""The commands of translators: translate, and what `evaluate` does for them."""

from __future__ import annotations

import argparse
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abc_attn import paths
from abc_attn.commands.errors import CommandError, explained
from abc_attn.commands.models import compile_steps, hugging_face, load_saved

if TYPE_CHECKING:
    from abc_attn.data import ParallelSource
    from abc_attn.evaluation.translating import Translator

LINES_AT_ONCE = 256  # of standard input, if so many are there already
_SECONDS_BETWEEN_NOTES = 10


def translate(arguments: argparse.Namespace) -> None:
    """Translate standard input to standard output, line by line: as many lines come out as go in, and an empty line
    stays one. With --documents, an empty line ends a document, and a sentence is translated after those before it.
    Then, on stderr, tokens per second and the size of the state."""
    translator, context = _translator(arguments)
    if arguments.compile:
        with hugging_face():
            compile_steps(translator.model.eval(), 2)  # one graph for any number of rows but one
    out = _Output(translator)
    with hugging_face():
        for lines in _batches(_numbered(out), arguments.documents):
            kept = [
                (number, line)
                for number, line in lines
                if line is not None and _readable(translator, number, line, out)
            ]
            groups = _documents(kept) if arguments.documents else [[one] for one in kept if one[1]]
            out.expect(number for number, _ in lines)
            out.give({number: "" for number, line in lines if not line or number in out.refused})
            done = translator.stream([[line for _, line in group] for group in groups], context)
            for document, sentence, text in done:
                out.give({groups[document][sentence][0]: text})
    out.finish()
    if out.refused:
        shown = ", ".join(map(str, sorted(out.refused)[:5])) + (", ..." if len(out.refused) > 5 else "")
        raise CommandError(f"{len(out.refused)} of {out.lines} lines were not translated, and are empty: {shown}")


def evaluate_translation(arguments: argparse.Namespace) -> None:
    """BLEU and chrF of a translator on two files."""
    with explained():
        files = {"source": arguments.source, "reference": arguments.reference}
        for name, file in files.items():
            if file is None:
                raise CommandError(f"--{name} is needed: a text file, as long as the other")
        for file in files.values():
            paths.text_file(file)
    translator, context = _translator(arguments, cut=True)
    with hugging_face():
        from abc_attn.data import ParallelSource
        from abc_attn.evaluation.bleu import MEASURES, measure, measured_documents, signatures

        source = ParallelSource(
            ("", ""), {"test": tuple(files.values())}, blank_lines_end_documents=arguments.documents
        )
        documents = measured_documents(source, "test", context, None)
        _say_what_is_cut(translator, source)
        started = time.perf_counter()
        made = translator.documents([document.source for document in documents], context, label="translating")
        seconds = time.perf_counter() - started
        names = [name for name in MEASURES if context or "document" not in name]
        found: dict[str, Any] = {name: measure(name, documents, made) for name in names}
        found |= {"sentences": sum(map(len, made)), "seconds": seconds}
        if arguments.json:
            print(json.dumps(found | {"signatures": signatures()}, indent=2))
            return
        for name, value in found.items():
            print(f"{name:20} {value:,.2f}" if isinstance(value, float) else f"{name:20} {value:,}")
        for name, signature in signatures().items():
            print(f"{name:20} {signature}")


def _say_what_is_cut(translator: Translator, source: ParallelSource) -> None:
    from abc_attn.evaluation.translating import TooLong

    lines = []
    for pair in source.pairs("test"):
        try:
            translator.check(pair.source)
        except TooLong:
            lines.append(pair.line)
    if lines:
        shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
        said = f"lines of the source longer than the {translator.most:,} tokens that this model reads, which are cut"
        print(f"abc-attn: {said}: {shown}", file=sys.stderr, flush=True)


def _translator(arguments: argparse.Namespace, *, cut: bool = False) -> tuple[Translator, int]:
    """The translator in a folder, and how many sentences of context it takes. cut: sentences beyond its positions."""
    folder: Path = arguments.model
    model, tokenizer = load_saved(arguments)
    with hugging_face():
        from abc_attn.evaluation.translating import Translator

        if not model.can_generate() or not model.config.is_encoder_decoder:
            raise CommandError(
                f"{folder} holds a {type(model).__name__}; a translator (...ForConditionalGeneration) is needed"
            )
        translator = Translator(model, tokenizer, **_search(arguments), cut=cut)
        if arguments.longest is not None and translator.most is not None and arguments.longest > translator.most:
            raise CommandError(
                f"--longest {arguments.longest}: {folder} has positions for {translator.most} tokens, no more"
            )
        if not arguments.documents:
            return translator, 0
        context = getattr(model.config, "context_sentences", 0)
        if not context or tokenizer.sep_token_id is None:
            raise CommandError(
                f"--documents: {folder} was trained on single sentences (context_sentences in config.json)"
            )
        return translator, context


def _search(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"beams": arguments.beams, "length_penalty": arguments.length_penalty, "longest": arguments.longest}


class _Output:
    """Writes translations in the order of their lines, as soon as those before are there; says what was done."""

    def __init__(self, translator: Translator) -> None:
        from tqdm import tqdm

        self.translator = translator
        self.waiting: list[int] = []  # numbers of lines that are not written yet
        self.ready: dict[int, str] = {}
        self.refused: list[int] = []
        self.lines = 0
        self.started = self.noted = time.monotonic()
        quiet = not sys.stderr.isatty() or sys.stdout.isatty()  # translations on a terminal show how far they are
        self.bar = tqdm(desc="translating", unit=" lines", leave=False, disable=quiet)

    def expect(self, numbers: Iterator[int]) -> None:
        self.waiting += numbers

    def refuse(self, number: int, why: str) -> None:
        self.bar.write(f"abc-attn: line {number} {why}; an empty line stands for it", file=sys.stderr)
        self.refused.append(number)

    def give(self, texts: dict[int, str]) -> None:
        self.ready |= texts
        done = 0
        while done < len(self.waiting) and self.waiting[done] in self.ready:
            done += 1
        text = "".join(f"{self.ready.pop(number)}\n" for number in self.waiting[:done])
        del self.waiting[:done]
        self.lines += done
        self.bar.update(done)
        if text:
            with _uninterrupted():
                sys.stdout.write(text)
                sys.stdout.flush()
        if not sys.stderr.isatty() and time.monotonic() - self.noted > _SECONDS_BETWEEN_NOTES:
            self.noted = time.monotonic()
            self._say()

    def finish(self) -> None:
        self.bar.close()
        self._say(f", {_described(self.translator)}")

    def _say(self, more: str = "") -> None:
        tokens, seconds = self.translator.work.tokens, time.monotonic() - self.started
        said = f"{self.lines:,} lines, {tokens:,} tokens written, {tokens / max(1e-9, seconds):,.1f} tokens/s"
        print(f"{said}{more}", file=sys.stderr, flush=True)


def _described(translator: Translator) -> str:
    from abc_attn.hf.models import has_bounded_state

    beams = f"{translator.beams} beam{'s' * (translator.beams > 1)}"
    size = f"state {translator.work.state_bytes:,} bytes a sentence ({beams})"
    grows = "whatever the length" if has_bounded_state(translator.model) else "growing where attention is exact"
    return f"{size}, {grows}"


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until a line is whole."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _readable(translator: Translator, number: int, line: str, out: _Output) -> bool:
    from abc_attn.evaluation.translating import TooLong

    try:
        translator.check(line)
    except TooLong as error:
        out.refuse(number, str(error))
        return False
    return True


def _numbered(out: _Output) -> Iterator[list[tuple[int, str | None]]]:
    """The lines of standard input, as many at once as are there already: one who types gets an answer to each. None
    stands for a line that cannot be read: it is no empty one, which would end a document."""
    waiting: queue.Queue[bytes | str | Exception | None] = queue.Queue(4 * LINES_AT_ONCE)

    def read() -> None:
        try:
            for line in _standard_input():
                waiting.put(line)
            waiting.put(None)
        except Exception as error:  # raised below, in the thread that waits
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    number, line = 0, waiting.get()
    while isinstance(line, (bytes, str)):
        lines: list[tuple[int, str | None]] = []
        while isinstance(line, (bytes, str)):
            number += 1
            lines.append((number, _text(line, number, out)))
            if len(lines) == LINES_AT_ONCE or waiting.empty():
                break
            line = waiting.get()
        yield lines
        if isinstance(line, (bytes, str)):
            line = waiting.get()
    if line is not None:
        raise line


def _standard_input() -> Any:
    """Not sys.stdin itself: Python could not close that while a thread waits for its next line."""
    if sys.stdin is None:
        raise CommandError("standard input is closed: give a text with < FILE")
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except (OSError, AttributeError):  # it is no file
        return sys.stdin


def _text(line: bytes | str, number: int, out: _Output) -> str | None:
    try:
        text = line if isinstance(line, str) else line.decode("utf-8")
    except UnicodeDecodeError as error:
        out.refuse(number, f"is not UTF-8 text (byte {error.object[error.start]:#04x} at column {error.start})")
        return None
    return " ".join(text.removeprefix("\ufeff" * (number == 1)).split())


def _batches(read: Iterator[list[tuple[int, str | None]]], documents: bool) -> Iterator[list[tuple[int, str | None]]]:
    """What is translated together: lines as they come, or whole documents."""
    left: list[tuple[int, str | None]] = []
    for lines in read:
        if not documents:
            yield lines
            continue
        left += lines
        ends = [place for place, (_, line) in enumerate(left) if line == ""]
        if ends:
            yield left[: ends[-1] + 1]
            left = left[ends[-1] + 1 :]
    if left:
        yield left


def _documents(lines: Sequence[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """Lines between empty ones."""
    found: list[list[tuple[int, str]]] = [[]]
    for number, line in lines:
        if line:
            found[-1].append((number, line))
        elif found[-1]:
            found.append([])
    return [document for document in found if document]
