"""The documentation is run: its code, its table of controls, its links, and the places in the code it names."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from abc_attn import CONTROLS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ROOT / "docs" / "writing-a-control.md"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """The ```python blocks of a page, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)
    return [(text.count("\n", 0, block.start(1)) + 1, block[1]) for block in found]


def table(page: Path, heading: str) -> list[dict[str, str]]:
    """The first table of a page under a heading, a dict for each row."""
    section = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    head, _, *body = rows
    assert all(len(row) == len(head) for row in body), "a cell contains |"
    return [dict(zip(head, row, strict=True)) for row in body]


@pytest.fixture
def registry():
    """CONTROLS as it was, whatever a page registers."""
    before = dict(CONTROLS)
    yield
    CONTROLS.clear()
    CONTROLS.update(before)


@every_page
def test_code_runs(page, registry, tmp_path, monkeypatch):
    """The blocks of one page share a namespace, in order; files go to a folder of their own."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    for line, block in python_blocks(page):
        shifted = "\n" * (line - 1) + block  # a traceback then shows the page's own line numbers
        exec(compile(shifted, str(page), "exec"), namespace)


def test_there_is_code_to_run():
    assert len(python_blocks(ROOT / "README.md")) >= 3
    assert len(python_blocks(EXAMPLE)) >= 2


def test_a_control_takes_under_25_lines():
    _, example = python_blocks(EXAMPLE)[0]
    assert "@register_control(" in example
    assert len(example.splitlines()) < 25


def test_readme_lists_the_controls():
    listed = {row["name"].strip("`"): row for row in table(ROOT / "README.md", "The controls")}
    ours = {name: control for name, control in CONTROLS.items() if control.__module__.startswith("abc_attn.")}
    assert listed.keys() == ours.keys()
    for name, control in ours.items():
        row = listed[name]
        assert row["paper"] == control.paper, name
        assert row["causal"] == ("yes" if control.online else "no"), name
        call = ast.parse(f"control({row['options'].strip('`')})", mode="eval").body
        assert {option.arg: ast.literal_eval(option.value) for option in call.keywords} == control.options(), name
        assert ("linear read" in row["what a token writes"]) == control.linear, name


def test_maths_names_what_exists():
    rows = table(ROOT / "docs" / "maths.md", "From the paper to the code")
    places = [re.findall(r"`([\w/]+)\.py: (\w+)`", row["where"]) for row in rows]
    assert all(places)
    for module, name in (place for row in places for place in row):
        assert hasattr(import_module("abc_attn." + module.replace("/", ".")), name), (module, name)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row["here"])}
    assert {name for name, control in CONTROLS.items() if control.__module__.startswith("abc_attn.")} <= named


@pytest.mark.parametrize("page", sorted((ROOT / "results").glob("table*/*.md")), ids=lambda page: page.parent.name)
def test_the_docs_show_the_tables_that_were_measured(page):
    shown = (ROOT / "docs" / "language-modelling.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert set(rows) <= set(shown)


@every_page
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "http://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_readme_gives_commands_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
    assert {"make demo\n", "make test\n"} <= set(commands)
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {target for command in commands for target in re.findall(r"^make (\S+)", command, re.M)} <= targets
