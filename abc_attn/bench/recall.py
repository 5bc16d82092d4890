"""The benchmark `recall`: what a converted model still knows of a long text, and the bytes that it takes.

At equal rows of memory: exact attention, sinks and a window, the controls that keep what matters beside them, and
kvpress, whose rules keep as many rows once the whole prompt is there.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from abc_attn.bench import needles
from abc_attn.bench.measure import peak_of_process
from abc_attn.bench.pressed import PRESSES, missing, read_pressed
from abc_attn.bench.report import facts_of, load_average, megabytes, save_files
from abc_attn.hf import convert, state_bytes
from abc_attn.hf.models import BOUNDED
from abc_attn.hf.sources import load_source, load_source_tokenizer
from abc_attn.models.saved import load_model
from abc_attn.paths import Source
from abc_attn.progress import Progress

SINKS, BLOCK = 4, 64
WRITTEN = 16  # tokens written after the prompt, where bytes are measured
REPEATED = 1024  # tokens of the passage that is read again and again
KEEPING = ("keydiff", "knorm", "leverage", "tova")
FULL, LEARNED, KVPRESS = "full", "learned", "kvpress"
PARTS = ("needles", "perplexity", "bytes")

Result = dict[str, Any]


def controls(rows: int) -> dict[str, str | None]:
    """By name, what is compared: all of them have `rows` rows of memory, except exact attention."""
    kept = rows // 2
    window = rows - SINKS - kept - BLOCK
    if window < 1:
        raise ValueError(f"--rows must be {2 * (SINKS + BLOCK + 1)} or more, got {rows}")
    beside = f"global:{SINKS}+window:{window}"
    found: dict[str, str | None] = {FULL: None, "window": f"global:{SINKS}+window:{rows - SINKS}"}
    return found | {name: f"{beside}+{name}:{kept}" for name in KEEPING}


def run_recall(source: Source, book: str, options: dict[str, Any], output: Path | None) -> None:
    """Run the benchmark, print its tables, write files into `output`."""
    parts, compared = options["parts"], controls(options["rows"])
    _check_sizes(options)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)  # fails now, not after minutes of measuring
    started = time.monotonic()
    facts = facts_of(f"recall {source}", options, output)
    tokenizer = load_source_tokenizer(source)
    if tokenizer is None:
        load_source(source)  # its error is the clearer one, if more is wrong than the tokenizer
        raise ValueError(f"{source} has no tokenizer, and texts are needed here")
    tokens = tokenizer(book, add_special_tokens=False).input_ids
    longest = max(*options["lengths"], options["book_tokens"])
    if len(tokens) < longest + 1:
        raise ValueError(f"the book has {len(tokens)} tokens; {longest + 1} are needed for these lengths")
    texts = [*_needles(tokenizer, tokens, options)] if "needles" in parts else []
    begin = needles.beginning(tokenizer)
    original = load_source(source, dtype="float32")
    chosen = {name: compared[name] for name in compared if name in options["methods"]}
    if options["learned"] is not None:
        compared[LEARNED] = chosen[LEARNED] = _check_learned(options["learned"], original, options["rows"])
    rules = [name for name in PRESSES if name in chosen] or [*PRESSES]
    reason = missing() if KVPRESS in options["methods"] else None
    presses = [f"{KVPRESS} {rule}" for rule in rules if KVPRESS in options["methods"] and not reason]
    results: list[Result] = []
    notes = [f"skipped: {reason}"] if reason else []

    def written() -> tuple[str, list[Path]]:
        """The page of what is measured so far, and the files."""
        facts.update(load_average_end=load_average(), seconds=round(time.monotonic() - started, 1))
        report = {"benchmark": "recall", "provenance": facts, "controls": compared, "results": results}
        report |= {"note": "; ".join(notes)} if notes else {}
        page = tables(report)
        return page, [] if output is None else save(report, page, output)

    if "needles" in parts or "perplexity" in parts:
        passages = _passages(begin, tokens, options["book_tokens"]) if "perplexity" in parts else {}
        found, failures = _quality(original, texts, passages, chosen, presses, options)
        results += found
        notes += failures
    if "bytes" in parts:
        if results:
            written()  # an interrupt of the byte meter does not lose them
        results += _bytes(original, [*begin, *tokens], chosen, presses[:1], options)
    page, files = written()
    print(page)
    if files:
        print(f"written: {', '.join(map(str, files))}")


def _check_sizes(options: dict[str, Any]) -> None:
    """Refuse sizes of which nothing could be measured, before anything is loaded."""
    rows, read, depths = options["rows"], options["book_tokens"], len(options["depths"])
    if "perplexity" in options["parts"] and rows >= read - 1:
        raise ValueError(
            f"--rows {rows} hold all of --book-tokens {read}, and perplexity beyond the memory is measured: give "
            f"--book-tokens {rows + 2} or more, or fewer rows"
        )
    if "needles" in options["parts"] and depths > len(needles.NAMES):
        raise ValueError(f"--depths may be {len(needles.NAMES)}, one for each name that a fact may have; got {depths}")


def _passages(begin: list[int], book: list[int], length: int) -> dict[str, list[int]]:
    """What perplexity is measured on."""
    return {"book": [*begin, *book][:length], "repeated": [*begin, *book[:REPEATED] * 4][:length]}


def _quality(
    original: PreTrainedModel,
    texts: list[tuple[int, needles.Needles]],
    passages: dict[str, list[int]],
    chosen: dict[str, str | None],
    presses: list[str],
    options: dict[str, Any],
) -> tuple[list[Result], list[str]]:
    """Recall and perplexity; and what to say of presses that failed."""
    results: list[Result] = []
    failures: list[str] = []
    steps = len(chosen) * (len(texts) + len(passages)) + len(presses) * len(texts)
    with Progress("bench recall", steps) as progress:

        def ask(name: str, model: PreTrainedModel, press: str | None = None) -> None:
            for length, text in texts:
                cache = None if press is None else read_pressed(model, press, options["rows"], text.text)
                for depth, right in needles.recalls(model, text, cache).items():
                    results.append(
                        {"method": name, "kind": text.kind, "length": length, "depth": depth, "right": right}
                    )
                progress(f"{name}, {text.kind} in {length:,} tokens")

        for name, control in chosen.items():
            learned = name == LEARNED
            model = _learned(options[LEARNED]) if learned else _converted(original, control, options["positions"])
            ask(name, model)
            for kind, tokens in passages.items():
                losses = needles.loss_by_token(model, tokens)
                later = losses[REPEATED if kind == "repeated" else options["rows"] :]
                found = {"perplexity": needles.perplexity(losses), "perplexity_later": needles.perplexity(later)}
                results.append({"method": name, "kind": kind, "length": len(tokens)} | found)
                progress(f"{name}, perplexity of {kind} text")
            del model
            gc.collect()
        for name in presses:  # no perplexity: a press acts once, after a prompt
            try:
                ask(name, original, name.removeprefix(f"{KVPRESS} "))
            except Exception as error:  # another package's, of any kind: what was measured before must not be lost
                failures.append(f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())}")
    return results, failures


def _needles(tokenizer: Any, book: list[int], options: dict[str, Any]) -> Iterable[tuple[int, needles.Needles]]:
    """Texts with their lengths: the pairs are in one text, pass keys each in a text of its own."""
    depths, seed = options["depths"], options["seed"]
    for number in range(options["texts"]):
        for length in options["lengths"]:
            given = (book, length)
            yield length, needles.hide("pairs", *given, depths, tokenizer, seed + 1000 * number)
            for i, depth in enumerate(depths):
                yield length, needles.hide("pass key", *given, [depth], tokenizer, seed + 1000 * number + i + 1)


def _converted(original: PreTrainedModel, control: str | None, positions: str) -> PreTrainedModel:
    if control is None:
        return original
    options: dict[str, Any] = {"block": BLOCK} if any(name in control for name in KEEPING) else {}
    return convert(copy.deepcopy(original), control, positions=positions, **options).eval()


def _learned(folder: Path) -> PreTrainedModel:
    return load_model(folder).float().eval()


def _check_learned(folder: Path, original: PreTrainedModel, rows: int) -> str:
    """The control of the model in `folder`, if the comparison is fair: the same source, and as many rows."""
    model: Any = _learned(folder)
    if type(model) is not BOUNDED.get(type(original)):
        raise ValueError(
            f"{folder} holds a {type(model).__name__}, not a {type(original).__name__} with bounded attention: "
            "--learned is a model that abc-attn distill or convert made from the same source"
        )
    held = max(attention.control.rows for attention in model.attentions())
    if held != rows:
        raise ValueError(f"{folder} has {held} rows of memory in a layer, the others {rows}: give --rows {held}")
    return model.config.control


# The byte meter: a fresh process for each figure, in which the model has run once.


def _bytes(
    original: PreTrainedModel,
    book: list[int],
    chosen: dict[str, str | None],
    presses: list[str],
    options: dict[str, Any],
) -> list[Result]:
    methods = [*chosen, *presses]
    results: list[Result] = []
    with (
        TemporaryDirectory() as folder,
        Progress("bytes", len(methods) * len(options["lengths"])) as progress,
    ):
        original.save_pretrained(folder)
        for name in methods:
            for length in options["lengths"]:
                result: Result = {"method": name, "kind": "bytes", "length": length}
                tokens = book[:length]
                made = (Path(folder), chosen.get(name)) if name != LEARNED else (options[LEARNED], None)
                given = (made[0], name, made[1], options["positions"], options["rows"], tokens)
                state = Path(folder) / "state-bytes"
                result["peak_bytes"] = peak_of_process(_ready, *given, state)
                if result["peak_bytes"] is None:
                    result["note"] = "the process that measures memory failed or was killed"
                else:
                    result["state_bytes"], result["final_bytes"] = map(int, state.read_text().split())
                results.append(result)
                progress(f"{name}, {length:,} tokens")
    return results


def _ready(
    folder: Path, name: str, control: str | None, positions: str, rows: int, tokens: list[int], said: Path
) -> Callable[[], object]:
    """The call reads the text and writes some tokens; the most bytes of state, and those at the end, go to a file."""
    model = _converted(load_model(folder).float(), control, positions)

    def run(tokens: list[int]) -> tuple[int, int]:
        if name.startswith(KVPRESS):
            return _pressed(model, name.removeprefix(f"{KVPRESS} "), rows, tokens)
        return _chunked(model, tokens)

    run(tokens[: needles.READ + 1])  # threads are started and libraries loaded before the measurement
    return lambda: said.write_text("{} {}".format(*run(tokens)))


@torch.inference_mode()
def _chunked(model: PreTrainedModel, tokens: list[int]) -> tuple[int, int]:
    cache, most = needles.new_cache(model), 0
    last = [[3]] * WRITTEN
    for chunk in [*torch.tensor([tokens]).split(needles.READ, dim=1), *map(torch.tensor, ([token] for token in last))]:
        model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        most = max(most, bytes_of(cache))
    return most, bytes_of(cache)


@torch.inference_mode()
def _pressed(model: PreTrainedModel, rule: str, rows: int, tokens: list[int]) -> tuple[int, int]:
    cache = read_pressed(model, rule, rows, tokens)
    most = bytes_of(cache)
    for place in range(len(tokens), len(tokens) + WRITTEN):
        where = torch.tensor([[place]])
        model(torch.tensor([[3]]), past_key_values=cache, position_ids=where, use_cache=True)
    return max(most, bytes_of(cache)), bytes_of(cache)


def bytes_of(cache: Any) -> int:
    """What the keys and values in a cache take."""
    if isinstance(cache, needles.BoundedCache):
        return state_bytes(cache)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)


# What is shown.


def tables(report: dict[str, Any]) -> str:
    """Markdown: recall by length and depth, perplexity, bytes, and where they come from."""
    results, facts = report["results"], report["provenance"]
    asked = [each for each in results if "right" in each]
    parts = []
    for kind in dict.fromkeys(each["kind"] for each in asked):
        rows = [each for each in asked if each["kind"] == kind]
        columns = sorted({each["length"] for each in rows})
        lines = []
        for method in dict.fromkeys(each["method"] for each in rows):
            for depth in [*sorted({each["depth"] for each in rows}), None]:
                shown = [method, "all" if depth is None else f"{depth} %"]
                for length in columns:
                    found = [
                        each["right"]
                        for each in rows
                        if each["method"] == method and each["length"] == length and depth in (None, each["depth"])
                    ]
                    shown.append(f"{sum(found)} / {len(found)}")
                lines.append(shown)
        parts.append(f"{kind}: right answers, by depth of the fact and tokens of the text\n\n")
        parts[-1] += _table(["method", "depth", *(f"{length:,}" for length in columns)], lines)
    read = [each for each in results if "perplexity" in each]
    if read:
        lines = [
            [each["method"], each["kind"], f"{each['length']:,}"]
            + [f"{each[key]:.3f}" for key in ("perplexity", "perplexity_later")]
            for each in read
        ]
        head = ["method", "text", "tokens", "perplexity", "beyond the memory, or of the repetitions"]
        parts.append("perplexity\n\n" + _table(head, lines))
    held = [each for each in results if each["kind"] == "bytes"]
    if held:
        lines = [
            [each["method"], f"{each['length']:,}"]
            + [megabytes(each[key]) if each.get(key) else "-" for key in ("state_bytes", "final_bytes", "peak_bytes")]
            + [each.get("note", "")]
            for each in held
        ]
        head = ["method", "tokens", "most state between calls", "state at the end", "peak of the process", "note"]
        parts.append("bytes beyond the weights, over prompt and decoding\n\n" + _table(head, lines))
    if "note" in report:
        parts.append(report["note"])
    names = ", ".join(f"{name}: `{control}`" for name, control in report["controls"].items() if control)
    parts.append(
        f"{names}.\n`{facts['command']}`, {facts['date']}, {facts['cpu']}, {facts['threads']} threads, commit "
        f"{facts['commit'] or 'unknown'}, {facts['seconds']:.0f} s."
    )
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def save(report: dict[str, Any], page: str, folder: Path) -> list[Path]:
    """Write the report's JSON, Markdown and plot; returns what was written."""

    results = report["results"]
    panels = [
        ([each for each in results if "right" in each], "right", "share of the facts recalled"),
        ([each for each in results if each.get("peak_bytes")], "peak_bytes", "peak bytes beyond the weights"),
    ]
    panels = [panel for panel in panels if panel[0]]

    def draw(figure: Any) -> None:
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False)[0] if panels else (), panels, strict=True
        ):
            _lines(axes, *panel)

    return save_files(folder, "recall", report, page, draw)


def _lines(axes: Any, results: Sequence[Result], field: str, title: str) -> None:
    """The mean of a field by length, one line for each method."""
    for number, method in enumerate(dict.fromkeys(each["method"] for each in results)):
        own = [each for each in results if each["method"] == method]
        lengths = sorted({each["length"] for each in own})
        means = [statistics.fmean(each[field] for each in own if each["length"] == length) for length in lengths]
        axes.plot(lengths, means, marker="osD^vPX*"[number % 8], label=method)
    ticks = sorted({each["length"] for each in results})
    axes.set(title=title, xlabel="tokens of the text", xscale="log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
