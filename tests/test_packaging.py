"""What is installed works with what it declares, and the repository holds nothing of the machine it was made on."""

import re
import shlex
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from abc_attn.cli import make_parser

ROOT = Path(__file__).parents[1]


def requirements(name: str, found: set[str]) -> set[str]:
    """The distributions that installing `name` brings, without any extra."""
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and requirement.name not in found:
            found.add(requirement.name)
            requirements(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of a clean environment: the project's wheel, and of the rest only what the project declares.

    The declared packages are links to those installed here, which saves their download and nothing else.
    """
    folder = tmp_path_factory.mktemp("packaging")
    generated = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=generated)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    # The build tool is that of this environment: no download either.
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    interpreter = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", interpreter, "install", "--no-deps", wheel], check=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    for name in requirements("abc-attn", set()):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(installed.locate_file(top))
    return interpreter


def test_the_wheel_works_with_what_it_declares(python, tmp_path):
    code = """
import importlib.util
from pathlib import Path
import abc_attn, sys

assert Path(abc_attn.__file__).is_relative_to(sys.prefix), abc_attn.__file__
assert (Path(abc_attn.__file__).parent / "py.typed").exists()
assert importlib.util.find_spec("transformers") is None
assert importlib.util.find_spec("pytest") is None

import torch
from abc_attn import CONTROLS, BoundedAttention, State

assert len(CONTROLS) > 10
attention = BoundedAttention(32, 4, control="window:4+mlp:4", causal=True)
out, state = attention(torch.randn(2, 10, 32), return_state=True)
assert out.shape == (2, 10, 32)
state.save("state.safetensors")
assert State.load("state.safetensors").nbytes == state.nbytes
"""
    subprocess.run([python, "-I", "-W", "error", "-c", code], cwd=tmp_path, check=True)
    shown = subprocess.check_output([python.parent / "abc-attn", "env"], cwd=tmp_path, text=True)
    assert re.search(r"transformers +not installed", shown)


def test_the_repository_holds_nothing_of_the_machine():
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(list_files, cwd=ROOT, text=True).split("\0")
    files = [ROOT / name for name in listed if name and (ROOT / name).is_file()]
    assert len(files) > 10
    machine = re.compile(rb"(?<![\w.~*-])/(?:home|root|work|opt|Users)/\w|python[h]osted|pypi\.org")
    for file in files:
        assert not machine.search(file.read_bytes()), f"{file.relative_to(ROOT)}: {machine.search(file.read_bytes())}"


def test_the_commands_of_the_readme_exist():
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    commands = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    makefile = (ROOT / "Makefile").read_text()
    (targets,) = (line.split()[1:] for line in makefile.splitlines() if line.startswith(".PHONY:"))
    made = {word for command in commands if command[:1] == ["make"] for word in command[1:] if "=" not in word}
    assert made >= {"demo", "test"}
    assert made <= set(targets)
    for program, *arguments in filter(None, commands):
        if Path(program).name == "abc-attn":
            make_parser().parse_args([argument for argument in arguments if argument != "--help"] or ["env"])
