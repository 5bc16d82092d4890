"""Policy as tests: imports point one way, and `import abc_attn` needs torch alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "abc_attn"
# A room may import from those to the left of it; rooms of the same number do not know each other.
RANK = {"files": -1, "core": 0, "normaliser": 1, "controls": 2, "kernels": 2, "attention": 3, "hf": 4, "models": 5}
OUTERMOST = 6  # demo, cli and all that is built on top


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, as rooms."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[1] for name in names if name.startswith("abc_attn.")}


def test_imports_point_one_way():
    files = [path for path in PACKAGE.rglob("*.py") if room(path) != "__init__"]
    assert len(files) > 8
    for path in files:
        here = RANK.get(room(path), OUTERMOST)
        facade = {"models"} if path == PACKAGE / "hf" / "__init__.py" else set()  # it says why
        for other in imported(path) - {room(path)} - facade:
            there = RANK.get(other, OUTERMOST)
            assert there < here or here == OUTERMOST, f"{path.name} ({room(path)}) imports {other}"


def test_transformers_stays_in_its_rooms():
    for path in PACKAGE.rglob("*.py"):
        if room(path) not in {"hf", "models", "training", "evaluation", "data"}:
            assert not re.search(r"^\s*(import|from) transformers", path.read_text(), re.M), path


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
