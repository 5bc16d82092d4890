"""Labelled files of every kind, GLUE's folders, and mistakes that are named by file and line."""

import csv
import json
import lzma

import numpy as np
import pytest

from abc_attn.data.labelled import GLUE, LabelledBatches, LabelledSource, glue_source, read_labelled, split_off

COLUMNS = (("text",), ("label",))
ROWS = [("one, two", "yes"), ('a "quoted" word', "no"), ("drei und vier", "yes")]


def write(path, rows=ROWS, names=("text", "label")):
    if ".csv" in path.suffixes:
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([names, *rows])
    elif ".jsonl" in path.suffixes:
        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    else:
        path.write_text("".join("\t".join(row) + "\n" for row in [names, *rows]))
    return path


def test_a_label_with_a_tab_or_a_line_end_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "label": "a"}\n{"text": "two", "label": "b\\tc"}\n')
    with pytest.raises(ValueError, match=r"line 2: label 'b\\tc' has a tab or a line end"):
        LabelledSource(COLUMNS, files=(path, path)).read()


@pytest.mark.parametrize("header", [True, False])
def test_glues_cola_has_no_header(tmp_path, header):
    (tmp_path / "CoLA").mkdir()
    rows = "gj04\t1\t\tThe sailors rode the breeze.\nbc01\t0\t*\tThey drank the pub.\n"
    for name in ("train", "dev"):
        text = "source\tlabel\tstar\tsentence\n" * header + rows
        (tmp_path / "CoLA" / f"{name}.tsv").write_text(text)
    train, _, _ = glue_source("cola", tmp_path, None).read()
    assert [(each.text, each.label) for each in train] == [
        ("The sailors rode the breeze.", "1"), ("They drank the pub.", "0"),
    ]  # fmt: skip


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl"])
def test_kinds_of_files(tmp_path, ending):
    found = read_labelled(write(tmp_path / f"a.{ending}"), COLUMNS)
    assert [(each.text, each.label) for each in found] == ROWS
    assert [each.line for each in found] == ([1, 2, 3] if ending == "jsonl" else [2, 3, 4])
    assert all(each.pair is None for each in found)


def test_lines_of_csv_count_those_inside_quotes(tmp_path):
    path = write(tmp_path / "a.csv", [("two\nlines", "yes"), ("one", "no")])
    assert [(each.text, each.line) for each in read_labelled(path, COLUMNS)] == [("two\nlines", 2), ("one", 4)]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tsv", b"text\tlabel\none\tyes\ntwo\n", "a.tsv, line 3 has 1 columns, and the first line 2"),
        ("a.tsv", b"text\tlabel\none\tyes\n \tno\n", "a.tsv, line 3: 'text' is empty"),
        ("a.tsv", b"text\tlabel\none\tyes\ntwo\t\n", "a.tsv, line 3: 'label' is empty"),
        ("a.tsv", b"text\tlabel\none\tyes\nb\xff\tno\n", "a.tsv is not UTF-8: line 3 has byte 0xff at column 1"),
        ("a.tsv", b"sentence\tlabel\none\tyes\n", "a.tsv has no column 'text'; it has 'sentence', 'label'"),
        ("a.tsv", b"text\ttext\tlabel\none\tb\tyes\n", "a.tsv, line 1 must name the columns, each once"),
        ("a.tsv", b"text\tlabel\n", "a.tsv has no labelled texts"),
        ("a.tsv", b"", "a.tsv has no labelled texts"),
        ("a.csv", b'text,label\none,yes\n"two,no\n', "a.csv, line 3 is not CSV"),
        ("a.jsonl", b'{"text": "one", "label": 1}\n{"text"\n', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": "one", "label": 1}\n[1]\n', "a.jsonl, line 2 must be a JSON object, and is a list"),
        ("a.jsonl", b'{"text": "one", "label": 1}\n{"text": [2], "label": 1}\n', "line 2 has no text in 'text'"),
        ("a.jsonl", b'{"text": "one", "label": 1}\n{"text": "b"}\n', "line 2 has no text in 'label'"),
        ("a.tsv.xz", b"text\tlabel\n", "is not a whole .xz file"),
        ("a.txt", b"text\tlabel\n", "a.txt must be one of .tsv, .csv, .jsonl"),
    ],
)
def test_mistakes_name_the_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_labelled(tmp_path / name, COLUMNS)


def test_labels(tmp_path):
    train = write(tmp_path / "train.tsv", [("a", "10"), ("b", "9"), ("c", "10")])
    test = write(tmp_path / "test.tsv", [("a", "9"), ("b", "8")])
    assert LabelledSource(COLUMNS, files=(train, train)).read()[2] == ("9", "10")
    with pytest.raises(ValueError, match=r"test.tsv, line 3: label '8' is not one of '9', '10'"):
        LabelledSource(COLUMNS, files=(train, test)).read()
    with pytest.raises(ValueError, match=r"train.tsv has one label alone, 'x'; from 2 to 1000"):
        LabelledSource(COLUMNS, files=(write(train, [("a", "x"), ("b", "x")]), test)).read()
    before = LabelledSource(COLUMNS, files=(train, test)).fingerprint()
    write(train, [("a", "x"), ("c", "x")])
    assert LabelledSource(COLUMNS, files=(train, test)).fingerprint() != before


