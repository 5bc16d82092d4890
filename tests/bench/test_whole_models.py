"""The benchmarks `translate` and `encode-model`: whole models, checked before they are timed."""

import importlib.util
import json
import sys

import pytest
import torch

from abc_attn.bench import ctranslate2_peer, encoding, measure, translation
from abc_attn.cli import main

transformers = pytest.importorskip("transformers")

from abc_attn.bench import encoders, translators  # noqa: E402 (they import transformers)
from abc_attn.hf import convert  # noqa: E402
from abc_attn.hf.compiled import NotCompiled  # noqa: E402

RUNS = {
    "translate": "--lengths 30 9 --batch 2 --tokens 3 --layers 2 --width 16 --heads 2 --words 40",
    "encode-model": "--tokens 24 12 --slots 4 --batch 3 --layers 1 --width 16 --heads 2 --words 40",
}
SHAPE = translators.Shape(layers=2, width=16, heads=2, inner=64, words=40, positions=33)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One thread, small matrices, no plot, no process for each figure of memory, and no CTranslate2."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(measure, "SGEMM_SIZE", 64)
    monkeypatch.setattr("abc_attn.bench.keep_freed_memory", lambda: None)
    monkeypatch.setattr(translators, "compile_decoding", lambda model, rows: None)  # half a minute each
    monkeypatch.setattr(ctranslate2_peer, "missing", lambda: "skipped: ctranslate2 is not installed")
    for module in (translation, encoding):
        monkeypatch.setattr(module, "peak_of_process", lambda *arguments: 1000)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    yield
    torch.set_num_threads(threads)


def run(name, folder, *more):
    """The exit code of a tiny run, and the JSON it wrote."""
    words = ["bench", name, *RUNS[name].split(), "--repetitions", "2", "--threads", "1", "--output", str(folder), *more]
    try:
        code = main(words)
    except SystemExit as exit:
        code = exit.code
    return code, json.loads((folder / f"{name}.json").read_text())


def test_decoding_over_lengths(tmp_path, capsys):
    code, found = run("translate", tmp_path)
    assert code == 0
    rows = {(row["method"], row["tokens"]): row for row in found["rows"]}
    assert rows.keys() == {(method.name, length) for method in translation.METHODS for length in (9, 30)}
    for (method, length), row in rows.items():
        if method.startswith("ctranslate2"):
            assert (row["note"], row["seconds"]) == ("skipped: ctranslate2 is not installed", None)
            continue
        assert row["note"] == ""
        assert row["repetitions"] == 2
        assert row["quartiles"][0] <= row["seconds"] <= row["quartiles"][1]
        assert row["tokens_per_second"] == pytest.approx(2 / row["seconds"])
        whole = row["seconds_reading"] + length * row["seconds"]
        assert row["tokens_per_second_whole"] == pytest.approx(2 * length / whole)
        assert row["ratio_dynamic"] == pytest.approx(rows["dynamic", length]["seconds"] / row["seconds"])
        if method in translators.EXACT:
            assert row["same_tokens"] == (None if method == "dynamic" else 1)
            assert row["state_bytes"] >= SHAPE.bytes_of_keys_and_values(2, 2 * length - 4)
        else:
            assert row["gate_error"] < 1e-4
            assert row["state_bytes"] == rows[method, 9]["state_bytes"]
        if method == "mlp_compiled":
            assert row["same_tokens"] == 1
    assert "mlp 32/8 against DynamicCache" in found["summary"]
    assert any("decoded whole" in name for name in found["summary"])
    assert "| 30 | mlp 32/8 |" in (tmp_path / "translate.md").read_text()
    assert "mlp 32/8 against DynamicCache: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "method", [method for method in translation.METHODS if not method.compute], ids=lambda m: m.name
)
def test_decoding_near_the_end_is_decoding_from_the_text(method):
    """From the start, and from a cache near the end, once and again: the tokens that generate() gives from the text."""
    model = translators.prepare(translators.make_marian(SHAPE), method)
    text = translators.make_text(model, 20, 11)
    decoder = translators.Decoder(model, method.name, text, batch=2, steps=3)
    options = {"min_new_tokens": 4, "max_new_tokens": 4, "num_beams": 1}
    at_start = model.generate(text.source, **options)[0, 1:].tolist()
    at_end = model.generate(text.source, decoder_input_ids=text.target, **options)[0, 12:].tolist()
    for _ in range(2):
        assert decoder.start().tokens == at_start
        turn = decoder.end(decoder.full())
        assert turn.tokens == at_end
        assert len(turn.steps) == 3


