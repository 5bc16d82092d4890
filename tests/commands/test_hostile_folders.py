"""Damaged model folders are refused in one line that names the file or the key; nothing is loaded by half."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from command_line import refused_in_one_line  # noqa: E402

import abc_attn.hf as hf  # noqa: E402
from abc_attn import BoundedAttention, make_control  # noqa: E402
from abc_attn.cli import main  # noqa: E402
from abc_attn.files import whole_file, whole_folder  # noqa: E402
from fuzz import folders as fuzz  # noqa: E402


@pytest.fixture
def model(tmp_path):
    """Copies one of the fuzzer's good folders."""

    def copy(name):
        shutil.copytree(fuzz.folders()[name], tmp_path / "model")
        return tmp_path / "model"

    return copy


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})
    (folder / "weights.sha256").unlink(missing_ok=True)


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def in_config(**changes):
    return lambda folder: change_config(folder, **changes)


def in_file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


DAMAGES = {
    "a list": (in_file("config.json", b"[1, 2]"), "config.json must hold a JSON object, and holds a list"),
    "null": (in_file("config.json", b"null"), "config.json must hold a JSON object"),
    "brackets": (in_file("config.json", b"[" * 100_000), "config.json is not JSON that can be read: it is nested too"),
    "no weights": (in_file("model.safetensors", b""), "model.safetensors is not a whole safetensors file"),
    "half the weights": (lambda f: os.truncate(f / "model.safetensors", 2000), "model.safetensors is not a whole safe"),
    "a flipped length": (lambda f: flip(f / "model.safetensors", 1), "model.safetensors is not a whole safetensors"),
    "other sizes": (in_config(vocab_size=39), "weights of other sizes than its config.json asks for: "),
    "larger sizes": (in_config(intermediate_size=10**6), "its config.json asks for 48,"),
    "width 33": (in_config(hidden_size=33), "config.json"),
    "width -1": (in_config(hidden_size=-1), "config.json"),
    "width x": (in_config(hidden_size="x"), "hidden_size"),
    "no heads": (in_config(num_attention_heads=0), "config.json"),
    "no width inside": (in_config(intermediate_size=0), "intermediate_size must be a whole number from 1, got 0"),
    "no layers": (in_config(num_hidden_layers=0), "num_hidden_layers must be a whole number from 1, got 0"),
    "a layer more": (in_config(num_hidden_layers=2, intermediate_size=8), "config.json"),
    "many layers": (in_config(num_hidden_layers=10**9), "num_hidden_layers=1000000000, and there are "),
    "rope": (in_config(rope_parameters={"rope_type": "yarm"}), "config.json"),
    "tokenizer": (in_file("tokenizer_config.json", b"[1]"), "tokenizer_config.json must hold a JSON object"),
    "a broken tokenizer": (in_file("tokenizer.json", b'{"model": 5}'), "has no tokenizer that can be loaded"),
    "architectures": (in_config(architectures="LlamaForCausalLM"), "architectures must be a list of names, got 'Llama"),
    "whole numbers": (
        lambda f: change_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(16, dtype=torch.int32)})),
        "weight model.norm.weight has type I32",
    ),
    "a weight less": (
        lambda f: change_weights(f, lambda w: [w.pop("model.norm.weight"), w.update(other=torch.zeros(99))]),
        "lacks weights that its config.json asks for: model.norm.weight",
    ),
    "a layer's weights more": (
        lambda f: change_weights(f, lambda w: w.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(2)})),
        "has weights that its config.json has no place for: model.layers.1.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("command", ["generate", "convert"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_in_one_line(model, tmp_path, capsys, damage, command):
    folder, (make, said) = model("llama"), DAMAGES[damage]
    make(folder)
    rest = [str(tmp_path / "new")] if command == "convert" else ["--prompt", "w5"]
    refused_in_one_line([command, str(folder), *rest], said, capsys)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_layer_that_is_not_there_is_no_random_one(tmp_path, capsys):
    """Two layers in the file, three in config.json."""
    shallow = fuzz.small(transformers.LlamaForCausalLM, num_hidden_layers=2)
    shallow.save_pretrained(tmp_path / "plain")
    hf.convert(shallow, "mlp:4").save_pretrained(tmp_path / "bounded")
    for name in ("plain", "bounded"):
        change_config(tmp_path / name, num_hidden_layers=3)
        refused_in_one_line(["generate", str(tmp_path / name), "--prompt", "w5"], "config.json asks for", capsys)
    with pytest.raises(ValueError, match=r"lacks weights .* model.layers.2.*and 5 more"):
        hf.BoundedLlamaForCausalLM.from_pretrained(tmp_path / "bounded")


def test_controls_that_are_missing_are_an_error_unless_allowed(model, capsys):
    folder = model("bounded llama")
    change_weights(folder, lambda weights: weights.pop("controls.self.proj.weight"))
    with pytest.raises(ValueError, match=r"lacks the weights of its control: controls.self.proj.weight.*allow_new"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    new = transformers.AutoModelForCausalLM.from_pretrained(folder, allow_new_controls=True)
    assert new.controls["self"].slots == 4
    _, info = hf.BoundedLlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == {"controls.self.proj.weight"}  # who asks for the report judges it
    refused_in_one_line(["generate", str(folder), "--prompt", "w5"], "controls.self.proj.weight", capsys)


def test_a_new_head_is_for_training_and_not_for_the_commands(tmp_path, capsys):
    body = hf.convert(fuzz.small(transformers.LlamaModel), "mlp:4")
    body.save_pretrained(tmp_path)
    assert hf.BoundedLlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=3).score.weight.shape == (
        3,
        16,
    )
    change_config(tmp_path, architectures=["BoundedLlamaForCausalLM"])
    refused_in_one_line(["generate", str(tmp_path), "--prompt", "w5"], "config.json asks for", capsys)


