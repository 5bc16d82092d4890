"""What a user does from an empty folder, each step a process of its own; docs/huggingface.md shows it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = pytest.mark.processes

from gguf_file import write_gguf  # noqa: E402
from hf_sources import rows, save, source  # noqa: E402

import abc_attn.hf as hf  # noqa: E402
from abc_attn.cli import main  # noqa: E402


def run(folder, *command, given=""):
    """A process in `folder` that knows nothing of this one; what it wrote."""
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, input=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_gguf_file_becomes_a_conversation_that_is_kept(tmp_path):
    model = source(transformers.LlamaForCausalLM)
    model.lm_head.weight.data[:3] = 0  # no answer ends
    write_gguf(model, tmp_path / "tiny.gguf")
    command = ["-m", "abc_attn.cli"]
    control = ["--control", "global:2+window:30", "--positions", "slot"]
    assert "BoundedLlama" in run(tmp_path, *command, "convert", "tiny.gguf", "bounded", *control).stdout
    chat = [*command, "chat", "bounded", "--tokens", "6"]
    whole = run(tmp_path, *chat, given="my name is zork\nwhat is my name?\n").stdout
    first = run(tmp_path, *chat, given="my name is zork\n/save state\n")
    assert "saved" in first.stderr
    second = run(tmp_path, *chat, given="/load state\nwhat is my name?\n/stats\n")
    assert first.stdout + "".join(second.stdout.splitlines(keepends=True)[:-1]) == whole
    assert "whatever the length" in second.stdout


PIPELINE = """
import transformers
run = transformers.pipeline("text-generation", model="trained", trust_remote_code=True)
print(run("w5 w9", max_new_tokens=8, do_sample=False)[0]["generated_text"])
"""


def test_a_converted_model_is_trained_and_used_where_we_are_not_known(tmp_path):
    save(source(transformers.Qwen3ForCausalLM), tmp_path / "qwen3")
    assert main(["convert", str(tmp_path / "qwen3"), str(tmp_path / "bounded"), "--control", "window:3+mlp:4"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bounded")
    arguments = transformers.TrainingArguments(
        tmp_path / "runs", max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    hf.Trainer(model, arguments, train_dataset=rows(model, 12)).train()
    save(model, tmp_path / "trained")
    expected = transformers.pipeline("text-generation", model=str(tmp_path / "trained"))
    written = expected("w5 w9", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert run(tmp_path, "-c", PIPELINE).stdout.splitlines()[-1] == written
