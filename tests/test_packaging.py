"""What is installed works with what it declares, and the repository holds nothing of the machine it was made on."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import pytest
from journeys import GGUF_FILE, journey
from packaging.requirements import Requirement

from abc_attn.cli import make_parser

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


def requirements(declared: list[str], extras: set[str], found: set[str], ours: list[str]) -> set[str]:
    """The distributions that a package brings which declares these, with some of its extras. `ours` is what this
    project declares: its extras name each other."""
    for requirement in map(Requirement, declared):
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", *extras})
        own = requirement.name == "abc-attn"
        if wanted and (own or requirement.name not in found):
            found |= set() if own else {requirement.name}
            requirements(
                ours if own else distribution(requirement.name).requires or [], requirement.extras, found, ours
            )
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(about))


def brings(wheel: Path, *extras: str) -> set[str]:
    """The distributions that installing the wheel brings."""
    declared = metadata(wheel).get_all("Requires-Dist")
    return requirements(declared, set(extras), set(), declared)


def link(names: set[str], folder: Path) -> None:
    """Put links to packages that are installed here into a folder: that saves their download and nothing else."""
    for name in names:
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(installed.locate_file(top))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def wheel(folder) -> Path:
    """The project's wheel, built from a copy of the clone."""
    generated = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=generated)
    # The kernels that were compiled when this environment was made: to compile them again takes most of a minute.
    build = source / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    (build / "abc_attn" / "kernels").mkdir(parents=True)
    for library in (ROOT / "abc_attn" / "kernels").glob(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"):
        shutil.copy(library, build / "abc_attn" / "kernels")  # newer than its sources: setuptools takes it as it is
    # The build tool is that of this environment: no download either.
    options = ["--no-deps", "--no-build-isolation", "-w", folder]
    subprocess.run([*PIP, "wheel", *options, source], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(folder, wheel) -> Path:
    """The interpreter of a clean environment: the wheel, and of the rest only what the project declares."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    interpreter = folder / "venv" / "bin" / "python"
    subprocess.run([*PIP, "--python", interpreter, "install", "--no-deps", wheel], check=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    link(brings(wheel), packages)
    return interpreter


def test_the_wheel_holds_the_recipes_and_says_where_to_look(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "abc_attn").rglob("*.yaml")}
    assert len(ours) > 10
    assert ours | {"abc_attn/py.typed"} <= held
    assert "Paper, https://aclanthology.org/2022.acl-long.515" in metadata(wheel).get_all("Project-URL")


def test_the_wheel_works_with_what_it_declares(python, wheel, tmp_path):
    code = """
import importlib.util
from pathlib import Path
import abc_attn, sys

assert Path(abc_attn.__file__).is_relative_to(sys.prefix), abc_attn.__file__
assert (Path(abc_attn.__file__).parent / "py.typed").exists()
assert importlib.util.find_spec("transformers") is None
assert importlib.util.find_spec("yaml") is None
assert importlib.util.find_spec("pytest") is None

import torch
from abc_attn import CONTROLS, BoundedAttention, State

assert len(CONTROLS) > 10
attention = BoundedAttention(32, 4, control="window:4+mlp:4", causal=True)
out, state = attention(torch.randn(2, 10, 32), return_state=True)
assert out.shape == (2, 10, 32)
state.save("state.safetensors")
assert State.load("state.safetensors").nbytes == state.nbytes

from abc_attn.cli import main
assert main(["env"]) == 0
assert main(["recipes"]) == 0
assert main(["recipes", "--copy", "recipes"]) == 0
assert main(["train", "recall/small/softmax"]) == 2
"""
    shown = subprocess.run(
        [python, "-I", "-W", "error", "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    installed = subprocess.check_output([python.parent / "abc-attn", "--version"], text=True)
    assert installed.split()[1] == metadata(wheel)["Version"]
    assert re.search(r"transformers +not installed", shown.stdout)
    assert "recall/small/softmax" in shown.stdout
    assert (tmp_path / "recipes" / "recall" / "table.yaml").is_file()
    assert shown.stderr == (
        "abc-attn: error: No module named 'yaml'; this command needs: pip install 'abc-attn[train]'\n"
    )


@pytest.mark.nightly
def test_the_wheel_trains_without_a_clone(python, wheel, folder, tmp_path):
    """With the extra [train]: a recipe by its name, and a row of a table, one step each."""
    extra = folder / "train"
    extra.mkdir()
    link(brings(wheel, "train") - brings(wheel), extra)
    tiny = "max_steps=1 save_steps=1 logging_steps=1 per_device_train_batch_size=2 hidden_size=8 items=2 use_cpu=true"
    code = f"""
import sys
from pathlib import Path
import abc_attn
from abc_attn.cli import main

assert Path(abc_attn.__file__).is_relative_to(sys.prefix), abc_attn.__file__
assert main("train recall/small/recall {tiny} output_dir=run".split()) == 0
assert main("reproduce recall --rows softmax --set {tiny}".split()) == 0
assert main(["report"]) == 0
"""
    environment = os.environ | {"PYTHONPATH": str(extra), "OMP_NUM_THREADS": "1"}
    subprocess.run([python, "-c", code], cwd=tmp_path, check=True, env=environment)
    assert (tmp_path / "run" / "config.json").is_file()
    assert (tmp_path / "results" / "recall" / "runs.jsonl").is_file()
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.processes
def test_the_wheel_converts_and_generates(python, wheel, folder, tmp_path):
    """The journey of docs/journeys.md. The fixtures did its first steps; then a user's commands, each a process."""
    from gguf_file import write_gguf  # with transformers, which the other tests of this file do without
    from hf_sources import talkative

    _, (*install, convert, generate) = journey("From a wheel to a text")
    assert [step.command.split()[0] for step in install] == ["pip", "python", ".", "pip"]
    (extras,) = re.findall(r"whl\)\[(.*)\]", install[-1].command)
    extra = folder / "journey"
    extra.mkdir()
    link(brings(wheel, *extras.split(",")) - brings(wheel), extra)
    write_gguf(talkative(), tmp_path / GGUF_FILE)
    environment = os.environ | {"PYTHONPATH": str(extra), "OMP_NUM_THREADS": "1"}
    for step in (convert, generate):
        program, *words = shlex.split(step.command)
        done = subprocess.run(
            [python.parent / program, *words],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        step.check(done.stdout)


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
    targets = [word for line in makefile.splitlines() if line.startswith(".PHONY:") for word in line.split()[1:]]
    made = {word for command in commands if command[:1] == ["make"] for word in command[1:] if "=" not in word}
    assert made >= {"demo", "test"}
    assert made <= set(targets)
    for program, *arguments in filter(None, commands):
        if Path(program).name == "abc-attn":
            while arguments[-2:-1] and arguments[-2] in "<>":  # the shell's, with a file each
                del arguments[-2:]
            make_parser().parse_args([argument for argument in arguments if argument != "--help"] or ["env"])
