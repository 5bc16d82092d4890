"""What the demo measured, as a table for the terminal and as one HTML page with two charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape


@dataclass
class Result:
    """What was measured of one model. Decoding is by context; a context beyond the control's end is absent."""

    spec: str
    perplexity: float
    seconds: dict[int, float] = field(default_factory=dict)  # to decode one token of one sequence
    state_bytes: dict[int, int] = field(default_factory=dict)  # of one sequence


def note_text(batch: int, length: int) -> str:
    """How to read the table."""
    return (
        f"softmax is shown in absolute numbers (SDPA over a preallocated key/value cache, {batch} sequences at once), "
        "the others as multiples of it: more is better for speed, less for state. n/a: the linformer has weights for "
        f"{length} positions and ends there."
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
            cells += [f"{state[c]:.2g}x" if c in state else "n/a" for c in columns]
        rows.append([result.spec, f"{result.perplexity:.2f}", *cells])
    return rows


HEADINGS = ("decoding speed at context", "state per sequence at context")


def table_text(rows: list[list[str]]) -> str:
    """The table for a terminal."""
    half = len(rows[0]) // 2 + 1  # where the columns of the second heading begin
    widths = [max(9, *map(len, column)) for column in zip(*rows, strict=True)]
    spans = [sum(some) + 2 * len(some) - 2 for some in (widths[:2], widths[2:half], widths[half:])]
    lines = ["  ".join(f"{heading:^{span}}" for heading, span in zip(("", *HEADINGS), spans, strict=True)).rstrip()]
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
    return "\n".join(lines)


DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 5")  # as well as colours, so that the lines can be told apart without colour


def chart(title: str, results: Sequence[Result], values: Callable[[Result], dict[int, float]], unit: str) -> str:
    """A log-log line chart as inline SVG: context across, one line for each control."""
    left, right, top, bottom = 76, 620, 16, 300
    contexts = sorted(results[0].seconds)
    numbers = [value for result in results for value in values(result).values()]
    steps = [step * 10.0**power for power in range(-9, 13) for step in (1, 2, 5)]
    lowest = max(step for step in steps if step <= min(numbers))
    highest = min(step for step in steps if step >= max(numbers))
    ticks = [step for step in steps if lowest <= step <= highest]

    def across(context: int) -> float:
        return left + (right - left) * math.log(context / contexts[0]) / (math.log(contexts[-1] / contexts[0]) or 1)

    def up(value: float) -> float:
        return bottom - (bottom - top) * math.log(value / lowest) / math.log(highest / lowest)

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
        (
            "State of one sequence (the bounded ones lie on one line)",
            lambda result: {c: size / 1000 for c, size in result.state_bytes.items()},
            "kB",
        ),
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
