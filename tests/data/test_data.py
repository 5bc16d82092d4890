"""Text to tokens: what is counted, what is refused, and that a cache is whole or absent."""

import lzma

import numpy as np
import pytest
import torch

from abc_attn.data import Copy, Recall, Segments, Source, build_corpus, find_files

TEXT = {
    "train": " = Title = \n\n the cat sat on the mat \n the <unk> sat \n",
    "valid": "the dog sat\n",
    "test": "a cat\n\n",
}


@pytest.fixture
def folder(tmp_path):
    for split, text in TEXT.items():
        (tmp_path / f"wiki.{split}.tokens").write_text(text, encoding="utf-8")
    return tmp_path


def test_words_as_in_wikitext(folder, tmp_path):
    corpus = build_corpus(Source(find_files(folder)), tmp_path / "cache")
    tokenizer = corpus.tokenizer
    train = corpus.tokens["train"]
    shown = "= Title = <eos> <eos> the cat sat on the mat <eos> the <unk> sat <eos>"
    assert " ".join(tokenizer.convert_ids_to_tokens(train)) == shown
    assert tokenizer.convert_ids_to_tokens(corpus.tokens["validation"]) == ["the", "<unk>", "sat", "<eos>"]
    assert corpus.words == {"train": 16, "validation": 4, "test": 4}
    counts = np.bincount(train)
    assert (np.diff(counts) <= 0).all()  # numbered by falling frequency
    assert isinstance(train, np.memmap)
    # The tokenizer that is saved with a model agrees.
    encoded = tokenizer("the cat sat\nthe zebra\n")["input_ids"]
    assert " ".join(tokenizer.convert_ids_to_tokens(encoded)) == "the cat sat <eos> the <unk> <eos>"
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_smaller_vocabulary_keeps_the_frequent_words(folder, tmp_path, size):
    corpus = build_corpus(Source(find_files(folder)), tmp_path / "cache", vocab_size=size)
    assert len(corpus.tokenizer) == size
    assert {"<unk>", "<eos>"} <= set(corpus.tokenizer.get_vocab())
    assert corpus.words["train"] == len(corpus.tokens["train"]) == 16
    assert (np.diff(np.bincount(corpus.tokens["train"], minlength=size)) <= 0).all()


def test_byte_pairs_give_back_the_text(folder, tmp_path):
    corpus = build_corpus(Source(find_files(folder)), tmp_path / "cache", "bpe", vocab_size=270)
    assert corpus.tokenizer.decode(corpus.tokens["train"]) == TEXT["train"]
    assert corpus.tokenizer(TEXT["test"])["input_ids"] == corpus.tokens["test"].tolist()
    assert corpus.words == {"train": 16, "validation": 4, "test": 4}  # words, not tokens
    assert len(corpus.tokenizer) <= 270


@pytest.mark.parametrize(("tokenizer", "size"), [("word", None), ("bpe", 270)])
def test_the_words_of_a_beginning(folder, tmp_path, tokenizer, size):
    corpus = build_corpus(Source(find_files(folder)), tmp_path / "cache", tokenizer, vocab_size=size)
    tokens, end = corpus.tokens["train"], corpus.tokenizer.eos_token_id
    line_ends = np.flatnonzero(tokens == end) + 1
    for count, words in zip(line_ends, (4, 5, 12, 16), strict=True):  # a line's end is a word
        assert corpus.beginning("train", count)[1] == words
    some, words = corpus.beginning("train", line_ends[0] + 1)
    np.testing.assert_array_equal(some, tokens[: line_ends[0] + 1])
    assert words == 5
    assert corpus.beginning("train", None)[1] == corpus.beginning("train", 10**6)[1] == 16


