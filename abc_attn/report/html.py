"""One self-contained HTML page of all results: tables, plots, what the figures mean, and where they come from."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from abc_attn import recipes
from abc_attn.files import write_whole
from abc_attn.provenance import now
from abc_attn.recipes import SCALES
from abc_attn.recipes.table import Table
from abc_attn.report.page import introduction, pictures, sections, title
from abc_attn.report.runs import RUNS, read_runs

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.wide { overflow-x: auto }
code { background: #f3f3f3; padding: 0 0.2em }
img { max-width: 100% }
h2 { margin-top: 3rem; border-top: 2px solid #222; padding-top: 1rem }
"""


def write_report(results: Path, output: Path) -> None:
    """Write the page of every table in a folder of results (results/<table>/runs.jsonl), and of its *.json files."""
    folders = sorted(path.parent for path in results.glob(f"*/{RUNS}"))
    others = sorted(results.glob("*.json"))
    if not folders and not others:
        raise FileNotFoundError(f"no results in {results}: it has no <table>/{RUNS}; `abc-attn reproduce` makes them")
    parts = [part for folder in folders for part in _table(folder)]
    parts += [part for path in others for part in _figures(path)]
    links = "".join(f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, heading, _ in parts)
    body = "".join(f'<section id="{name}"><h2>{escape(heading)}</h2>{text}</section>' for name, heading, text in parts)
    write_whole(
        output,
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>abc-attn: results</title>'
        f"<style>{_STYLE}</style></head><body><h1>abc-attn: results</h1>"
        f"<p>Written by <code>abc-attn report</code>, {now()}.</p><ul>{links}</ul>{body}</body></html>\n",
    )


def _table(folder: Path) -> Iterable[tuple[str, str, str]]:
    """A table's scales: name, heading, HTML."""
    records = read_runs(folder)
    table = _described(folder.name, records)
    for scale in [*SCALES, *sorted({run["scale"] for run in records} - set(SCALES))]:
        runs = [run for run in records if run["scale"] == scale]
        if runs:
            text = _paragraph(introduction(table, scale, runs))
            text += "".join(_picture(folder / name, label) for name, (label, _) in pictures(table, scale, runs).items())
            for section in sections(table, runs):
                text += f"<h3>{escape(section.title)}</h3>" + _paragraph(section.text)
                text += _grid(section.head, section.rows)
            text += _provenance(runs)
            yield f"{table.name}-{scale}", title(table, scale), text


def _described(name: str, records: Sequence[Mapping[str, Any]]) -> Table:
    """What the package says of a table, or as much as its results do."""
    if name in recipes.tables():
        return Table.open(name)
    columns = {column: column for run in records for column in run["scores"]}
    return Table(name=name, folder=None, title=name, task="", reading="", columns=columns)


def _picture(path: Path, label: str) -> str:
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{escape(label)}" src="data:image/png;base64,{data}"></p>'


def _provenance(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ["row", "seed", "recipe", "commit", "date", "steps", "seconds", "CPU", "threads", "versions"]
    rows = []
    for run in runs:
        trained, machine = run.get("training", {}), run.get("machine", {})
        versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
        facts = [run["row"], run["seed"], run.get("recipe"), run.get("commit"), run.get("date"), trained.get("steps")]
        facts += [trained.get("seconds"), machine.get("cpu"), machine.get("threads"), versions]
        rows.append(["-" if fact is None else str(fact) for fact in facts])
    return f"<details><summary>Where these figures come from</summary>{_grid(head, rows)}</details>"


def _figures(path: Path) -> Iterable[tuple[str, str, str]]:
    """A JSON file of figures by what was measured, each with the versions it was measured with."""
    rows = []
    for name, said in json.loads(path.read_text(encoding="utf-8")).items():
        found = dict(said) if isinstance(said, dict) else {"": said}
        origin = ", ".join(f"{key} {value}" for key, value in found.pop("with", {}).items())
        rows += [[name, key, _number(value), origin] for key, value in found.items()]
    yield path.stem, path.stem, _grid(["measured", "figure", "value", "with"], rows)


def _number(value: Any) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{_words(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_words(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _paragraph(text: str) -> str:
    return f"<p>{_words(text)}</p>" if text else ""


def _words(text: str) -> str:
    """Text with `code` in it."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))