def test_a_flipped_bit_of_a_saved_weight_is_found(model, capsys):
    folder = model("bounded llama")
    flip(folder / "model.safetensors", -3)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or was changed since it was saved"):
        hf.BoundedLlamaForCausalLM.from_pretrained(folder)
    refused_in_one_line(["generate", str(folder), "--prompt", "w5"], "remove weights.sha256 if the change", capsys)
    (folder / "weights.sha256").unlink()
    hf.BoundedLlamaForCausalLM.from_pretrained(folder)


def test_outputs_that_are_not_numbers_are_an_error(model, tmp_path, capsys):
    folder = model("llama")
    change_weights(folder, lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    (tmp_path / "text.txt").write_text("w5 w9 w12")
    for rest in (
        ["generate", str(folder), "--prompt", "w5"],
        ["evaluate", str(folder), "--file", f"{tmp_path}/text.txt"],
    ):
        refused_in_one_line(rest, "the model's outputs are not numbers", capsys)


def test_a_tokenizer_of_another_model_is_an_error(model, capsys):
    folder = model("llama")
    file = folder / "tokenizer.json"
    about = json.loads(file.read_text())
    about["model"]["vocab"]["w5"] = 1000
    file.write_text(json.dumps(about))
    refused_in_one_line(["generate", str(folder), "--prompt", "w5"], "gives token 1000, and the model has 40", capsys)


# convert leaves all or nothing.


@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_nothing_and_can_be_repeated(model, tmp_path, capsys, monkeypatch, stop):
    def save(*_, **__):
        raise stop

    command = ["convert", str(model("llama")), str(tmp_path / "new" / "folder"), "--control", "mlp:4"]
    with monkeypatch.context() as patched:
        patched.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", save)
        assert main(command) == (2 if isinstance(stop, OSError) else 130)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert main(command) == 0
    assert (tmp_path / "new" / "folder" / "tokenizer.json").is_file()


def test_a_full_disk(model, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12k", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        for target in (disk / "new", disk):  # into it, and as a folder that cannot be replaced
            refused_in_one_line(["convert", str(model("llama")), str(target)], "No space left on device", capsys)
            assert not list(disk.iterdir())
            shutil.rmtree(tmp_path / "model")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_mounted_folder_is_filled(tmp_path, monkeypatch):
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "volume")
    with whole_folder(tmp_path / "volume") as partial:
        (partial / "config.json").write_text("{}")
        assert partial.is_relative_to(tmp_path / "volume")
    assert [path.name for path in (tmp_path / "volume").iterdir()] == ["config.json"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    (tmp_path / ".new.abc.partial").mkdir()
    (tmp_path / ".new.abc.partial" / "half").touch()
    with whole_folder(tmp_path / "new") as first:
        assert not (tmp_path / ".new.abc.partial").exists()
        (first / "a").touch()
        with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "new"):
            raise ZeroDivisionError
        assert (first / "a").exists()
        with whole_folder(tmp_path / "new") as quicker:
            (quicker / "b").touch()
        taken = pytest.raises(FileExistsError, match="another process wrote it")
        with taken, whole_folder(tmp_path / "new") as slower:
            (slower / "c").touch()
        shutil.rmtree(tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "a"]
    with whole_file(tmp_path / "file") as temporary, open(temporary, "w") as file:
        file.write("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]


# Sizes that no machine has.

ABSURD = ["mlp:1000000000000", "linformer:1000000000", "favor:10000000000", "window:1000000000", f"window:{2**70}",
          "window:1000000000000", "random:10000000000", "window:4+mlp:1000000000000"]  # fmt: skip


@pytest.mark.parametrize("control", ABSURD)
def test_absurd_sizes_are_refused_before_anything_is_built(model, tmp_path, capsys, control):
    said = r"would take (\S+ [TEG]B|more than 10\^30 bytes) of memory, and this machine has \S+ .B free"
    with pytest.raises(ValueError, match=said):
        BoundedAttention(32, 2, control, causal=True)
    command = ["convert", str(model("llama")), str(tmp_path / "new"), "--control", control]
    refused_in_one_line(command, "of memory, and this machine has", capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("control", "options"),
    [("linformer:8", {"max_length": 10**12}), ("dilated:8", {"dilation": 10**12}), ("luna:8", {"packed_dim": 10**12})],
)
def test_absurd_options_too(control, options):
    with pytest.raises(ValueError, match="of memory, and this machine has"):
        make_control(control, embed_dim=32, num_heads=2, **options)


def test_the_states_of_all_layers_count(monkeypatch):
    monkeypatch.setattr("abc_attn.memory_limit.free_bytes", lambda: 3_000_000)
    BoundedAttention(32, 2, "window:10000", causal=True)
    deep = fuzz.small(transformers.LlamaForCausalLM, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"the states of 2 attentions .* would take 5.12 MB"):
        hf.convert(deep, "window:20000")


@pytest.mark.parametrize("case", range(24))
def test_cases_of_the_fuzzer(case, tmp_path):
    fuzz.run(case, tmp_path)
