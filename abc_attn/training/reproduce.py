"""The paper's Tables 1a and 1b: every row trained by its recipe, scored, and set beside the paper's numbers.

A row is a recipe in the table's folder, so adding one is adding a file. Rows that are done are left as they are.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM

from abc_attn.evaluation import perplexity, token_nll
from abc_attn.evaluation.scoring import PAPERS_WINDOW
from abc_attn.files import write_whole
from abc_attn.training.recipe import Recipe, load_recipe
from abc_attn.training.run import STARTED, open_corpus, prepare

SCALES = ("small", "full")
STREAMS = ("stream", "whole stream")


class Table(NamedTuple):
    """What a table of the paper shows."""

    title: str
    contexts: tuple[int, ...]  # tokens that precede what is scored
    paper: dict[str, tuple[float, ...]]  # by recipe: validation at each context, then test at each context


TABLES = {
    "table1a": Table(
        "Table 1a: WikiText-103, 16 layers",
        (0, 480),
        {
            "base": (19.8, 18.4, 20.5, 19.0),
            "linformer-64": (26.5, 27.1, 27.2, 30.7),
            "random-64": (23.2, 22.3, 24.0, 23.1),
            "mlp-32": (21.2, 19.7, 21.9, 20.5),
            "mlp-64": (20.4, 18.9, 21.1, 19.5),
        },
    ),
    "table1b": Table(
        "Table 1b: WikiText-103, 32 layers",
        (256,),
        {
            "base": (17.9, 18.5),
            "elu": (22.0, 22.8),
            "rfa-32": (20.4, 21.3),
            "t2r-32": (20.1, 20.8),
            "mlp-32": (19.2, 19.9),
        },
    ),
}


class Plan(NamedTuple):
    """One run of one row."""

    row: str
    seed: int
    recipe: Recipe
    result: Path
    done: bool  # the result is there, of this very recipe

    @classmethod
    def make(cls, row: str, seed: int, recipe: Recipe, result: Path) -> Plan:
        done = result.is_file()
        if done and (different := recipe.differences(json.loads(result.read_text(encoding="utf-8"))["values"])):
            raise ValueError(
                f"{result} is of a recipe with other values of {', '.join(different)}; move it away to train again"
            )
        return cls(row, seed, recipe, result, done)

    def announce(self, number: int, total: int) -> None:
        before = ": done before" if self.done else ""
        print(f"[{number}/{total}] {self.row}, seed {self.seed}{before}", file=sys.stderr, flush=True)


def plan(
    table: str,
    scale: str,
    *,
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    overrides: dict[str, Any] | None = None,
    recipes: Path = Path("recipes"),
    results: Path = Path("results"),
) -> list[Plan]:
    """The runs that make a table, in order: a row that starts from another comes after it."""
    folder = recipes / table if scale == "full" else recipes / "small" / table
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no recipes in {folder}: run this in a clone of the project, or say where with --recipes"
        )
    found = sorted(path.stem for path in folder.glob("*.yaml") if not path.name.startswith("_"))
    if unknown := sorted(set(rows or ()) - set(found)):
        raise ValueError(f"no row {', '.join(unknown)} in {folder}; there are {', '.join(found)}")
    known = list(TABLES[table].paper)
    chosen = sorted(rows or found, key=lambda row: (known.index(row) if row in known else len(known), row))
    plans: list[Plan] = []
    for row in chosen:
        for seed in seeds:
            run = Path("runs", scale, table, f"{row}-seed{seed}")
            values = {"seed": seed, "output_dir": str(run)} | (overrides or {})
            recipe = load_recipe(folder / f"{row}.yaml", values)
            if source := recipe.settings.init_from:
                recipe = load_recipe(folder / f"{row}.yaml", values | {"init_from": f"{source}-seed{seed}"})
                if (source, seed) not in {(earlier.row, earlier.seed) for earlier in plans} and not (
                    run.parent / f"{source}-seed{seed}" / "config.json"
                ).is_file():
                    raise ValueError(f"row {row} starts from the trained {source}: add it to --rows")
            plans.append(Plan.make(row, seed, recipe, results / table / f"{scale}-{row}-seed{seed}.json"))
    return plans


def reproduce(table: str, scale: str, plans: Sequence[Plan], results: Path = Path("results")) -> Path:
    """Train and score what is not done yet, and write the table as Markdown; returns where it is."""
    carry_out(plans, lambda recipe: {"scale": scale, "perplexity": score(recipe, TABLES[table].contexts)})
    page = results / table / f"{scale}.md"
    write_whole(page, markdown(table, scale, results))
    return page


def carry_out(plans: Sequence[Plan], measure: Callable[[Recipe], dict[str, Any]]) -> None:
    """Train what is not done yet, measure it, and write each result with where it comes from."""
    for number, planned in enumerate(plans, 1):
        planned.announce(number, len(plans))
        if planned.done:
            continue
        try:
            train = prepare(planned.recipe, resume=True)
        except (ValueError, TypeError) as error:
            raise OSError(f"{planned.row}, seed {planned.seed}: {error}") from error
        trained = train()
        about = json.loads(Path(planned.recipe.values["output_dir"], STARTED).read_text(encoding="utf-8"))
        record = about | {"row": planned.row, "training": trained} | measure(planned.recipe)
        planned.result.parent.mkdir(parents=True, exist_ok=True)
        write_whole(planned.result, json.dumps(without_places(record), indent=2) + "\n")


def without_places(record: dict[str, Any]) -> dict[str, Any]:
    """Where files lay on the machine says nothing about a result."""
    places = {"data_dir", "cache_dir", "output_dir", "init_from", "train_file", "validation_file", "test_file"}
    return record | {"values": {key: value for key, value in record["values"].items() if key not in places}}


def score(recipe: Recipe, contexts: Sequence[int]) -> dict[str, dict[str, float | str | None]]:
    """Perplexity on validation and test text: after each context, and streaming (None where the model cannot)."""
    folder = recipe.values["output_dir"]
    model, corpus = AutoModelForCausalLM.from_pretrained(folder), open_corpus(recipe)
    figures: dict[str, dict[str, float | str | None]] = {}
    for split in ("validation", "test"):
        tokens, words = corpus.beginning(split, recipe.settings.eval_tokens)
        figures[split] = {}
        for context in contexts:
            started = time.monotonic()
            nll = token_nll(model, tokens, window=PAPERS_WINDOW, context=context)
            figures[split][str(context)] = figure = perplexity(nll, words)
            seconds = time.monotonic() - started
            print(f"  {split}, context {context}: {figure:.2f} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        found: dict[str, float] = {}
        if not any(control.startswith(("softmax", "linformer")) for control in _controls(recipe.values)):
            nll = token_nll(model, corpus.tokens[split])  # one pass, from end to end
            found = {
                "stream": perplexity(nll[: len(tokens)], words),  # of what is scored with a context, too
                "whole stream": perplexity(nll, corpus.words[split]),
            }
        for name in STREAMS:
            streamed = found.get(name)
            figures[split][name] = "inf" if streamed == math.inf else streamed  # JSON has no infinity
            print(f"  {split}, {name}: {_figure([figures[split][name]])}", file=sys.stderr, flush=True)
    return figures


def markdown(table: str, scale: str, results: Path) -> str:
    """The table of all results there are, beside the paper's numbers."""
    shown = TABLES[table]
    records: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((results / table).glob(f"{scale}-*-seed*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        records.setdefault(record["row"], []).append(record)
    columns = [(split, str(context)) for split in ("validation", "test") for context in shown.contexts]
    streams = [(split, name) for name in STREAMS for split in ("validation", "test")]
    names = [f"{split} {context}" for split, context in columns]
    head = [
        "row",
        "control",
        "n",
        "seeds",
        *names,
        *(f"{split} {name}" for split, name in streams),
        *(f"paper: {name}" for name in names),
    ]
    lines = [head, ["---"] * len(head)]
    for row in [*(row for row in shown.paper if row in records), *sorted(records.keys() - shown.paper.keys())]:
        runs = records[row]
        values = runs[0]["values"]
        figures = [_figure([run["perplexity"][split].get(name) for run in runs]) for split, name in columns + streams]
        paper = [f"{figure:.1f}" for figure in shown.paper.get(row, ())] or ["-"] * len(columns)
        slots = values.get("slots", "-")
        control = ", ".join(f"`{control}`" for control in _controls(values))
        lines.append([row, control, str(slots), str(len(runs)), *figures, *paper])
    scales = {"small": "WikiText-2, small twins of the recipes", "full": "the paper's scale"}
    limit = next((run["values"].get("eval_tokens") for runs in records.values() for run in runs), None)
    beginning = "" if limit is None else f"All but whole streams score the first {limit:,} tokens of a text.\n"
    table_lines = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"# {shown.title}, here: {scales[scale]}\n\n"
        "Perplexity per word, lower is better. 0, 256 and 480 are tokens of context before what is scored; a\n"
        "stream is read once from end to end, and its state carried throughout.\n"
        f"{beginning}Several seeds: mean (lowest to highest). Written by\n"
        f"`abc-attn reproduce {table} --scale {scale}`.\n\n{table_lines}\n"
    )


def _controls(values: Mapping[str, Any]) -> list[str]:
    """The control of a run, or those of its layers."""
    control = values.get("control", "mlp")
    return [control] if isinstance(control, str) else control


def _figure(found: Sequence[float | str | None]) -> str:
    figures = [float(figure) for figure in found if figure is not None]
    if not figures:
        return "n/a"
    mean = f"{statistics.fmean(figures):.2f}"
    return mean if min(figures) == max(figures) else f"{mean} ({min(figures):.2f} to {max(figures):.2f})"
