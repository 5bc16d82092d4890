"""The commands that train by recipe and show what came of it: train, average, reproduce, recipes, report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from abc_attn import paths, recipes
from abc_attn.allocator import keep_freed_memory
from abc_attn.commands.errors import CommandError, explained, resumable
from abc_attn.commands.user_controls import check_controls, import_controls


def train(arguments: argparse.Namespace) -> None:
    """Train a model as a recipe says, into its output_dir: the model, metrics.jsonl and checkpoints. The recipe is a
    file, or the name of an installed one (`abc-attn recipes` lists them). Several processes are started by torchrun:
    torchrun --nproc_per_node 2 -m abc_attn.cli train ..."""
    with explained("train"):
        from abc_attn.recipes.reading import parse_value, read_recipe  # needs yaml alone

        recipe = recipes.find(arguments.recipe)
        overrides = {key: parse_value(value) for key, value in arguments.overrides}
        values = read_recipe(recipe) | overrides
    import_controls(arguments)
    check_controls(values.get("control"))
    keep_freed_memory()
    if arguments.grid:
        _train_grid(recipe, overrides, {key: parse_value(value) for key, value in arguments.grid})
        return
    with explained("train"):
        from abc_attn.training import load_recipe, prepare

        run = prepare(load_recipe(recipe, overrides), resume=arguments.resume)
    with resumable(), explained("train"):
        run()


def _train_grid(recipe: Path, overrides: dict[str, Any], grid: dict[str, Any]) -> None:
    """Every combination of values, each in a folder under output_dir; prints the folder of the best."""
    with explained("train"):
        from abc_attn.training.grid import MEASURE, check_grid, points, search

        check_grid("--grid (changes to the recipe go before it)", grid)
        runs = points(recipe, overrides, grid)
        for run in runs:
            run.make_task().check()
    with resumable(), explained("train"):
        found = search(runs)
    for run, done in zip(runs, found.trained, strict=True):
        score = "diverged" if "diverged" in done else f"{done['validation'][MEASURE]:8.4f}"
        print(f"{score}  {run.values['output_dir']}")
    print(f"best {MEASURE} on held-out text: {found.best.values['output_dir']}")


def average(arguments: argparse.Namespace) -> None:
    """Average the weights of saved models or checkpoints, and save the result as a model. A run stands for its
    checkpoints (--last of them)."""
    sources, target = arguments.sources, arguments.output
    with explained("hf"):
        paths.new_folder(target)
        if len(sources) == 1 and arguments.last is None:
            raise CommandError(f"one model has no mean: say how many checkpoints of {sources[0]} (--last 5)")
        from abc_attn.models.averaging import save_mean

        folders = [part for source in sources for part in _checkpoints(source, arguments.last)]
        save_mean(folders, target)
    print(f"{target}: the mean of {', '.join(map(str, folders))}")


def _checkpoints(source: Path, last: int | None) -> list[Path]:
    """The last checkpoints of a run, if `last` says how many; the folder itself otherwise."""
    if not source.is_dir():
        raise FileNotFoundError(f"no folder {source}: a saved model, a checkpoint or a run is needed")
    if last is None:
        return [source]
    from abc_attn.training.checkpoints import all_checkpoints

    found = all_checkpoints(source)
    if len(found) < last:
        raise ValueError(f"{source} has {len(found)} checkpoints, and --last asks for {last}")
    return found[-last:]


def reproduce(arguments: argparse.Namespace) -> None:
    """Train and score every row of a table, and write the results with a page that sets them beside the paper's. Runs
    that are finished are not repeated."""
    table, folder = arguments.table, arguments.recipes
    with explained("train"):
        from abc_attn.recipes.reading import parse_value

        check_table(table, folder)
        paths.writable_folder(arguments.output)
        overrides = {key: parse_value(value) for key, value in arguments.set}
    import_controls(arguments)
    check_controls(overrides.get("control"))
    keep_freed_memory()
    with explained("train"):
        from abc_attn.training import tables

        plans = tables.plan(
            table,
            arguments.scale,
            rows=arguments.rows,
            seeds=arguments.seeds,
            overrides=overrides,
            recipes=folder,
            results=arguments.output,
        )
    with resumable(), explained("train"):
        print(tables.reproduce(table, arguments.scale, plans, arguments.output))


def check_table(table: str, folder: Path | None) -> None:
    """Refuse a table that is not among those of `folder`, or of the package."""
    if folder is not None and not folder.is_dir():
        raise CommandError(f"no folder of recipes at {folder}; `abc-attn recipes --copy FOLDER` makes one")
    known = recipes.tables(folder)
    if table not in known:
        where = "" if folder is None else f" in {folder}"
        raise CommandError(f"no table {table!r}{where}; there are {', '.join(known) or 'none'}")


def list_recipes(arguments: argparse.Namespace) -> None:
    """List the installed recipes by table, as `abc-attn train` takes them; or copy them into a folder of your own, to
    change them there (`abc-attn reproduce --recipes FOLDER`)."""
    if arguments.copy is not None:
        with explained():
            recipes.copy(paths.new_folder(arguments.copy))
        print(f"{arguments.copy}: {len(recipes.names())} recipes of {len(recipes.tables())} tables")
        return
    names = recipes.names()
    for table in recipes.tables():
        rows = [name for name in names if name.startswith(f"{table}/")]
        print(f"{table}: abc-attn reproduce {table}")
        for name in rows:
            print(f"  {name}")


def report(arguments: argparse.Namespace) -> None:
    """Write one page of all results: the tables with their plots, in one HTML file that needs nothing else."""
    with explained():
        if not arguments.results.is_dir():
            raise CommandError(f"no folder of results at {arguments.results}; `abc-attn reproduce` makes one")
        paths.new_file(arguments.output)
    with explained("train"):
        from abc_attn.report import write_report

        write_report(arguments.results, arguments.output)
    print(arguments.output)
