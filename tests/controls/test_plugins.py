"""Controls from a user's own module or file (`--import`), and from installed packages (entry points)."""

from __future__ import annotations

import json
import sys

import pytest

from abc_attn import CONTROLS, BoundedAttention, plugins
from abc_attn.cli import main

CONTROL = '''
from pathlib import Path
from abc_attn import Control, Write, register_control

with open(Path(__file__).with_suffix(".imported"), "a") as file:
    file.write("once\\n")

@register_control("even")
class Even(Control):
    """Every token goes into every slot, each alike."""
    def forward(self, x, k, key_padding_mask, state):
        return Write(x.new_full((1, 1, x.shape[1], self.slots), 0.5)), state
'''


def forget(module):
    """As in a new process: neither the module nor its control is known."""
    sys.modules.pop(module, None)
    CONTROLS.pop("even", None)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with my_controls.py; afterwards all is as it was."""
    controls, path = dict(CONTROLS), list(sys.path)
    (tmp_path / "my_controls.py").write_text(CONTROL)
    monkeypatch.chdir(tmp_path)
    plugins.load_entry_points.cache_clear()
    yield tmp_path
    plugins.load_entry_points.cache_clear()
    sys.path[:] = path
    for module in ("my_controls", "wrong", "package_of_controls"):
        sys.modules.pop(module, None)
    CONTROLS.clear()
    CONTROLS.update(controls)


@pytest.mark.parametrize("name", ["my_controls", "my_controls.py", "./my_controls.py", "{}/my_controls.py"])
def test_a_module_is_imported_by_its_name_or_its_file(name, place):
    plugins.import_control_modules([name.format(place), "my_controls", "./my_controls.py"])
    assert CONTROLS["even"].__module__ == "my_controls"
    assert (place / "my_controls.imported").read_text() == "once\n"
    BoundedAttention(8, 2, "window:2+even:4", causal=True)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(:", "SyntaxError: "),
        ("1 / 0", "ZeroDivisionError: division by zero (/"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (/"),
        ("raise SystemExit(3)", "SystemExit: 3 (/"),
        ("from abc_attn import register_control as r\n\nr('mlp')(type('C', (__import__('abc_attn').Control,), {}))",
         "ValueError: control 'mlp' is registered already, by MLP ("),
    ],
)  # fmt: skip
def test_what_a_module_raises_is_one_line(code, said, place, capsys):
    (place / "wrong.py").write_text(code)
    assert main(["controls", "--import", "wrong.py"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("abc-attn: error: --import wrong.py: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert "wrong" not in sys.modules


def test_nothing_is_imported_if_one_name_is_wrong(place, capsys):
    assert main(["controls", "--import", "my_controls", "--import", "no_such_module"]) == 2
    assert f"no such module among the installed packages or in {place}" in capsys.readouterr().err
    assert "my_controls" not in sys.modules


@pytest.fixture
def package(place, monkeypatch):
    """An installed package that announces the control "even", and another entry point that fails."""
    folder = place / "site"
    about = folder / "package_of_controls-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: package-of-controls\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[abc_attn.controls]\nbroken = no_such_module\neven = package_of_controls:Even\n"
    )
    (folder / "package_of_controls.py").write_text(CONTROL)
    monkeypatch.syspath_prepend(folder)
    return folder


def test_entry_points_are_loaded_once(package):
    (failed,) = plugins.load_entry_points()
    assert CONTROLS["even"].__module__ == "package_of_controls"
    assert "broken = no_such_module of package-of-controls failed: ModuleNotFoundError" in failed
    assert plugins.load_entry_points() == (failed,)
    assert (package / "package_of_controls.imported").read_text() == "once\n"


def test_controls_of_packages_and_modules_are_listed(package, capsys):
    assert main(["controls", "--json"]) == 0
    shown = capsys.readouterr()
    assert {row["name"]: row["module"] for row in json.loads(shown.out)}["even"] == "package_of_controls"
    assert shown.err.startswith("abc-attn: entry point broken")
    assert shown.err.count("\n") == 1


@pytest.fixture
def llama(place):
    """A folder with a tiny Llama and its tokenizer, and a text."""
    transformers = pytest.importorskip("transformers")
    from hf_sources import TEXT, save, source

    (place / "text.txt").write_text(TEXT)
    return save(source(transformers.LlamaForCausalLM), place / "llama")


def test_a_converted_model_says_which_module_it_needs(llama, place, capsys):
    """convert, generate and evaluate with --import; without it, the error names the module, which is not imported."""
    from transformers import AutoModelForCausalLM

    assert main(["convert", "llama", "plain", "--control", "even:4"]) == 2
    assert "unknown control 'even' in 'even:4'; accepted: " in (said := capsys.readouterr().err)
    assert "--import" in said
    given = ["--import", "./my_controls.py"]
    assert main(["convert", "llama", "bounded", "--control", "window:2+even:4", *given]) == 0
    assert json.loads((place / "bounded" / "config.json").read_text())["control_modules"] == ["my_controls"]
    generate = ["generate", "bounded", "--prompt", "w5 w9", "--tokens", "3"]
    evaluate = ["evaluate", "bounded", "--file", "text.txt", "--json"]
    for command in (generate, evaluate):
        forget("my_controls")
        capsys.readouterr()
        (place / "my_controls.imported").unlink()
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "bounded needs the control 'even', which is not part of abc-attn: add --import my_controls " in said
        assert said.count("\n") == 1
        with pytest.raises(ValueError, match=r"needs the control 'even', .*its controls came from: my_controls"):
            AutoModelForCausalLM.from_pretrained("bounded")
        assert not (place / "my_controls.imported").exists()
        assert main([*command, *given]) == 0
        assert (place / "my_controls.imported").read_text() == "once\n"
    assert "perplexity" in capsys.readouterr().out


def test_a_module_name_in_a_model_is_shown_only_if_it_is_one(llama, place, capsys):
    config = json.loads((place / "llama" / "config.json").read_text())
    config |= {"control": "even:4", "control_modules": ["\x1b[2J; rm", 3, "fine.one"]}
    (place / "llama" / "config.json").write_text(json.dumps(config))
    assert main(["generate", "llama", "--prompt", "w5"]) == 2
    assert "add --import fine.one (a module" in capsys.readouterr().err


RECIPE = """
task: recall
items: 2
vocab_size: 16
hidden_size: 16
num_hidden_layers: 1
num_attention_heads: 2
intermediate_size: 16
control: even:4
max_steps: 2
logging_steps: 1
save_steps: 2
per_device_train_batch_size: 2
output_dir: run
use_cpu: true
"""


def test_a_trained_model_says_which_module_it_needs(place, capsys):
    pytest.importorskip("transformers")
    (place / "tiny.yaml").write_text(RECIPE)
    assert main(["train", "tiny.yaml"]) == 2
    assert "unknown control 'even'" in capsys.readouterr().err
    assert main(["train", "tiny.yaml", "--import", "my_controls"]) == 0
    for folder in (place / "run", place / "run" / "checkpoint-2"):
        assert json.loads((folder / "config.json").read_text())["control_modules"] == ["my_controls"]
    forget("my_controls")
    capsys.readouterr()
    assert main(["generate", "run", "--prompt", "1"]) == 2
    assert "add --import my_controls " in capsys.readouterr().err
