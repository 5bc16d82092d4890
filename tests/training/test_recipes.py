"""The recipes of the package: each describes a model, twins agree, and the recorded results are of these recipes."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_text import fill
from transformers import TrainingArguments

from abc_attn import recipes
from abc_attn.recipes.table import Table
from abc_attn.report.page import markdown, pictures
from abc_attn.report.runs import read_runs
from abc_attn.tasks import TRANSLATION
from abc_attn.training import load_recipe

RESULTS = Path(__file__).parents[2] / "results"
every_table = pytest.mark.parametrize("table", recipes.tables())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("recipes"))


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_describes_a_model(name, place, monkeypatch):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.values["output_dir"] == f"runs/{name}"
    monkeypatch.chdir(place)
    data = recipe.task.settings_class.names("source") & recipe.task.tiny.keys()  # in place of what is not here
    load_recipe(name, {key: recipe.task.tiny[key] for key in data}).make_task().check()
    TrainingArguments(**recipe.training() | {"output_dir": "unused"})


@every_table
def test_every_row_of_the_paper_has_a_recipe_and_a_small_twin(table):
    shown = Table.open(table)
    first = load_recipe(next(iter(shown.rows("small").values())).path)
    assert first.make_task().check_scores(shown.own_scores()) is None
    for row in shown.paper:
        small, full = (dict(load_recipe(f"{table}/{scale}/{row}").values) for scale in ("small", "full"))
        if small["control"] == "linformer" and shown.task != "language-modelling":  # in short trainings (LOG.md)
            small["control_options"] = dict(small["control_options"])
            assert small["control_options"].pop("start") == "identity"
        if shown.task == TRANSLATION:  # half as many slots for sentences of half the length
            options = [values.get("control_options", {}) for values in (small, full)]
            assert [one.pop("max_length", None) for one in options] == [
                values["max_length"] if values["control"] == "linformer" else None for values in (small, full)
            ]
            if "slots" in full:
                full["slots"] = {site: count // 2 for site, count in full["slots"].items()}
        for key in ("control", "slots", "where", "control_options", "layerdrop", "block_size", "context_sentences"):
            assert small.get(key) == full.get(key), key
    if shown.paper:
        assert set(shown.rows("full")) == set(shown.paper)  # rows of our own are small only


@every_table
def test_every_result_is_that_of_its_recipe(table):
    """A table may have no results yet."""
    shown, runs = Table.open(table), read_runs(RESULTS / table)
    assert [(run["row"], run["seed"], run["scale"]) for run in runs] == sorted(
        (run["row"], run["seed"], run["scale"]) for run in runs
    )
    for run in runs:
        row = shown.rows(run["scale"])[run["row"]]
        recipe = load_recipe(row.path, row.values | {"seed": run["seed"]})
        assert recipe.differences(run["values"]) == [], run["row"]
        assert set(shown.columns) <= run["scores"].keys() <= set(shown.scores()), run["row"]


@every_table
def test_pages_are_those_of_the_results(table):
    scales = {run["scale"] for run in read_runs(RESULTS / table)}
    assert {path.stem for path in (RESULTS / table).glob("*.md")} == scales
    for scale in scales:
        page = RESULTS / table / f"{scale}.md"
        runs = [run for run in read_runs(RESULTS / table) if run["scale"] == scale]
        shown = Table.open(table)
        assert {path.name for path in page.parent.glob(f"{scale}*.png")} == pictures(shown, scale, runs).keys()
        assert page.read_text(encoding="utf-8") == markdown(shown, scale, runs)


def test_results_are_of_tables():
    folders = {path.parent.name for path in RESULTS.glob("*/runs.jsonl")}
    assert {"table1a", "table1b", "recall", "copy"} <= folders <= {*recipes.tables()}


def test_recipes_are_found_by_name_or_path(tmp_path):
    assert recipes.find("table1a/small/mlp-64") == recipes.find("table1a/small/mlp-64.yaml")
    mine = tmp_path / "mine.yaml"
    mine.write_text("max_steps: 1\n")
    assert recipes.find(mine) == recipes.find(str(mine)) == mine
    with pytest.raises(
        FileNotFoundError, match=r"no recipe at table1a/small/mlp-65, .*did you mean table1a/small/mlp-6"
    ):
        recipes.find("table1a/small/mlp-65")
    with pytest.raises(FileNotFoundError, match="`abc-attn recipes` lists"):
        recipes.find("none.yaml")


def test_recipes_and_the_keys_of_tasks_are_listed_without_heavy_imports():
    code = """
import sys
before = set(sys.modules)
from abc_attn import recipes
from abc_attn.tasks import TASKS, keys_help
assert recipes.tables() and recipes.names()
help = keys_help()
assert all(f"task {name}" in help for name in TASKS) and "block_size" in help and "items" in help
third_party = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names) - {'abc_attn'}
assert not third_party, third_party
"""
    subprocess.run([sys.executable, "-c", code], check=True)
