"""Parallel text: what is aligned, what is refused and left out, windows of documents, and batches by tokens."""

import gzip
import json
import lzma

import numpy as np
import pytest
import torch
from tiny_pairs import write_pairs

from abc_attn.data import ParallelSource, TokenBatches, build_pairs, find_parallel_files
from abc_attn.data.batches import by_length

EN_DE = ("en", "de")
BATCHES = {"pad": 0, "separator": 2, "start": 0}


@pytest.fixture
def folder(tmp_path):
    return write_pairs(tmp_path)


def source(folder, name="pairs", **options):
    return ParallelSource(EN_DE, find_parallel_files(folder / name, EN_DE), **options)


def build(folder, name="pairs", **options):
    return build_pairs(source(folder, name, **options), folder / "cache", 300)


def text(corpus, tokens):
    return corpus.tokenizer.decode(tokens).strip()


@pytest.mark.parametrize("pack", [None, (gzip.compress, ".gz"), (lzma.compress, ".xz")])
def test_two_files_a_split(folder, pack):
    lines = [(folder / "pairs" / f"train.{language}").read_text().splitlines() for language in EN_DE]
    for file in [*(folder / "pairs").iterdir()] if pack else ():
        (folder / "pairs" / f"{file.name}{pack[1]}").write_bytes(pack[0](file.read_bytes()))
        file.unlink()
    corpus = build(folder)
    examples = corpus.examples("train")
    assert len(examples) == 120
    for index in (0, 7, 119):
        for side, tokens in enumerate(examples.tokens(index, 2)):
            assert text(corpus, tokens[:-1]) == lines[side][index]
            assert tokens[-1] == corpus.tokenizer.eos_token_id == 1
    assert len(corpus.tokenizer) <= 300
    assert isinstance(corpus.sides["train"][0].ids, np.memmap)
    assert corpus.tokenizer("e1 e2").input_ids[-1] == 1


def test_documents_are_windows(folder):
    corpus = build(folder, "documents")
    packed = folder / "packed"
    packed.mkdir()
    for file in (folder / "documents").iterdir():
        with lzma.open(packed / f"{file.name}.xz", "wb") as out:
            out.write(file.read_bytes())
    assert [*map(list, build(folder, "packed").sides["train"][1])] == [*map(list, corpus.sides["train"][1])]
    plain = build(folder)
    assert [*map(list, corpus.sides["train"][0])] == [*map(list, plain.sides["train"][0])]
    windows = corpus.examples("train", 3)
    assert len(windows) == 120
    assert windows.first[:7].tolist() == [0, 0, 0, 0, 1, 5, 5]
    assert windows.last[:7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    document = json.loads((folder / "documents" / "train.jsonl").read_text().splitlines()[0])
    for side, tokens in enumerate(windows.tokens(4, 2)):
        parts = text(corpus, tokens[:-1]).split("<sep>")
        assert [part.strip() for part in parts] == document[EN_DE[side]][1:5]
        assert tokens[-1] == 1
    lengths = [[len(side) for side in windows.tokens(index, 2)] for index in range(120)]
    assert windows.lengths().T.tolist() == lengths


def test_blank_lines_end_documents(folder):
    for language in EN_DE:
        (folder / "pairs" / f"test.{language}").write_text("\n\na\nb\n\n\n\nc\n\n")
    pairs = list(source(folder, blank_lines_end_documents=True).pairs("test"))
    assert [(pair.source, pair.document, pair.line) for pair in pairs] == [("a", 0, 3), ("b", 0, 4), ("c", 1, 8)]
    assert len(list(source(folder).pairs("test"))) == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pairs/train.en": "a\nb\n"}, r"not aligned: .*train.en ends after 2 lines, and .*train.de has 120"),
        ({"pairs/test.de": "a\n"}, r"not aligned: .*test.de ends after 1 lines, and .*test.en has 15"),
        ({"pairs/valid.en": "", "pairs/valid.de": ""}, "the validation text is empty"),
        ({"pairs/train.en": "\n" * 120, "pairs/train.de": "\n" * 120}, "the training text has no words"),
        (
            {"documents/train.jsonl": '{"en": ["a"], "de": []}\n'},
            "line 1 is not aligned: 1 sentences in 'en', 0 in 'de'",
        ),
        ({"documents/test.jsonl": '\n{"en": ["a"]}\n'}, "line 2 needs 'de', a list of sentences; it has 'en'"),
        ({"documents/test.jsonl": '{"en": ["a"], "de": [3]}\n'}, "line 1 needs 'de', a list of sentences"),
        ({"documents/test.jsonl": "[]\n"}, "line 1 must be a JSON object, and is a list"),
        ({"documents/test.jsonl": "{\n"}, "line 1 is not JSON"),
    ],
)
def test_what_does_not_belong_together_is_an_error_and_leaves_no_cache(folder, changes, said):
    for file, content in changes.items():
        (folder / file).write_text(content)
    with pytest.raises(ValueError, match=said):
        build(folder, next(iter(changes)).partition("/")[0])
    assert list((folder / "cache").iterdir()) == []


