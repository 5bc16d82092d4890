"""Training by recipe: the same losses after any kill, clear mistakes, and models that load."""

import json
import math
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from tiny_text import fill
from transformers import AutoModelForCausalLM, AutoTokenizer
from two_processes import train_in_two

from abc_attn.cli import main
from abc_attn.evaluation import perplexity, token_nll
from abc_attn.tasks import TASKS, get_task
from abc_attn.training import load_recipe, prepare, train
from abc_attn.training.recipe import parse_value
from abc_attn.training.trainer import RunTrainer, read_metrics


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a little text and the recipe `tiny.yaml`."""
    return fill(tmp_path_factory.mktemp("training"))


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
    assert ", perplexity per token " in shown
    assert "eval_perplexity per word" in shown
    assert "tokens/s" in shown
    assert "left" in shown
    assert "\r" not in shown
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 6, 8, 10, 12]
    assert [record["step"] for record in records if "eval_perplexity per word" in record] == [6, 12]
    assert all(
        math.isclose(math.exp(record["loss"]), record["perplexity per token"]) for record in records if "loss" in record
    )
    assert losses(folder)[12] < losses(folder)[2]
    assert done["validation"] == {
        "loss": records[-1]["eval_loss"], "perplexity per word": records[-1]["eval_perplexity per word"]
    }  # fmt: skip
    assert [point["tokens"] for point in done["history"]] == [done["tokens"] // 2, done["tokens"]]
    assert done["history"][-1] == done["validation"] | {"tokens": done["tokens"]}
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
    task = recipe().make_task()
    task.open()
    corpus = task.corpus
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
    original = getattr(RunTrainer, where)

    def kill(self, *arguments, **options):
        if self.state.global_step == (8 if where == "_save_rng_state" else 10):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments, **options)

    setattr(RunTrainer, where, kill)
    train(load_recipe("tiny.yaml", changes))


@pytest.mark.parametrize(
    ("where", "changes", "left"),
    [
        ("training_step", {"position_period": 32}, "checkpoint-8"),
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
    with pytest.raises(ValueError, match="was of other data"):
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
    plain |= {"output_dir": str(tmp_path / "two"), "ddp_backend": "gloo", "gradient_accumulation_steps": 1}
    train_in_two(plain)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5


def test_from_a_trained_softmax(recipe, tmp_path):
    train(recipe("base", control="softmax", max_steps=4))
    assert main(["evaluate", str(tmp_path / "base"), "--file", "text/test.txt"]) == 0  # in windows: it has no stream
    done = train(recipe("t2r", control="t2r:4", init_from="base", max_steps=4))
    scratch = train(recipe("scratch", control="t2r:4", max_steps=4))
    assert done["validation"]["loss"] < scratch["validation"]["loss"]
    with pytest.raises(ValueError, match="init_from='base' has hidden_size=16, this recipe 32"):
        train(recipe("other", control="t2r:4", init_from="base", hidden_size=32))
    with pytest.raises(FileNotFoundError, match="init_from='nothing': no trained model"):
        train(recipe("other", control="t2r:4", init_from="nothing"))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains(place, tmp_path, monkeypatch, name):
    """The same losses twice; the model that is saved has the score that was reported."""
    monkeypatch.chdir(place)
    steps = {"max_steps": 4, "logging_steps": 2, "save_steps": 4, "use_cpu": True}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"task": name} | get_task(name).tiny | steps))
    recipes = [load_recipe(tmp_path / "tiny.yaml", {"output_dir": str(tmp_path / run)}) for run in ("once", "twice")]
    done, again = map(train, recipes)
    assert losses(tmp_path / "once").keys() == {2, 4}
    assert losses(tmp_path / "once") == losses(tmp_path / "twice")
    assert done["validation"] == again["validation"]
    assert all(map(math.isfinite, done["validation"].values()))
    task = recipes[0].make_task()
    task.open()
    assert task.quick_score(task.load_model(tmp_path / "once"), 8) == pytest.approx(done["validation"])


@pytest.mark.parametrize("name", ["recall", "copy"])
def test_the_score_of_a_synthetic_task_is_the_share_of_right_answers(name):
    task = load_recipe(f"{name}/small/{name}", {"items": 4, "hidden_size": 16}).make_task()
    found = task.scores(task.build_model(None), ["accuracy"])
    assert found.keys() == {"accuracy"}
    assert 0 <= found["accuracy"] <= 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rat": 1}, "unknown key 'learning_rat'; did you mean learning_rate"),
        ({"hiden_size": 1}, "did you mean hidden_size"),
        ({"num_train_epochs": 3}, "max_steps says how long"),
        ({"save_steps": 5}, "save_steps=5 must be a multiple of logging_steps=2"),
        ({"task": "sing"}, "task must be one of"),
        ({"max_steps": 0}, "max_steps must be a whole number from 1, got 0"),
        ({"max_steps": 1e3}, "max_steps must be a whole number from 1, got 1000.0"),
        ({"block_size": 0}, "block_size must be a whole number from 1, got 0"),
        ({"block_size": "many"}, "block_size must be a whole number from 1, got 'many'"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be a whole number from 1, got 0"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps must be a whole number from 1, got True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1, got 0"),
        ({"seed": -1}, "seed must be a whole number from 0, got -1"),
        ({"learning_rate": 0}, "learning_rate must be a number above 0, got 0"),
        ({"learning_rate": math.nan}, "learning_rate must be a number above 0, got nan"),
        ({"learning_rate": "fast"}, "learning_rate must be a number above 0, got 'fast'"),
        ({"items": 3}, "unknown key 'items'; it is a key of task recall and copy"),
        ({"tokenizer": "char"}, "tokenizer must be one of word, bpe, got 'char'"),
        ({"data_dir": 3}, "data_dir must be text, got 3"),
        ({"carry_state": True}, "unknown key 'carry_state'"),
    ],
)
def test_a_wrong_recipe_is_an_error(recipe, changes, said):
    with pytest.raises(ValueError, match=said):
        recipe(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"control": "luna"}, "cannot be causal"),
        ({"control": "mpl:4"}, "mpl"),
        ({"control": ["mlp:4", "luna"]}, "cannot be causal"),
        ({"control": "rfa:3"}, "even number of slots"),
        ({"control": "mlp", "slots": "many"}, "slots"),
        ({"control_options": {"max_lenth": 3}}, "max_lenth"),
        ({"hidden_size": 15}, "hidden_size must be even"),
        ({"cutoffs": [20, 10]}, "cutoffs must rise"),
        ({"dropout": 2.0}, r"dropout must be in \[0, 1\)"),
        ({"data_dir": "nowhere"}, "no folder nowhere"),
        ({"train_file": "text/train.txt"}, "are all needed"),
        ({"train_file": "a", "validation_file": "b", "test_file": "c"}, "no train text at a"),
        ({"tokenizer": "bpe"}, "needs a vocab_size"),
        ({"tokenizer": "bpe", "vocab_size": 200}, "at least 257"),
        ({"init_from": "nothing"}, "no trained model there"),
        ({"optim": "adamm"}, "adamm"),
    ],
)
def test_mistakes_are_found_before_the_text_is_read(recipe, monkeypatch, changes, said):
    monkeypatch.setattr("abc_attn.data.text.Corpus.open", None)  # would fail if it were called
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=said):
        prepare(recipe(**changes))


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
