"""Masked language models and classifiers: transformers' own RoBERTa with softmax, runs that resume, a grid that does
not look at the text to be scored, and a table of models that are pretrained, then fine-tuned."""

import copy
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_encoder import labelled, lines, pack, roberta, save
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    BertModel,
    RobertaForMaskedLM,
)

from abc_attn.data.blocks import FixedBlocks, MaskedBlocks, build_text
from abc_attn.data.labelled import without_shared
from abc_attn.evaluation.classifying import measure
from abc_attn.evaluation.masked import MaskedOnly
from abc_attn.hf import convert, packs
from abc_attn.models.starting import start_at_positions, wanted
from abc_attn.tasks.classification import Classification
from abc_attn.training import grid, load_recipe, prepare, tables, train
from abc_attn.training.trainer import read_metrics

COMMON = {
    "init_from": "roberta", "control": "mlp", "slots": 4, "cache_dir": "cache", "max_steps": 6, "learning_rate": 1e-3,
    "per_device_train_batch_size": 4, "logging_steps": 2, "save_steps": 4, "use_cpu": True,
}  # fmt: skip
MASKED = COMMON | {"task": "masked_lm", "data_dir": "text", "block_size": 24, "eval_blocks": 5}
LABELLED = COMMON | {"task": "classification", "train_file": "train.tsv", "test_file": "test.tsv", "max_length": 32}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `roberta`, a tiny model with its tokenizer; text; labelled texts; and a recipe for each task."""
    folder = tmp_path_factory.mktemp("encoders")
    save(folder / "roberta")
    (folder / "text").mkdir()
    for split, count in (("train", 120), ("valid", 30)):
        (folder / "text" / f"{split}.txt").write_text("\n".join(lines(count, count)) + "\n")
    labelled(folder / "train.tsv", 80)
    labelled(folder / "test.tsv", 20, seed=1)
    (folder / "masked.yaml").write_text(yaml.safe_dump(MASKED))
    (folder / "labelled.yaml").write_text(yaml.safe_dump(LABELLED))
    return folder


@pytest.fixture
def recipe(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    return lambda kind="masked", name="run", **changes: load_recipe(
        f"{kind}.yaml", {"output_dir": str(tmp_path / name)} | changes
    )


def opened(recipe):
    task = recipe.make_task()
    task.check()
    task.open()
    return task


def losses(folder):
    return {record["step"]: record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record}


def test_softmax_is_transformers_own_roberta(recipe, place):
    """Logits, and the loss and gradients of a training step: the head sees masked tokens alone, to the same effect."""
    task = opened(recipe(control="softmax", slots=None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    ours = task.build_model(task.start()).train()
    plain = RobertaForMaskedLM.from_pretrained(
        place / "roberta", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ).train()
    data = task.training_set(8, 0)
    batch = data.collate([data.items[index] for index in range(4)])
    found = []
    for model in (ours, plain):
        loss = model(**batch).loss
        loss.backward()
        found.append((loss, {name: weight.grad for name, weight in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)
    read = batch["input_ids"]
    torch.testing.assert_close(ours.eval()(read).logits, plain.eval()(read).logits, rtol=1e-4, atol=1e-4)
    assert ours(**batch).logits.shape == (int((batch["labels"] != -100).sum()), 320)


@pytest.mark.parametrize("kind", ["masked", "labelled"])
def test_a_run_resumes_bit_for_bit(recipe, tmp_path, kind):
    train(recipe(kind, "whole"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    killed.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        shutil.copyfile(whole / name, killed / name)
    shutil.copytree(whole / "checkpoint-4", killed / "checkpoint-4")
    train(recipe(kind, "killed"), resume=True)
    assert losses(killed) == losses(whole)
    final, again = (load_file(folder / "model.safetensors") for folder in (whole, killed))
    assert final.keys() == again.keys()
    assert all(torch.equal(final[name], again[name]) for name in final)
    assert any(name.startswith("controls.") for name in final)


def test_masks_are_roberta_s(place, tmp_path):
    words = AutoTokenizer.from_pretrained(place / "roberta")
    files = {"train": [place / "text/train.txt"], "validation": [place / "text/valid.txt"]}
    text = build_text(files, tmp_path, words, None)
    blocks = MaskedBlocks(text.tokens["train"], 32, 1000, 3, words, 0.15)
    again = MaskedBlocks(text.tokens["train"], 32, 1000, 3, words, 0.15)
    items = [blocks[index] for index in range(600)]
    for index in (599, 5, 130):  # whatever was read before
        assert all(torch.equal(part, items[index][name]) for name, part in again[index].items())
    read, labels = (torch.stack([item[name] for item in items]) for name in ("input_ids", "labels"))
    masked = labels != -100
    assert bool(masked.any(1).all())
    assert float(masked[:, 1:-1].float().mean()) == pytest.approx(0.15, abs=0.02)  # line ends are never masked
    assert not bool(masked[:, [0, -1]].any())
    hidden = float((read[masked] == words.mask_token_id).float().mean())
    kept = float((read[masked] == labels[masked]).float().mean())
    assert hidden == pytest.approx(0.8, abs=0.03)
    assert kept == pytest.approx(0.1, abs=0.03)
    assert bool((read[:, 0] == words.cls_token_id).all())
    assert bool((read[:, -1] == words.sep_token_id).all())
    other = blocks[blocks.cuts.per_pass]  # of the second pass
    assert not any(torch.equal(other["input_ids"], item["input_ids"]) for item in items[: blocks.cuts.per_pass])
    fixed = FixedBlocks(text.tokens["validation"], 32, 4, words, 0.15)
    assert len(fixed) == len([*fixed]) == 4
    assert torch.equal(fixed[2]["labels"], [*fixed][2]["labels"])


def test_the_head_of_a_body_is_trained_alone(recipe, place, tmp_path, monkeypatch):
    """From a packaged body without a head, as the small recipes do it; then another control from that."""
    pack(tmp_path / "tiny.hmsemb")
    monkeypatch.setitem(packs.PACKS, "tiny", packs.Pack("tiny", "tiny.hmsemb", "pip install tiny"))
    monkeypatch.setattr(packs, "find_pack", lambda name: tmp_path / "tiny.hmsemb")
    changes = {"init_from": "tiny", "control": "softmax", "slots": None, "cache_dir": str(tmp_path / "cache")}
    train(recipe(name="source", trainable="head", **changes))
    body = packs.load_pack(tmp_path / "tiny.hmsemb")[0].state_dict()
    trained = load_file(tmp_path / "source" / "model.safetensors")
    assert all(torch.equal(trained[f"roberta.{name}"], weight) for name, weight in body.items())
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "source")
    assert model.lm_head.decoder.weight is model.roberta.embeddings.word_embeddings.weight
    deviation = float(trained["roberta.embeddings.word_embeddings.weight"].std()) * 4  # width 16
    assert float(trained["lm_head.layer_norm.weight"].mean()) == pytest.approx(1 / deviation, rel=0.05)
    done = train(recipe(name="control", init_from="source", trainable="control"))
    swapped = load_file(tmp_path / "control" / "model.safetensors")
    new = {name for name in swapped if name.startswith("controls.")}
    assert new
    assert swapped.keys() - trained.keys() == new
    assert all(torch.equal(swapped[name], weight) for name, weight in trained.items())
    assert done["validation"].keys() == {"loss", "accuracy"}


def test_a_head_that_is_there_stays(recipe, tmp_path):
    """Whatever the class is called that it was saved with."""
    config = BertConfig(
        vocab_size=320, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40, pad_token_id=1,
    )  # fmt: skip
    source = BertForPreTraining(config)
    torch.nn.init.constant_(source.cls.predictions.transform.LayerNorm.weight, 3)
    source.save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained("roberta").save_pretrained(tmp_path / "bert")
    task = opened(recipe(init_from=str(tmp_path / "bert")))
    assert torch.equal(
        task.build_model(task.start()).cls.predictions.transform.LayerNorm.weight, torch.full((16,), 3.0)
    )


def test_a_run_is_of_its_data_and_of_the_weights_it_starts_from(recipe, place, tmp_path):
    """A finished run is not taken for one of other texts, nor one that goes on for one from another model."""
    train(recipe(max_steps=2))
    train(recipe(max_steps=2))  # nothing to do
    (tmp_path / "other").mkdir()
    for split in ("train", "valid"):
        (tmp_path / "other" / f"{split}.txt").write_text("\n".join(lines(100, 7)) + "\n")
    with pytest.raises(ValueError, match="was of other data"):
        prepare(recipe(max_steps=2, data_dir=str(tmp_path / "other")))
    save(tmp_path / "seven", seed=7)
    with pytest.raises(ValueError, match="was of other weights in init_from"):
        prepare(recipe(max_steps=2, init_from=str(tmp_path / "seven")))
    (tmp_path / "run" / "finished.json").unlink()
    with pytest.raises(ValueError, match="was of other weights in init_from"):
        prepare(recipe(max_steps=2, init_from=str(tmp_path / "seven")), resume=True)


def test_text_to_score_that_is_too_short_is_found_before_training(recipe, place, tmp_path):
    (tmp_path / "short.txt").write_text("w1 w2\n")
    files = {"train_file": "text/train.txt", "validation_file": str(tmp_path / "short.txt"), "data_dir": None}
    with pytest.raises(ValueError, match=r"the text to score has \d+ tokens, fewer than a block"):
        prepare(recipe(**files))


def test_a_point_that_diverges_is_not_the_best(recipe, tmp_path, monkeypatch, capsys):
    """... and where all do, it is said."""
    changes = {"output_dir": str(tmp_path / "grid"), "max_steps": 3, "max_grad_norm": 0.0}
    found = grid.search(grid.points("labelled.yaml", changes, {"learning_rate": [1e38, 1e-3]}))
    assert [("diverged" in done) for done in found.trained] == [True, False]
    assert found.best.values["learning_rate"] == 1e-3
    assert "the loss is" in capsys.readouterr().err
    changes["output_dir"] = str(tmp_path / "all")
    with pytest.raises(FloatingPointError, match="at every point"):
        grid.search(grid.points("labelled.yaml", changes, {"learning_rate": [1e38]}))


def test_a_bert_is_as_good(recipe, tmp_path):
    config = BertConfig(
        vocab_size=320, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40, pad_token_id=1,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "bert")
    AutoTokenizer.from_pretrained("roberta").save_pretrained(tmp_path / "bert")
    train(recipe(name="mlm", init_from=str(tmp_path / "bert"), max_steps=2))
    done = train(recipe("labelled", "fine", init_from=str(tmp_path / "mlm"), control="mlp", max_steps=2))
    assert 0 <= done["validation"]["accuracy"] <= 1
    assert type(recipe().make_task().load_model(tmp_path / "fine")).__name__ == "BoundedBertForSequenceClassification"


def test_a_grid_is_chosen_on_held_out_text_alone(recipe, place, tmp_path, monkeypatch):
    """Other labels of the text to be scored change nothing of the choice, and it is scored once."""
    asked = []
    measured = Classification._measured
    monkeypatch.setattr(Classification, "_measured", lambda self, *args: asked.append(args[1]) or measured(self, *args))
    other = {"\tmore": "\tfewer", "\tfewer": "\tmore"}
    rows = re.sub("\t(more|fewer)", lambda found: other[found[0]], (place / "test.tsv").read_text())
    (tmp_path / "other.tsv").write_text(rows)
    values = {"learning_rate": [1e-6, 3e-2], "per_device_train_batch_size": [4, 8]}
    steps = [run.values["max_steps"] for run in grid.points("labelled.yaml", {}, values)]
    assert steps == [6, 3, 6, 3]  # as many passes
    found = {}
    for test in ("test.tsv", str(tmp_path / "other.tsv")):
        changes = {"output_dir": str(tmp_path / Path(test).stem), "train_file": "train.tsv", "test_file": test}
        changes["max_steps"] = 3
        runs = grid.points("labelled.yaml", changes, {"learning_rate": [1e-6, 3e-2]})
        found[test] = grid.search(runs)
        task = opened(runs[0])
        assert all(part == task._held_out for part in asked)
        assert not {each.text for each in task._held_out} & {each.text for each in task._train}
        assert len(task._held_out) == 8
    one, other = found.values()
    assert one.trained[0]["validation"] == other.trained[0]["validation"]
    assert Path(one.best.values["output_dir"]).name == Path(other.best.values["output_dir"]).name
    best = max(done["validation"]["accuracy"] for done in one.trained)
    assert read_best(one) == best
    with pytest.raises(ValueError, match="--grid: learning_rate must be a list of values"):
        grid.check_grid("--grid", {"learning_rate": 1e-3})


def read_best(found):
    task = opened(found.best)
    return task.quick_score(task.load_model(Path(found.best.values["output_dir"])), 8)["accuracy"]


def test_a_table_of_models_that_are_fine_tuned(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = tmp_path / "mine" / "small"
    small.mkdir(parents=True)
    steps = {"max_steps": 2, "cache_dir": str(place / "cache")}
    said = MASKED | steps | {"init_from": str(place / "roberta"), "data_dir": str(place / "text")}
    (small / "mlp.yaml").write_text(yaml.safe_dump(said))
    files = {"train_file": str(place / "train.tsv"), "test_file": str(place / "test.tsv")}
    plain = {key: value for key, value in LABELLED.items() if key not in ("init_from", "control", "slots")}
    (small / "_words.yaml").write_text(yaml.safe_dump(plain | steps | files))
    (small / "_grid.yaml").write_text("learning_rate: [1.0e-3, 1.0e-2]\n")
    about = {
        "title": "Mine", "task": "masked_lm", "reading": "Accuracy.",
        "columns": {"words/accuracy": "words", "average/accuracy": "mean", "validation/loss": "loss"},
        "downstream": {"grid": "_grid.yaml", "words": "_words.yaml"},
    }  # fmt: skip
    (tmp_path / "mine" / "table.yaml").write_text(yaml.safe_dump(about))
    plans = tables.plan("mine", "small", recipes=tmp_path, overrides={"downstream.max_length": 24})
    scored, before = [], Classification.scores
    monkeypatch.setattr(Classification, "scores", lambda self, *args: scored.append(self) or before(self, *args))
    page = tables.reproduce("mine", "small", plans)
    assert len(scored) == 1  # the best point, once
    assert "| mlp | `mlp` | 4 | 1 |" in page.read_text()
    (run,) = tables.read_runs(Path("results/mine"))
    rate = (1e-3, 1e-2)[run["downstream"]["words"]["best"]]
    assert f"| mlp | learning_rate {rate} |" in page.read_text().split("## Chosen from the grid")[1]
    assert run["scores"]["words/accuracy"] == run["scores"]["average/accuracy"]
    assert 0 <= run["scores"]["words/accuracy"] <= 100
    assert [point["values"]["learning_rate"] for point in run["downstream"]["words"]["points"]] == [1e-3, 1e-2]
    folders = sorted(Path("runs/mine/small/mlp-seed0-words").iterdir())
    assert sum((folder / "model.safetensors").is_file() for folder in folders) == 1
    again = tables.plan("mine", "small", recipes=tmp_path, overrides={"downstream.max_length": 24})
    assert all(plan.done for plan in again)
    with pytest.raises(ValueError, match="has mlp, seed 0, with other values of words"):
        tables.plan("mine", "small", recipes=tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("masked", {"init_from": "nothing"}, "init_from='nothing': no trained model"),
        ("masked", {"init_from": None}, "which needs a vocab_size of at least 261"),
        ("masked", {"hidden_size": 32}, "init_from='roberta' has hidden_size=16, this recipe 32"),
        ("masked", {"block_size": 39}, "sequences of 39 tokens need as many positions, and the model has 38"),
        ("masked", {"block_size": 4}, "block_size must be a whole number from 8"),
        ("masked", {"mlm_probability": 1.5}, "mlm_probability must be between 0 and 1"),
        ("masked", {"trainable": "tail"}, "trainable must be one of all, head, control"),
        ("masked", {"data_dir": "text,nowhere"}, "no folder nowhere"),
        ("masked", {"data_dir": None}, "a recipe needs one source of text"),
        ("masked", {"control": "linformer", "control_options": {"max_length": 16}}, "control's max_length=16"),
        ("labelled", {"max_length": 39}, "sequences of 39 tokens need as many positions"),
        ("labelled", {"train_file": "none.tsv", "test_file": "test.tsv"}, "no training file at none.tsv"),
        ("labelled", {"train_file": "masked.yaml", "test_file": "test.tsv"}, "must be one of .tsv, .csv, .jsonl"),
        ("labelled", {"glue": "sst3", "data_dir": "."}, "glue must be one of sst2, cola"),
        ("labelled", {"glue": "sst2", "data_dir": "."}, "no folder SST-2: data_dir must hold GLUE's folders"),
        ("labelled", {"glue": "sst2"}, "glue needs data_dir or dataset_name"),
        ("labelled", {"text_column": "sentence"}, "train.tsv has no column 'sentence'; it has 'text', 'label'"),
        ("labelled", {"held_out": 0.0}, "held_out must be between 0 and 1"),
    ],
)
def test_mistakes(recipe, kind, changes, said):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        prepare(recipe(kind, **changes))


def test_a_control_must_be_named(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    plain = {key: value for key, value in MASKED.items() if key not in ("control", "slots")}
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(plain))
    with pytest.raises(ValueError, match="init_from='roberta' has exact attention: the recipe must name a control"):
        prepare(load_recipe(tmp_path / "plain.yaml", {"output_dir": str(tmp_path / "run")}))


def test_one_file_is_enough_to_train(recipe):
    task = opened(recipe("labelled", train_file="train.tsv", test_file=None))
    assert len(task._train) + len(task._held_out) == 80
    assert task.scores(None, []) == {}
    with pytest.raises(ValueError, match="score 'test/accuracy' needs test_file"):
        task.check_scores(["test/accuracy"])


def test_measures():
    right, predicted = [1, 1, 0, 0, 1], [1, 0, 0, 0, 1]
    assert measure("accuracy", predicted, right, 2) == 0.8
    assert measure("f1", predicted, right, 2) == pytest.approx(2 * 2 / (2 + 3))
    assert measure("matthews", predicted, right, 2) == pytest.approx((2 * 2 - 0 * 1) / (2 * 3 * 3 * 2) ** 0.5 * 1.0)
    assert measure("matthews", [0, 0], [0, 1], 2) == 0.0
    assert measure("f1", [0, 1, 2], [0, 1, 1], 3) == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_pairs_that_are_scored_are_not_trained_on(recipe, tmp_path, capsys):
    labelled(tmp_path / "train.tsv", 40, pair=True)
    rows = (tmp_path / "train.tsv").read_text().splitlines()
    swapped = "\t".join([*rows[1].split("\t")[1::-1], "more"])
    (tmp_path / "test.tsv").write_text("\n".join([rows[0], rows[2], swapped]) + "\n")
    files = {"train_file": str(tmp_path / "train.tsv"), "test_file": str(tmp_path / "test.tsv")}
    task = opened(recipe("labelled", **files, text_pair_column="other", drop_shared=True))
    assert "2 of 40 training texts are among those to be scored" in capsys.readouterr().err
    assert len(task._train) + len(task._held_out) == 38
    assert without_shared(task._train, task._scored) == task._train
    model = task.build_model(task.start())
    assert model.config.text_pairs
    assert model.config.id2label == {0: "fewer", 1: "more"}
    item = task.training_set(4, 0).items[0]
    assert item["input_ids"].count(task.tokenizer.sep_token_id) == 3


def test_masked_only_can_be_removed(recipe):
    task = opened(recipe())
    model = task.build_model(task.start())
    only = MaskedOnly(model)
    only.remove()
    assert model(torch.zeros(1, 5, dtype=torch.int64)).logits.shape == (1, 5, 320)


@pytest.mark.parametrize("slots", [1, 6, 8, 63])
def test_slots_that_want_positions_hold_texts_of_every_length(slots):
    """Every slot wants one token most, together they want all that fit, and none three times as often as another."""
    for length in range(1, slots + 1):
        preferred = wanted(slots, length)
        best, token = preferred.max(dim=1)
        assert bool((best > 0).all())
        assert bool(((preferred == best[:, None]).sum(1) == 1).all())
        held = token.bincount(minlength=length)
        assert held.min() >= 1
        assert held.max() < 3 * held.min(), (length, held)
    longer = wanted(slots, 2 * slots + 1)
    assert torch.equal(longer.argmax(0)[slots:], torch.arange(slots, 2 * slots + 1) % slots)


@pytest.mark.parametrize("how", [{}, {"tie_control": False}, {"layers": [1]}], ids=str)
@torch.no_grad()
def test_slots_that_start_at_positions_hold_single_tokens(how):
    """Where hidden states tell nothing but positions, the paper's control then gives what exact attention gives."""
    source = roberta("RobertaModel", hidden_size=64, num_hidden_layers=2, intermediate_size=64)
    source.embeddings.word_embeddings.weight.mul_(0.01)
    exact = convert(copy.deepcopy(source), "softmax").eval()
    words = torch.randint(5, 300, (6, 16), generator=torch.Generator().manual_seed(0))
    right = {length: exact(words[:, :length]).last_hidden_state for length in (4, 8)}  # all tokens held as often
    model = convert(source, "mlp", 8, **how).eval()

    def error():
        return max(
            float((model(words[:, :length]).last_hidden_state - out).norm() / out.norm())
            for length, out in right.items()
        )

    before = error()
    start_at_positions(model, exact, [words[:, :length] for length in (16, 8, 4)])
    assert before > 0.1
    assert error() < 1e-3


