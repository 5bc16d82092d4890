"""`abc-attn bench recall`: facts in a text, and figures of a tiny model."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
from command_line import refused_in_one_line
from gguf_file import TOKENS, write_gguf
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from abc_attn.bench import needles, pressed, recall
from abc_attn.cli import main
from abc_attn.hf import convert
from abc_attn.hf.sources import load_source_tokenizer
from abc_attn.paths import model_source

SIZES = {"vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).eval()


@pytest.fixture
def file(model, tmp_path):
    write_gguf(model, tmp_path / "tiny.gguf")
    (tmp_path / "book.txt").write_text("we were here and there " * 80)
    return tmp_path / "tiny.gguf"


def test_facts_are_where_they_should_be(file):
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    book = [3] * 500
    hidden = needles.hide("pairs", book, 300, [10, 50, 90], tokenizer, seed=1)
    assert len(hidden.text) == 300
    begins = [i for i, (a, b) in enumerate(zip(hidden.text, hidden.text[1:], strict=False)) if a == 3 != b]
    assert begins[0] < 40
    assert 250 < begins[-1] < 290
    assert hidden == needles.hide("pairs", book, 300, [10, 50, 90], tokenizer, seed=1)


def test_texts_begin_as_the_tokenizer_begins_them(file):
    """The GGUF file says that every text begins with token 0; transformers' own reader does not see that."""
    plain = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    begun = load_source_tokenizer(model_source(str(file)))
    assert (needles.beginning(plain), needles.beginning(begun)) == ([], [0])
    book = [*range(3, 40)] * 100
    for tokenizer in (plain, begun):
        hidden = needles.hide("pairs", book, 300, [10, 50, 90], tokenizer, seed=1)
        passages = recall._passages(needles.beginning(tokenizer), book, 3000)
        texts = [(hidden.text, 300), *((tokens, 3000) for tokens in passages.values())]
        for tokens, length in texts:
            assert len(tokens) == length
            assert tokens.index(0) == 0 if tokenizer is begun else 0 not in tokens
    assert (
        passages["repeated"][1 : recall.REPEATED + 1] == passages["repeated"][recall.REPEATED + 1 :][: recall.REPEATED]
    )


def test_all_controls_have_the_same_rows():
    for name, control in recall.controls(512).items():
        if control is not None:
            made = convert(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)), control)
            assert made.controls["self"].rows == 512, name
    with pytest.raises(ValueError, match="--rows must be 138 or more, got 100"):
        recall.controls(100)


@pytest.mark.parametrize("control", ["keydiff", "tova"])
def test_the_state_is_flat_and_keys_and_values_are_not(model, control):
    bounded = recall._converted(model, recall.controls(138)[control], "slot")
    sizes = {recall._chunked(bounded, [3] * tokens) for tokens in (600, 1500)}
    assert len(sizes) == 1
    assert recall._chunked(model, [3] * 600)[0] < recall._chunked(model, [3] * 1500)[0]


def test_the_command(file, tmp_path, capsys):
    options = ["--lengths", "200", "--depths", "50", "--texts", "1", "--rows", "138", "--book-tokens", "1100"]
    options += ["--parts", "needles", "perplexity", "--methods", "full", "keydiff", "tova"]
    options += ["--output", str(tmp_path / "out")]
    assert main(["bench", "recall", str(file), "--file", str(tmp_path / "book.txt"), *options]) == 0
    found = json.loads((tmp_path / "out" / "recall.json").read_text())
    assert {each["kind"] for each in found["results"]} == {"pass key", "pairs", "book", "repeated"}
    assert found["controls"]["keydiff"] == "global:4+window:1+keydiff:69"
    said = capsys.readouterr().out
    assert "| keydiff | 50 % | " in said
    assert "| tova | 50 % | " in said
    learned = tmp_path / "learned"
    assert main(["convert", str(file), str(learned), "--control", "global:4+keep:134", "--positions", "slot"]) == 0
    given = ["bench", "recall", str(file), "--file", str(tmp_path / "book.txt"), *options, "--learned", str(learned)]
    assert main(given) == 0
    found = json.loads((tmp_path / "out" / "recall.json").read_text())
    assert found["controls"]["learned"] == "global:4+keep:134"
    assert {each["method"] for each in found["results"]} == {"full", "keydiff", "tova", "learned"}
    capsys.readouterr()
    refused_in_one_line([*given[:-1], str(tmp_path / "nothing")], "no saved model at", capsys)
    assert main([*given, "--rows", "200"]) == 2
    assert "138 rows of memory in a layer, the others 200: give --rows 138" in capsys.readouterr().err


