"""The documentation is run: its code, its links, the places in the code it names, and what is generated in it."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from abc_attn import CONTROLS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "LOG.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
EXAMPLE = ROOT / "docs" / "writing-a-control.md"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


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


def load(path: Path) -> ModuleType:
    """A Python file that is no part of the package."""
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load(ROOT / "docs" / "generate.py")


@pytest.fixture
def registry():
    """CONTROLS as it was, whatever a page registers."""
    before = dict(CONTROLS)
    yield
    CONTROLS.clear()
    CONTROLS.update(before)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "journeys.md"], ids=lambda page: page.name)
def test_code_runs(page, registry, tmp_path, monkeypatch):
    """The blocks of one page share a namespace, in order; files go to a folder of their own.

    test_journeys.py runs docs/journeys.md, whose code is files that its commands run.
    """
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem.replace("-", "_")}  # of contract.py, which runs one of them too
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
        call = ast.parse(f"control({row['options and defaults'].strip('`')})", mode="eval").body
        assert {option.arg: ast.literal_eval(option.value) for option in call.keywords} == control.options(), name
        assert (row["read"] == "linear") == control.linear, name


def test_maths_names_what_exists():
    rows = table(ROOT / "docs" / "maths.md", "From the paper to the code")
    places = [re.findall(r"`([\w/]+)\.py: (\w+)`", row["where"]) for row in rows]
    assert all(places)
    for module, name in (place for row in places for place in row):
        assert hasattr(import_module("abc_attn." + module.replace("/", ".")), name), (module, name)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row["here"])}
    assert {name for name, control in CONTROLS.items() if control.__module__.startswith("abc_attn.")} <= named


@pytest.mark.parametrize("name", ["table1a", "table1b"])
def test_the_docs_show_the_papers_tables_as_measured(generate, name):
    blocks = dict(generate.BLOCK.findall((ROOT / "docs" / "language-modelling.md").read_text(encoding="utf-8")))
    rows = (ROOT / "results" / name / "small.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in rows if line.startswith("|")]
    assert len(rows) > 10
    assert rows == [line for line in blocks[f"results-{name}"].splitlines() if line.startswith("|")]


def test_the_docs_list_the_families(generate):
    from abc_attn.hf.families import FAMILIES

    listed = generate.supported().splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in listed] == [family.title for family in FAMILIES]
    assert "`BertForMaskedLM`" in next(line for line in listed if line.startswith("| BERT "))


@every_page
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "http://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_readme_gives_commands_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S)
    named = {target for block in blocks for target in re.findall(r"^make (\S+)", block, re.M)}
    assert {"demo", "test"} <= named <= make_targets()


def test_contributing_names_targets_that_exist():
    named = re.findall(r"`make ([\w-]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 5
    assert set(named) <= make_targets()


def make_targets() -> set[str]:
    return set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def test_the_glossary_names_what_exists():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([\w ]+) \|", text, re.M)
    words = [word for word in words if word != "word"]
    assert len(words) > 40
    assert len(words) == len(set(words)), "a word with two meanings"
    places = re.findall(r"`([\w/]+)\.py: (\w+)`", text)
    assert len(places) > 10
    for module, name in places:
        assert hasattr(import_module("abc_attn." + module.replace("/", ".")), name), (module, name)


def test_the_design_has_every_room():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = {
        path.name for path in (ROOT / "abc_attn").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    missing = [room for room in sorted(rooms - {"__init__.py"}) if f"`{room.removesuffix('.py')}" not in text]
    assert not missing


def test_what_is_generated_is_up_to_date(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_a_figure_that_changed_is_noticed(generate, monkeypatch, capsys):
    measured = generate.results

    def faster(name):
        rows, provenance = measured(name)
        return [row | {"ratio_sdpa": (row["ratio_sdpa"] or 0) * 1.1, "state_bytes": 1.0} for row in rows], provenance

    monkeypatch.setattr(generate, "results", faster)
    assert generate.main(["--check"]) == 1
    said = capsys.readouterr().err.splitlines()
    pages = ["README.md", "benchmarks/README.md", "docs/speed.md", "docs/gain.svg"]
    assert [line.partition(" ")[0] for line in said] == pages
    assert all("make docs" in line for line in said)


def test_the_api_page_has_every_public_name():
    import abc_attn.hf

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for module in (abc_attn, abc_attn.hf):
        shown = text.split(f"\n## {module.__name__}\n")[1].split("\n## ")[0]
        names = set(re.findall(r"^### (\w+)$", shown, re.M)) | set(re.findall(r"^\| `(\w+)` \|", shown, re.M))
        public = {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
        assert public <= names


def test_no_speed_is_typed_into_the_readme(generate):
    typed = generate.BLOCK.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert not re.search(r"\d ?(ms|us|µs|x|times|tokens/s|GFLOP/s|GB|MB|kB)\b", typed)


@pytest.mark.parametrize("source", [None, "SOURCE/"])
def test_a_package_index_gets_no_relative_link(source):
    index_readme = load(ROOT / "setup.py").index_readme
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", index_readme(text, source))
    assert all(target.startswith(("https://", "#", "SOURCE/blob/main/", "SOURCE/raw/main/docs/")) for target in targets)
    assert len(targets) > (1 if source else 0)
    assert ("SOURCE/raw/main/docs/gain.svg" in targets) == (source is not None)
