"""Damaged runs and caches: what is damaged is named, the checkpoint before it is used, and two runs never meet."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_text import fill
from transformers import AutoModelForCausalLM

from abc_attn import data
from abc_attn.cli import main
from abc_attn.files import FolderLock
from abc_attn.training import load_recipe, train
from abc_attn.training.checkpoints import CHECKSUMS, last_whole_checkpoint
from abc_attn.training.trainer import read_metrics
from fuzz import kills


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with text, a recipe, and a finished run in `whole`."""
    folder = fill(tmp_path_factory.mktemp("runs"))
    before = Path.cwd()
    os.chdir(folder)
    train(load_recipe("tiny.yaml", {"output_dir": "whole", "max_steps": 8}))
    os.chdir(before)
    return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch):
    """A copy of the run, as if it had been killed after its last checkpoint."""
    monkeypatch.chdir(place)
    shutil.copytree("whole", tmp_path / "run")
    (tmp_path / "run" / "finished.json").unlink()
    return tmp_path / "run"


def resume(folder):
    return main(["train", "tiny.yaml", f"output_dir={folder}", "max_steps=8", "--resume"])


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-content[-1] % 40 - 1] ^= 4
    file.write_bytes(content)


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"]
DAMAGES = {"cut": cut, "emptied": lambda file: file.write_bytes(b""), "flipped": flip, "gone": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_checkpoint_before_is_taken(run, name, damage):
    DAMAGES[damage](run / "checkpoint-8" / name)
    checkpoint, damaged = last_whole_checkpoint(run)
    assert checkpoint == run / "checkpoint-4"
    assert len(damaged) == 1
    assert f"checkpoint-8/{name}" in damaged[0]


@pytest.mark.parametrize("damage", ["cut", "emptied", "gone"])
@pytest.mark.parametrize("name", FILES[:4])
def test_checkpoints_without_checksums_are_looked_at_too(run, name, damage):
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / CHECKSUMS).unlink()
    assert last_whole_checkpoint(run) == (run / "checkpoint-8", [])
    if (name, damage) != ("model.safetensors", "gone"):
        DAMAGES[damage](run / "checkpoint-8" / name)
        checkpoint, damaged = last_whole_checkpoint(run)
        assert checkpoint == run / "checkpoint-4"
        assert name in damaged[0]


def test_a_run_goes_on_from_the_checkpoint_before_to_the_same_end(place, run, capsys):
    flip(run / "checkpoint-8" / "optimizer.pt")
    assert resume(run) == 0
    said = capsys.readouterr().err
    assert "checkpoint-8/optimizer.pt is damaged" in said
    assert "going on from checkpoint-4 before it" in said
    losses = [[record.get("loss") for record in read_metrics(f / "metrics.jsonl")] for f in (place / "whole", run)]
    assert losses[0] == losses[1]
    whole, resumed = (AutoModelForCausalLM.from_pretrained(folder) for folder in (place / "whole", run))
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, resumed.get_parameter(name)), name
    assert last_whole_checkpoint(run) == (run / "checkpoint-8", [])


def refused(folder, said, capsys):
    assert resume(folder) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert said in shown


def test_no_checkpoint_is_whole(run, capsys):
    for checkpoint in run.glob("checkpoint-*"):
        cut(checkpoint / "model.safetensors")
    refused(run, f"To start anew, give another output_dir or remove {run}", capsys)


@pytest.mark.parametrize(
    "content", ["{}", "", "[1]", "null", "[" * 100_000, '{"values": 5}', '{"values": {}}', "\udcff"]
)
def test_a_damaged_run_json(run, capsys, content):
    (run / "run.json").write_text(content, errors="surrogateescape")
    refused(run, "run.json", capsys)
    refused(run, "start anew, give another output_dir or remove", capsys)


@pytest.mark.parametrize("content", ["{}", "x", "null", '{"steps": "x"}'])
def test_a_damaged_finished_json(run, capsys, content):
    (run / "finished.json").write_text(content)
    refused(run, "finished.json", capsys)
    refused(run, "remove it and resume", capsys)


def test_damaged_metrics_end_where_the_damage_is(tmp_path):
    good = json.dumps({"step": 1, "seconds": 0.5})
    for bad in (b"x", b"[1]", b"5", b'{"step": "x"}', b"{}", b"\xff", b"[" * 100_000):
        (tmp_path / "metrics.jsonl").write_bytes(good.encode() + b"\n" + bad + b"\n" + good.encode() + b"\n")
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_model_to_start_from_that_is_damaged(place, run, capsys):
    flip(run / "model.safetensors")
    arguments = ["train", "tiny.yaml", f"output_dir={run.parent / 'new'}", f"init_from={run}", "max_steps=8"]
    assert main(arguments) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err


def test_two_runs_in_one_folder(run, capsys):
    lock = FolderLock(run)
    refused(run, f"{run} is in use by process {os.getpid()}", capsys)
    lock.release()


# Tokenized text.


@pytest.fixture
def source(place):
    return data.Source(data.find_files(place / "text"))


def test_a_damaged_cache_is_made_again(source, tmp_path, capsys):
    good = data.build_corpus(source, tmp_path).tokens["train"].tolist()
    (folder,) = tmp_path.iterdir()
    for name in ("train.npy", "corpus.json", "tokenizer.json"):
        for damage in (cut, flip, Path.unlink):
            damage(folder / name)
            assert data.build_corpus(source, tmp_path).tokens["train"].tolist() == good
            assert f"{name}" in (said := capsys.readouterr().err)
            assert "is made again" in said
    (folder / "corpus.sha256").unlink()  # of a cache of version 0.1
    data.build_corpus(source, tmp_path)
    assert not capsys.readouterr().err


def test_two_processes_make_one_cache(source, tmp_path, monkeypatch):
    """The second is quicker: the first takes what it has made."""
    write = data.text._write
    calls = []

    def slow(*arguments):
        calls.append(arguments)
        write(*arguments)
        if len(calls) == 1:
            data.build_corpus(source, tmp_path)

    monkeypatch.setattr("abc_attn.data.text._write", slow)
    corpus = data.build_corpus(source, tmp_path)
    assert len(calls) == 2
    assert [path.name for path in tmp_path.iterdir()] == [corpus.folder.name]


@pytest.mark.parametrize("case", [1, 2, 3], ids=["convert", "save_state", "cache"])
def test_kill_9_leaves_nothing_half_written(case, tmp_path):
    kills.run(case, tmp_path)
