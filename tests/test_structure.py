"""Policy as tests: imports point one way, tasks are named in one place, files stay short, help needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import abc_attn
from abc_attn import control_names
from abc_attn.tasks import TASKS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "abc_attn"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]

# Every room, innermost first. A room may import from the lines above its own, not from its neighbours on the line.
ROOMS = """
    allocator control_names files memory_limit plugins progress
    paths recipes
    core
    checks state normaliser
    controls kernels
    attention provenance
    hf
    models
    data demo report
    evaluation bench
    tasks
    training
    commands
    cli
"""
RANK = {room: rank for rank, line in enumerate(ROOMS.strip().splitlines()) for room in line.split()}
# (file, room) -> why it may import against the direction.
UPWARD = {
    ("hf/__init__.py", "models"): "abc_attn.hf.AdaptiveLM, a public name of version 0.1, is imported when it is used",
}

# Rooms that may import transformers. `commands` does so inside functions, after its checks.
TRANSFORMERS = {"hf", "models", "data", "tasks", "training", "evaluation", "report", "bench", "commands"}
# Imported by `abc-attn --help`, or before a mistake is reported: neither torch nor transformers at their top.
LIGHT = {"control_names", "files", "paths", "plugins", "progress", "provenance", "recipes", "tasks", "commands", "cli"}
# Where the benchmark `recall` is named, which is not the task of that name.
BENCH_RECALL = {"cli.py", "commands/bench.py", "bench/recall.py"}

WHOLE_MODELS = {
    "models.py",
    "translators.py",
    "encoders.py",
    "needles.py",
    "pressed.py",
    "recall.py",
}  # of the benchmarks, imported when one needs them

LONGEST = 600  # lines
# file -> why it may be longer.
LONG = {"tests/controls/test_identities.py": "one test for each equation of the paper, in the paper's order"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """The dotted names of what a file imports; `package` is the one it lies in, for relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            beginning = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*beginning, *([node.module] if node.module else [])])
            # `from abc_attn import core` imports a room, `from abc_attn.core import read` a name of one.
            yield from ([f"{base}.{alias.name}" for alias in node.names] if base == "abc_attn" else [base])


def imported_rooms(source: str, package: list[str]) -> set[str]:
    """The rooms of this package that a file imports from, in whatever way."""
    found = set()
    for name in imported_modules(ast.parse(source), package):
        top, _, rest = name.partition(".")
        if top == "abc_attn":
            first = rest.partition(".")[0]
            found.add(abc_attn._HOME.get(first, first))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import abc_attn.core",
        "import abc_attn.core as c",
        "from abc_attn.core import read",
        "from abc_attn import core",
        "from abc_attn import Memory",
        "def f():\n    from abc_attn import core",
        "from .. import core",
        "from ..core import read",
    ],
)
def test_every_kind_of_import_is_seen(source):
    assert imported_rooms(source, ["abc_attn", "hf"]) == {"core"}


def test_every_room_has_a_rank():
    assert {room(path) for path in FILES} <= RANK.keys()


def test_imports_point_one_way():
    assert len(FILES) > 30
    for path in FILES:
        where = path.relative_to(PACKAGE).as_posix()
        for other in imported_rooms(path.read_text(), ["abc_attn", *path.relative_to(PACKAGE).parts[:-1]]):
            allowed = other == room(path) or (where, other) in UPWARD
            assert other in RANK, f"{where} imports {other or 'abc_attn itself'}, which is not a room"
            assert allowed or RANK[other] < RANK[room(path)], f"{where} ({room(path)}) imports {other}"


def early(tree: ast.Module) -> set[str]:
    """The packages that importing a file imports: not those inside functions, or for type checkers alone."""
    found = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.partition(".")[0] for name in imported_modules(node, [])}
        waiting += ast.iter_child_nodes(node)
    return found


def test_transformers_stays_in_its_rooms():
    for path in FILES:
        tree = ast.parse(path.read_text())
        if room(path) not in TRANSFORMERS:
            assert "transformers" not in {name.partition(".")[0] for name in imported_modules(tree, [])}, path
        if room(path) in LIGHT or (room(path) == "bench" and path.name not in WHOLE_MODELS):
            assert "transformers" not in early(tree), path
        if room(path) in LIGHT:
            assert "torch" not in early(tree), path


def test_import_needs_torch_alone():
    allowed = "{'torch', 'abc_attn'}"
    code = f"""
import sys, torch
before = set(sys.modules)
from abc_attn import *
third_party = {{name.split('.')[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names) - {allowed}
assert not third_party, third_party
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_of_controls_that_are_known_without_torch():
    ours = [name for name, control in abc_attn.CONTROLS.items() if control.__module__.startswith("abc_attn.")]
    assert [*control_names.BUILT_IN] == ours


def test_tasks_are_named_in_their_room_alone():
    """A string that is the name of a task stands in tasks/ and in recipes/, so that a new task touches nothing else."""
    for path in FILES:
        if room(path) not in {"tasks", "recipes"}:
            strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            if path.relative_to(PACKAGE).as_posix() in BENCH_RECALL:
                strings -= {"recall"}
            assert not strings & TASKS.keys(), f"{path.relative_to(ROOT)} names {strings & TASKS.keys()}"


def test_files_are_short():
    paths = [path for folder in ("abc_attn", "tests") for path in (ROOT / folder).rglob("*")]
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in paths
        if path.suffix in {".py", ".h", ".cpp"}
    }
    assert {name for name, length in lengths.items() if length > LONGEST} <= LONG.keys()
    assert all(lengths[name] > LONGEST for name in LONG), "a file of this list is short by now: take it out"
