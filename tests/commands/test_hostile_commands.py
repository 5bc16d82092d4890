"""Hostile command lines and recipes: one line that names the key or the file, before anything slow."""

from __future__ import annotations

import ctypes
import gzip
import io
import json
import lzma
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from command_line import refused_in_one_line  # noqa: E402
from tiny_text import fill  # noqa: E402

from abc_attn.cli import main  # noqa: E402
from fuzz import commands as fuzz  # noqa: E402
from fuzz.folders import folders  # noqa: E402


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("hostile"))


WRONG_VALUES = [
    "learning_rate=x",
    "learning_rate=nan",
    "learning_rate=-1",
    "learning_rate=.inf",
    "learning_rate=true",
    "learning_rate=[1]",
    "per_device_train_batch_size=0",
    "per_device_train_batch_size=-1",
    "per_device_train_batch_size=1.5",
    "num_hidden_layers=0",
    "num_hidden_layers=x",
    "num_hidden_layers=1e99",
    "hidden_size=-1",
    "intermediate_size=0",
    "vocab_size=0",
    "max_steps=x",
    "max_steps=0",
    "max_steps=1e99",
    "max_steps=100000000000",
    "max_steps=null",
    "seed=-1",
    "seed=4294967296",
    "warmup_steps=-1",
    "warmup_steps=x",
    "weight_decay=nan",
    "adam_beta1=1",
    "adam_beta2=-0.1",
    "adam_epsilon=x",
    "max_grad_norm=-1",
    "label_smoothing_factor=2",
    "dataloader_num_workers=-1",
    "dataloader_num_workers=1000000",
    "save_total_limit=0",
    "gradient_accumulation_steps=0",
    "logging_steps=0.5",
    "eval_steps=0",
    "use_cpu=5",
    "bf16=x",
    "optim=5",
    "lr_scheduler_type=5",
    "neftune_noise_alpha=-1",
    "ddp_timeout=0",
    "block_size=-1",
    "block_size=100000000000",
    "eval_tokens=0",
    "data_dir=5",
    "task=[1]",
    "dropout=2",
    "dropout=x",
    "layerdrop=nan",
    "local_heads=-1",
    "position_period=1",
    "div_val=0",
    "output_dir=5",
    "cutoffs=x",
    "control_options=5",
]


@pytest.mark.parametrize("override", WRONG_VALUES)
def test_every_value_of_a_recipe_is_checked_by_name_before_data_is_read(place, monkeypatch, capsys, override):
    monkeypatch.chdir(place)
    monkeypatch.setattr("abc_attn.data.build_corpus", None)  # would fail if it were called
    given = [] if override.startswith("output_dir") else ["output_dir=never"]
    refused_in_one_line(["train", "tiny.yaml", override, *given], override.partition("=")[0], capsys)
    assert not (place / "never").exists()


