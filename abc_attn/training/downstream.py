"""What a pretrained model is good for: fine-tuned on other tasks, from a grid that held-out training text decides."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abc_attn.recipes.reading import read_mapping
from abc_attn.recipes.table import AVERAGE, DOWNSTREAM_GRID, Table
from abc_attn.tasks.base import Figures
from abc_attn.training.checkpoints import remove_checkpoints
from abc_attn.training.grid import check_grid, points, search
from abc_attn.training.recipe import Recipe

OVERRIDES = "downstream."  # begins the names of `--set` values that are not for the pretraining


def split_overrides(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values for the rows of a table, and those for what is fine-tuned from them."""
    own = {key: value for key, value in overrides.items() if not key.startswith(OVERRIDES)}
    theirs = {key.removeprefix(OVERRIDES): value for key, value in overrides.items() if key.startswith(OVERRIDES)}
    return own, theirs


def plan_downstream(
    table: Table, scale: str, pretrained: Path, seed: int, overrides: Mapping[str, Any]
) -> dict[str, list[Recipe]]:
    """The fine-tunings of the model in folder `pretrained`, by task: a recipe for each point of the grid."""
    if not table.downstream:
        if overrides:
            raise ValueError(f"{table.name} fine-tunes nothing: {OVERRIDES}{next(iter(overrides))} has no use")
        return {}
    assert table.folder is not None
    folder, files = table.folder / scale, dict(table.downstream)
    grid_file = files.pop(DOWNSTREAM_GRID, None)
    grid = {} if grid_file is None else read_mapping(folder / grid_file)
    check_grid(str(folder / str(grid_file)), grid)
    found = {}
    for name, file in files.items():
        place = {"init_from": str(pretrained), "seed": seed, "output_dir": f"{pretrained}-{name}"}
        found[name] = points(folder / file, place | dict(overrides), grid)
        for recipe in found[name]:
            task = recipe.make_task()
            task.check_scores(_scores(table, name).values())  # type: ignore[arg-type]
            task.check()
    return found


def _scores(table: Table, name: str) -> dict[str, str]:
    """The scores of the table that a task gives, and what the task itself calls them: mnli/accuracy, test/accuracy."""
    shown = [score for score in table.scores() if score.startswith(f"{name}/")]
    return {score: f"test/{score.partition('/')[2]}" for score in shown}


def fine_tune(table: Table, planned: Mapping[str, list[Recipe]]) -> tuple[Figures, dict[str, Any]]:
    """The scores of a pretrained model, and how they were found. The scored text is read by the best point alone."""
    figures: Figures = {}
    about: dict[str, Any] = {}
    for name, recipes in planned.items():
        found = search(recipes)
        names = _scores(table, name)
        task = found.best.make_task()
        task.open()
        measured = task.scores(task.load_model(Path(found.best.values["output_dir"])), list(names.values()))
        figures |= {score: measured[theirs] for score, theirs in names.items()}
        shown = ", ".join(f"{score} {figures[score]:.2f}" for score in names)
        print(f"  {shown} ({Path(found.best.values['output_dir']).name})", file=sys.stderr, flush=True)
        about[name] = {
            "best": recipes.index(found.best),
            "points": [
                {"values": recipe.without_places(), "validation": done["validation"], "seconds": done["seconds"]}
                for recipe, done in zip(recipes, found.trained, strict=True)
            ],
        }
        _tidy(recipes, found.best)
    for score in table.scores():
        average, _, measure = score.partition("/")
        if planned and average == AVERAGE:
            each = [figures[f"{name}/{measure}"] for name in planned]
            figures[score] = statistics.fmean(figure for figure in each if figure is not None)
    return figures, about


def _tidy(recipes: list[Recipe], best: Recipe) -> None:
    """Remove what a finished grid does not need: checkpoints, and the weights of those that were not chosen."""
    for recipe in recipes:
        folder = Path(recipe.values["output_dir"])
        remove_checkpoints(folder)
        if recipe is not best:
            for weights in folder.glob("*.safetensors"):
                weights.unlink()


def check_recorded(planned: Mapping[str, list[Recipe]], recorded: Mapping[str, Any]) -> list[str]:
    """The tasks whose recorded fine-tunings have other values than those that are planned."""
    different = []
    for name, recipes in planned.items():
        before = [point["values"] for point in recorded.get(name, {}).get("points", [])]
        same = len(before) == len(recipes) and not any(
            recipe.differences(values) for recipe, values in zip(recipes, before, strict=True)
        )
        if not same:
            different.append(name)
    return different