def test_glue_by_name(tmp_path):
    """The official names of files and columns, and those of the copies that are about."""
    for name, task in GLUE.items():
        folder = tmp_path / task.folder
        folder.mkdir()
        names = (*(texts[-1] for texts in task.texts), task.label_columns[-1])
        rows = [(*("a b" for _ in task.texts), label) for label in task.labels]
        write(folder / "train.tsv", rows, names)
        write(folder / f"{task.scored}.tsv", rows[:1], names)
        (folder / "test.tsv").write_text("index\tsentence\n")  # without labels: never read
        source = glue_source(name, tmp_path, None)
        assert [path.name for path in source.files] == ["train.tsv", f"{task.scored}.tsv"]
        train, scored, labels = source.read()
        assert (len(train), len(scored), labels) == (len(task.labels), 1, task.labels)
        assert (train[0].pair is not None) == source.pairs == (len(task.texts) == 2)
    odd = tmp_path / "odd" / "QQP"
    odd.mkdir(parents=True)
    text = "question1\tquestion2\tlabel\na\tb\t0\nc\td\t1\n"
    for name in ("lmbff_10k_subset.tsv.xz", "cs224n_quora_dev_20k.tsv.xz"):
        with lzma.open(odd / name, "wt") as file:
            file.write(text)
    found = glue_source("qqp", tmp_path / "odd", None)
    assert [path.name for path in found.files] == ["lmbff_10k_subset.tsv.xz", "cs224n_quora_dev_20k.tsv.xz"]
    assert len(found.read()[0]) == 2
    with pytest.raises(FileNotFoundError, match="SST-2: data_dir must hold GLUE's folders"):
        glue_source("sst2", tmp_path / "odd", None)
    (odd / "more.tsv").write_text(text)
    with pytest.raises(FileNotFoundError, match=r"no train text in .*: one train.tsv is needed; there are lmbff"):
        glue_source("qqp", tmp_path / "odd", None)


def test_rows_of_glue_that_cannot_be_used_are_left_out_and_said(tmp_path, capsys):
    """The official QQP has a few."""
    (tmp_path / "QQP").mkdir()
    good, bad = ["1\ta\tb\t0", "2\tc\td\t1"], ["3\te", "4\t\tf\t1"]
    for name, rows in (("train", [good[0], *bad, good[1]]), ("dev", good)):
        text = "\n".join(["id\tquestion1\tquestion2\tis_duplicate", *rows]) + "\n"
        (tmp_path / "QQP" / f"{name}.tsv").write_text(text)
    train, scored, _ = glue_source("qqp", tmp_path, None).read()
    assert [(each.text, each.pair, each.label) for each in train] == [("a", "b", "0"), ("c", "d", "1")]
    assert [each.line for each in train] == [2, 5]
    assert len(scored) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "2 of 4 rows of" in said
    assert said.endswith("train.tsv cannot be used and are left out: lines 3, 4")
    with pytest.raises(ValueError, match=r"line 3 has 2 columns, and the first line 4"):
        read_labelled(tmp_path / "QQP" / "train.tsv", (("question1",), ("question2",), ("is_duplicate",)))


def test_glue_by_the_datasets_library(monkeypatch, capsys):
    import datasets

    rows = [{"sentence": text, "label": label} for text, label in (("a", 1), ("b", 0), (" ", 1))]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: datasets.Dataset.from_list(rows))
    train, scored, labels = glue_source("sst2", None, "mine").read()
    assert [(each.text, each.label, each.line) for each in train] == [("a", "1", 1), ("b", "0", 2)]
    assert (scored, labels) == (train, ("0", "1"))
    assert "1 of 3 rows of mine, train cannot be used and are left out: line 3" in capsys.readouterr().err
    rows[1]["label"] = -1  # as in the test text, whose labels are not public
    with pytest.raises(ValueError, match="mine, train, row 2: label -1 is not from 0 to 1"):
        glue_source("sst2", None, "mine").read()


def test_held_out_text_is_always_the_same(tmp_path):
    examples = read_labelled(write(tmp_path / "a.tsv", [(f"t{n}", str(n % 2)) for n in range(50)]), COLUMNS)
    kept, held = split_off(examples, 0.1)
    assert (len(kept), len(held)) == (45, 5)
    assert {*kept} | {*held} == {*examples}
    assert split_off(examples, 0.1) == (kept, held)
    assert [len(part) for part in split_off(examples[:2], 0.01)] == [1, 1]


def test_batches_have_every_example_once_and_are_of_like_length():
    lengths = np.random.default_rng(0).integers(3, 60, 500)
    encoded = [{"input_ids": [0] * length, "place": place} for place, length in enumerate(lengths)]
    batches, again = (LabelledBatches(encoded, 8, 1000, seed=1) for _ in range(2))
    first = [batches[index]["place"] for index in range(500)]
    assert sorted(first) == [*range(500)]
    assert [again[index]["place"] for index in (700, 3)] == [batches[700]["place"], first[3]]
    assert first != [batches[index]["place"] for index in range(500, 1000)]
    spread = [np.ptp([lengths[place] for place in first[start : start + 8]]) for start in range(0, 496, 8)]
    assert np.mean(spread) < 3
    assert first != sorted(first, key=lambda place: lengths[place])