def test_no_tokens_per_second_where_logits_or_tokens_are_wrong(tmp_path, monkeypatch):
    right_logits, right_turn = translators.check_state, translators.Decoder.end

    def wrong_logits(model, method, *given):
        found, expected = right_logits(model, method, *given)
        return (found * 1.001 if method == "t2r" else found), expected

    def wrong_turn(self, cache):
        turn = right_turn(self, cache)
        return turn._replace(tokens=[0, *turn.tokens[1:]]) if self.method in ("static", "mlp_compiled") else turn

    monkeypatch.setattr(translators, "check_state", wrong_logits)
    monkeypatch.setattr(translators.Decoder, "end", wrong_turn)
    code, found = run("translate", tmp_path)
    assert code == 1
    said = {"t2r": "error 1", "static": "of its tokens are those of DynamicCache", "mlp_compiled": "those of mlp 32/8"}
    for row in found["rows"]:
        if row["method"] in said:
            assert row["note"].startswith("CHECK FAILED: ")
            assert said[row["method"]] in row["note"]
            assert row["seconds"] is row["peak_bytes"] is row["ratio_dynamic"] is None
        elif not row["method"].startswith("ctranslate2"):
            assert row["seconds"] > 0


def test_what_does_not_fit_or_cannot_be_compiled_is_skipped_and_said(tmp_path, monkeypatch):
    def refuse(model, rows):
        raise NotCompiled("no C++ compiler was found")

    monkeypatch.setattr(translators, "compile_decoding", refuse)
    monkeypatch.setattr(translation, "available_bytes", lambda: 3 * SHAPE.bytes_of_keys_and_values(2, 20))
    code, found = run("translate", tmp_path)
    assert code == 0
    for row in found["rows"]:
        compiled = row["method"] in ("mlp_compiled", "mlp_int8")
        assert (row["note"] == "skipped: not compiled: no C++ compiler was found") == compiled
        skipped = row["note"].startswith("skipped: keys and values take")
        assert skipped == (row["method"] in translators.EXACT and row["tokens"] == 30)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        (
            [(64, 0.5), (256, 2.0), (1024, 4.0)],
            "faster from about 130 tokens on: 0.50 times as fast at 64 tokens, 4.00",
        ),
        ([(64, 1.5), (256, 2.0)], "faster at every length: 1.50 times"),
        ([(64, 0.5), (256, 0.8)], "not faster up to 256 tokens: 0.50 times"),
        ([(64, 2.0), (256, 0.8), (1024, 1.25)], "faster from about 510 tokens on"),
    ],
)
def test_where_lines_cross_is_said_in_words(ratios, said):
    assert translation.crossover(ratios).startswith(said)


@pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason="needs ctranslate2")
def test_ctranslate2_decodes_the_same_weights(tmp_path):
    model = translators.make_marian(SHAPE)
    translators.save(model, SHAPE, tmp_path / "model")
    ctranslate2_peer.convert(tmp_path / "model", tmp_path / "converted")
    text = translators.make_text(model, 20, 11)
    names = translators.words_of(SHAPE)
    source, (_, *target) = ([names[token] for token in tokens[0]] for tokens in (text.source, text.target))
    decoder = translators.Decoder(model, "dynamic", text, batch=2, steps=3)
    peer = ctranslate2_peer.Peer(tmp_path / "converted", "float32", 1)
    try:
        found = peer.decode(source, target, batch=2, steps=3)
        assert found.tokens == decoder.end(decoder.full()).tokens
        assert len(found.steps) == 3
        assert peer.decode(source, [], batch=2, steps=3).tokens == decoder.start().tokens
        likely = torch.tensor(peer.log_likelihoods(source, target))
    finally:
        peer.close()
    assert measure.error(likely, translators.log_likelihoods(model, text).double()) < 1e-5


