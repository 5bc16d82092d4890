"""The HTML page of all results: whole in itself, and with every figure of the results."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from abc_attn.report import write_report

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
