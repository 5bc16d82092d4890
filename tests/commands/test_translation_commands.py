"""translate, evaluate --task translation and average: lines in, lines out, whatever comes in."""

import io
import json
import os
import random
import signal
import subprocess
import sys

import pytest
import torch
from command_line import refused_in_one_line
from safetensors.torch import load_file
from tiny_pairs import marian, sentences, write_pairs
from transformers import AutoTokenizer

from abc_attn.cli import main
from abc_attn.data import ParallelSource, build_pairs, find_parallel_files
from abc_attn.hf import convert

LIMIT = ["--longest", "6"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Parallel text; `sentence`, `document` and `plain`: translators of sentences, of documents, and not converted."""
    folder = write_pairs(tmp_path_factory.mktemp("commands"))
    source = ParallelSource(("en", "de"), find_parallel_files(folder / "pairs", ("en", "de")))
    tokenizer = build_pairs(source, folder / "cache", 300).tokenizer
    for name, context in (("sentence", 0), ("document", 3), ("plain", 0)):
        model = marian(vocab_size=len(tokenizer), max_position_embeddings=96)
        if name != "plain":
            model = convert(model, "mlp", {"self": 2, "cross": 4}, where=["self", "cross"])
            model.config.context_sentences = context
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def translated(place, monkeypatch, capsys):
    """Runs `translate` on a text; returns the exit code, the lines that came out, and what was said."""

    def run(text, model="sentence", *options):
        stdin = io.StringIO(text) if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", stdin)
        code = main(["translate", str(place / model), *LIMIT, "--beams", "2", *options])
        shown = capsys.readouterr()
        assert not shown.out or shown.out.endswith("\n")
        return code, shown.out.split("\n")[:-1], shown.err

    return run


def test_as_many_lines_come_out_as_go_in(translated, monkeypatch):
    lines = [source for source, _ in sentences(12)]
    lines[3], lines[7] = "", "   "
    code, made, said = translated("\n".join(lines) + "\n")
    assert code == 0
    assert len(made) == 12
    assert [place for place, line in enumerate(made) if not line] == [3, 7]
    assert "12 lines, " in said
    assert "tokens/s, state " in said
    assert "bytes a sentence (2 beams), whatever the length" in said
    # A line is translated the same alone, in other company, and without an end of the last line.
    for number in (0, 5):
        assert translated(lines[number])[1] == [made[number]]
    assert translated("\n".join(lines[::-1]))[1] == made[::-1]
    monkeypatch.setattr("abc_attn.commands.translation.LINES_AT_ONCE", 2)
    assert translated("\n".join(lines) + "\n")[1] == made
    assert translated("")[:2] == (0, [])
    assert "growing where attention is exact" in translated(lines[0], "plain")[2]


def test_documents_are_translated_with_their_context(translated):
    first, second = ([source for source, _ in sentences(4, seed)] for seed in (1, 2))
    code, made, _ = translated("\n".join([*first, "", "", *second, ""]) + "\n", "document", "--documents")
    assert code == 0
    assert len(made) == 11
    assert [place for place, line in enumerate(made) if not line] == [4, 5, 10]
    assert translated("\n".join(second), "document", "--documents")[1] == made[6:10]
    alone = translated("\n".join(second), "document")[1]
    assert alone[0] == made[6]
    assert alone[1:] != made[7:10]


def test_a_bad_line_is_named_and_the_rest_is_translated(translated, tmp_path):
    lines = [source for source, _ in sentences(4)]
    good = translated("\n".join(lines))[1]
    bad = tmp_path / "bad.txt"
    bad.write_bytes("\n".join([lines[0], "e1 " * 100, lines[1]]).encode() + b"\n\xff\xfe\n" + lines[2].encode())
    with open(bad) as file:
        code, made, said = translated(file)
    assert made == [good[0], "", good[1], "", good[2]]
    assert code == 2
    assert "abc-attn: line 2 has " in said
    assert "tokens, and this model reads 96 at most; an empty line stands for it" in said
    assert "abc-attn: line 4 is not UTF-8 text (byte 0xff at column 0); an empty line stands for it" in said
    assert "abc-attn: error: 2 of 5 lines were not translated, and are empty: 2, 4\n" in said


def test_a_bad_line_of_a_document_is_left_out_and_does_not_end_it(translated, tmp_path):
    lines = [source for source, _ in sentences(3)]
    whole = translated("\n".join(lines), "document", "--documents")[1]
    for bad in (b"\xff\xfe", b"e1 " * 100):
        text = tmp_path / "bad.txt"
        text.write_bytes("\n".join(lines[:2]).encode() + b"\n" + bad + b"\n" + lines[2].encode())
        with open(text) as file:
            code, made, _ = translated(file, "document", "--documents")
        assert (code, made) == (2, [*whole[:2], "", whole[2]])


def test_a_byte_order_mark_is_no_text(translated, place, tmp_path, capsys):
    (tmp_path / "text").write_text("\ufeffe1 e2\n", encoding="utf-8")
    with open(tmp_path / "text", encoding="utf-8") as file:
        assert translated(file)[1] == translated("e1 e2")[1]
    source = ParallelSource(("a", "b"), {"test": (tmp_path / "text", tmp_path / "text")})
    assert [(pair.source, pair.target) for pair in source.pairs("test")] == [("e1 e2", "e1 e2")]


def test_what_looks_like_a_special_token_is_text(place):
    tokenizer = AutoTokenizer.from_pretrained(place / "sentence")
    ids = tokenizer("e1 </s> <sep> e2").input_ids
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.sep_token_id not in ids


def test_a_line_that_is_too_long_is_cut_to_be_scored(place, tmp_path, capsys):
    source, reference = ((place / "pairs" / f"test.{language}").read_text() for language in ("en", "de"))
    (tmp_path / "in").write_text(f"{source}{'e1 ' * 100}\n")
    (tmp_path / "out").write_text(f"{reference}d1\n")
    files = ["--source", str(tmp_path / "in"), "--reference", str(tmp_path / "out")]
    assert (
        main(["evaluate", str(place / "sentence"), "--task", "translation", *files, *LIMIT, "--beams", "2", "--json"])
        == 0
    )
    shown = capsys.readouterr()
    assert json.loads(shown.out)["sentences"] == 16
    assert "longer than the 96 tokens that this model reads, which are cut: 16\n" in shown.err


@pytest.mark.parametrize("context", ["sentences", "documents"])
def test_a_thousand_lines_in_any_company(translated, context):
    """Backwards, each line is in a batch with others, of other lengths; documents are of 1 to 9 lines."""
    lines = [source for source, _ in sentences(1000)]
    options, parts = ["--beams", "2"], [[line] for line in lines]
    if context == "documents":
        chance, parts = random.Random(0), []
        while len(parts) < 40:
            parts.append([lines.pop() for _ in range(chance.randint(1, 9))])
        options.append("--documents")
    end = [""] if context == "documents" else []

    def made(given):
        text = [line for part in given for line in [*part, *end]]
        found = iter(translated("\n".join(text) + "\n", "document", *options)[1])
        return [[next(found) for _ in [*part, *end]] for part in given]

    straight = made(parts)
    assert len({line for part in straight for line in part}) > 10
    assert straight == made(parts[::-1])[::-1]


def test_an_answer_comes_before_the_next_line_and_an_interruption_leaves_whole_lines(place):
    code = "import sys; from abc_attn.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "translate", str(place / "sentence"), "--beams", "2", "--longest", "40"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True) as process:
        for line in ("e1 e2", "", "e3"):  # one who types a line gets its translation at once
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            assert bool(process.stdout.readline().strip()) == bool(line)
        process.stdin.write("".join(f"{source}\n" for source, _ in sentences(1000)))
        process.stdin.flush()
        process.stdout.readline()
        os.kill(process.pid, signal.SIGINT)
        made, said = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 130, said
    assert said.endswith("abc-attn: interrupted\n")
    assert "Traceback" not in said
    assert made.endswith("\n") or not made
    assert made.count("\n") < 999


@pytest.mark.nightly
def test_the_state_of_a_long_translation(place, tmp_path, translated):
    """2,000 tokens are written in as many bytes as 10."""
    tokenizer = AutoTokenizer.from_pretrained(place / "sentence")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2100, "decoder_layers": 1}
    model = convert(marian(**sizes), "mlp", {"self": 2, "cross": 4}, where=["self", "cross"])
    model.final_logits_bias[0, tokenizer.eos_token_id] = -1e4  # it never ends by itself
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    states = []
    for longest in (10, 2000):
        said = translated("e1 e2", tmp_path, "--longest", str(longest))[2]
        assert f"1 lines, {longest + 1:,} tokens written" in said
        states.append(said.partition("state ")[2])
    assert states[0] == states[1]


def test_scores(place, capsys):
    files = ["--source", str(place / "pairs" / "test.en"), "--reference", str(place / "pairs" / "test.de")]
    command = ["evaluate", str(place / "sentence"), "--task", "translation", *files, *LIMIT, "--beams", "2"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {
        "BLEU", "chrF", "BLEU short", "BLEU middle", "BLEU long", "sentences", "seconds", "signatures"
    }  # fmt: skip
    assert found["sentences"] == 15
    assert found["signatures"]["BLEU"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert main(command) == 0
    assert f"BLEU                 {found['BLEU']:.2f}\n" in capsys.readouterr().out
    assert main([command[0], str(place / "document"), *command[2:], "--documents", "--json"]) == 0
    assert "BLEU by document" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["translate", "{}/nothing"], "no saved model at"),
        (["translate", "{}/sentence", "--documents"], "was trained on single sentences"),
        (["translate", "{}/sentence", "--longest", "97"], "has positions for 96 tokens, no more"),
        (["evaluate", "{}/sentence", "--task", "translation", "--source", "x"], "--reference is needed"),
        (
            ["evaluate", "{}/sentence", "--task", "translation", "--source", "{}/pairs/test.en", "--reference",
             "{}/pairs/train.de"],
            "are not aligned",
        ),
        (["evaluate", "{}/sentence"], "--file is needed"),
        (["average", "{}/sentence", "--output", "{}/pairs"], "exists and is not empty"),
        (["average", "{}/sentence", "--last", "2", "--output", "{}/new"], "has 0 checkpoints, and --last asks for 2"),
        (["average", "{}/pairs", "{}/sentence", "--output", "{}/new"], "no weights (*.safetensors) in"),
        (["average", "{}/sentence", "--output", "{}/new"], "one model has no mean: say how many checkpoints"),
        (["average", "{}/sentence", "{}/plain", "--output", "{}/new"], "have other weights: controls.cross"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(place, arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    refused_in_one_line([argument.format(place) for argument in arguments], said, capsys)
    assert not (place / "new").exists()


def test_average(place, tmp_path, capsys):
    for number in range(3):
        model = convert(marian(number), "mlp", 4, where=["self"])
        model.save_pretrained(tmp_path / "run" / f"checkpoint-{9 + number}")
        (tmp_path / "run" / f"checkpoint-{9 + number}" / "optimizer.pt").touch()
    parts = [tmp_path / "run" / f"checkpoint-{number}" for number in (9, 10, 11)]
    assert main(["average", *map(str, parts), "--output", str(tmp_path / "mean")]) == 0
    assert "mean: the mean of " in capsys.readouterr().out
    assert main(["average", str(tmp_path / "run"), "--last", "3", "--output", str(tmp_path / "again")]) == 0
    mean, again = (load_file(tmp_path / name / "model.safetensors") for name in ("mean", "again"))
    weights = [load_file(part / "model.safetensors") for part in parts]
    for name, weight in mean.items():
        torch.testing.assert_close(weight, sum(one[name] for one in weights) / 3)
        assert torch.equal(weight, again[name])
    type(model).from_pretrained(tmp_path / "mean")
    assert not list((tmp_path / "mean").glob("optimizer*"))
    assert (tmp_path / "mean" / "weights.sha256").is_file()
