"""What a user does from an empty folder: docs/journeys.md, run. test_packaging.py runs the journey of the wheel in a
clean environment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
import subprocess
import sys
import warnings

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from command_line import light_session  # noqa: E402
from gguf_file import write_gguf  # noqa: E402
from hf_sources import save, source, talkative  # noqa: E402
from journeys import GGUF_FILE, Step, journey  # noqa: E402
from safetensors import safe_open  # noqa: E402

from abc_attn.cli import main  # noqa: E402

CHATTING = "From a GGUF file to a conversation that is kept"
TRAINING = "From a Qwen3 to a trained model that loads anywhere"
INSTALLING = "From a wheel to a text"


@pytest.fixture(params=["one process", pytest.param("a process a step", marks=pytest.mark.processes)])
def run(request, tmp_path, monkeypatch):
    """Runs a step of the page in the empty folder, and returns what it printed, which is compared with the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    outputs = run_here if request.param == "one process" else run_in_a_process

    def run(step: Step) -> str:
        output = outputs(shlex.split(step.command), "".join(f"{line}\n" for line in step.typed))
        step.check(output)
        return output

    return run


def run_here(words, typed):
    output, before = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(typed)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a user's session does not end at a warning
            if words[0] == "python":
                runpy.run_path(words[1], run_name="__main__")
            else:
                assert main(words[1:]) == 0, output.getvalue()
    finally:
        sys.stdin = before
    return output.getvalue()


def run_in_a_process(words, typed):
    programs = {"python": [sys.executable], "abc-attn": [sys.executable, "-m", "abc_attn.cli"]}
    environment = os.environ | {"HF_HOME": os.path.abspath("home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*programs[words[0]], *words[1:]],
        input=typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def tensors(file):
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name).tolist() for name in opened.keys()}  # noqa: SIM118


def answers(output, told):
    """What a chat printed, without lines that do not come from the model."""
    return [line for line in output.splitlines() if not line.startswith(told)]


def test_a_gguf_file_becomes_a_conversation_that_is_kept(run, tmp_path):
    write_gguf(talkative(), tmp_path / GGUF_FILE)
    _, (convert, first, second) = journey(CHATTING)
    run(convert)
    told = ("saved ", "loaded ", "begun anew")
    kept = answers(run(first), told) + answers(run(second), told)[:-1]  # the last line is that of /stats
    questions = [line for step in (first, second) for line in step.typed if not line.startswith("/")]
    assert len(kept) == len(questions) == 2
    # One session without /save and /load says the same. Without the first question, the second is answered otherwise.
    whole = answers(run(Step(first.command, [*questions, "/reset", questions[1]])), told)
    assert whole[:2] == kept
    assert whole[2] != kept[1]
    run(Step(first.command, [second.typed[0], "/save again.state"]))
    assert tensors(tmp_path / "again.state") == tensors(tmp_path / "zork.state")


def test_a_qwen3_is_converted_trained_and_loaded_where_we_are_not_known(run, tmp_path):
    save(source(transformers.Qwen3ForCausalLM), tmp_path / "qwen3")
    files, (convert, *scripts) = journey(TRAINING)
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    run(convert)
    assert [step.command for step in scripts] == [f"python {name}" for name in files]
    said = [run(step).rstrip("\n") for step in scripts][-1]
    expected = transformers.pipeline("text-generation", model=str(tmp_path / "trained"))
    text = expected("Once upon a time", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert said.endswith(text)
    assert len(text) > len("Once upon a time")
    weights = [tensors(tmp_path / name / "model.safetensors") for name in ("bounded", "trained")]
    assert weights[0].keys() == weights[1].keys()
    assert weights[0] != weights[1]


def test_after_the_install_a_file_becomes_a_text(run, tmp_path):
    write_gguf(talkative(), tmp_path / GGUF_FILE)
    _, steps = journey(INSTALLING)
    ours = [step for step in steps if step.command.startswith("abc-attn ")]
    assert len(ours) == 2
    for step in ours:
        run(step)


def test_a_wrong_step_is_one_line_before_torch_is_imported(tmp_path):
    (tmp_path / GGUF_FILE).write_bytes(b"GGUF")
    for name, config in (("smollm2", {"control": "global:4+window:508"}), ("base", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").touch()
    _, steps = journey("When a step is wrong")
    assert len(steps) > 10
    results = light_session([shlex.split(step.command)[1:] for step in steps], tmp_path)
    for step, (code, out, err, heavy) in zip(steps, results, strict=True):
        assert (code, out, err.count("\n"), heavy) == (2, "", 1, []), step.command
        assert len(step.printed) == 1
        step.check(err)
    assert {path.name for path in tmp_path.iterdir()} == {GGUF_FILE, "smollm2", "base"}
