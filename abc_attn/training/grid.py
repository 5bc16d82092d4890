"""The best of several values, chosen on held-out text: every point of a grid is a run of its own, trained once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from abc_attn.training.recipe import Recipe, load_recipe
from abc_attn.training.run import prepare

BATCH = "per_device_train_batch_size"
MEASURE = "accuracy"  # of held-out text: of those that a task's quick_score reports


class Found(NamedTuple):
    """What came of a grid."""

    best: Recipe
    trained: list[dict[str, Any]]  # of each point, what its finished.json says; or "diverged", and why


def check_grid(where: str, grid: Mapping[str, Any]) -> None:
    """Refuse what is not a list of values for each key."""
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}: {key} must be a list of values, such as [1e-5, 2e-5], got {values!r:.100}")


def points(path: str | Path, overrides: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> list[Recipe]:
    """A recipe for each combination of values, in a folder of its own under the recipe's output_dir.

    max_steps is for the recipe's own batches; with others, a point goes through the text as often.
    """
    plain = load_recipe(path, dict(overrides))
    found = []
    for values in product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        name = ",".join(f"{key}={value}" for key, value in point.items()) or "only"
        if BATCH in point and "max_steps" not in point:
            before, now = plain.training().get(BATCH, 8), point[BATCH]
            if isinstance(now, int) and now > 0:
                point["max_steps"] = max(1, round(plain.training()["max_steps"] * before / now))
        folder = Path(plain.values["output_dir"]) / name
        found.append(load_recipe(path, {**overrides, **point, "output_dir": str(folder)}))
    return found


def search(recipes: Sequence[Recipe]) -> Found:
    """Train every point that is not finished, and choose by the score on held-out text; the first of equals."""
    trained: list[dict[str, Any]] = []
    for number, recipe in enumerate(recipes, 1):
        print(f"({number}/{len(recipes)}) {recipe.values['output_dir']}", file=sys.stderr, flush=True)
        try:
            done = prepare(recipe, resume=True)()
        except FloatingPointError as error:  # with another learning rate it may not
            print(f"  {error}", file=sys.stderr, flush=True)
            trained.append({"validation": {}, "seconds": 0.0, "diverged": str(error)})
            continue
        if MEASURE not in done["validation"]:
            raise ValueError(f"a grid is compared by {MEASURE}, which task {recipe.values.get('task')} does not report")
        trained.append(done)
    whole = [place for place, done in enumerate(trained) if "diverged" not in done]
    if not whole:
        raise FloatingPointError("training diverged at every point of the grid: try smaller learning rates")
    best = max(whole, key=lambda place: trained[place]["validation"][MEASURE])
    return Found(recipes[best], trained)
