"""The command line: quick help, plain errors, and the demo from end to end."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from command_line import light_session
from torch.nn.utils import parameters_to_vector

from abc_attn import CONTROLS, cli, recipes
from abc_attn.cli import main
from abc_attn.commands.errors import INTERRUPTED
from abc_attn.demo import SPECS, LanguageModel, Settings, run_demo
from abc_attn.provenance import backends

COMMAND = [sys.executable, "-m", "abc_attn.cli"]
COMMANDS = [
    "demo", "bench", "train", "reproduce", "recipes", "report", "convert", "generate", "chat", "evaluate",
    "translate", "classify", "average", "env", "controls",
    *(f"bench {name}" for name in ("op", "decode", "encode", "scaling", "generate", "translate", "encode-model")),
]  # fmt: skip

# What is wrong with a command, and what is said about it. {} is a folder with model/, a folder that looks like a saved
# model, broken/, one whose config.json is not JSON, foreign/, one with a control of somebody's, and text.txt.
MISTAKES = [
    ("", "command"),
    ("demmo", "'demmo'"),
    ("demo --steps 0", "a whole number from 1 is needed, got '0'"),
    ("demo --seed x", "got 'x'"),
    ("demo --stepz 3", "--stepz"),
    ("demo --output no/such/folder/demo.html", "no/such/folder/demo.html cannot be written"),
    ("bench", "benchmark"),
    ("bench opp", "'opp'"),
    ("bench op --tokens 0", "a whole number from 1 to 100000000 is needed, got '0'"),
    ("bench op --tokens", "--tokens"),
    ("bench op --slots -3", "got '-3'"),
    ("bench op --output /dev/null/results", "/dev/null is not a folder"),
    ("bench decode --contexts 1", "a whole number from 2"),
    ("bench encode --tokens 64 128", "128"),
    ("bench scaling --repetitions x", "got 'x'"),
    ("bench generate --model nowhere", "no saved model at nowhere"),
    ("bench encode-model --model {}/model nowhere", "no saved model at nowhere"),
    ("train nowhere.yaml", "no recipe at nowhere.yaml"),
    ("train table1a/small/mpl-64", "did you mean table1a/small/mlp-64"),
    ("train {}/text.txt", "text.txt must be a mapping of keys to values"),
    ("train table1a/small/mlp-64 control=mpl", "unknown control 'mpl'"),
    ("train table1a/small/mlp-64 slots={", "is not a YAML value"),
    ("train table1a/small/mlp-64 slots", "key=value is needed, got 'slots'"),
    ("train table1a/small/mlp-64 --resume slots={", "is not a YAML value"),  # changes may follow an option
    ("train table1a/small/mlp-64 --resume slots", "unrecognized arguments: slots"),
    ("train table1a/small/mlp-64 --resume =3", "unrecognized arguments: =3"),
    ("evaluate {}/model slots=3", "unrecognized arguments: slots=3"),
    ("train table1a/small/mlp-64 --import {}/nowhere.py", "there is no such Python file (tried "),
    ("reproduce table9", "no table 'table9'; there are "),
    ("reproduce table1a --recipes {}/nowhere", "no folder of recipes at"),
    ("reproduce table1a --recipes {}", "no table 'table1a' in {}; there are none"),
    ("reproduce table1a --output {}/text.txt", "text.txt is not a folder"),
    ("recipes --copy {}/model", "exists and is not empty"),
    ("report --results {}/nowhere", "no folder of results at"),
    ("report --results {} --output {}/no/report.html", "report.html cannot be written"),
    ("convert {}/nowhere {}/new", "no saved model at"),
    ("convert {}/text.txt {}/new", "no saved model at"),
    ("convert nowhere {}/new", "a .gguf file, or a name on the hub (owner/name) is needed"),
    ("convert {}/nowhere.gguf {}/new", "no saved model at"),
    ("convert {}/text.gguf {}/new", "text.gguf is not a GGUF file"),
    ("convert {} {}/new --gguf-file no.gguf", "no GGUF file at"),
    ("convert {}/model {}/new --dtype float8", "'float8'"),
    ("convert {}/model {}/new --layers every", "got 'every'"),
    ("convert {}/broken {}/new", "config.json is not JSON"),
    ("convert {}/model {}/model", "exists and is not empty"),
    ("convert {}/model {}/text.txt", "text.txt is a file"),
    ("convert {}/model {}/text.txt/new", "text.txt is not a folder"),
    ("convert {}/model {}/new --where above", "'above'"),
    ("convert {}/model {}/new --control windw:8", "unknown control 'windw' in 'windw:8'; accepted: softmax, window, "),
    ("convert {}/model {}/new --control global:4+window:x", "the slots of a control are a whole number from 1"),
    ("generate {}/foreign --prompt w5", "foreign needs the control 'clock', which is not part of abc-attn: add "),
    ("convert {}/model {}/new --import no_such_module", "no such module among the installed packages or in"),
    ("convert {}/model {}/new --import {}/model/torch.py", "Python has another module named 'torch'"),
    ("generate {}/nowhere --prompt w5", "no saved model at"),
    ("generate {}/model --prompt", "--prompt"),
    ("generate {}/model --prompt=", "the prompt is empty"),
    ("generate {}/model --prompt w5 --temperature -1", "a number from 0 is needed"),
    ("generate {}/model --prompt w5 --load-state {}/nowhere", "no state at"),
    ("generate {}/model --prompt w5 --save-state {}/no/state", "cannot be written"),
    ("generate {}/model --prompt w5 --system w4", "--system is for the beginning of a chat"),
    ("generate {}/model --prompt w5 --chat", "has no chat template"),
    ("chat {}/nowhere", "no saved model at"),
    ("chat {}/text.gguf", "text.gguf is a GGUF file: convert it first"),
    ("chat {}/model", "has no chat template: it was not made to chat; `abc-attn generate"),
    ("chat {}/model --load-state {}/nowhere", "no state at"),
    ("chat {}/model --load-state {}/text.txt --system w4", "give one of them"),
    ("evaluate {}/nowhere --file {}/text.txt", "no saved model at"),
    ("evaluate {}/model --file {}/nowhere.txt", "no text file at"),
    ("evaluate {}/model --file {}/empty.txt", "has no text"),
    ("evaluate {}/model --file {}/latin.txt", "is not UTF-8"),
    ("evaluate {}/model", "--file is needed"),
    ("evaluate {}/model --task sing", "'sing'"),
    ("evaluate {}/model --task translation --source {}/text.txt", "--reference is needed"),
    ("evaluate {}/model --task translation --source {}/text.txt --reference {}/nowhere.txt", "no text file at"),
    ("translate {}/nowhere", "no saved model at"),
    ("translate {}/model --beams 0", "a whole number from 1 is needed, got '0'"),
    ("average {}/model", "--output"),
    ("average {}/model --output {}/model", "exists and is not empty"),
    ("average {}/model --output {}/text.txt", "text.txt is a file"),
]


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """The folder of MISTAKES; and every help and every mistake, run by light_session."""
    folder = tmp_path_factory.mktemp("light")
    for name, config in (("model", "{}"), ("broken", "{"), ("foreign", '{"control": "clock:8"}')):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
        (folder / name / "model.safetensors").touch()
    for name in ("empty.txt", "model/torch.py"):
        (folder / name).touch()
    (folder / "text.txt").write_text("w5 w9")
    (folder / "text.gguf").write_text("w5 w9")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    lines = [f"{command} --help" for command in ["", *COMMANDS]] + [line for line, _ in MISTAKES]
    words = [line.replace("{}", str(folder)).split() for line in lines]
    return folder, dict(zip(lines, light_session(words, folder), strict=True))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_needs_no_torch_and_has_an_example(command, light):
    code, shown, _, heavy = light[1][f"{command} --help"]
    assert code == 0
    assert "example:\n  " + f"abc-attn {command}".strip() in shown
    assert heavy == []


@pytest.mark.parametrize(("line", "said"), MISTAKES)
def test_a_mistake_is_one_line_at_once(line, said, light):
    folder, results = light
    code, out, err, heavy = results[line]
    assert (code, out) == (2, "")
    assert err.startswith("abc-attn: error: ")
    assert err.count("\n") == 1
    assert said.replace("{}", str(folder)) in err
    assert heavy == []


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith("abc-attn 0.")


def test_env_tells_versions_threads_and_backends(capsys):
    assert main(["env"]) == 0
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"abc-attn", "python", "torch", "safetensors", "transformers", "platform", "backend torch"} <= set(shown)
    assert [f"backend {name}" for name, _, _ in backends()] == [name for name in shown if name.startswith("backend")]
    assert int(shown["CPU threads"]) >= 1


def test_env_says_why_a_backend_is_unavailable(monkeypatch, capsys):
    monkeypatch.setattr("abc_attn.commands.about.backends", lambda: [("native", False, "no compiler was found")])
    assert main(["env"]) == 0
    assert re.search("backend native +unavailable: no compiler was found\n", capsys.readouterr().out)


def test_controls_are_those_of_the_registry(capsys):
    assert main(["controls"]) == 0
    shown = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert set(CONTROLS) <= shown
    assert main(["controls", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(CONTROLS)
    assert rows["linformer"]["options"].keys() >= {"max_length"}
    assert (rows["luna"]["causal"], rows["elu"]["read"]) == (False, "linear")


def test_recipes_are_listed_and_copied(tmp_path, capsys):
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out.split()
    assert {*recipes.tables(), *recipes.names()} <= {*shown, *(word.removesuffix(":") for word in shown)}
    copied = tmp_path / "mine"
    assert main(["recipes", "--copy", str(copied)]) == 0
    assert recipes.tables(copied) == recipes.tables()
    for name in recipes.names():
        assert (copied / f"{name}.yaml").read_bytes() == recipes.find(name).read_bytes()


def test_a_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)  # as `abc-attn recipes | head` when head has ended
    with os.fdopen(write, "w") as closed:
        shown = subprocess.run([*COMMAND, "recipes"], stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")


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


def test_an_interrupted_training_says_how_to_go_on(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    prepared = {"load_recipe": lambda path, overrides: path, "prepare": lambda recipe, resume: interrupt}
    monkeypatch.setitem(sys.modules, "abc_attn.training", SimpleNamespace(**prepared))
    with pytest.raises(SystemExit) as exit:
        main(["train", recipes.names()[0]])
    assert exit.value.code == INTERRUPTED
    assert "--resume" in capsys.readouterr().err


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
