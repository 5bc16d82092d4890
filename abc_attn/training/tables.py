"""Tables of results: every row trained by its recipe, scored by its task, and set beside the paper's figures.

A table is a folder of recipes with a table.yaml, a row is a recipe in it: adding one is adding a file. Runs whose
results are recorded are not trained again, and a row that is another table's own takes the result from there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from abc_attn.progress import Progress
from abc_attn.recipes.table import Table
from abc_attn.report import write_page
from abc_attn.report.plots import check_plot
from abc_attn.report.runs import RUNS, add_run, read_runs
from abc_attn.tasks import get_task
from abc_attn.training.checkpoints import remove_checkpoints
from abc_attn.training.downstream import check_recorded, fine_tune, plan_downstream, split_overrides
from abc_attn.training.recipe import Recipe, load_recipe
from abc_attn.training.run import STARTED, prepare


class Plan(NamedTuple):
    """One run of one row."""

    table: Table
    scale: str
    row: str
    seed: int
    recipe: Recipe
    done: bool  # its result is recorded, with the values of this very recipe
    shared: dict[str, Any] | None  # ... or another table's, which has every score that is needed here
    downstream: dict[str, list[Recipe]]  # by task: what is fine-tuned from its model, for each point of a grid

    @property
    def name(self) -> str:
        return f"{self.row}, seed {self.seed}"


def plan(
    table: str,
    scale: str,
    rows: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    overrides: Mapping[str, Any] | None = None,
    recipes: Path | None = None,
    results: Path = Path("results"),
) -> list[Plan]:
    """The runs that make a table, in order: a row that starts from another's model comes after it.

    What can be wrong with any of them is found here, before the first is trained. recipes: a folder of tables (default:
    those of the package).
    """
    shown = Table.open(table, recipes)
    known = shown.rows(scale)
    if unknown := sorted(set(rows or ()) - known.keys()):
        raise ValueError(f"no row {', '.join(unknown)} in {table} at scale {scale}; there are {', '.join(known)}")
    if shown.plot and find_spec("matplotlib") is None:  # said now, not after all trainings
        raise ValueError("the plot needs matplotlib: pip install 'abc-attn[train]'")
    recorded = {(run["scale"], run["row"], run["seed"]): run for run in read_runs(results / table)}
    own, theirs = split_overrides(overrides or {})
    plans: dict[tuple[str, int], Plan] = {}

    def add(row: str, seed: int) -> None:
        if (row, seed) in plans:
            return
        run = known[row].run() if not known[row].values else Path(table, scale, row)
        folder = Path("runs", run.parent, f"{run.name}-seed{seed}")
        values = known[row].values | {"seed": seed, "output_dir": str(folder)} | own
        recipe = load_recipe(known[row].path, values)
        source = recipe.settings.init_from
        if source in known:  # the run of that row with the same seed
            recipe = load_recipe(known[row].path, values | {"init_from": f"{source}-seed{seed}"})
            if source in (rows or known):
                add(source, seed)
        before = recorded.get((scale, row, seed))
        fine_tuned = plan_downstream(shown, scale, Path(recipe.values["output_dir"]), seed, theirs)
        different = [] if before is None else recipe.differences(before["values"])
        different += [] if before is None else check_recorded(fine_tuned, before.get("downstream", {}))
        if different:
            raise ValueError(
                f"{results / table / RUNS} has {row}, seed {seed}, with other values of {', '.join(different)}; give "
                "another --output, or remove its line to train again"
            )
        shared = None if before is not None or fine_tuned else _recorded_elsewhere(results, run, seed, recipe, shown)
        plans[row, seed] = Plan(shown, scale, row, seed, recipe, before is not None, shared, fine_tuned)
        if before is None and shared is None:
            _check(plans[row, seed], source, plans.get((str(source), seed)))

    asked = [(row, seed) for row in rows or known for seed in seeds]
    with Progress("checking the recipes", len(asked)) if shown.downstream else nullcontext(lambda row: None) as done:
        for row, seed in asked:
            add(row, seed)
            done(row)
    if shown.plot:
        check_plot(shown)
    return list(plans.values())


def _recorded_elsewhere(results: Path, run: Path, seed: int, recipe: Recipe, shown: Table) -> dict[str, Any] | None:
    """The record of `run` (table/scale/row) in its own table's results, if that is another table and serves here."""
    table, scale, row = run.parts
    if table == shown.name:
        return None
    for record in read_runs(results / table):
        same = (record["scale"], record["row"], record["seed"]) == (scale, row, seed)
        if same and not recipe.differences(record["values"]) and record["scores"].keys() >= set(shown.own_scores()):
            return record | {"scores": {name: record["scores"][name] for name in shown.own_scores()}}
    return None


def _check(planned: Plan, source: str | None, before: Plan | None) -> None:
    """What can be known of a run before it starts. source: what its model starts from; before: the run of that."""
    table, recipe = planned.table, planned.recipe
    if recipe.task is not get_task(table.task):
        raise ValueError(f"row {planned.row} is of task {recipe.values.get('task')}, its table of {table.task}")
    task = recipe.make_task()
    task.check_scores(table.own_scores())
    task.check()
    if source is not None and (before is None or before.done):
        try:
            task.start()
        except FileNotFoundError:
            hint = "its result is recorded, but its model is not here" if before else "add it to --rows"
            raise ValueError(f"row {planned.row} starts from the trained {source}: {hint}") from None


def reproduce(table: str, scale: str, plans: Sequence[Plan], results: Path = Path("results")) -> Path:
    """Train, score and record what is not done yet, and write the table's page and plot; returns the page's path.

    A row whose training diverges does not keep the others from theirs: FloatingPointError is raised at the end.
    """
    diverged = []
    for number, planned in enumerate(plans, 1):
        before = ": done before" if planned.done else f": as in {planned.shared['recipe']}" if planned.shared else ""
        print(f"[{number}/{len(plans)}] {planned.name}{before}", file=sys.stderr, flush=True)
        if not planned.done:
            try:
                record = planned.shared or _run(planned)
            except FloatingPointError as error:
                print(f"{planned.name}: {error}", file=sys.stderr, flush=True)
                diverged.append(planned.name)
                continue
            add_run(results / table, record | {"row": planned.row, "scale": planned.scale})
            if planned.shared is None:
                remove_checkpoints(Path(planned.recipe.values["output_dir"]))
    shown = plans[0].table if plans else Table.open(table)
    page = write_page(shown, scale, results)
    if diverged:
        raise FloatingPointError(f"training diverged for {'; '.join(diverged)}; {page} has the other rows")
    return page


def _run(planned: Plan) -> dict[str, Any]:
    """Train and score; returns the record of it."""
    recipe, folder = planned.recipe, Path(planned.recipe.values["output_dir"])
    try:
        train = prepare(recipe, resume=True)
    except (ValueError, TypeError) as error:
        raise OSError(f"{planned.name}: {error}") from error
    trained = train()
    task = recipe.make_task()
    task.open()
    scores = task.scores(task.load_model(folder), planned.table.own_scores())
    more, fine_tuned = fine_tune(planned.table, planned.downstream)
    about = json.loads((folder / STARTED).read_text(encoding="utf-8"))
    about["values"] = recipe.without_places()
    if signatures := task.signatures():
        about["signatures"] = signatures
    if fine_tuned:
        about["downstream"] = fine_tuned
    return about | {"training": trained, "scores": scores | more}
