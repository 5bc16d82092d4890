"""Writes what is generated in the documentation: `python docs/generate.py`, or `make docs`.

- docs/api.md: the public names of abc_attn and abc_attn.hf, with signatures and docstrings
- docs/gain.svg: the picture of the README
- the blocks between `<!-- generated: name -->` and `<!-- end -->` in README.md, benchmarks/README.md and docs/*.md: the
  controls, backends and families from their registries, every speed and size from benchmarks/results/*.json, the tables
  of results/

`--check` writes nothing, and exits with 1 and a line for each file that is not what would be written.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "gain.svg"
BLOCK = re.compile(r"^<!-- generated: ([\w-]+) -->\n(.*?)^<!-- end -->$", re.M | re.S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
    if parser.parse_args(arguments).check:
        stale = [*stale_texts(), *stale_picture()]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run `make docs`", file=sys.stderr)
        return int(bool(stale))
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
    draw(decoding())
    return 0


def texts() -> dict[Path, str]:
    """Every generated file except the picture, as it should be."""
    return {ROOT / "docs" / "api.md": api()} | {page: filled(page) for page in pages()}


def pages() -> list[Path]:
    """Every page with something generated in it."""
    written = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in written if BLOCK.search(page.read_text(encoding="utf-8"))]


def stale_texts() -> Iterator[Path]:
    for path, text in texts().items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield path


def stale_picture() -> Iterator[Path]:
    """The picture carries the figures it shows: its bytes depend on the version of matplotlib, the figures do not."""
    if not PICTURE.is_file() or described(decoding()) not in PICTURE.read_text(encoding="utf-8"):
        yield PICTURE


def filled(page: Path) -> str:
    """A page with each of its blocks generated again."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        known = BLOCKS | {f"results-{table}": partial(measured, table) for table in tables()}
        if name not in known:
            raise ValueError(f"{page.name}: unknown block {name!r}; there are {', '.join(known)}")
        return f"<!-- generated: {name} -->\n{known[name]()}\n<!-- end -->"

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


# Tables from benchmarks/results


