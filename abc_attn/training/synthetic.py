"""Accuracy against slots on the synthetic tasks: each control with more and more memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from abc_attn.training.recipe import load_recipe
from abc_attn.training.reproduce import Plan, carry_out

CONTROLS = ("softmax", "mlp", "window", "random", "linformer")
SLOTS = (4, 8, 16, 32)


def plan(
    task: str,
    scale: str,
    *,
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    overrides: dict[str, Any] | None = None,
    recipes: Path = Path("recipes"),
    results: Path = Path("results"),
) -> list[Plan]:
    """A run for every control and number of slots; a row is "mlp-8"."""
    if scale != "small":
        raise ValueError(f"{task} has one scale: leave out --scale {scale}")
    if find_spec("matplotlib") is None:  # said now, not after all trainings
        raise ValueError("the plot needs matplotlib: pip install 'abc-attn[bench]'")
    points: dict[str, tuple[str, int | None]] = {"softmax": ("softmax", None)}
    points |= {f"{control}-{slots}": (control, slots) for control in CONTROLS[1:] for slots in SLOTS}
    if unknown := sorted(set(rows or ()) - points.keys()):
        raise ValueError(f"no row {', '.join(unknown)}; there are {', '.join(points)}")
    plans = []
    for row in rows or points:
        control, slots = points[row]
        for seed in seeds:
            values = {"control": control, "slots": slots, "seed": seed}
            values |= {"output_dir": str(Path("runs", task, f"{row}-seed{seed}"))} | (overrides or {})
            recipe = load_recipe(recipes / "synthetic" / f"{task}.yaml", values)
            plans.append(Plan.make(row, seed, recipe, results / task / f"{row}-seed{seed}.json"))
    return plans


def reproduce(task: str, scale: str, plans: Sequence[Plan], results: Path = Path("results")) -> Path:
    """Train what is not done yet, and draw the accuracies of all that is; returns where the plot is."""
    carry_out(plans, lambda recipe: {})
    return draw(task, results)


def draw(task: str, results: Path) -> Path:
    """One curve for each control: mean accuracy over seeds, against slots; softmax is a level."""
    from matplotlib.figure import Figure

    found: dict[tuple[str, int | None], list[float]] = {}
    for path in sorted((results / task).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        values = record["values"]
        accuracy = record["training"]["validation"]["accuracy"]
        found.setdefault((values["control"], values["slots"]), []).append(accuracy)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for control in CONTROLS:
        points = sorted((n, sum(values) / len(values)) for (name, n), values in found.items() if name == control and n)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=control)
    if level := found.get(("softmax", None)):
        axes.axhline(sum(level) / len(level), color="black", linestyle=":", label="softmax")
    axes.set(xscale="log", xlabel="slots", ylabel="share of right answers", title=task, ylim=(0, 1.02))
    axes.set_xticks(SLOTS, [str(slots) for slots in SLOTS])
    axes.minorticks_off()
    axes.legend()
    path = results / task / "accuracy.png"
    figure.savefig(path, dpi=120)
    return path
