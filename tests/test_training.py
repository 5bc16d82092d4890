"""Training by recipe: the same losses after any kill, clear mistakes, and models that load."""

import json
import math
import multiprocessing
import os
import random
import signal
import socket
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from abc_attn.cli import main
from abc_attn.evaluation import perplexity, token_nll
from abc_attn.hf import AdaptiveLM, AdaptiveLMConfig
from abc_attn.training import load_recipe, train
from abc_attn.training.recipe import parse_value
from abc_attn.training.reproduce import TABLES
from abc_attn.training.run import open_corpus
from abc_attn.training.trainer import LMTrainer, read_metrics

TINY = {
    "data_dir": "text", "cache_dir": "cache", "block_size": 16, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 32, "cutoffs": [10, 20], "div_val": 2, "control": "mlp:4",
    "max_steps": 12, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "logging_steps": 2, "save_steps": 4, "use_cpu": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a little text and the recipe `tiny.yaml`."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "text").mkdir()
    words, chance = [f"w{i}" for i in range(40)], random.Random(0)
    for split, lines in (("train", 80), ("valid", 10), ("test", 10)):
        text = "\n".join(" ".join(chance.choices(words, range(40, 0, -1), k=9)) for _ in range(lines))
        (folder / "text" / f"{split}.txt").write_text(text + "\n")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return folder


@pytest.fixture
def recipe(place, tmp_path, monkeypatch):
    """Makes the tiny recipe, with changes, for a run in the test's own folder."""
    monkeypatch.chdir(place)
    return lambda name="run", **changes: load_recipe("tiny.yaml", {"output_dir": str(tmp_path / name)} | changes)


def losses(folder):
    return {
        record["step"]: record["loss"] for record in read_metrics(Path(folder) / "metrics.jsonl") if "loss" in record
    }


def test_a_run_from_end_to_end(recipe, tmp_path, capsys):
    done = train(recipe(eval_strategy="steps", eval_steps=6))
    folder = tmp_path / "run"
    shown = capsys.readouterr().err
    assert "step 12/12: loss " in shown  # plain lines: this is no terminal
    assert "tokens/s" in shown
    assert "left" in shown
    assert "\r" not in shown
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 6, 8, 10, 12]
    assert [record["step"] for record in records if "eval_perplexity" in record] == [6, 12]
    assert losses(folder)[12] < losses(folder)[2]
    assert done["validation"]["perplexity"] == records[-1]["eval_perplexity"]
    about = json.loads((folder / "run.json").read_text())
    assert about["seed"] == 0
    assert about["values"]["control"] == "mlp:4"
    assert not list(folder.rglob("training_args.bin"))
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-8"]

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("w1 w2 w3", return_tensors="pt")
    written = model.generate(prompt.input_ids, attention_mask=torch.ones_like(prompt.input_ids), max_new_tokens=3)
    assert tokenizer.decode(written[0]).startswith("w1 w2 w3 ")

    assert main(["generate", str(folder), "--prompt", "w1 w2", "--tokens", "3"]) == 0
    assert "state" in capsys.readouterr().err
    assert main(["evaluate", str(folder), "--file", "text/test.txt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    corpus = open_corpus(recipe())
    ours = perplexity(token_nll(model, corpus.tokens["test"]))
    assert math.isclose(found["perplexity"], ours, rel_tol=1e-5)
    assert math.isclose(math.log(found["word perplexity"]) * corpus.words["test"], math.log(ours) * found["tokens"])

    # A finished run is left as it is, resumed or not; another run in its place is refused.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for resume in (False, True):
        assert train(recipe(eval_strategy="steps", eval_steps=6), resume=resume) == done
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    with pytest.raises(ValueError, match=r"other values of eval_steps .* learning_rate \(0.01 there, 0.02 here\)"):
        train(recipe(learning_rate=2e-2), resume=True)


@pytest.fixture(scope="module")
def processes():
    """Where processes come from: a server that has imported everything once, which takes the longest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.trainer", "abc_attn.training"])
    return context


def run_until_killed(where, changes):
    """Trains, and kills its own process in the save at step 8 or in step 11."""
    original = getattr(LMTrainer, where)

    def kill(self, *arguments, **options):
        if self.state.global_step == (8 if where == "_save_rng_state" else 10):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments, **options)

    setattr(LMTrainer, where, kill)
    train(load_recipe("tiny.yaml", changes))


def run_as(rank, port, changes):
    """Trains as torchrun would have it: process `rank` of two."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train(load_recipe("tiny.yaml", changes))


@pytest.mark.parametrize(
    ("where", "changes", "left"),
    [
        ("training_step", {"carry_state": True, "position_period": 32}, "checkpoint-8"),
        ("_save_rng_state", {"layerdrop": 0.2}, "checkpoint-4"),  # in the middle of the save at step 8
    ],
)
def test_kill_and_resume_give_the_losses_of_an_uninterrupted_run(recipe, processes, tmp_path, where, changes, left):
    train(recipe("whole", **changes))
    folder = tmp_path / "killed"
    killed = processes.Process(target=run_until_killed, args=(where, changes | {"output_dir": str(folder)}))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert max(folder.glob("checkpoint-*")).name == left
    assert (folder / ".partial" / "checkpoint-8").exists() == (where == "_save_rng_state")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"loss": 1.')  # as a kill may leave it
    with pytest.raises(ValueError, match="go on with --resume"):
        train(recipe("killed", **changes))
    train(recipe("killed", **changes), resume=True)
    assert losses(folder) == losses(tmp_path / "whole")
    assert not (folder / ".partial").exists()
    whole, resumed = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "killed"))
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name)), name