def test_what_cannot_be_trained_on_is_counted_and_left_out(folder):
    for language, change in (("en", {3: "", 7: " "}), ("de", {7: "", 9: "", 11: "word " * 40})):
        lines = (folder / "pairs" / f"train.{language}").read_text().splitlines()
        for line, words in change.items():
            lines[line - 1] = words
        (folder / "pairs" / f"train.{language}").write_text("\n".join(lines) + "\n")
    corpus = build(folder)
    kept, said = corpus.usable("train", 0, 30)
    assert len(kept) == 116
    assert not {2, 6, 8, 10} & {*kept.last.tolist()}
    assert said == [
        "3 of 120 pairs of the train text with an empty side are left out: lines 3, 7, 9",
        "1 of 120 pairs of the train text with more than 30 tokens on a side are left out: line 11",
    ]
    assert corpus.usable("validation", 0, 30)[1] == []
    with pytest.raises(ValueError, match=r"nothing is left of the train text: .*120 .*left out: lines 1, 2, 4, 5, 6, "):
        corpus.usable("train", 0, 2)


def test_files_are_found_or_named(folder):
    with pytest.raises(FileNotFoundError, match="no folder"):
        find_parallel_files(folder / "nowhere", EN_DE)
    with pytest.raises(FileNotFoundError, match=r"no train text in .*: looked for train.es, train.jsonl"):
        find_parallel_files(folder / "pairs", ("en", "es"))
    (folder / "pairs" / "test.en").rename(folder / "pairs" / "test_2016.en")
    assert find_parallel_files(folder / "pairs", EN_DE)["test"][0].name == "test_2016.en"
    (folder / "pairs" / "test_2017.en").touch()
    with pytest.raises(ValueError, match=r"several files that fit: test_2016\.en, test_2017\.en"):
        find_parallel_files(folder / "pairs", EN_DE)
    with pytest.raises(ValueError, match=r"vocab_size of at least 260 .* got 100"):
        build_pairs(source(folder, "documents"), folder / "cache", 100)
    with pytest.raises(FileNotFoundError, match="no train text at"):
        build_pairs(ParallelSource(EN_DE, {"train": (folder / "none",)}), folder / "cache", 300)


def test_a_data_set(folder, monkeypatch):
    import datasets

    rows = [{"pair": {"en": f"e{i}", "de": f"d{i}"}} for i in range(6)]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: datasets.Dataset.from_list(rows))
    given = ParallelSource(EN_DE, dataset_name="mine", dataset_column="pair")
    assert [pair[:2] for pair in given.pairs("train")] == [(f"e{i}", f"d{i}") for i in range(6)]
    assert len(build_pairs(given, folder / "cache", 300).examples("test")) == 6
    with pytest.raises(ValueError, match="mine has columns pair; a column 'other' is needed"):
        list(ParallelSource(EN_DE, dataset_name="mine", dataset_column="other").pairs("train"))
    with pytest.raises(ValueError, match="mine, row 1 has no text in en and fr"):
        list(ParallelSource(("en", "fr"), dataset_name="mine", dataset_column="pair").pairs("train"))


def test_built_once_and_again_if_damaged(folder, monkeypatch, capsys):
    first = build(folder)
    assert [path.name for path in (folder / "cache").iterdir()] == [first.folder.name]
    with monkeypatch.context() as patch:
        patch.setattr("abc_attn.data.pairs._write", None)  # would fail if it were called
        assert build(folder).fingerprint == first.fingerprint
    file = first.folder / "train.target.ids.npy"
    expected = file.read_bytes()
    file.write_bytes(expected[:-2] + b"xx")
    again = build(folder)
    assert "train.target.ids.npy is damaged" in capsys.readouterr().err
    assert file.read_bytes() == expected
    assert again.fingerprint == first.fingerprint
    assert build(folder, blank_lines_end_documents=True).fingerprint != first.fingerprint


def test_batches_are_a_function_of_the_seed(folder):
    examples = build(folder).examples("train")
    batches = TokenBatches(examples, 200, 1000, 3, **BATCHES)
    per_pass = batches.per_pass
    assert 5 < per_pass < 40
    rows = []  # of each pass
    for start in (0, per_pass):
        items = [batches[start + index] for index in range(per_pass)]
        for item in items:
            assert max(item["input_ids"].numel(), item["labels"].numel()) <= 200
            assert torch.equal(item["decoder_input_ids"][:, 1:], item["labels"][:, :-1].clamp(min=0))
            assert (item["decoder_input_ids"][:, 0] == 0).all()
            assert torch.equal(item["attention_mask"] == 0, item["input_ids"] == 0)
        pairs = [
            (tuple(one[one > 0].tolist()), tuple(other[other > 0].tolist()))
            for item in items
            for one, other in zip(item["input_ids"], item["labels"], strict=True)
        ]
        expected = [tuple(tuple(side.tolist()) for side in examples.tokens(i, 2)) for i in range(len(examples))]
        assert sorted(pairs) == sorted(expected)  # every example once
        real = sum(int((item["labels"] >= 0).sum()) for item in items)
        assert real / sum(item["labels"].numel() for item in items) > 0.9  # like lengths together
        rows.append(pairs)
    assert rows[0] != rows[1]
    same, other = (TokenBatches(examples, 200, 1000, seed, **BATCHES) for seed in (3, 4))
    for index in (per_pass + 2, 0, 5):  # in any order, as after a resumption
        assert all(torch.equal(same[index][key], batches[index][key]) for key in same[index])
    assert any(not torch.equal(other[i]["labels"], batches[i]["labels"]) for i in range(per_pass))
    with pytest.raises(ValueError, match="max_tokens=5 is less than the longest example"):
        TokenBatches(examples, 5, 10, 0, **BATCHES)


def test_groups_by_length_keep_every_row_once():
    lengths = np.random.default_rng(0).integers(1, 30, (2, 50))
    groups = by_length(lengths, 64)
    assert sorted(np.concatenate(groups).tolist()) == list(range(50))
    assert all(len(group) * lengths[:, group].max() <= 64 for group in groups)
