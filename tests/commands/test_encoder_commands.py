"""classify, evaluate of classifiers and masked language models, and train --grid."""

import io
import json
import sys

import pytest
import yaml
from command_line import refused_in_one_line
from tiny_encoder import labelled, lines, roberta, save, tokenizer

from abc_attn.cli import main
from abc_attn.hf import convert

NAMES = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """`one` and `two`: classifiers of texts and of pairs; `masked`; labelled.tsv and text.txt."""
    folder = tmp_path_factory.mktemp("encoder-commands")
    save(folder / "masked")
    for name in ("one", "two"):
        model = convert(roberta("RobertaForSequenceClassification", **NAMES), "mlp", 4)
        model.config.text_pairs = name == "two"
        model.save_pretrained(folder / name)
        words = tokenizer()
        words.model_max_length = 32
        words.save_pretrained(folder / name)
    (folder / "text.txt").write_text("\n".join(lines(30)) + "\n")
    path = labelled(folder / "labelled.tsv", 12)
    path.write_text(path.read_text().replace("more", "good").replace("fewer", "bad"))
    return folder


@pytest.fixture
def classified(place, monkeypatch, capsys):
    def run(text, model="one"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        code = main(["classify", str(place / model)])
        shown = capsys.readouterr()
        return code, shown.out.split("\n")[:-1], shown.err

    return run


def test_as_many_lines_come_out_as_go_in(classified):
    texts = lines(300)
    texts[7] = " "
    code, out, _ = classified("\n".join(texts).encode())
    assert code == 0
    assert len(out) == 300
    assert out[7] == ""
    labels, shares = zip(*(line.split("\t") for line in out if line), strict=True)
    assert {*labels} == {"bad", "good"}
    assert all(0.5 <= float(share) <= 1 for share in shares)
    assert classified(texts[3].encode())[1] == [out[3]]


def test_pairs_and_lines_that_cannot_be_used(classified):
    code, out, said = classified(b"w1 w2\tw3\nonly one\nw1\tb\xff\n\nw4\tw5\n", "two")
    assert code == 2
    assert [bool(line) for line in out] == [True, False, False, False, True]
    assert "line 2 must be two texts with a tab between them" in said
    assert "line 3 is not UTF-8 text (byte 0xff at column 4)" in said
    assert "2 lines were not labelled, and are empty: 2, 3" in said


def test_evaluate_a_classifier(place, capsys):
    command = ["evaluate", str(place / "one"), "--task", "classification", "--file", str(place / "labelled.tsv")]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == 12
    assert 0 <= found["accuracy"] <= 1
    assert found.keys() == {"accuracy", "f1", "matthews", "examples", "seconds"}
    for more, said in (
        (["--columns", "sentence", "label"], "no column 'sentence'"),
        (["--columns", "text", "text", "label"], "this model takes one text"),
        (["--columns", "label"], "--columns names those of the text"),
    ):
        refused_in_one_line([*command, *more], said, capsys)


def test_evaluate_a_masked_language_model(place, capsys):
    command = ["evaluate", str(place / "masked"), "--task", "masked_lm", "--file", str(place / "text.txt")]
    assert main([*command, "--window", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] > 0
    assert found["blocks"] > 5
    refused_in_one_line([*command, "--window", "39"], "--window must be from 8 to 38", capsys)
    command[1] = str(place / "one")
    refused_in_one_line(command, "a masked language model (...ForMaskedLM) is needed", capsys)


def test_train_a_grid(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = {
        "task": "classification", "init_from": str(place / "masked"), "control": "mlp", "slots": 2, "max_steps": 2,
        "train_file": str(place / "labelled.tsv"), "test_file": str(place / "labelled.tsv"), "max_length": 20,
        "save_steps": 2, "logging_steps": 2, "use_cpu": True, "output_dir": "out",
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "mine.yaml", "--grid", "learning_rate=[1e-4,1e-3]"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 3
    assert out[2].startswith("best accuracy on held-out text: out/learning_rate=")
    assert main(["train", "mine.yaml", "--grid", "learning_rate=[1e-4,1e-3]"]) == 0  # finished: nothing to do
    capsys.readouterr()
    said = "--grid (changes to the recipe go before it): max_steps must be a list of values"
    refused_in_one_line(["train", "mine.yaml", "--grid", "learning_rate=[1e-4]", "max_steps=3"], said, capsys)