def results(name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a benchmark, and where they come from."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found["rows"], found["provenance"]


def find(rows: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The one row with these values; without a gate, unless one is asked for."""
    wanted = {"gate": ""} | wanted
    (row,) = (row for row in rows if all(row.get(key, "") == value for key, value in wanted.items()))
    return row


def values(rows: Iterable[dict[str, Any]], key: str) -> list[Any]:
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(row[key] for row in rows if row[key] is not None))


def figure(x: float) -> str:
    """Three significant digits: 3.54, 26.3, 106, 2,440."""
    x = float(f"{x:.3g}")
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:,.0f}"


def megabytes(count: float) -> str:
    return f"{figure(count / 1e6)} MB"


def duration(seconds: float) -> str:
    return f"{figure(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{figure(seconds * 1e6)} us"


def quoted(default: Any) -> str:
    """A default as code: strings in double quotes."""
    return json.dumps(default) if isinstance(default, str) else repr(default)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def source(*names: str) -> str:
    """Where the figures of these benchmarks come from, in one line."""
    provenances = [results(name)[1] for name in names]
    said = []
    for provenance in provenances:
        torch = provenance["versions"]["torch"].partition("+")[0]
        day = provenance["date"].partition(" ")[0]
        width = re.search(r"\((\w+),", provenance["backend"])
        cpu = f"{provenance['cpu']}{f' with {width[1]}' if width else ''}"
        said.append(f"{cpu}, {provenance['threads']} threads, torch {torch}, {day}")
    commands = ", ".join(f"`{command(name)}`" for name in names)
    return f"{'; '.join(dict.fromkeys(said))}. Measured by {commands}."


def command(name: str) -> str:
    """What measures the results of this name."""
    return f"abc-attn bench {'generate --peer llama-cpp' if name == 'peer' else name}"


def op_ratios(slots: int, phase: str) -> list[str]:
    rows, _ = results("op")
    at = values(rows, "tokens")
    return [figure(find(rows, method="native", slots=slots, phase=phase, tokens=t)["ratio_sdpa"]) for t in at]


def speed() -> str:
    """README: how many times as fast as SDPA, by length."""
    (op, _), (decode, _) = results("op"), results("decode")
    lengths = sorted({*values(op, "tokens"), *(t for t in values(decode, "tokens") if t >= min(values(op, "tokens")))})
    most = max(values(op, "slots"))
    lines = []
    for phase in values(op, "phase"):
        ratios = dict(zip(values(op, "tokens"), op_ratios(most, phase), strict=True))
        lines.append([f"causal attention, {most} slots, {phase}", *(ratios.get(t, "") for t in lengths)])
    steps = {row["tokens"]: figure(row["ratio_sdpa"]) for row in decode if row["method"] == "mlp"}
    lines.append([f"one decoding step, {values(decode, 'slots')[0]} slots", *(steps.get(t, "") for t in lengths)])
    table = markdown(["SDPA's time / ours", *(f"{t:,} tokens" for t in lengths)], lines)
    return f"{table}\n\n{source('op', 'decode')}"


def model_speed() -> str:
    """README: a whole model under generate()."""
    rows, _ = results("generate")
    lines = []
    for batch in values(rows, "batch"):
        for baseline, key in (("transformers' DynamicCache", "dynamic"), ("a preallocated cache", "preallocated")):
            ours = [find(rows, method="bounded", batch=batch, tokens=t) for t in values(rows, "tokens")]
            lines.append([f"batch {batch}, against {baseline}", *(figure(row[f"ratio_{key}"]) for row in ours)])
    states = [find(rows, method="bounded", batch=1, tokens=t)["state_bytes"] for t in values(rows, "tokens")]
    lines.append(["state, batch 1", *map(megabytes, states)])
    whole = [find(rows, method="dynamic", batch=1, tokens=t)["state_bytes"] for t in values(rows, "tokens")]
    lines.append(["keys and values of the original, batch 1", *map(megabytes, whole)])
    head = ["tokens/s, ours / the original's", *(f"{t:,} tokens" for t in values(rows, "tokens"))]
    return f"{markdown(head, lines)}\n\n{source('generate')}"


def backends() -> str:
    """README: what each backend takes, and its time."""
    from abc_attn.kernels import BACKENDS

    rows, _ = results("op")
    lines = []
    for name, module in BACKENDS.items():
        _, _, takes = (module.__doc__ or "").partition("\n")[0].partition(": ")
        spans = []
        for phase in values(rows, "phase"):
            cases = [(row["slots"], row["tokens"]) for row in rows if row["method"] == name and row["phase"] == phase]
            times = [over_native(rows, name, slots, tokens, phase) for slots, tokens in cases]
            spans += [f"{min(times):.1f} to {max(times):.1f} ({phase})"] if times else []
        time = "1" if name == "native" else ", ".join(spans) or "not measured"
        lines.append([f"`{name}`", takes.removesuffix("."), time])
    return markdown(["backend", "takes", "time against `native`"], lines)


def over_native(rows: list[dict[str, Any]], backend: str, slots: int, tokens: int, phase: str) -> float:
    other, native = (find(rows, method=m, slots=slots, tokens=tokens, phase=phase) for m in (backend, "native"))
    return other["seconds"] / native["seconds"]


def op() -> str:
    """benchmarks/README: causal attention."""
    rows, _ = results("op")
    lines = [
        [f"{phase}, n = {slots}", *op_ratios(slots, phase)]
        for phase in values(rows, "phase")
        for slots in values(rows, "slots")
    ]
    return markdown(["SDPA's time / ours", *(f"t = {t:,}" for t in values(rows, "tokens"))], lines)


def torch_backend() -> str:
    """benchmarks/README: the torch backend beside the native one."""
    rows, _ = results("op")
    lines = [
        [
            f"{phase}, n = {slots}",
            *(f"{over_native(rows, 'torch', slots, t, phase):.1f}" for t in values(rows, "tokens")),
        ]
        for phase in values(rows, "phase")
        for slots in values(rows, "slots")
    ]
    return markdown(["torch's time / native's", *(f"t = {t:,}" for t in values(rows, "tokens"))], lines)


def encode() -> str:
    """benchmarks/README: attention that is not causal."""
    rows, _ = results("encode")
    lines = [
        [phase, *(figure(find(rows, method="mlp", slots=n, phase=phase)["ratio_sdpa"]) for n in values(rows, "slots"))]
        for phase in values(rows, "phase")
    ]
    return markdown(["SDPA's time / ours", *(f"n = {n}" for n in values(rows, "slots"))], lines)


def decode() -> str:
    """benchmarks/README: one step."""
    rows, _ = results("decode")
    ours = [row for row in rows if row["method"] == "mlp"]
    lines = [
        ["SDPA's time / ours, in turn", *(figure(row["ratio_sdpa"]) for row in ours)],
        ["time of ours by itself", *(duration(row["seconds_alone"]) for row in ours)],
    ]
    return markdown(["context", *(f"{row['tokens']:,}" for row in ours)], lines)


def generation() -> str:
    """benchmarks/README: a whole model under generate()."""
    rows, _ = results("generate")
    ours = [row for row in rows if row["method"] == "bounded"]
    names = {"dynamic": "against DynamicCache", "preallocated": "against a preallocated cache"}
    lines = [[title, *(figure(row[f"ratio_{key}"]) for row in ours)] for key, title in names.items()]
    return markdown(["tokens/s", *(f"b = {row['batch']}, {row['tokens']:,}" for row in ours)], lines)


def not_measured(name: str) -> str | None:
    """What to say where a benchmark has no results; None if it has."""
    said = f"Not measured yet: `{command(name)} --output benchmarks/results`, then `make docs`."
    return None if (RESULTS / f"{name}.json").is_file() else said


def in_full(name: str, alt: str) -> str:
    """The plot of a benchmark, where its whole table is, and where it comes from."""
    place = "../benchmarks/results"
    shown = [f"![{alt}]({place}/{name}.png)"] if (RESULTS / f"{name}.png").is_file() else []
    return "\n\n".join([*shown, f"All figures: [{name}.md]({place}/{name}.md). {source(name)}"])


def by_length(rows: list[dict[str, Any]], field: str, text: Callable[[float], str]) -> str:
    """One line for each method, one column for each length."""
    lengths = values(rows, "tokens")
    lines = []
    for title in values(rows, "title"):
        found = {row["tokens"]: row[field] for row in rows if row["title"] == title and row[field] is not None}
        lines.append([title, *(text(found[t]) if t in found else "" for t in lengths)])
    return markdown(["", *(f"{t:,}" for t in lengths)], lines)


def figure_2() -> str:
    """docs/efficiency: decoding speed and memory by length, and where the lines cross."""
    if missing := not_measured("translate"):
        return missing
    rows, _ = results("translate")
    summary = json.loads((RESULTS / "translate.json").read_text(encoding="utf-8"))["summary"]
    parts = [
        "Decoding, tokens per second of the whole batch, by the length of source and target:",
        by_length(rows, "tokens_per_second", lambda x: f"{x:,.0f}"),
        "With reading the source, tokens per second:",
        by_length(rows, "tokens_per_second_whole", lambda x: f"{x:,.0f}"),
        "Peak memory while decoding, beyond the weights, MB:",
        by_length(rows, "peak_bytes", lambda x: f"{x / 1e6:,.0f}"),
        "Where the lines cross:",
        "\n".join(f"- {name}: {value}" for name, value in summary.items()),
    ]
    if notes := {f"{row['title']}, {row['tokens']:,} tokens: {row['note']}" for row in rows if row["note"]}:
        parts.append("\n".join(f"- {note}" for note in sorted(notes)))
    return "\n\n".join([*parts, in_full("translate", "Decoding speed and peak memory by length.")])


def with_titles() -> list[dict[str, Any]]:
    """The rows of `generate --peer`, with what to call them."""
    titles = {
        "int8_compiled": "ours, int8, compiled",
        "fp32_compiled": "ours, fp32, compiled",
        "fp32": "ours, fp32, uncompiled",
        "llama_cpp": "llama.cpp, 4 bits a weight",
    }
    return [row | {"title": titles[row["method"]]} for row in results("peer")[0]]


def llama_speed() -> str:
    """README: SmolLM2 token by token, beside llama.cpp."""
    return f"{by_length(with_titles(), 'tokens_per_second', lambda x: f'{x:.1f}')}\n\n{source('peer')}"


def beside_llama() -> str:
    """docs/speed: the same in full."""
    if missing := not_measured("peer"):
        return missing
    rows = with_titles()
    summary = json.loads((RESULTS / "peer.json").read_text(encoding="utf-8"))["summary"]
    return "\n\n".join(
        [
            "Tokens per second, one sequence, by the tokens read before:",
            by_length(rows, "tokens_per_second", lambda x: f"{x:.1f}"),
            "Times llama.cpp's:",
            by_length([row for row in rows if row["method"] != "llama_cpp"], "ratio_llama_cpp", lambda x: f"{x:.2f}"),
            "State, or keys and values, MB:",
            by_length(rows, "state_bytes", lambda x: f"{x / 1e6:.1f}"),
            "\n".join(f"- {name}: {value:,.4g}" for name, value in summary.items()),
            in_full("peer", "Tokens per second by context."),
        ]
    )


def table_4() -> str:
    """docs/efficiency: whole encoders beside the paper's ratios, and by length."""
    if missing := not_measured("encode-model"):
        return missing
    rows, _ = results("encode-model")
    first = [row for row in rows if row["tokens"] == values(rows, "tokens")[0]]
    base, eager = (find(first, method=method) for method in ("sdpa", "eager"))
    lines = []
    for row in first:
        cells = [base["seconds"] / row["seconds"], eager["seconds"] / row["seconds"], row["paper_speed"]]
        cells += [row["peak_bytes"] / base["peak_bytes"], row["peak_bytes"] / eager["peak_bytes"], row["paper_memory"]]
        lines.append([row["title"], *("" if cell is None else f"{cell:.2f}" for cell in cells)])
    head = ["", "speed, SDPA = 1", "eager = 1", "the paper's", "memory, SDPA = 1", "eager = 1", "the paper's"]
    summary = json.loads((RESULTS / "encode-model.json").read_text(encoding="utf-8"))["summary"]
    longer = [
        row | {"over_sdpa": find(rows, method="sdpa", tokens=row["tokens"])["seconds"] / row["seconds"]}
        for row in rows
        if row["seconds"]
    ]
    return "\n\n".join(
        [
            f"{base['batch']} x {base['tokens']} tokens:",
            markdown(head, lines),
            "Speed by length, SDPA = 1 (one text at a time where it is longer):",
            by_length(longer, "over_sdpa", lambda x: f"{x:.2f}"),
            "\n".join(f"- {name}: {value}" for name, value in summary.items()),
            in_full("encode-model", "Speed and peak memory relative to SDPA, by length."),
        ]
    )


# The picture


def decoding() -> dict[str, list[float]]:
    """What the picture shows: one step of decoding by context."""
    rows, _ = results("decode")
    shown: dict[str, list[float]] = {"context": values(rows, "tokens")}
    for method in ("mlp", "sdpa"):
        cases = [find(rows, method=method, tokens=t) for t in shown["context"]]
        shown[f"{method}_seconds"] = [row["seconds"] for row in cases]
        shown[f"{method}_bytes"] = [row["state_bytes"] for row in cases]
    return shown


def described(shown: dict[str, list[float]]) -> str:
    return "data: " + "; ".join(f"{name} {' '.join(f'{x:.6g}' for x in column)}" for name, column in shown.items())


def gain() -> str:
    """README: the picture, and what it says in words."""
    shown, (rows, _) = decoding(), results("decode")
    sizes = ", ".join(f"{values(rows, key)[0]} {key}" for key in ("slots", "heads"))
    ours, theirs = (
        f"{duration(shown[f'{method}_seconds'][-1])} and {megabytes(shown[f'{method}_bytes'][-1])}"
        for method in ("mlp", "sdpa")
    )
    alt = "Time of a decoding step and size of the state, by context: flat for bounded memory, growing for SDPA."
    return (
        f"![{alt}](docs/gain.svg)\n\n"
        f"One decoding step after {shown['context'][-1]:,} tokens, and the state it needs: **{ours}** with a bounded "
        f"memory, **{theirs}** with exact attention (SDPA). Attention alone, {sizes}, a batch of "
        f"{values(rows, 'batch')[0]}. {source('decode')}"
    )


def draw(shown: dict[str, list[float]]) -> None:
    """docs/gain.svg."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {
        "svg.hashsalt": "abc-attn",
        "svg.fonttype": "none",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    drawing, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    panels = (("seconds", 1e3, "ms", "Time of one decoding step"), ("bytes", 1e-6, "MB", "Size of the state"))
    for axis, (quantity, unit, name, title) in zip(axes, panels, strict=True):
        for method, label, colour in (
            ("sdpa", "exact attention (SDPA)", "#8a8f98"),
            ("mlp", f"bounded memory, {values(results('decode')[0], 'slots')[0]} slots", "#0b6e99"),
        ):
            column = [x * unit for x in shown[f"{method}_{quantity}"]]
            axis.plot(shown["context"], column, "o-", color=colour, linewidth=2.2, markersize=5, label=label)
            last = f"{column[-1]:,.3g}" if column[-1] < 1000 else f"{column[-1]:,.0f}"
            offset = (-4, 7) if method == "mlp" else (-8, -1)
            axis.annotate(
                f"{last} {name}",
                (shown["context"][-1], column[-1]),
                xytext=offset,
                textcoords="offset points",
                ha="right",
                color=colour,
                weight="bold",
            )
        axis.set(
            xscale="log",
            yscale="log",
            title=title,
            xlabel="tokens of context (log scale)",
            ylabel=f"{name} (log scale)",
        )
        axis.set_xticks(shown["context"], [f"{t:,}" for t in shown["context"]], fontsize=9)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, loc="upper left", fontsize=10)
    metadata = {"Date": None, "Creator": None, "Description": described(shown)}
    drawing.savefig(PICTURE, metadata=metadata)
    plt.close(drawing)
    text = PICTURE.read_text(encoding="utf-8")
    PICTURE.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


# The controls


def controls() -> str:
    """README: the registry, as `abc-attn controls` shows it."""
    from abc_attn import CONTROLS

    lines = []
    for name, control in CONTROLS.items():
        if not is_ours(control):
            continue
        options = ", ".join(f"{option}={quoted(default)}" for option, default in control.options().items())
        summary = (control.__doc__ or "").strip().partition("\n")[0]
        causal, read = "yes" if control.online else "no", "linear" if control.linear else "softmax"
        lines.append([f"`{name}`", control.paper, causal, read, summary, f"`{options}`" if options else ""])
    return markdown(["name", "paper", "causal", "read", "what it does", "options and defaults"], lines)


# The families


def supported() -> str:
    """docs/huggingface.md: the registry of families."""
    from abc_attn.hf.families import FAMILIES
    from abc_attn.hf.models import AUTO, CLASSES

    lines = []
    for family in FAMILIES:
        known = [f"{family.name}{kind}" for kind in AUTO if f"Bounded{family.name}{kind}" in CLASSES]
        lines.append([family.title, ", ".join(f"`{name}`" for name in known)])
    return markdown(["family", "classes, each with `Bounded` in front"], lines)


# Tables of results


def tables() -> list[str]:
    from abc_attn import recipes

    return recipes.tables()


def measured(name: str) -> str:
    """docs: the sections of results/<table>/small.md."""
    from abc_attn.recipes.table import Table
    from abc_attn.report.page import sections
    from abc_attn.report.runs import read_runs

    runs = [run for run in read_runs(ROOT / "results" / name) if run["scale"] == "small"]
    parts = []
    for section in sections(Table.open(name), runs):
        parts.append(f"**{section.title}.** {section.text}" if section.text else f"{section.title}:")
        parts.append(markdown(section.head, section.rows))
    return "\n\n".join(parts)


BLOCKS: dict[str, Callable[[], str]] = {
    "gain": gain,
    "speed": speed,
    "model-speed": model_speed,
    "backends": backends,
    "controls": controls,
    "families": supported,
    "op": op,
    "torch-backend": torch_backend,
    "encode": encode,
    "decode": decode,
    "generation": generation,
    "figure-2": figure_2,
    "llama-speed": llama_speed,
    "beside-llama": beside_llama,
    "table-4": table_4,
}


# docs/api.md


def api() -> str:
    """Every public name: signature and docstring."""
    import abc_attn
    import abc_attn.hf

    parts = [
        "# The public names",
        "Generated by `make docs` from signatures and docstrings. Axes: `b` batch, `h` heads, `t` tokens, `n` slots, "
        "`d` key width, `e` value width, `D` width of the model. Other names of the package may change without notice.",
    ]
    for module, title in ((abc_attn, "abc_attn"), (abc_attn.hf, "abc_attn.hf")):
        parts.append(f"## {title}")
        parts.append(paragraph(module))
        parts += [text for name in sorted(module.__all__, key=str.lower) if (text := entry(module, name))]
        if title == "abc_attn.hf":
            parts.append(converted(module))
    return "\n\n".join(parts) + "\n"


def paragraph(thing: Any) -> str:
    """A docstring, without indentation; its shapes and formulas as they are."""
    return inspect.cleandoc(own_doc(thing) or "")


def own_doc(thing: Any) -> str | None:
    """The docstring that this very thing has, not one it inherits."""
    if isinstance(thing, type):
        doc = vars(thing).get("__doc__")
        generated = dataclasses.is_dataclass(thing) and (doc or "").startswith(thing.__name__ + "(")
        return None if generated else doc
    return getattr(thing, "__doc__", None)


def is_ours(thing: Any) -> bool:
    return getattr(thing, "__module__", "").partition(".")[0] == "abc_attn"


def entry(module: ModuleType, name: str) -> str:
    """One public name; nothing for submodules and for the classes that `converted` lists."""
    thing = getattr(module, name)
    if isinstance(thing, ModuleType) or thing in families(module):
        return ""
    if isinstance(thing, dict):
        names = ", ".join(f"`{key}`" for key, value in thing.items() if is_ours(value))
        return f"### {name}\n\nThe registered controls by name: {names}."
    parts = [f"### {name}"]
    if isinstance(thing, type):
        parts += [code(class_signature(name, thing)), paragraph(thing), *methods(thing)]
    else:
        parts += [code(signature(name, thing)), paragraph(thing)]
    return "\n\n".join(part for part in parts if part)


def families(module: ModuleType) -> list[type]:
    """The classes made from transformers' own: Bounded<Family>..."""
    made = (getattr(module, name) for name in module.__all__)
    return [c for c in made if isinstance(c, type) and c.__name__.startswith("Bounded") and is_transformers(c)]


def is_transformers(cls: type) -> bool:
    """Whether a class of transformers' models (not its base classes) is among the parents."""
    return any(parent.__module__.startswith("transformers.models.") for parent in cls.__mro__)


def converted(module: ModuleType) -> str:
    """The classes of the families, in one table: their parameters and methods are transformers' own."""
    lines = [
        [
            f"`{cls.__name__}`",
            f"`{next(p.__name__ for p in cls.__mro__ if p.__module__.startswith('transformers.models.'))}`",
        ]
        for cls in sorted(families(module), key=lambda cls: cls.__name__)
    ]
    intro = (
        "### Converted classes\n\nEach behaves as the class of transformers that it is made from, with its attention "
        "replaced. `convert` returns them, and the Auto classes load them after `import abc_attn.hf`. Their configs "
        "have the fields of `BoundedConfig` besides their own."
    )
    return f"{intro}\n\n{markdown(['class', 'made from'], lines)}"


def code(text: str) -> str:
    return f"```text\n{text}\n```" if text else ""


def class_signature(name: str, cls: type) -> str:
    """How it is made: fields of a tuple or a config, or the arguments of a constructor of ours."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        lines = re.findall(r"^    \w+: .+$", inspect.getsource(cls), re.M)  # the comments give the shapes
        return f"class {name}(NamedTuple):\n" + "\n".join(lines)
    if dataclasses.is_dataclass(cls):
        notes = vars(cls).get("__annotations__", {})
        known = {field.name: field for field in dataclasses.fields(cls)}
        return layout(
            name,
            [
                "*",
                *(argument(field, note, default_of(known[field])) for field, note in notes.items() if field in known),
            ],
        )
    for parent in cls.__mro__:
        if "__init__" in vars(parent):
            return signature(name, vars(parent)["__init__"]) if is_ours(parent) else ""
    return ""


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is dataclasses.MISSING else field.default_factory()


def methods(cls: type) -> Iterator[str]:
    """The public methods that the class or a parent of ours documents, in the order of the source."""
    seen = set()
    for parent in cls.__mro__:
        if not is_ours(parent):
            continue
        for name, thing in vars(parent).items():
            plain = inspect.unwrap(getattr(thing, "__func__", thing))
            plain = thing.fget if isinstance(thing, property) else plain
            if (
                name.startswith("_")
                or name in seen
                or not inspect.isfunction(plain)
                or not plain.__doc__
                or not is_ours(plain)
            ):
                continue
            seen.add(name)
            shown = f"{name}" if isinstance(thing, property) else signature(name, plain)
            yield f"{code(f'{cls.__name__}.{shown}')}\n\n{paragraph(plain)}"


def signature(name: str, function: Any) -> str:
    """`name(arguments) -> result`, without self, on several lines if it is long."""
    found = inspect.signature(function)
    shown, keywords = [], False
    for index, parameter in enumerate(found.parameters.values()):
        if index == 0 and parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            shown.append("*")
        keywords |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(stars + argument(parameter.name, parameter.annotation, parameter.default))
    result = found.return_annotation
    ending = "" if result in (inspect.Signature.empty, None, "None") else f" -> {annotation(result)}"
    return layout(name, shown) + ending


def argument(name: str, note: Any, default: Any) -> str:
    text = name if note is inspect.Parameter.empty else f"{name}: {annotation(note)}"
    if default is inspect.Parameter.empty:
        return text
    shown = default.__name__ if isinstance(default, type) else repr(default)
    return f"{text} = {shown}" if ": " in text else f"{text}={shown}"


def annotation(note: Any) -> str:
    return note if isinstance(note, str) else inspect.formatannotation(note)


def layout(name: str, arguments: Sequence[str]) -> str:
    one_line = f"{name}({', '.join(arguments)})"
    if len(one_line) <= 100:
        return one_line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


if __name__ == "__main__":
    sys.exit(main())