def test_killed_before_the_first_checkpoint_starts_again(recipe, tmp_path):
    train(recipe("whole", max_steps=4))
    (tmp_path / "killed").mkdir()
    for name in ("run.json", "metrics.jsonl"):
        (tmp_path / "killed" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    train(recipe("killed", max_steps=4), resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_killed_after_the_last_checkpoint_trains_no_further(recipe, tmp_path):
    done = train(recipe())
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    for name in ("finished.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    (tmp_path / "other").mkdir()
    for file in Path("text").iterdir():
        (tmp_path / "other" / file.name).write_text("\n".join(reversed(file.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match="was started with another text"):
        train(recipe(data_dir=str(tmp_path / "other")), resume=True)
    again = train(recipe(), resume=True)
    assert again["validation"] == done["validation"]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    assert list(losses(tmp_path / "run")) == [2, 4, 6, 8, 10, 12]


def test_a_loss_that_is_not_finite_stops_the_run(recipe):
    with pytest.raises(FloatingPointError, match=r"at step 2: .*smaller learning_rate"):
        train(recipe(learning_rate=1e30, max_grad_norm=0, optim="sgd", warmup_steps=0))


def test_two_processes_give_the_loss_of_one(recipe, processes, tmp_path):
    """DDP: two batches of 3 are the two accumulated batches of one process."""
    plain = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "adaptive_dropout"), 0.0)
    plain["max_steps"] = 4
    train(recipe("one", **plain))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain |= {"output_dir": str(tmp_path / "two"), "ddp_backend": "gloo", "gradient_accumulation_steps": 1}
    both = [processes.Process(target=run_as, args=(rank, port, plain)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5


def test_from_a_trained_softmax(recipe, tmp_path):
    train(recipe("base", control="softmax", max_steps=4))
    assert main(["evaluate", str(tmp_path / "base"), "--file", "text/test.txt"]) == 0  # in windows: it has no stream
    done = train(recipe("t2r", control="t2r:4", init_from="base", max_steps=4))
    scratch = train(recipe("scratch", control="t2r:4", max_steps=4))
    assert done["validation"]["perplexity"] < scratch["validation"]["perplexity"]
    with pytest.raises(ValueError, match="init_from='base' has hidden_size=16, this recipe 32"):
        train(recipe("other", control="t2r:4", init_from="base", hidden_size=32))
    with pytest.raises(FileNotFoundError, match="init_from='nothing': no trained model"):
        train(recipe("other", control="t2r:4", init_from="nothing"))


@pytest.mark.parametrize("task", ["recall", "copy"])
def test_synthetic_tasks_train(recipe, task):
    done = train(recipe(task=task, items=4, vocab_size=16, cutoffs=[], max_steps=4))
    assert 0 <= done["validation"]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rat": 1}, "unknown key 'learning_rat'; did you mean learning_rate"),
        ({"hiden_size": 1}, "did you mean hidden_size"),
        ({"num_train_epochs": 3}, "max_steps says how long"),
        ({"save_steps": 5}, "save_steps=5 must be a multiple of logging_steps=2"),
        ({"task": "sing"}, "task must be one of"),
        ({"carry_state": True, "layerdrop": 0.1}, "leave out layerdrop"),
        ({"max_steps": 0}, "needs max_steps"),
        ({"block_size": 0}, "block_size must be a whole number from 1, got 0"),
        ({"items": "many"}, "items must be a whole number from 1, got 'many'"),
    ],
)
def test_a_wrong_recipe_is_an_error(recipe, changes, said):
    with pytest.raises(ValueError, match=said):
        recipe(**changes)


def test_mistakes_are_one_line(recipe, tmp_path, monkeypatch, capsys):
    for change, said in (("slots=many", "slots"), ("report_to=tensorboard", "pip install tensorboard")):
        monkeypatch.setattr("abc_attn.training.run.find_spec", lambda name: None)
        assert main(["train", "tiny.yaml", change, f"output_dir={tmp_path / 'run'}"]) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert len(shown.splitlines()) == 1


def test_recipes_extend_each_other(tmp_path):
    (tmp_path / "a.yaml").write_text("max_steps: 10\nlearning_rate: 1e-3\nhidden_size: 8\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\nhidden_size: 16\n")
    recipe = load_recipe(tmp_path / "b.yaml", {"max_steps": 20})
    assert recipe.values["learning_rate"] == 1e-3
    assert recipe.model() == {"hidden_size": 16}
    assert recipe.training()["max_steps"] == 20
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    with pytest.raises(ValueError, match="extends itself"):
        load_recipe(tmp_path / "b.yaml")
    (tmp_path / "a.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="mapping"):
        load_recipe(tmp_path / "a.yaml")
    values = {"1e-3": 1e-3, "2": 2, "mlp:32": "mlp:32", "[1, 2]": [1, 2], "true": True, "no": "no"}
    assert {text: parse_value(text) for text in values} == values


def test_a_table_is_made_row_by_row_and_once(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipes" / "small" / "table1b"
    folder.mkdir(parents=True)
    shared = TINY | {"data_dir": str(place / "text"), "cache_dir": str(place / "cache"), "max_steps": 4}
    (folder / "_shared.yaml").write_text(yaml.safe_dump(shared | {"block_size": 272, "eval_tokens": 60}))
    (folder / "base.yaml").write_text("extends: _shared.yaml\ncontrol: softmax\n")
    (folder / "t2r-32.yaml").write_text("extends: _shared.yaml\ncontrol: t2r:4\ninit_from: base\n")
    (folder / "ours.yaml").write_text("extends: _shared.yaml\ncontrol: mlp:4\n")
    assert main(["reproduce", "table1b", "--rows", "t2r-32"]) == 2
    assert "row t2r-32 starts from the trained base: add it to --rows" in capsys.readouterr().err
    assert main(["reproduce", "table1b"]) == 0
    results = tmp_path / "results" / "table1b"
    assert {path.name for path in results.iterdir()} == {
        "small.md", "small-base-seed0.json", "small-t2r-32-seed0.json", "small-ours-seed0.json"
    }  # fmt: skip
    record = json.loads((results / "small-ours-seed0.json").read_text())
    assert record["perplexity"]["test"].keys() == {"256", "stream", "whole stream"}
    streams = [record["perplexity"]["test"][name] for name in ("stream", "whole stream")]
    assert streams[0] != streams[1]  # of 60 tokens, and of all 100
    assert "the first 60 tokens" in (results / "small.md").read_text()
    assert record["training"]["steps"] == 4
    assert str(place) not in json.dumps(record)
    rows = [line.strip("| ").split(" | ") for line in (results / "small.md").read_text().splitlines() if "|" in line]
    assert [row[0] for row in rows[2:]] == ["base", "t2r-32", "ours"]  # the paper's first
    assert rows[2][-2:] == ["17.9", "18.5"]
    assert rows[2][6:10] == ["n/a"] * 4  # softmax is not streamed
    assert rows[4][-2:] == ["-", "-"]

    other = ["--rows", "ours", "--output", "elsewhere", "--set", "learning_rate=1"]
    assert main(["reproduce", "table1b", *other]) == 2  # runs/ holds the first one
    assert "ours, seed 0: " in (shown := capsys.readouterr().err)
    assert "give another output_dir" in shown
    monkeypatch.setattr("abc_attn.training.reproduce.prepare", None)  # would fail if it were called
    assert main(["reproduce", "table1b"]) == 0
    assert main(["reproduce", "table1b", "--set", "learning_rate=1"]) == 2
    assert "other values of learning_rate" in capsys.readouterr().err


def test_accuracy_is_drawn_against_slots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = ["max_steps=2", "save_steps=2", "logging_steps=2", "hidden_size=16", "items=4", "use_cpu=true"]
    recipes = str(Path(__file__).parents[1] / "recipes")
    assert main(["reproduce", "recall", "--recipes", recipes, "--rows", "softmax", "mlp-4", "--set", *tiny]) == 0
    assert {path.name for path in (tmp_path / "results" / "recall").iterdir()} == {
        "accuracy.png", "softmax-seed0.json", "mlp-4-seed0.json"
    }  # fmt: skip


RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.parametrize(
    "path", sorted((RECIPES.parent / "results").glob("table*/small-*.json")), ids=lambda path: path.stem
)
def test_every_result_is_that_of_its_recipe(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    recipe = load_recipe(RECIPES / "small" / path.parent.name / f"{record['row']}.yaml", {"seed": record["seed"]})
    assert recipe.differences(record["values"]) == []


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RECIPES.rglob("*.yaml")) if not path.name.startswith("_")],
    ids=lambda path: path.stem,
)
def test_every_recipe_describes_a_model(path):
    recipe = load_recipe(path)
    small = "small" in path.parts or "synthetic" in path.parts
    vocabulary = {} if "synthetic" in path.parts else {"vocab_size": 33_278 if small else 267_735}
    bands = {"cutoffs": ()} if "synthetic" in path.parts else {}
    with torch.device("meta" if "rfa" not in path.stem else "cpu"):
        if "rfa" not in path.stem or small:
            AdaptiveLM(AdaptiveLMConfig(**bands | recipe.model() | vocabulary))
    TrainingArguments(**recipe.training() | {"output_dir": "unused"})
    table = path.parent.name
    if table in TABLES and path.stem in TABLES[table].paper:
        full = load_recipe(RECIPES / table / path.name)
        for key in ("control", "slots", "control_options", "layerdrop", "block_size"):
            assert recipe.values.get(key) == full.values.get(key), key


def test_every_row_of_the_paper_has_a_recipe():
    for name, table in TABLES.items():
        for folder in (RECIPES / name, RECIPES / "small" / name):
            assert {path.stem for path in folder.glob("*.yaml")} >= table.paper.keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "none.yaml"], "no recipe at none.yaml"),
        (["train", "tiny.yaml", "slots"], "key=value is needed, got 'slots'"),
        (["train", "tiny.yaml", "slotz=3"], "did you mean slots"),
        (["train", "tiny.yaml", "data_dir=nowhere", "output_dir=never"], "no folder nowhere"),
        (["train", "tiny.yaml", "control=luna", "output_dir=never"], "cannot be causal"),
    ],
)
def test_a_wrong_command_is_one_line(place, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(place)
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code
    shown = capsys.readouterr().err
    assert code == 2
    assert shown.startswith("abc-attn: error: ")
    assert shown.count("\n") == 1
    assert said in shown
    assert not Path("never").exists()