def test_a_start_at_positions_is_part_of_a_run(recipe, place, tmp_path):
    """It is the same in every run, changes the control alone, and says what it cannot do before any text is read."""
    still = {"learning_rate": 1e-12, "warmup_steps": 0, "max_steps": 1, "control_start": "positions"}
    train(recipe(name="start", **still))
    train(recipe(name="again", **still))
    started, again = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "again"))
    assert all(torch.equal(started[name], again[name]) for name in started)
    before = load_file(place / "roberta" / "model.safetensors")
    torch.testing.assert_close({name: started[name] for name in before}, before, rtol=0, atol=1e-9)
    (control,) = (weight for name, weight in started.items() if name.startswith("controls."))
    assert float(control.std()) > 3  # at random 1 / sqrt(16)
    for wrong, said in (
        ({"control": "window"}, "is for mlp .* not for control 'window'"),
        ({"control": "mlp:3+window:1"}, "is for mlp"),
        ({"control_options": {"activation": "relu"}}, "is for mlp"),
        ({"init_from": None, "vocab_size": 300}, "needs init_from"),
    ):
        with pytest.raises(ValueError, match=said):
            prepare(recipe(control_start="positions", **wrong))
    (tmp_path / "short.txt").write_text("w1 w2 w3\n")
    short = {"data_dir": None, "train_file": str(tmp_path / "short.txt"), "validation_file": "text/valid.txt"}
    with pytest.raises(ValueError, match="use more text or a smaller block_size"):
        prepare(recipe(control_start="positions", **short))
    with pytest.raises(ValueError, match=r"control_start=positions needs .* has control 'mlp'"):
        prepare(recipe(name="more", control_start="positions", init_from=str(tmp_path / "start")))