def test_mistakes_are_found_before_work(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("short")
    given = ["bench", "recall", str(tmp_path / "nothing.gguf"), "--file", str(tmp_path / "book.txt")]
    refused_in_one_line(given, "no saved model at", capsys)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--rows", "1099"],
            "--rows 1099 hold all of --book-tokens 1100, and perplexity beyond the memory is measured",
        ),
        (["--rows", "100"], "--rows must be 138 or more, got 100"),
        (["--depths", *map(str, range(1, 14))], "--depths may be 12, one for each name that a fact may have; got 13"),
        (["--lengths", "128"], "--lengths: 128 tokens are too few for 5 facts, which take 1"),
    ],
)
def test_sizes_that_cannot_be_measured(given, said, file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "load_source", lambda *_, **__: pytest.fail("the model was loaded"))
    command = ["bench", "recall", str(file), "--file", str(tmp_path / "book.txt"), "--lengths", "400"]
    refused_in_one_line([*command, "--rows", "138", "--book-tokens", "1100", *given], said, capsys)


def few(tmp_path, *more):
    """Options of a short run."""
    options = ["--lengths", "200", "--depths", "50", "--texts", "1", "--rows", "138", "--book-tokens", "1100"]
    return ["--file", str(tmp_path / "book.txt"), *options, "--output", str(tmp_path / "out"), *more]


def found_in(tmp_path):
    return json.loads((tmp_path / "out" / "recall.json").read_text())


def test_the_longest_memory_that_can_be_measured(file, tmp_path):
    options = few(tmp_path, "--parts", "perplexity", "--methods", "full", "--rows", "1098")
    assert main(["bench", "recall", str(file), *options]) == 0
    assert len(found_in(tmp_path)["results"]) == 2


def test_a_press_that_fails_is_noted_and_nothing_else_is_lost(file, tmp_path, capsys, monkeypatch):
    def fails(model, rule, rows, tokens):
        if rule == "knorm":
            raise AttributeError("no\nhead_dim")
        cache = needles.new_cache(model)
        assert [*needles.read(model, tokens, cache)]
        return cache

    monkeypatch.setattr(recall, "missing", lambda: None)
    monkeypatch.setattr(recall, "read_pressed", fails)
    options = few(tmp_path, "--parts", "needles", "--methods", "window", "kvpress")
    assert main(["bench", "recall", str(file), *options]) == 0
    assert {each["method"] for each in found_in(tmp_path)["results"]} == {"window", "kvpress keydiff", "kvpress tova"}
    assert found_in(tmp_path)["note"] == "kvpress knorm failed: AttributeError: no head_dim"
    assert "\nkvpress knorm failed: AttributeError: no head_dim\n" in capsys.readouterr().out


def test_an_interrupt_of_the_byte_meter_loses_nothing_else(file, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(recall, "peak_of_process", interrupted)
    options = few(tmp_path, "--parts", "needles", "bytes", "--methods", "window")
    assert main(["bench", "recall", str(file), *options]) == 130
    assert {each["kind"] for each in found_in(tmp_path)["results"]} == {"pairs", "pass key"}


def test_bytes_of_every_method(file, tmp_path, monkeypatch):
    given = {}

    def measured(prepare, folder, name, control, positions, rows, tokens, said):
        given[name] = tokens
        said.write_text("1 2")
        return 3

    monkeypatch.setattr(recall, "peak_of_process", measured)
    for methods in (["knorm"], ["full", "window", "keydiff", "knorm", "tova"]):
        given.clear()
        assert main(["bench", "recall", str(file), *few(tmp_path, "--parts", "bytes", "--methods", *methods)]) == 0
        assert [each["method"] for each in found_in(tmp_path)["results"]] == methods
        assert {(len(tokens), tokens[0], 0 in tokens[1:]) for tokens in given.values()} == {(200, 0, False)}


def test_without_kvpress_the_page_says_so(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "missing", lambda: "kvpress is not installed")
    given = ["--lengths", "200", "--depths", "50", "--texts", "1", "--rows", "138", "--book-tokens", "1100"]
    given += ["--parts", "needles", "--methods", "window", "kvpress"]
    assert main(["bench", "recall", str(file), "--file", str(tmp_path / "book.txt"), *given]) == 0
    assert "skipped: kvpress is not installed" in capsys.readouterr().out


def test_kvpress_keeps_the_rows_that_it_is_given(model):
    """Where it is installed (docs/huggingface.md): its own cache, with our versions of transformers."""
    pytest.importorskip("kvpress")
    text = torch.randint(3, len(TOKENS), (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for rule in pressed.PRESSES:
        cache = pressed.read_pressed(model, rule, 138, text)
        assert [layer.keys.shape[2] for layer in cache.layers] == [138]
        size = recall.bytes_of(cache)
        most, last = recall._pressed(model, rule, 138, text)
        assert last == most == size * (138 + recall.WRITTEN) / 138
    question = needles.Needles("pass key", text, [needles.Question(50, text[:3], text[3:5])])
    whole = pressed.read_pressed(model, "keydiff", 300, text)  # nothing is dropped: full attention
    assert needles.recalls(model, question, whole) == needles.recalls(model, question)
