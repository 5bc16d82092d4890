"""The commands convert, generate and evaluate; and what they say to mistakes."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import source  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from abc_attn.cli import main  # noqa: E402
from abc_attn.evaluation import perplexity, token_nll  # noqa: E402

WORDS = ["<s>", "<pad>", "</s>", *(f"w{i}" for i in range(3, 61))]
TEXT = " ".join(WORDS[3 + i * i % 58] for i in range(90))


@pytest.fixture
def llama(tmp_path):
    """A folder with a tiny Llama and a tokenizer of words."""
    folder = tmp_path / "llama"
    source(transformers.LlamaForCausalLM).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    (tmp_path / "text.txt").write_text(TEXT)
    return folder


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
    model = transformers.AutoModelForCausalLM.from_pretrained(bounded)
    ids = torch.tensor([WORDS.index(word) for word in TEXT.split()])
    for options, given in (([], {}), (["--context", "20"], {"window": 20, "context": 15})):
        expected = perplexity(token_nll(model, ids, **given))
        assert main(["evaluate", str(bounded), "--file", text, "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["perplexity"] == pytest.approx(expected)
        assert found["word perplexity"] == pytest.approx(expected)
        assert found["tokens"] == 90
    assert main(["evaluate", str(llama), "--file", text, "--tokens", "40"]) == 0
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "{}/nowhere", "{}/new"], "no saved model at"),
        (["convert", "{}/llama", "{}/llama"], "exists and is not empty"),
        (["convert", "{}/t5", "{}/new"], "T5Model, of no supported family; supported are bart, bert, gpt2"),
        (["convert", "{}/llama", "{}/new", "--control", "luna"], "'luna' cannot be causal"),
        (["convert", "{}/llama", "{}/new", "--control", "mpl"], "unknown control 'mpl'"),
        (["convert", "{}/llama", "{}/new", "--where", "cross"], "no 'cross' attention"),
        (["generate", "{}/nowhere", "--prompt", "w5"], "no saved model at"),
        (["generate", "{}/llama", "--prompt", ""], "the prompt is empty"),
        (["generate", "{}/llama", "--prompt", "w5", "--temperature", "-1"], "a number from 0 is needed"),
        (["evaluate", "{}/llama", "--file", "{}/nowhere.txt"], "no text file at"),
    ],
)
def test_mistakes_are_one_line(llama, tmp_path, arguments, said, capsys):
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5" / "config.json").write_text(json.dumps({"architectures": ["T5Model"]}))
    try:
        code = main([argument.format(tmp_path) for argument in arguments])
    except SystemExit as exit:
        code = exit.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.err.startswith("abc-attn: error: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
