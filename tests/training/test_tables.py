"""Tables: a row is trained once and recorded, a new table is a folder, and mistakes are found before any training."""

import json
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import yaml
from tiny_text import TINY, fill

from abc_attn import recipes
from abc_attn.recipes.reading import read_recipe
from abc_attn.recipes.table import Table
from abc_attn.report import write_report
from abc_attn.report.page import command
from abc_attn.report.runs import add_run, read_runs
from abc_attn.training import tables


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("tables"))


@pytest.fixture
def folder(place, tmp_path, monkeypatch):
    """A table of one's own: `mine/table.yaml` and three rows, of which two start from others; recipes in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    small = tmp_path / "mine" / "small"
    small.mkdir(parents=True)
    said = {
        "title": "Mine", "task": "language-modelling", "reading": "Lower is better.",
        "columns": {"validation/256": "validation", "test/256": "test"}, "paper": {"base": [17.9, 18.5]},
        "more": [{"title": "Streams", "reading": "", "columns": {"test/stream": "test", "test/whole stream": "whole"}}],
        "notes": {"eval_tokens": "Only {} tokens."},
        "plot": {"kind": "bars", "column": "test/256", "label": "perplexity per word"},
    }  # fmt: skip
    (tmp_path / "mine" / "table.yaml").write_text(yaml.safe_dump(said))
    shared = TINY | {"data_dir": str(place / "text"), "cache_dir": str(place / "cache"), "max_steps": 4}
    (small / "_shared.yaml").write_text(yaml.safe_dump(shared | {"block_size": 272, "eval_tokens": 60}))
    (small / "base.yaml").write_text("extends: _shared.yaml\ncontrol: softmax\n")
    (small / "another.yaml").write_text("extends: _shared.yaml\ncontrol: t2r:4\ninit_from: middle\n")
    (small / "middle.yaml").write_text("extends: _shared.yaml\ncontrol: mlp:4\ninit_from: base\n")
    return tmp_path


def plan(rows=None, **options):
    return tables.plan("mine", "small", rows, **{"recipes": Path("."), "results": Path("results")} | options)


def rewrite(path, **changes):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


def test_a_table_is_made_row_by_row_and_once(folder, place, monkeypatch):
    plans = plan()
    assert [planned.row for planned in plans] == ["base", "middle", "another"]  # each after what it starts from
    page = tables.reproduce("mine", "small", plans, Path("results"))
    assert page == Path("results/mine/small.md")
    assert sorted(path.name for path in page.parent.iterdir()) == ["runs.jsonl", "small.md", "small.png"]
    runs = read_runs(Path("results/mine"))
    assert [(run["row"], run["seed"], run["scale"]) for run in runs] == [
        ("another", 0, "small"), ("base", 0, "small"), ("middle", 0, "small")
    ]  # fmt: skip
    record = runs[2]
    assert record.keys() >= {"recipe", "values", "seed", "commit", "machine", "versions", "date", "training"}
    assert record["scores"].keys() == {"validation/256", "test/256", "test/stream", "test/whole stream"}
    assert record["scores"]["test/stream"] != record["scores"]["test/whole stream"]  # of 60 tokens, and of all 100
    assert record["training"]["steps"] == 4
    assert str(place) not in json.dumps(runs)
    assert runs[1]["scores"]["test/stream"] is None  # softmax is not streamed
    text = page.read_text()
    assert "Only 60 tokens." in text
    ours, papers, streams = text.split("\n## ")[1:]
    assert [line.split(" | ")[0] for line in ours.splitlines()[4:]] == ["| base", "| another (ours)", "| middle (ours)"]
    assert "| base | 17.9 | 18.5 |" in papers
    assert "| base | `softmax` | - | 1 | n/a | n/a |" in streams
    write_report(Path("results"), Path("report.html"))  # though the package has no such table
    assert "middle" in Path("report.html").read_text()
    assert not list(Path("runs").rglob("checkpoint-*"))  # they are for resuming

    # Done is done; another recipe is not the same run; a run's folder of another recipe is refused.
    monkeypatch.setattr("abc_attn.training.tables.prepare", None)  # would fail if it were called
    assert all(planned.done for planned in plan())
    before = (page.parent / "runs.jsonl").read_bytes()
    tables.reproduce("mine", "small", plan(), Path("results"))
    assert (page.parent / "runs.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="has middle, seed 0, with other values of learning_rate"):
        plan(["middle"], overrides={"learning_rate": 1})
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    other = plan(["base"], overrides={"learning_rate": 1}, results=Path("elsewhere"))
    with pytest.raises(OSError, match=r"base, seed 0: .* give another output_dir"):
        tables.reproduce("mine", "small", other, Path("elsewhere"))


def test_a_row_that_is_another_tables_takes_its_result(folder, monkeypatch):
    """Though the trained model is gone: what is recorded there has the scores that are shown here."""
    own = plan(["base"])[0].recipe.without_places()
    record = {"row": "base", "seed": 0, "scale": "small", "recipe": "mine/small/base", "values": own}
    add_run(Path("results/mine"), record | {"scores": {"test/256": 20.0, "validation/256": 19.0}})
    (folder / "yours" / "small").mkdir(parents=True)
    (folder / "yours" / "table.yaml").write_text((folder / "mine" / "table.yaml").read_text())
    rewrite(folder / "yours" / "table.yaml", title="Yours", columns={"test/256": "test"}, more=[], paper={})
    (folder / "yours" / "small" / "exact.yaml").write_text("extends: ../../mine/small/base.yaml\n")
    monkeypatch.setattr("abc_attn.training.tables.prepare", None)  # would fail if it were called
    options = {"recipes": Path("."), "results": Path("results")}
    tables.reproduce("yours", "small", tables.plan("yours", "small", **options), Path("results"))
    (taken,) = read_runs(Path("results/yours"))
    assert taken == record | {"row": "exact", "scores": {"test/256": 20.0}}
    for changed in ({"seeds": [1]}, {"overrides": {"learning_rate": 1}, "results": Path("others")}):
        assert [p.shared for p in tables.plan("yours", "small", **options | changed)] == [None]
    rewrite(folder / "yours" / "table.yaml", columns={"test/256": "test", "test/0": "test, 0"})  # not taken there
    (folder / "results" / "yours" / "runs.jsonl").unlink()
    assert [p.shared for p in tables.plan("yours", "small", **options)] == [None]


def test_a_page_names_the_values_that_were_given(folder):
    table, given = Table.open("mine", Path(".")), {"learning_rate": 0.5, "control_options": {"gate": True}}
    runs = []
    for row, more in (("base", {}), ("middle", {"max_steps": 3, "init_from": "base-seed1"})):
        values = read_recipe(table.rows("small")[row].path) | given | more
        runs.append({"row": row, "seed": 1, "values": values | {"seed": 1}})
    said = "abc-attn reproduce mine --seeds 1 --set learning_rate=0.5 'control_options={\"gate\": true}'"
    assert command(table, "small", runs) == said
    assert command(table, "small", runs[1:]) == said.replace("=0.5", "=0.5 max_steps=3")
    assert command(table, "small", [*runs, {"row": "gone", "seed": 1, "values": {}}]) == said.partition(" --set")[0]


def test_a_row_starts_from_a_trained_one(folder):
    with pytest.raises(ValueError, match="row middle starts from the trained base: add it to --rows"):
        plan(["middle"])
    record = {"row": "base", "seed": 0, "scale": "small", "values": plan(["base"])[0].recipe.without_places()}
    add_run(Path("results/mine"), record | {"scores": {}})
    with pytest.raises(ValueError, match="its result is recorded, but its model is not here"):
        plan(["base", "middle"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"titel": "x"}, "unknown key 'titel'; did you mean title"),
        ({"task": "sing"}, "task must be one of"),
        ({"task": "recall"}, "is of task None, its table of recall"),
        ({"columns": {"test/512": "test"}, "paper": {}}, "no score 'test/512'"),
        ({"paper": {"base": [1.0]}}, "base has 1 figures, there are 2 columns"),
        ({"grid": {"slots": [1]}}, "grid needs `recipe`"),
        ({"grid": {"recipe": "none", "slots": [1]}}, "no recipe 'none'"),
        ({"more": [{"titel": "x"}]}, "titel"),
    ],
)
def test_a_wrong_table_is_an_error_before_any_training(folder, changes, said):
    rewrite(folder / "mine" / "table.yaml", **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        plan()


def test_what_cannot_be_planned(folder, monkeypatch):
    with pytest.raises(ValueError, match="no row none in mine at scale small; there are base, another, middle"):
        plan(["none"])
    with pytest.raises(FileNotFoundError, match=r"mine has no recipes at scale 'full'.*there are: small"):
        tables.plan("mine", "full", recipes=Path("."))
    with pytest.raises(FileNotFoundError, match=r"no table 'yours'.*there are mine"):
        tables.plan("yours", "small", recipes=Path("."))
    with pytest.raises(FileNotFoundError, match="no folder nowhere"):
        plan(overrides={"data_dir": "nowhere"})
    rewrite(folder / "mine" / "small" / "another.yaml", control="luna")  # the last row, said before the first
    with pytest.raises(ValueError, match="cannot be causal"):
        plan()
    monkeypatch.setattr("abc_attn.training.tables.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the plot needs matplotlib"):
        plan(["base"])


def test_a_grid_is_a_row_for_each_combination(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = {"max_steps": 2, "save_steps": 2, "logging_steps": 2, "hidden_size": 16, "items": 4, "use_cpu": True}
    plans = tables.plan("recall", "small", ["mlp-16", "softmax", "mlp-8"], overrides=tiny)
    assert [(planned.recipe.values["control"], planned.recipe.values["slots"]) for planned in plans] == [
        ("mlp", 16), ("softmax", None), ("mlp", 8)
    ]  # fmt: skip
    page = tables.reproduce("recall", "small", plans)
    assert [line.split(" | ")[0] for line in page.read_text().splitlines() if line.startswith("| ")][2:] == [
        "| softmax", "| mlp-8", "| mlp-16"
    ]  # fmt: skip
    assert len(Table.open("recall").rows("small")) == 25
    sites = Table("t", tmp_path, "", "", "", {}, grid={"recipe": "r", "slots": [{"cross": 32, "self": 8}]})
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "r.yaml").touch()
    assert sites.rows("small")["32-8"].values == {"slots": {"cross": 32, "self": 8}}


def test_runs_are_added_whole_by_several_at_once(tmp_path):
    record = {"row": "a", "scale": "small", "values": {}}
    with ThreadPool(8) as pool:
        pool.map(lambda seed: add_run(tmp_path, record | {"seed": seed, "scores": {"x": float("inf")}}), range(20))
    runs = read_runs(tmp_path)
    assert [run["seed"] for run in runs] == list(range(20))
    assert runs[0]["scores"] == {"x": "inf"}
    assert [path.name for path in tmp_path.iterdir()] == ["runs.jsonl"]
    with open(tmp_path / "runs.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match="line 21: row, scale, scores, seed, values missing"):
        read_runs(tmp_path)


def test_copied_recipes_are_the_same_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes.copy("mine")
    assert recipes.tables(Path("mine")) == recipes.tables()
    tiny = {"max_steps": 2, "save_steps": 2, "logging_steps": 2}
    ours, copied = (tables.plan("copy", "small", overrides=tiny, recipes=where) for where in (None, Path("mine")))
    assert [planned.recipe.values for planned in ours] == [planned.recipe.values for planned in copied]
    with pytest.raises(FileExistsError, match="mine exists"):
        recipes.copy("mine")


def test_a_row_that_diverges_does_not_stop_the_others(folder, monkeypatch, capsys):
    trained = tables._run

    def diverges(planned):
        if planned.row == "base":
            raise FloatingPointError("the loss is nan at step 1")
        return trained(planned)

    (folder / "mine" / "small" / "another.yaml").unlink()
    rewrite(folder / "mine" / "small" / "middle.yaml", init_from=None)
    monkeypatch.setattr(tables, "_run", diverges)
    with pytest.raises(FloatingPointError, match=r"training diverged for base, seed 0; results/mine/small.md has"):
        tables.reproduce("mine", "small", plan(), Path("results"))
    assert "base, seed 0: the loss is nan at step 1" in capsys.readouterr().err
    assert [run["row"] for run in read_runs(Path("results/mine"))] == ["middle"]
