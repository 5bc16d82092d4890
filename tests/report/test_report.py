"""The HTML page of all results: whole in itself, and with every figure of the results."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from abc_attn.recipes import ROOT
from abc_attn.recipes.table import Table
from abc_attn.report import write_page, write_report
from abc_attn.report.page import sections
from abc_attn.report.runs import add_run, history, read_runs, tokens_until

RESULTS = Path(__file__).parents[2] / "results"


class Page(HTMLParser):
    """Collects what a page refers to, and fails where tags do not nest."""

    void = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.cells, self.ids = [], [], [], set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("href", "src", "srcset")]
        self.ids |= {value for name, value in attributes if name == "id"}
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if "td" in self.open:
            self.cells.append(text)


def test_one_page_of_all_results_needs_nothing_else(tmp_path):
    write_report(RESULTS, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} == page.ids
    assert sum(link.startswith("data:") for link in page.links) == len([*RESULTS.glob("*/*.png")])
    assert "http" not in text
    for figure in ("240.0", "255.1 (251.2 to 258.9)", "18.9", "0.97", "n/a"):
        assert any(figure in cell for cell in page.cells), figure
    for fact in ("23d77d7", "table1a/small/mlp-64-gated", "2026-11-17", "AMD EPYC", "Xeon"):
        assert any(fact in cell for cell in page.cells), fact


def test_a_page_of_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no results in"):
        write_report(tmp_path, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_figure_beyond_floating_point_is_shown_as_such(tmp_path):
    text = (RESULTS / "table1a" / "runs.jsonl").read_text(encoding="utf-8")
    run = json.loads(text.splitlines()[0])
    run["scores"]["test/480"] = "inf"
    (tmp_path / "table1a").mkdir()
    (tmp_path / "table1a" / "runs.jsonl").write_text(json.dumps(run) + "\n", encoding="utf-8")
    write_report(tmp_path, tmp_path / "report.html")
    assert "inf" in Page((tmp_path / "report.html").read_text(encoding="utf-8")).cells


def test_numbers_that_are_none_are_kept_as_words_wherever_they_stand(tmp_path):
    record = pretrained("base", 0, 1.5, float("nan")) | {"scores": {"test": float("inf")}}
    add_run(tmp_path, record)
    (found,) = read_runs(tmp_path)
    assert found["scores"]["test"] == "inf"
    assert [point["loss"] for point in found["training"]["history"]] == [1.5, "nan"]


def pretrained(row, seed, *losses):
    history = [{"tokens": 1_000_000 * place, "loss": loss} for place, loss in enumerate(losses)]
    return {"row": row, "seed": seed, "scale": "small", "values": {}, "scores": {}, "training": {"history": history}}


def test_scores_over_the_tokens_of_training(tmp_path):
    records = [pretrained("base", 0, 5.0, 3.0, 2.0), pretrained("base", 1, 5.0, 3.0, 1.0)]
    records += [pretrained("mlp-64", 0, 6.0, 2.6, 1.5), pretrained("mlp-128", 0, 8.0, 7.0), pretrained("random-64", 0)]
    records.append(pretrained("source", 0, 9.0, 8.0))  # not one of the rows that are compared
    for record in records:
        add_run(tmp_path / "table3", record)
    table = Table.open("table3")
    page = write_page(table, "small", tmp_path)
    shown = sections(table, records)[-1]
    assert shown.head[-1] == "tokens until base + 0.1"
    # base ends at a mean of 1.5, and is at 1.6 after 1 + 1.4 / 1.5 million tokens; mlp-64 after 1 + 1 / 1.1
    assert shown.rows == [
        ["base", "5.00", "1.50", "1.93M"],
        ["mlp-64", "6.00", "1.50", "1.91M"],
        ["mlp-128", "8.00", "7.00", "-"],
    ]
    assert table.history.rows[:2] == ["base", "linformer-64"]
    assert {path.name for path in page.parent.glob("*.png")} == {"small.png", "small-history.png"}
    assert "![loss of masked tokens, validation](small-history.png)" in page.read_text(encoding="utf-8")
    add_run(tmp_path / "few" / "table3", records[-1])
    page = write_page(table, "small", tmp_path / "few")  # nothing to draw, and no table without lines
    assert {path.name for path in page.parent.glob("*.png")} == {"small.png"}
    assert "During pretraining" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("level", "tokens"), [(9.0, 0.0), (8.0, 0.0), (7.0, 50.0), (6.0, 100.0), (4.5, 150.0), (3.0, 200.0), (2.9, None)]
)
def test_tokens_until_a_level(level, tokens):
    assert tokens_until({0: 8.0, 100: 6.0, 200: 3.0}, level) == tokens


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": "base"}, "rows must be a list of rows, got 'base'"),
        ({"row": "mlp-32"}, "row must be one of rows, got 'mlp-32'"),
        ({"within": "near"}, "within must be a number, got 'near'"),
    ],
)
def test_a_wrong_history_is_said(tmp_path, changes, said):
    about = yaml.safe_load((ROOT / "table3" / "table.yaml").read_text())
    about["history"] |= changes
    (tmp_path / "table3").mkdir()
    (tmp_path / "table3" / "table.yaml").write_text(yaml.safe_dump(about))
    with pytest.raises(ValueError, match=said):
        Table.open("table3", tmp_path)


def test_a_curve_has_the_points_of_all_seeds():
    runs = [pretrained("base", 0, 5.0, 3.0, 2.0), pretrained("base", 1, 4.0, 2.0)]
    assert history(runs, "loss") == {0: 4.5, 1_000_000: 2.5}
    assert history(runs, "accuracy") == history([], "loss") == {}
