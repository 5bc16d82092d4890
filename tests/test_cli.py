"""The command line: quick help, plain errors, and the demo from end to end."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from abc_attn import CONTROLS, cli
from abc_attn.cli import INTERRUPTED, main
from abc_attn.demo import SPECS, LanguageModel, Settings, run_demo

COMMAND = [sys.executable, "-m", "abc_attn.cli"]


@pytest.mark.parametrize("arguments", [[], ["demo"], ["env"], ["controls"], ["train"], ["reproduce"]])
def test_help_is_quick_and_has_an_example(arguments):
    code = "import sys; from abc_attn.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    seconds = []
    for _ in range(3):  # the best of three: other tests run beside this one
        started = time.perf_counter()
        shown = subprocess.check_output([sys.executable, "-c", code, *arguments, "--help"], text=True)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1
    assert "example:\n  abc-attn" in shown


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith("abc-attn 0.")


def test_env_tells_versions_threads_and_backend(capsys):
    assert main(["env"]) == 0
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"abc-attn", "python", "torch", "safetensors", "transformers", "platform", "backend"} <= set(shown)
    assert int(shown["CPU threads"]) >= 1


def test_controls_are_those_of_the_registry(capsys):
    assert main(["controls"]) == 0
    shown = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert set(CONTROLS) <= shown
    assert main(["controls", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(CONTROLS)
    assert rows["linformer"]["options"].keys() >= {"max_length"}
    assert (rows["luna"]["causal"], rows["elu"]["read"]) == (False, "linear")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "command"),
        (["demmo"], "'demmo'"),
        (["demo", "--steps", "0"], "a whole number from 1 is needed, got '0'"),
        (["demo", "--seed", "x"], "got 'x'"),
        (["demo", "--stepz", "3"], "--stepz"),
        (["demo", "--output", "no/such/folder/demo.html"], "no/such/folder/demo.html cannot be written"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(arguments, said, capsys):
    refused_in_one_line(arguments, said, capsys)


def refused_in_one_line(arguments, said, capsys):
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.startswith("abc-attn: error: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err


def test_a_closed_pipe_is_no_error():
    shown = subprocess.run(f"{' '.join(COMMAND)} controls | head -1", shell=True, capture_output=True, text=True)
    assert shown.stdout.startswith("control")
    assert shown.stderr == ""


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "demo", "--threads", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    )
    process.stdout.readline()  # training begins
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert shown.strip().splitlines()[-1] == "abc-attn: interrupted, nothing was written"
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_listing_says_no_more_than_that(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("abc_attn.cli.controls", functools.wraps(cli.controls)(interrupt))
    assert main(["controls"]) == INTERRUPTED
    assert capsys.readouterr().err == "\nabc-attn: interrupted\n"


class Page(HTMLParser):
    """Collects the tags of a page and fails where they do not nest."""

    void = ("meta", "path", "circle", "polyline")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.links = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("href", "src", "srcset", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag


def test_how_a_model_starts_depends_on_the_seed_alone():
    settings = Settings(width=32, heads=2)
    for spec in SPECS:
        first, second, third = (
            parameters_to_vector(LanguageModel(spec, replace(settings, seed=seed)).parameters()) for seed in (0, 0, 1)
        )
        assert torch.equal(first, second), spec  # though random numbers were drawn in between
        assert len(first) == len(third)
        assert not torch.isclose(first, third).all()


def test_demo_from_end_to_end(tmp_path, capsys):
    settings = Settings(
        steps=2, length=32, layers=1, width=32, heads=2, contexts=(32, 1024, 8192), columns=(32, 1024, 8192),
        decode_batch=2, decode_steps=2, rounds=1,
    )  # fmt: skip
    output = tmp_path / "demo.html"
    results = run_demo(settings, output)
    assert [result.spec for result in results] == list(SPECS)
    for result in results:
        assert 1 < result.perplexity < 1e4
        if result.spec == "softmax":  # keys and values of 32 numbers, 4 bytes each, for every token
            assert result.state_bytes == {context: context * 2 * 32 * 4 for context in settings.contexts}
        else:
            assert len(set(result.state_bytes.values())) == 1  # whatever the context

    shown = capsys.readouterr()
    rows = {line.split()[0]: line.split() for line in shown.out.splitlines() if line.startswith(SPECS)}
    assert rows["linformer"][-2:] == ["n/a", "n/a"]
    for spec in SPECS[1:]:
        assert rows[spec].count("n/a") == (4 if spec == "linformer" else 0)
        assert rows[spec][2].endswith("x")
    assert f"training: {5 * settings.steps}/{5 * settings.steps}, " in shown.err  # plain lines: this is no terminal
    assert "\r" not in shown.err

    text = output.read_text()
    page = Page(text)
    assert page.links == []
    assert "http" not in text
    assert not {"script", "link", "iframe", "img"} & set(page.seen)
    assert "url(" not in text
    assert "@import" not in text
    assert page.seen.count("figure") == 2
    assert text.count("n/a</td>") == 4
    assert list(tmp_path.iterdir()) == [output]