def test_built_once_and_whole(folder, tmp_path, monkeypatch):
    files, cache = find_files(folder), tmp_path / "cache"
    first = build_corpus(Source(files), cache)
    assert [path.name for path in cache.iterdir()] == [first.folder.name]
    monkeypatch.setattr("abc_attn.data.text._write", None)  # would fail if it were called
    assert build_corpus(Source(files), cache).folder == first.folder
    monkeypatch.undo()
    # The same text compressed is the same text to train on, but other bytes: it is built anew, with the same tokens.
    for split, text in TEXT.items():
        (folder / f"wiki.{split}.tokens").unlink()
        (folder / f"wiki.{split}.tokens.xz").write_bytes(lzma.compress(text.encode()))
    again = build_corpus(Source(find_files(folder)), cache)
    for split in again.tokens:
        np.testing.assert_array_equal(again.tokens[split], first.tokens[split])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("wiki.train.tokens", b"", "no words"),
        ("wiki.train.tokens", b"\n\n", "no words"),
        ("wiki.test.tokens", b"", "the test text is empty"),
        ("wiki.valid.tokens", b"good line\nbad \xff line\n", r"not UTF-8: line 2 has byte 0xff at column 4"),
        ("wiki.test.tokens.xz", lzma.compress(b"some words\n" * 99)[:-20], "not a whole .xz file"),
        ("wiki.test.tokens.xz", b"plain text", "not a whole .xz file"),
    ],
)
def test_bad_text_is_an_error_and_leaves_no_cache(folder, tmp_path, name, content, said):
    if name.endswith(".xz"):
        (folder / name.removesuffix(".xz")).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        build_corpus(Source(find_files(folder)), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_text_is_an_error(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        find_files(tmp_path / "nowhere")
    (folder / "wiki.test.tokens").unlink()
    with pytest.raises(FileNotFoundError, match=r"no test text in .* looked for wiki\.test\.tokens"):
        find_files(folder)
    with pytest.raises(ValueError, match="one of word, bpe, got 'char'"):
        build_corpus(Source({}), tmp_path / "cache", "char")
    for size, said in ((None, "needs a vocab_size"), (256, "at least 257 .*, got 256")):
        with pytest.raises(ValueError, match=said):
            build_corpus(Source({}), tmp_path / "cache", "bpe", vocab_size=size)
    with pytest.raises(ValueError, match=r"at least 3 \(<unk>, <eos> and a word\), got 2"):
        build_corpus(Source({}), tmp_path / "cache", vocab_size=2)
    with pytest.raises(FileNotFoundError, match="no train text at"):
        build_corpus(Source({"train": tmp_path / "none"}), tmp_path / "cache")


def test_the_datasets_library_gives_the_same_tokens(folder, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "rows").mkdir()
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        (tmp_path / "rows" / f"{name}.txt").write_text(TEXT[split])
    files = build_corpus(Source(find_files(folder)), tmp_path / "cache")
    rows = build_corpus(Source(dataset_name=str(tmp_path / "rows")), tmp_path / "cache")
    for split in files.tokens:
        np.testing.assert_array_equal(rows.tokens[split], files.tokens[split])


def test_segments_go_through_the_text_once_a_pass():
    tokens = np.arange(1000, dtype=np.uint16)
    data = Segments(tokens, length=32, total=90, seed=5)
    assert data.cuts.per_pass == 30
    for number in range(3):
        items = [data[number * 30 + i] for i in range(30)]
        read = np.sort(np.concatenate([item["input_ids"] for item in items]))
        assert (np.diff(read) == 1).all()  # neighbours, each token once
        assert all((item["shift_labels"] == item["input_ids"] + 1).all() for item in items)
    # Out of order it is the same: that is what resuming needs.
    late = Segments(tokens, length=32, total=90, seed=5)[77]
    assert (late["input_ids"] == data[77]["input_ids"]).all()
    assert (Segments(tokens, 32, 90, seed=6)[77]["input_ids"] != late["input_ids"]).any()
    with pytest.raises(ValueError, match="1000 tokens, fewer than two segments of 501"):
        Segments(tokens, length=501, total=1, seed=0)


def test_recall_asks_for_the_value_of_each_key():
    item = Recall(items=5, vocab_size=20, total=3, seed=1)[2]
    words, labels = item["input_ids"].tolist(), item["shift_labels"].tolist()
    value = dict(zip(words[0:10:2], words[1:10:2], strict=True))
    asked = [(word, label) for word, label in zip(words, labels, strict=True) if label != -100]
    assert len(asked) == 5
    assert dict(asked) == value
    with pytest.raises(ValueError, match="vocab_size of at least 10"):
        Recall(items=5, vocab_size=9, total=1, seed=0)
    with pytest.raises(ValueError, match="and 8 more for filler"):
        Recall(items=5, vocab_size=10, total=1, seed=0, filler=3)


@pytest.mark.parametrize("sequences", [Recall, Copy])
def test_filler_stands_between_items_and_changes_no_answer(sequences):
    places = set()
    for index in range(20):
        item = sequences(items=5, vocab_size=28, total=20, seed=1, filler=7)[index]
        words = torch.cat([item["input_ids"], item["shift_labels"][-1:]])
        filler = words >= 20
        assert filler.sum() == 7
        asked = torch.cat([torch.tensor([False]), item["shift_labels"] != -100])
        assert not (asked & filler).any()
        left, answers = words[~filler], words[asked]
        half = len(left) // 2
        if sequences is Copy:
            assert left[:half].tolist() == left[half + 1 :].tolist() == answers.tolist()
        else:
            value = dict(left[:half].view(-1, 2).tolist())
            assert [value[int(key)] for key in left[half::2]] == answers.tolist()
            assert not (filler[1:] & (words[:-1] < 10)).any()  # a value follows its key at once
        places.add(tuple(filler.nonzero()[:, 0].tolist()))
    assert len(places) == 20  # no two alike


def test_copy_asks_for_every_word_again():
    item = Copy(items=6, vocab_size=9, total=1, seed=0)[0]
    words, labels = item["input_ids"], item["shift_labels"]
    assert words[6] == 0
    assert (labels[:6] == -100).all()
    assert labels[6:].tolist() == words[:6].tolist()