def test_models_and_batches_that_cannot_be_held_are_refused(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for sizes in (["intermediate_size=2000000000"], ["num_hidden_layers=2000000000"], ["block_size=2000000000"],
                  ["per_device_train_batch_size=2000000000"]):  # fmt: skip
        refused_in_one_line(["train", "tiny.yaml", "output_dir=never", *sizes], "of memory, and this machine", capsys)
    refused_in_one_line(["train", "tiny.yaml", "control=mlp:1000000000000"], "of memory, and this machine has", capsys)


BENCHMARKS = ("op", "decode", "encode", "scaling", "generate", "translate", "encode-model")
ABSURD = [
    *((f"{name} --repetitions {given}", f"from 1 to 1000000 is needed, got '{given}'") for name in BENCHMARKS
      for given in ("0", "-1", "1.5", "10000000")),
    *((f"{name} --threads {given}", f"from 1 to 1024 is needed, got '{given}'") for name in BENCHMARKS
      for given in ("0", "-1", "1000000000")),
    *((f"{name} --{size} {given}", f"argument --{size}: a whole number from 1 to 1000000 is needed, got '{given}'")
      for name in BENCHMARKS[:4] for size in ("slots", "width", "heads") for given in ("0", "-7", "1000000000")),
    *((f"{name} --tokens {given}", f"from 1 to 100000000 is needed, got '{given}'")
      for name in ("op", "encode", "scaling") for given in ("0", "-1", "x", "1000000000000")),
    *((f"{name} --batch 0", "from 1 to 1000000 is needed, got '0'") for name in ("decode", "encode")),
    ("op --tokens 512 0", "got '0'"),
    ("op --slots 64 -1", "got '-1'"),
    ("op --slots " + "9" * 5000, "a whole number from 1 to"),
    ("decode --contexts 1000000000000", "a whole number from 2 to 10000000 is needed, got '1000000000000'"),
    ("decode --contexts 512 1", "a whole number from 2 to 10000000 is needed, got '1'"),
    ("generate --contexts 10000000", "a whole number from 2 to 1000000 is needed, got '10000000'"),
    ("generate --batches 1 1000000000000", "a whole number from 1 to 1000000 is needed, got '1000000000000'"),
    ("generate --tokens 1000000000000", "a whole number from 1 to 10000 is needed, got '1000000000000'"),
    ("generate --tokens 0", "a whole number from 1 to 10000 is needed, got '0'"),
    *((f"translate --{size} 0", "from 1 to 1000000 is needed, got '0'") for size in ("layers", "width", "words")),
    ("translate --lengths 64 4", "a whole number from 5 to 100000 is needed, got '4'"),
    *((f"encode-model --{size} 0", "from 1 to 1000000 is needed, got '0'") for size in ("layers", "slots", "words")),
]  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_of_absurd_sizes_are_refused_at_once(name, monkeypatch, capsys):
    monkeypatch.setattr("abc_attn.bench.run_bench", None)  # would fail if it were called
    lines = [(line, said) for line, said in ABSURD if line.startswith(name)]
    assert len(lines) > 8
    for line, said in lines:
        refused_in_one_line(["bench", *line.split()], said, capsys)
    refused_in_one_line(["demo", "--threads", "1000000000"], "a whole number from 1 to 1024 is needed", capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("op --tokens 100000000", "100000000 tokens, 64 slots, width 64, 8 heads and a batch of 1 take 2.87 TB"),
        ("op --tokens 16 100000000 --heads 1000000", "1000000 heads"),
        ("op --tokens 16 --slots 8 1000000 --width 1000000", "16 tokens, 8 slots, width 1000000"),
        ("op --tokens 16 --slots 8 1000000 --heads 8", "16 tokens, 1000000 slots"),
        ("encode --heads 1000000", "1000000 heads"),
        ("encode --batch 1000000", "a batch of 1000000"),
        ("encode --slots 64 1000000", "1000000 slots"),
        ("scaling --tokens 1024 100000000", "100000000 tokens"),
        ("scaling --slots 1000000", "1000000 slots"),
        ("decode --heads 1000000", "1000000 heads"),
        ("decode --slots 1000000", "1000000 slots"),
        ("decode --batch 1000000", "a batch of 1000000"),
        ("translate --layers 1000000", "7 models of 1000000 layers and width 512 would take"),
        ("translate --batch 1000000", "a batch of 1000000 sources of 4096 tokens would take"),
        ("translate --width 100 --heads 3", "--heads 3 must divide --width 100"),
        ("translate --words 7", "at least 8 are needed"),
        ("encode-model --width 768000", "7 models of 12 layers and width 768000 would take"),
        ("encode-model --batch 100000", "a batch of 100000 texts of 512 tokens, or one of 8192, would take"),
        ("encode-model --heads 7", "--heads 7 must divide --width 768"),
    ],
)
def test_benchmarks_that_do_not_fit_are_refused_before_they_start(line, said, monkeypatch, capsys):
    monkeypatch.setattr("abc_attn.bench.measure.free_bytes", lambda: 10**10)
    monkeypatch.setattr("abc_attn.bench.Progress", None)  # would fail if it were called
    refused_in_one_line(["bench", *line.split()], said, capsys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--control window:1000000000000", "the state of control 'window:1000000000000'"),
        ("--control mlp:0", "slots"),
        ("--control nothing", "unknown control 'nothing'"),
        ("--control mlp:4", "positions='slot' is for tokens kept whole"),
        (
            "--contexts 8 1000000",
            "a context of 1000000 tokens, read at once for the check, would take 576 MB of memory",
        ),
        ("--batches 1 1000000", "a batch of 1000000 would take"),
    ],
)
def test_generating_that_does_not_fit_is_refused_before_it_starts(line, said, monkeypatch, capsys):
    monkeypatch.setattr("abc_attn.memory_limit.free_bytes", lambda: 500_000_000)
    monkeypatch.setattr("abc_attn.bench.models.check_against_original", None)
    control = [] if "--control" in line else ["--control", "window:4"]
    refused_in_one_line(
        ["bench", "generate", "--model", str(folders()["llama"]), *control, *line.split()], said, capsys
    )


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_that_could_not_be_written_are_refused_before_they_start(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("abc_attn.bench.run_bench", None)
    (tmp_path / "file").touch()
    refused_in_one_line(["bench", name, "--output", str(tmp_path / "file")], "file is not a folder", capsys)
    refused_in_one_line(["bench", name, "--output", str(tmp_path / "file/x")], "file is not a folder", capsys)
    if Path("/proc").is_dir():  # where not even root can write
        for folder in ("/proc", "/proc/new/folder"):
            refused_in_one_line(["bench", name, "--output", folder], "/proc is not writable", capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("temperature", ["1e-45", "1e-300", "5e-324", "1e-3"])
def test_a_temperature_near_0_takes_the_likeliest(temperature, capsys):
    shown = []
    for given in ("0", temperature):
        arguments = ["--prompt", "w5 w9", "--tokens", "4", "--temperature", given]
        assert main(["generate", str(folders()["bounded llama"]), *arguments]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] or temperature == "1e-3"


def test_evaluate_takes_what_train_takes(tmp_path, capsys):
    text = "w5 w9 w12 w3\nw30 w5"
    (tmp_path / "plain.txt").write_text(text)
    (tmp_path / "packed.txt.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    found = []
    for name in ("plain.txt", "packed.txt.xz", "packed.txt.gz"):
        assert main(["evaluate", str(folders()["adaptive"]), "--file", str(tmp_path / name), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["word perplexity"])
    assert found[0] == found[1] == found[2]
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(text.encode())[:-5])
    command = ["evaluate", str(folders()["adaptive"]), "--file", str(tmp_path / "cut.txt.gz")]
    refused_in_one_line(command, "cut.txt.gz is not a whole .gz file", capsys)


def test_text_that_is_not_utf_8_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "latin.txt").write_bytes("w5 é".encode("latin-1"))
    model = str(folders()["llama"])
    said = "latin.txt is not UTF-8: line 1 has byte 0xe9 at column 3"
    refused_in_one_line(["evaluate", model, "--file", str(tmp_path / "latin.txt")], said, capsys)
    with open(tmp_path / "latin.txt", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        refused_in_one_line(["generate", model, "--prompt", "-"], "standard input is not UTF-8", capsys)


def test_a_locale_without_the_letters_of_a_path(tmp_path, monkeypatch, capsys):
    """As in the C locale: stdout takes ASCII alone."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    source = tmp_path / "ä"
    source.symlink_to(folders()["llama"], target_is_directory=True)
    assert main(["convert", str(source), str(tmp_path / "ü"), "--control", "mlp:4"]) == 0
    assert b"\\xfc: BoundedLlamaForCausalLM" in stream.buffer.getvalue()
    monkeypatch.undo()
    source = tmp_path / os.fsdecode(b"\xfc")  # a path may be any bytes
    source.symlink_to(folders()["llama"], target_is_directory=True)
    refused_in_one_line(["generate", str(source), "--prompt", "w5"], "this path is not UTF-8", capsys)
    assert main(["generate", str(tmp_path / "ü"), "--prompt", "w5", "--tokens", "1"]) == 0


@contextmanager
def as_an_ordinary_user():
    """Root may write anywhere: without two of its capabilities it may not."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, before):
        pytest.skip("capabilities cannot be read here")
    less = (ctypes.c_uint32 * 6)(*before)
    less[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of those in effect
    if libc.capset(header, less):
        pytest.skip("capabilities cannot be given up here")
    try:
        yield
    finally:
        libc.capset(header, before)


def test_read_only_folders(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    (sealed / "llama").symlink_to(folders()["llama"], target_is_directory=True)
    sealed.chmod(0o555)
    lines = [
        ["convert", str(folders()["llama"]), str(sealed / "new")],
        ["recipes", "--copy", str(sealed / "new")],
        ["train", "tiny.yaml", f"output_dir={sealed / 'run'}"],
        ["train", "tiny.yaml", f"output_dir={tmp_path / 'run'}", f"cache_dir={sealed / 'cache'}"],
        ["report", "--results", str(tmp_path), "--output", str(sealed / "report.html")],
    ]
    with as_an_ordinary_user():
        for line in lines:
            refused_in_one_line(line, str(sealed), capsys)
        assert main(["generate", str(sealed / "llama"), "--prompt", "w5", "--tokens", "1"]) == 0
    assert [path.name for path in sealed.iterdir()] == ["llama"]


@pytest.mark.parametrize("case", range(20))
def test_cases_of_the_fuzzer(case, tmp_path):
    deterministic = torch.are_deterministic_algorithms_enabled()
    fuzz.run(case, tmp_path)
    torch.use_deterministic_algorithms(deterministic)