def test_attention_transfer_trains_controls_and_nothing_else(recipe, place, tmp_path):
    """The error of the attentions falls; with exact attention it is zero; the saved model is an ordinary one."""
    changes = {"objective": "transfer", "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    done = train(recipe(name="transfer", trainable="control", learning_rate=3e-2, max_steps=20, **changes))
    assert losses(tmp_path / "transfer")[20] < 0.8 * losses(tmp_path / "transfer")[2]
    before, after = (load_file(folder / "model.safetensors") for folder in (place / "roberta", tmp_path / "transfer"))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert done["validation"]["loss"] > 1
    train(recipe(name="then", init_from="transfer", max_steps=2))
    task = opened(recipe(control="softmax", slots=None, **changes))
    model = task.build_model(task.start()).train()
    data = task.training_set(4, 0)
    assert float(model(**data.collate([data.items[0]])).loss.detach()) < 1e-10
    for wrong, said in (({"trainable": "head"}, "is about attention"), ({"init_from": None}, "needs init_from")):
        with pytest.raises(ValueError, match=said):
            prepare(recipe(objective="transfer", **wrong))
    with pytest.raises(ValueError, match="has control 'mlp'"):
        prepare(recipe(name="again", objective="transfer", init_from=str(tmp_path / "transfer")))
