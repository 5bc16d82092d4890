"""The examples run, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[1] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_are_run_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == {"classify_roberta", "stream_llama", "train_translator"}


def test_classify_roberta():
    assert example("classify_roberta").main(steps=60) > 0.6


def test_stream_llama(tmp_path):
    held = example("stream_llama").main(file=tmp_path / "state.safetensors")
    assert len(held) == 8
    assert len(set(held)) == 1


def test_train_translator(tmp_path):
    losses = example("train_translator").main(str(tmp_path), steps=8)
    assert losses[-1] < losses[0]
    assert (tmp_path / "README.md").exists()
