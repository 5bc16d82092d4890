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
    known = {"classify_roberta", "stream_llama", "train_translator", "translate_files"}
    assert {path.stem for path in FOLDER.glob("*.py")} == known


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


def test_translate_files(tmp_path, capsys):
    """Two files of one's own, given as such."""
    module = example("translate_files")
    for side, name in enumerate(("mine.en", "mine.de")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in module.toy(100)))
    loss = module.main(*(str(tmp_path / name) for name in ("mine.en", "mine.de")), str(tmp_path), steps=20)
    assert loss < 3.5  # log of the 300 tokens is 5.7
    assert capsys.readouterr().out.count(" -> ") == 3
    assert (tmp_path / "run" / "model.safetensors").exists()
    (tmp_path / "mine.de").write_text("one line\n")
    with pytest.raises(SystemExit, match=r"mine.en has 100 lines, .*mine.de 1: each line"):
        module.main(*(str(tmp_path / name) for name in ("mine.en", "mine.de")))
