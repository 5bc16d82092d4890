"""The commands convert, generate and evaluate; and what they say to mistakes."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from command_line import refused_in_one_line  # noqa: E402
from hf_sources import TEXT, WORDS, save, source  # noqa: E402

from abc_attn.cli import main  # noqa: E402
from abc_attn.evaluation import perplexity, token_nll  # noqa: E402
from abc_attn.hf import convert  # noqa: E402


@pytest.fixture
def llama(tmp_path):
    """A folder with a tiny Llama and a tokenizer of words."""
    (tmp_path / "text.txt").write_text(TEXT)
    return save(source(transformers.LlamaForCausalLM), tmp_path / "llama")


def test_convert_generate_and_evaluate(llama, tmp_path, capsys):
    bounded, text = tmp_path / "bounded", str(tmp_path / "text.txt")
    assert main(["convert", str(llama), str(bounded), "--control", "global:2+window:6", "--positions", "slot"]) == 0
    assert "BoundedLlamaForCausalLM" in capsys.readouterr().out
    assert "`llama`" in (bounded / "README.md").read_text()
    assert main(["generate", str(bounded), "--prompt", "w5 w9 w20", "--tokens", "12"]) == 0
    shown = capsys.readouterr()
    assert 1 <= len(shown.out.split()) <= 12
    assert "3 tokens read" in shown.err
    assert "tokens/s, state" in shown.err
    assert shown.err.endswith("bytes, whatever the length\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(bounded)
    ids = torch.tensor([WORDS.index(word) for word in TEXT.split()])
    windows = {"window": 20, "context": 15}
    # --context was the name of --window.
    asked = [([], {}), (["--window", "20"], windows), (["--context", "20"], windows)]
    for options, given in (*asked, (["--window", "20", "--scored", "2"], {"window": 20, "context": 18})):
        expected = perplexity(token_nll(model, ids, **given))
        assert main(["evaluate", str(bounded), "--file", text, "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["perplexity"] == pytest.approx(expected)
        assert found["word perplexity"] == pytest.approx(expected)
        assert found["tokens"] == 90
    for window in ([], ["--window", "8"]):
        assert main(["evaluate", str(bounded), "--file", text, "--scored", "9", *window]) == 2
        assert "give a window of at least 9 tokens" in capsys.readouterr().err
    assert main(["evaluate", str(llama), "--file", text, "--tokens", "40"]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_a_text_that_ends_at_once(tmp_path, capsys):
    model = convert(source(transformers.LlamaForCausalLM), "global:2+window:6", positions="slot")
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens are alike: the first is chosen
    model.generation_config.update(eos_token_id=0)
    folder = save(model, tmp_path / "bounded")
    command = ["generate", str(folder), "--prompt", "w5 w9"]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert said.startswith("2 tokens read, none written: the model ended the text at once, state")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "the model ended the text at once (with --chat it answers the prompt), state" in said
    assert main([*command, "--chat"]) == 0
    assert "the model ended the text at once, state" in capsys.readouterr().err


def test_an_exact_layer_grows_and_it_says_so(tmp_path, capsys):
    folder = save(convert(source(transformers.LlamaForCausalLM), "mlp:4", layers=[0]), tmp_path / "half")
    assert main(["generate", str(folder), "--prompt", "w5 w9", "--tokens", "3"]) == 0
    assert capsys.readouterr().err.endswith("bytes, growing where attention is exact\n")


# RoBERTa counts positions from its padding token's number on, which is 1 here.
@pytest.mark.parametrize(
    ("cls", "end"),
    [(transformers.GPT2LMHeadModel, 20), (transformers.BertLMHeadModel, 20), (transformers.RobertaForCausalLM, 18),
     (transformers.MarianForCausalLM, 20), (transformers.BartForCausalLM, 20)],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_positions_that_end(cls, end, tmp_path, capsys):
    """Beyond them a text is evaluated in windows that fit, and a continuation is refused; up to them all is well."""
    model = convert(source(cls, max_position_embeddings=20), "window:3+mlp:4")
    model.generation_config.eos_token_id = None
    folder = save(model, tmp_path / "bounded")
    (tmp_path / "text.txt").write_text(TEXT)
    ids = torch.tensor([WORDS.index(word) for word in TEXT.split()])
    expected = perplexity(token_nll(model, ids, window=end, context=end - end // 4))
    assert main(["evaluate", str(folder), "--file", str(tmp_path / "text.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] == pytest.approx(expected)
    assert main(["evaluate", str(folder), "--file", str(tmp_path / "text.txt"), "--window", str(end + 1)]) == 2
    assert f"end after {end} tokens" in capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "w5 w9 w20", "--tokens", str(end - 2)]) == 0
    assert f"{end - 2} written" in capsys.readouterr().err
    assert main(["generate", str(folder), "--prompt", "w5 w9 w20", "--tokens", str(end - 1)]) == 2
    said = capsys.readouterr().err
    assert f"end after {end} tokens: prompt and --tokens may be {end + 1} together, and are 3 and {end - 1}" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "cls", "text", "found"),
    [("text-generation", transformers.LlamaForCausalLM, "w5 w9", "generated_text"),
     ("fill-mask", transformers.BertForMaskedLM, "w5 w60 w9", "token_str"),
     ("text-classification", transformers.RobertaForSequenceClassification, "w5 w9", "label")],
)  # fmt: skip
def test_pipelines(task, cls, text, found, tmp_path):
    folder = save(convert(source(cls), "window:3+mlp:4"), tmp_path)
    run = transformers.pipeline(task, model=str(folder))
    assert type(run.model).__name__.startswith("Bounded")
    assert found in run(text)[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["convert", "{}/t5", "{}/new"],
            "T5Model is not supported; the supported families are Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma 3",
        ),
        (
            ["convert", "{}/tagger", "{}/new"],
            "LlamaForTokenClassification is not supported; of its family these are: LlamaModel, LlamaForCausalLM, Lla",
        ),
        (["convert", "{}/llama", "{}/new", "--control", "luna"], "'luna' cannot be causal"),
        (["convert", "{}/llama", "{}/new", "--control", "mpl"], "unknown control 'mpl'"),
        (["convert", "{}/llama", "{}/new", "--where", "cross"], "no 'cross' attention"),
        (["convert", "{}/bounded", "{}/new"], "is a bounded model already (control 'mlp:4')"),
        (["generate", "{}/t5", "--prompt", "w5"], "T5Model is not supported; the supported families are"),
    ],
)
def test_mistakes_that_take_transformers_are_one_line(llama, tmp_path, arguments, said, capsys):
    """Those that do not are in test_cli.py."""
    configs = {
        "t5": {"architectures": ["T5Model"], "model_type": "t5"},
        "tagger": {"architectures": ["LlamaForTokenClassification"], "model_type": "llama"},
        "bounded": {"architectures": ["BoundedLlamaModel"], "control": "mlp:4"},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").touch()
    refused_in_one_line([argument.format(tmp_path) for argument in arguments], said, capsys)
    assert not (tmp_path / "new").exists()
