"""What convert takes besides a model: a folder, a name on the hub, a GGUF file; in Python and as a command."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from command_line import refused_in_one_line  # noqa: E402
from gguf_file import write_gguf  # noqa: E402
from hf_sources import save, source  # noqa: E402

from abc_attn.cli import main  # noqa: E402
from abc_attn.hf import convert  # noqa: E402
from abc_attn.hf.sources import load_source  # noqa: E402
from abc_attn.paths import model_source  # noqa: E402

LLAMA, QWEN3 = transformers.LlamaForCausalLM, transformers.Qwen3ForCausalLM
IDS = torch.arange(3, 20)[None]
WINDOW = ["--control", "global:2+window:20", "--positions", "slot"]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(source(LLAMA), file)
    return file


def test_a_folder_is_converted_in_another_precision(tmp_path):
    folder = save(source(LLAMA), tmp_path / "llama")
    exact = convert(folder, "softmax")
    with torch.no_grad():
        assert (exact(IDS).logits - source(LLAMA)(IDS).logits).abs().max() < 1e-4
    for given in (str(folder), source(LLAMA)):
        half = convert(given, "mlp:4", dtype="bfloat16")
        assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert main(["convert", str(folder), str(tmp_path / "half"), "--dtype", "bfloat16", "--where", "self"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.where == ["self"]
    assert convert(source(LLAMA), "mlp:4", where="self").config.where == ["self"]  # one site, not four letters


def test_a_gguf_file_is_dequantised_converted_and_generates(gguf_file, tmp_path, capsys):
    expected = source(LLAMA)
    for given in ({"model": gguf_file}, {"model": str(gguf_file.parent), "gguf_file": "tiny.gguf"}):
        model = convert(given.pop("model"), "softmax", **given)
        with torch.no_grad():
            assert (model(IDS).logits - expected(IDS).logits).abs().max() < 0.1  # of 8-bit weights; else above 1
    assert main(["convert", str(gguf_file), str(tmp_path / "bounded"), *WINDOW]) == 0
    assert "BoundedLlamaForCausalLM" in capsys.readouterr().out
    assert "| source model | `tiny.gguf` |" in (tmp_path / "bounded" / "README.md").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bounded")
    assert not hasattr(loaded.config, "quantization_config")
    with torch.no_grad():
        assert (loaded(IDS).logits - model(IDS).logits).abs().max() < 1e-4
    assert main(["generate", str(tmp_path / "bounded"), "--prompt", "hello", "--tokens", "5"]) == 0
    assert "6 tokens read" in capsys.readouterr().err  # <s>, as the file says, and five letters


def test_a_name_on_the_hub(tmp_path, monkeypatch):
    """From the cache of the hub's client: nothing is fetched by tests."""
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / "0123"
    save(source(LLAMA), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["convert", "owner/tiny", str(tmp_path / "bounded"), "--control", "mlp:4"]) == 0
    assert "`owner/tiny`" in (tmp_path / "bounded" / "README.md").read_text()
    assert (tmp_path / "bounded" / "tokenizer.json").is_file()


def test_the_hub_cannot_be_reached(tmp_path, monkeypatch, capsys):
    said = "owner/name is no folder here, and as a name on the hub it cannot be loaded (HF_HUB_OFFLINE is set): check"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    refused_in_one_line(["convert", "owner/name", "new"], said, capsys)
    with pytest.raises(OSError, match="check the name and the connection"):
        convert("owner/name")


def test_what_is_on_this_machine_is_never_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/tiny", "tiny", "./tiny", "models/tiny.gguf", "owner/tiny.gguf", "/owner/tiny", "a/b/c", ""):
        with pytest.raises((OSError, ValueError), match=r"no saved model at|has no config\.json"):
            model_source(name)
    assert not model_source("owner/tiny").local


def test_mistakes_with_gguf_files(gguf_file, tmp_path):
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "cut.gguf").write_bytes(gguf_file.read_bytes()[:300])
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    for given, said in (
        ({"model": tmp_path / "text.gguf"}, "text.gguf is not a GGUF file"),
        ({"model": tmp_path / "cut.gguf"}, "cut.gguf cannot be read as a GGUF model"),
        ({"model": tmp_path, "gguf_file": "none.gguf"}, "no GGUF file at"),
        ({"model": tmp_path}, r"has no config.json, but cut.gguf: name that file"),
        ({"model": gguf_file, "gguf_file": "a.gguf"}, "leave out the second, a.gguf"),
        ({"model": source(LLAMA), "gguf_file": "a.gguf"}, "is for a folder or a name; a LlamaForCausalLM was given"),
        ({"model": source(LLAMA), "dtype": "float8"}, "dtype must be one of 'bfloat16', 'float32', got 'float8'"),
    ):
        with pytest.raises((OSError, ValueError), match=said):
            convert(**given)
    write_gguf(source(QWEN3), tmp_path / "narrow.gguf", "qwen3")  # transformers reads no width of heads from it
    with pytest.raises(ValueError, match="weights of other sizes than transformers reads from its header"):
        load_source(tmp_path / "narrow.gguf")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileNotFoundError, match="no weights"):
        convert(tmp_path)
