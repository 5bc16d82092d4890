"""Training translators: the step of transformers' own Marian, runs that resume bit for bit, averages, and scores."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from safetensors.torch import load_file
from tiny_pairs import TINY, write_pairs
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel
from two_processes import train_in_two

from abc_attn import recipes
from abc_attn.recipes.table import Table
from abc_attn.report import plots
from abc_attn.report.plots import draw
from abc_attn.training import load_recipe, prepare, tables, train
from abc_attn.training.trainer import read_metrics


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a little parallel text and the recipe `tiny.yaml`."""
    folder = write_pairs(tmp_path_factory.mktemp("translation"))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return folder


@pytest.fixture
def recipe(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    return lambda name="run", **changes: load_recipe("tiny.yaml", {"output_dir": str(tmp_path / name)} | changes)


def losses(folder):
    return {record["step"]: record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record}


def test_a_run_resumes_bit_for_bit_and_is_averaged(recipe, tmp_path, capsys):
    done = train(recipe("whole", dropout=0.3))
    whole = tmp_path / "whole"
    assert done["validation"].keys() == {"loss", "perplexity per token"}
    assert "tokens/s" in capsys.readouterr().err
    assert losses(whole)[12] < losses(whole)[2]
    # As a kill after the first checkpoint leaves it.
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        shutil.copyfile(whole / name, killed / name)
    train(recipe("first", dropout=0.3, max_steps=6))
    shutil.copytree(tmp_path / "first" / "checkpoint-4", killed / "checkpoint-4")
    train(recipe("killed", dropout=0.3), resume=True)
    assert losses(killed) == losses(whole)
    final = load_file(whole / "model.safetensors")
    assert load_file(killed / "model.safetensors").keys() == final.keys()
    for name, weight in load_file(killed / "model.safetensors").items():
        assert torch.equal(weight, final[name]), name
    # The model is the mean of the last two checkpoints, and has the score that was reported.
    last = [load_file(whole / f"checkpoint-{step}" / "model.safetensors") for step in (8, 12)]
    for name, weight in final.items():
        torch.testing.assert_close(weight, (last[0][name] + last[1][name]) / 2)
    assert not torch.equal(final["model.shared.weight"], last[1]["model.shared.weight"])
    task = recipe("whole", dropout=0.3).make_task()
    task.open()
    model = task.load_model(whole)
    assert task.quick_score(model, 8) == pytest.approx(done["validation"])
    auto = AutoModelForSeq2SeqLM.from_pretrained(whole)
    assert type(auto) is type(model)
    assert auto.config.context_sentences == 0
    assert AutoTokenizer.from_pretrained(whole)("e1").input_ids[-1] == auto.config.eos_token_id


def test_a_step_is_that_of_transformers_marian(recipe):
    """Loss and gradients of the first batch, with control softmax, and the form of Vaswani et al."""
    task = recipe(control="softmax", slots=None, where=None, dropout=0.0).make_task()
    task.check()
    task.open()
    torch.manual_seed(1)
    ours = task.build_model(None)
    values = {key: value for key, value in ours.config.to_dict().items() if key not in ("model_type", "architectures")}
    plain = MarianMTModel(MarianConfig(**values))
    plain.load_state_dict(ours.state_dict())
    found = []
    for model in (ours.train(), plain.train()):
        batch = dict(task.training_set(4, 0).items[0])
        labels = batch.pop("labels")
        loss = task.loss_function()(model(**batch), labels)
        loss.backward()
        found.append((loss, {name: weight.grad for name, weight in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    torch.testing.assert_close(found[0][1], found[1][1])
    config = ours.config
    assert config.scale_embedding
    assert config.activation_function == "relu"
    assert ours.lm_head.weight is ours.model.shared.weight is ours.model.encoder.embed_tokens.weight
    assert task.loss_function().smoothing == 0.1


@pytest.mark.processes
def test_two_processes_give_the_loss_of_one(recipe, tmp_path):
    """DDP: the batches of two processes are the two accumulated batches of one, though they have other sizes."""
    plain = {"dropout": 0.0}
    train(recipe("one", **plain))
    plain |= {"output_dir": str(tmp_path / "two"), "ddp_backend": "gloo", "gradient_accumulation_steps": 1}
    train_in_two(plain)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5


def test_control_and_options_by_site(recipe):
    task = recipe(control={"self": "window", "cross": "mlp"}, control_options={"self": {"gate": True}}).make_task()
    task.check()
    task.open()
    controls = task.build_model(None).controls
    assert [type(controls[site]).__name__ for site in ("self", "cross")] == ["Gated", "MLP"]
    assert (controls["self"].slots, controls["cross"].slots) == (2, 4)
    layers = task.build_model(None).model.decoder.layers
    assert len({id(layer.encoder_attn.control) for layer in layers}) == 1  # tied


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_dir": "nowhere"}, "no folder nowhere"),
        ({"source_lang": "es"}, "no train text in pairs: looked for train.es"),
        ({"train_source": "a"}, "all six are needed"),
        ({"dataset_name": "x", "data_dir": None, "context_sentences": 3}, "context_sentences needs documents"),
        ({"vocab_size": 100}, "vocab_size of at least 260"),
        ({"max_length": 65}, "max_length=65 tokens of a side need as many positions"),
        ({"max_tokens": 63}, "max_tokens=63 must be at least max_length=64"),
        ({"slots": {"self": 2}}, "must give a number for each bounded site"),
        ({"control": {"self": "mlp"}}, "must give a control for each bounded site"),
        ({"control_options": {"encoder": {"gate": True}}}, "options of site 'encoder', which is not bounded here"),
        ({"control_options": {"self": 3}}, "control_options of site 'self' must be a mapping"),
        ({"control": "luna"}, "cannot be causal"),
        ({"control": "linformer", "control_options": {"max_length": 32}}, "more than the control's max_length=32"),
        ({"d_model": 15}, "15"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_the_text_is_read(recipe, monkeypatch, changes, said):
    monkeypatch.setattr("abc_attn.data.pairs.PairCorpus.open", None)  # would fail if it were called
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=said):
        prepare(recipe(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"per_device_train_batch_size": 2}, "cannot choose per_device_train_batch_size: max_tokens says how large"),
        ({"length_penalty": "much"}, "length_penalty must be a number, got 'much'"),
        ({"num_beams": 0}, "num_beams must be a whole number from 1, got 0"),
        ({"average_checkpoints": 5}, "average_checkpoints=5: there are fewer in max_steps=12 with save_steps=4"),
        ({"save_total_limit": 1}, "average_checkpoints=2 needs a save_total_limit of as many, got 1"),
        ({"decoder_start_token_id": 3}, "unknown key 'decoder_start_token_id'"),
    ],
)
def test_wrong_values(recipe, changes, said):
    with pytest.raises(ValueError, match=said):
        recipe(**changes)


def test_from_a_trained_softmax(recipe):
    train(recipe("base", control="softmax", slots=None, where=None))
    done = train(recipe("mine", init_from="base", max_steps=8))
    scratch = train(recipe("scratch", max_steps=8))
    assert done["validation"]["loss"] < scratch["validation"]["loss"]
    with pytest.raises(ValueError, match="init_from='base' has d_model=16, this recipe 32"):
        train(recipe("other", init_from="base", d_model=32))


def test_a_translator_keeps_its_tokens_on_other_text(recipe, tmp_path):
    train(recipe("base"))
    other = tmp_path / "other pairs"
    shutil.copytree("pairs", other)
    for file in other.iterdir():
        file.write_text(file.read_text().replace("e", "z"))
    task = recipe("other", init_from="base", data_dir=str(other)).make_task()
    task.open()
    new = recipe("new", data_dir=str(other)).make_task()
    new.open()
    assert (tmp_path / "base" / "tokenizer.json").read_bytes() == (task.corpus.folder / "tokenizer.json").read_bytes()
    assert task.tokenizer.get_vocab() != new.tokenizer.get_vocab()
    words = "z3 z17"
    assert task.tokenizer.decode(task.tokenizer(words).input_ids, skip_special_tokens=True).strip() == words
    assert task.fingerprint != new.fingerprint
    saved = json.loads((tmp_path / "base" / "tokenizer.json").read_text())
    saved["added_tokens"], saved["model"]["vocab"]["<sap>"] = [], saved["model"]["vocab"].pop("<sep>")
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="not the tokenizer of a translator of abc-attn: <sep> missing"):
        recipe("third", init_from="base").make_task().open()


def test_the_bias_of_the_output_may_be_how_frequent_tokens_are(recipe, tmp_path):
    task = recipe().make_task()
    task.open()
    assert not task.build_model(None).final_logits_bias.any()  # Marian's own
    task = recipe(frequency_bias=True).make_task()
    task.open()
    model = task.build_model(None)
    target = torch.from_numpy(task.corpus.sides["train"][1].ids.astype("int64"))
    counts = torch.bincount(target, minlength=len(task.tokenizer)).clamp(min=0.5)
    torch.testing.assert_close(model.final_logits_bias[0], (counts / counts.sum()).log())
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(task.load_model(tmp_path / "saved").final_logits_bias, model.final_logits_bias)


def test_a_table_of_documents(place, tmp_path, monkeypatch):
    """Trained, scored with predicted and with reference context, and recorded with signatures; a row of another table
    is not trained again."""
    monkeypatch.chdir(tmp_path)
    values = TINY | {"data_dir": str(place / "documents"), "cache_dir": str(place / "cache"), "context_sentences": 3}
    values |= {"max_length": 128, "max_position_embeddings": 128, "max_steps": 8, "num_beams": 2, "eval_documents": 2}
    names = ["BLEU", "BLEU after references", "BLEU by document", "BLEU long", "chrF"]
    said = {
        "title": "Mine",
        "task": "translation",
        "reading": "BLEU.",
        "columns": {f"test/{name}": name for name in names},
    }
    for table, row in (("one", yaml.safe_dump(values)), ("two", "extends: ../../one/small/row.yaml\n")):
        (tmp_path / table / "small").mkdir(parents=True)
        (tmp_path / table / "table.yaml").write_text(yaml.safe_dump(said))
        said |= {"columns": {"test/chrF": "chrF"}}
        (tmp_path / table / "small" / "row.yaml").write_text(row)
    for table in ("one", "two"):
        page = tables.reproduce(table, "small", tables.plan(table, "small", recipes=Path(".")))
        (record,) = [json.loads(line) for line in Path(f"results/{table}/runs.jsonl").read_text().splitlines()]
        assert record["scores"].keys() == ({f"test/{name}" for name in names} if table == "one" else {"test/chrF"})
        assert all(0 <= score <= 100 for score in record["scores"].values())
        assert record["signatures"]["BLEU"] in page.read_text()
        assert record["recipe"] == "one/small/row"
        assert str(place) not in json.dumps(record)
    assert [path.name for path in Path("runs").iterdir()] == ["one"]
    with pytest.raises(ValueError, match=r"no score 'test/TER': .*BLEU by document; the same with after references"):
        load_recipe("one/small/row.yaml").make_task().check_scores(["test/TER"])


@pytest.mark.parametrize(
    ("table", "scale", "shared"),
    [
        ("table5", "full", {"mlp-32-8", "mlp-32-32"}),
        ("table5", "small", set()),  # of shorter trainings
        ("table6", "full", {"base", "exp-32-8", "exp-32-32"}),
        ("table6", "small", {"base", "exp-32-8", "exp-32-32"}),
    ],
)
def test_rows_of_other_tables(table, scale, shared):
    runs = {row: str(known.run()) for row, known in Table.open(table).rows(scale).items()}
    assert {row for row, run in runs.items() if not run.startswith(f"{table}/")} == shared
    assert "exp-32-8" not in runs or runs["exp-32-8"] == f"table2a/{scale}/mlp-32-8"


def test_the_heat_map(tmp_path):
    table = Table.open("table5")
    runs = {}
    for row, known in table.rows("small").items():
        values = load_recipe(known.path).values
        runs[row] = [{"values": values, "scores": {"validation/BLEU": 30.0 + values["slots"]["cross"]}}]
    draw(table, runs, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000
    figure = Figure()
    plots.heatmap(table, runs, figure)
    ours, papers = figure.axes
    assert sorted(text.get_text() for text in ours.texts) == sorted(
        f"{30 + run['values']['slots']['cross']:.1f}" for (run,) in runs.values()
    )
    assert len(papers.texts) == len(table.paper)
    assert ours.get_xlabel() == "slots for the source (cross)"
    draw(table, {}, tmp_path / "empty.png")
    assert {"table2a", "table2b", "table5", "table6"} <= {*recipes.tables()}