def test_ctranslate2_is_continued_as_a_line():
    start = ctranslate2_peer.Decoded(9.0, [1.0, 1.0, 1.5], [5], 100)
    reached = ctranslate2_peer.Decoded(8.0, [2.0, 3.0], [6], 150)
    assert ctranslate2_peer.continued(start, reached, 1.0) == reached
    assert ctranslate2_peer.continued(start, reached, 4.0) == (8.0, [5.0, 9.0], [], 300)
    noisy = ctranslate2_peer.Decoded(8.0, [0.5, 3.0], [6], 90)  # faster, and smaller, than at the start
    assert ctranslate2_peer.continued(start, noisy, 4.0) == (8.0, [0.5, 9.0], [], 90)


def test_whole_encoders(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "PAPER_SIZE", (3, 12))
    monkeypatch.setattr(encoding, "PAPER", {("mlp", 4): (1.5, 0.5)})
    code, found = run("encode-model", tmp_path)
    assert code == 0
    rows = {(row["title"], row["tokens"]): row for row in found["rows"]}
    titles = ("SDPA", "eager softmax", "no attention", "linformer, n=4", "mlp, n=4")
    assert rows.keys() == {(title, length) for title in titles for length in (12, 24)}
    assert rows["eager softmax", 24]["note"].startswith("skipped: ")
    assert rows.pop(("eager softmax", 24))["seconds"] is None
    for (title, length), row in rows.items():
        assert row["note"] == ""
        assert row["batch"] == (3 if length == 12 else 1)
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * length / row["seconds"])
        assert row["ratio_sdpa"] == pytest.approx(rows["SDPA", length]["seconds"] / row["seconds"])
        assert row["attention_share"] == pytest.approx(1 - rows["no attention", length]["seconds"] / row["seconds"])
        assert row["memory_sdpa"] == 1
        assert row["memory_eager"] == (1 if length == 12 else None)
        assert (row["gate_error"] is None) == (title == "no attention")
        paper = (1.5, 0.5) if (title, length) == ("mlp, n=4", 12) else (None, None)
        assert (row["paper_speed"], row["paper_memory"]) == paper
    assert len(found["summary"]) == 2


def test_no_figure_of_an_encoder_that_is_wrong(tmp_path, monkeypatch):
    right = encoders.check
    wrong = iter([1e-3])
    monkeypatch.setattr(encoders, "check", lambda *given: next(wrong, None) or right(*given))
    code, found = run("encode-model", tmp_path)
    assert code == 1
    for row in found["rows"]:
        skipped = (row["title"], row["tokens"]) == ("eager softmax", 24)
        assert (row["seconds"] is None) == (row["title"] == "SDPA" or skipped)


def test_without_attention_each_token_is_alone():
    model = encoders.prepare(encoders.make_roberta(encoders.Shape(1, 16, 2, 40, 12)), encoders.NONE, None)
    words = torch.randint(4, 40, (1, 12))
    others = words.clone()
    others[:, 1:] = 5
    with torch.no_grad():
        assert torch.equal(model(words).last_hidden_state[:, 0], model(others).last_hidden_state[:, 0])


def test_saved_encoders_against_the_original(tmp_path, capsys):
    config = transformers.RobertaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=22,
    )  # fmt: skip
    original, bounded, twin = tmp_path / "original", tmp_path / "mlp-4", tmp_path / "twin" / "original"
    model = transformers.RobertaForMaskedLM(config)
    model.save_pretrained(original)
    model.save_pretrained(twin)
    convert(model, "mlp", 4).save_pretrained(bounded)
    folders = ["--model", str(original), str(bounded), "--tokens", "20"]
    code, found = run("encode-model", tmp_path, *folders)
    assert code == 0
    assert [row["title"] for row in found["rows"]] == ["SDPA", "eager softmax", "no attention", "mlp-4"]
    assert found["rows"][-1]["slots"] == 4
    assert found["rows"][-1]["ratio_sdpa"] > 0
    assert "mlp-4" in found["provenance"]["command"]
    for line, said in (
        (["--model", str(bounded), str(original)], "name the original first"),
        (["--model", str(original), "--tokens", "21"], "has positions for 20 tokens, --tokens asks for 21"),
        (["--model", str(original), str(twin)], "two of the folders are called 'original'"),
    ):
        assert main(["bench", "encode-model", *RUNS["encode-model"].split(), "--tokens", "20", *line]) == 2
        assert said in capsys.readouterr().err
