"""Damaged model folders: a command refuses each in one line that exits with 2, or runs with the weights of its files.

Damage: bytes of any file change, JSON documents change value by value, weights are dropped, renamed, resized, made
whole numbers or NaN, files vanish. The commands are `generate`, `evaluate` and `convert`, called in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import io
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel

from abc_attn.cli import main
from abc_attn.hf import AdaptiveLM, AdaptiveLMConfig, convert
from abc_attn.models import saved

NAME = "folders"
WORDS = ["<s>", "<pad>", "</s>", *(f"w{i}" for i in range(3, 40))]
CHECKSUMS = "weights.sha256"

torch.set_num_threads(1)


# Good folders.


def small(cls: type, **changed: Any) -> Any:
    """A model of one layer, as small as it can be."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    sizes |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    return cls(cls.config_class(**(sizes | changed))).eval()  # type: ignore[attr-defined]


@functools.cache
def folders() -> dict[str, Path]:
    """Good folders by name: converted and not, in one file and in several, of three families and our own model."""
    root = Path(tempfile.mkdtemp(prefix="good."))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    transformers.utils.logging.disable_progress_bar()
    llama = functools.partial(small, transformers.LlamaForCausalLM, num_key_value_heads=1)
    config = AdaptiveLMConfig(
        vocab_size=len(WORDS), cutoffs=(10, 20), div_val=2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, control="window:3+mlp:4",
    )  # fmt: skip
    made = {
        "llama": (llama(), {}),
        "bounded llama": (convert(llama(), "mlp:4"), {}),
        "slot llama": (convert(llama(), "global:2+window:4", positions="slot"), {}),
        "shards": (convert(llama(), "window:3+mlp:4", tie_control=False), {"max_shard_size": "4KB"}),
        "bert": (small(transformers.BertForMaskedLM), {}),
        "bounded gpt2": (convert(small(transformers.GPT2LMHeadModel), "rfa:6"), {}),
        "adaptive": (AdaptiveLM(config).eval(), {}),
    }
    for name, (model, options) in made.items():
        model.save_pretrained(root / name, **options)
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(root / name)
        (root / name / "README.md").unlink(missing_ok=True)
    return {name: root / name for name in made}


# Damage. Each returns whether it must be refused, whatever else is true.


def damaged_bytes(chance: random.Random, folder: Path) -> bool:
    """A flipped bit, another byte, a region that is zero, gone, twice there or noise; a file cut or emptied."""
    file = chance.choice(sorted(folder.iterdir()))
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else len(content)
    at = chance.randrange(chance.choice([min(8, end), end, len(content)]) or 1)
    length = chance.choice([1, 2, 8, 100])
    kind = chance.randrange(8)
    if kind == 0:
        changed = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    elif kind == 1:
        changed = content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :]
    elif kind == 2:
        changed = content[:at] + bytes(length) + content[at + length :]
    elif kind == 3:
        changed = content[:at] + content[at + length :]
    elif kind == 4:
        changed = content[: at + length] + content[at:]
    elif kind == 5:
        changed = content[:at] + chance.randbytes(length) + content[at + length :]
    elif kind == 6:
        changed = content[:at]
    else:
        changed = b""
    file.write_bytes(changed)
    return changed != content and file.suffix == ".safetensors" and (folder / CHECKSUMS).exists()


HOSTILE: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 7, 33, 2**31, 2**63, 10**30, 0.5, -0.5, 1e-30, 1e30, float("nan"), float("inf"),
    "", "x", "ü\udcff", "\0", "../../etc/passwd", "mlp:4", "mlp:1000000000000", "softmax", "float16", "eager",
    [], [1, 2], ["x"], [None], [[]], {}, {"x": 1}, {"rope_type": "yarm"}, {"rope_type": "yarn", "factor": 0}, "gelu",
    "LlamaForCausalLM", ["BertModel"], "llama", "os:system", {"AutoTokenizer": ["x.y", "x.y"]},
]  # fmt: skip


def damaged_json(chance: random.Random, folder: Path) -> bool:
    """A document in which some values are others, or keys are gone, new or renamed; or another document."""
    file = chance.choice([*sorted(folder.glob("*.json")), folder / "config.json"])
    if chance.random() < 0.1:
        deep = chance.choice(["[", '{"a":']) * 100_000
        documents = [deep, "null", "[1, 2]", '"x"', "{}", "0", "NaN", "{", '{"a": 1}', "\ufeff{}", "[" * 50 + "]" * 50]
        file.write_text(chance.choice(documents), encoding="utf-8")
        return False
    document = json.loads(file.read_text())
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        _change(chance, document)
    file.write_text(json.dumps(document), encoding="utf-8")
    return False


def _hostile(chance: random.Random) -> Any:
    """A copy: another change may be made inside it, and a case is a function of its number alone."""
    return copy.deepcopy(chance.choice(HOSTILE))


def _change(chance: random.Random, document: Any) -> None:
    while True:
        keys: list[Any] = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(document[key], (dict, list)) and document[key] and chance.random() < 0.5:
            document = document[key]
            continue
        break
    kind = chance.randrange(4)
    if kind == 0:
        del document[key]
    elif kind == 1 and isinstance(document, dict):
        document[chance.choice(["x", key + "x", "head_dim", "quantization_config", "auto_map", "control", "slots"])] = (
            chance.choice([document.pop(key), _hostile(chance)])
        )
    else:
        document[key] = _hostile(chance)


def damaged_weights(chance: random.Random, folder: Path) -> bool:
    """A weight that is missing, has another name, another shape or a type of whole numbers, or is NaN; or a new one."""
    file = chance.choice(sorted(folder.glob("*.safetensors")))
    weights, before = load_file(file), file.read_bytes()
    name = chance.choice(sorted(weights))
    kind = chance.choice(["dropped", "renamed", "resized", "whole", "nan", "added"])
    if kind == "dropped":
        del weights[name]
    elif kind == "renamed":
        weights[chance.choice([f"x{name}", name.replace("0", "1"), f"{name}.x"])] = weights.pop(name)
    elif kind == "resized":
        weights[name] = torch.zeros(chance.choice([(1,), (0,), (3, 3), (2, *weights[name].shape), ()]))
    elif kind == "whole":
        weights[name] = weights[name].to(chance.choice([torch.int32, torch.int8, torch.bool]))
    elif kind == "nan":
        weights[name] = torch.full_like(weights[name], chance.choice([torch.nan, torch.inf]))
    else:
        weights[chance.choice(["layers.1.x", "model.layers.1.mlp.up_proj.weight", "controls.self.x"])] = torch.zeros(2)
    save_file(weights, file, {"format": "pt"})
    if chance.random() < 0.7:  # as if it had been saved so
        (folder / CHECKSUMS).unlink(missing_ok=True)
    changed = file.read_bytes() != before  # a zero may be resized to a zero
    return changed and (kind in ("dropped", "resized", "whole") or (folder / CHECKSUMS).exists())


def damaged_listing(chance: random.Random, folder: Path) -> bool:
    """A file that is gone, a folder in its place, or its content under another's name."""
    file = chance.choice(sorted(folder.iterdir()))
    kind, others = chance.randrange(3), sorted(folder.iterdir())
    content = file.read_bytes()
    file.unlink()
    if kind == 1:
        file.mkdir()
    elif kind == 2:
        chance.choice(others).write_bytes(content)
    return False


DAMAGES: dict[Callable[[random.Random, Path], bool], int] = {
    damaged_bytes: 4,
    damaged_json: 5,
    damaged_weights: 3,
    damaged_listing: 1,
}


# The judge.


def run(case: int, folder: Path) -> str:
    """Make the folder of this case and give it to a command."""
    chance = random.Random(case)
    name = chance.choice(list(folders()))
    model = folder / "model"
    shutil.copytree(folders()[name], model)
    damage = chance.choices(list(DAMAGES), list(DAMAGES.values()))[0]
    must_refuse = damage(chance, model)
    command = chance.choice(["convert"] if name == "bert" else ["generate", "evaluate", "convert"])
    target, text = folder / "target", folder / "text.txt"
    text.write_text("w5 w9 w12 w3 w30 w5\n")
    arguments = {
        "generate": ["generate", str(model), "--prompt", "w5 w9", "--tokens", "2", "--temperature", "1"],
        "evaluate": ["evaluate", str(model), "--file", str(text), "--json"],
        "convert": ["convert", str(model), str(target), "--control", "window:2+mlp:2"],
    }[command]
    code, shown, loaded = call(arguments)
    assert code in (0, 2), f"{command} of {name} exits with {code}: {shown}"
    assert "Traceback" not in shown, shown
    left = [part.name for part in folder.iterdir() if part.name not in ("model", "target", "text.txt")]
    assert not left, f"{command} of {name} leaves {left}"
    if code == 2:
        assert shown.startswith("abc-attn: error: "), shown
        assert shown.count("\n") == 1, f"not one line: {shown!r}"
        assert not target.exists(), f"convert failed and leaves {list(target.iterdir())}"
        return f"{damage.__name__}: refused"
    assert not must_refuse, f"{damage.__name__} of {name} goes unnoticed by {command}"
    assert command != "convert" or (target / "config.json").is_file()
    if command != "convert":  # a converted model has given its weights away
        check_weights_are_the_files(loaded[0], model)
    return f"{damage.__name__}: harmless"


def call(arguments: list[str]) -> tuple[int, str, list[PreTrainedModel]]:
    """The exit code of a command, what it says on stderr, and the models that it has loaded."""
    loaded: list[PreTrainedModel] = []
    original = saved.load_model

    def load_model(folder: Path) -> PreTrainedModel:
        loaded.append(original(folder))
        return loaded[-1]

    errors = io.StringIO()
    saved.load_model = load_model
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = main(arguments)
    finally:
        saved.load_model = original
    return code, errors.getvalue(), loaded


def check_weights_are_the_files(model: PreTrainedModel, folder: Path) -> None:
    """Every weight of a model is in the files, and is what they say."""
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    prefix = f"{model.base_model_prefix}."
    found = {name: stored.get(name, stored.get(name.removeprefix(prefix))) for name in model.state_dict()}
    here = {weight.data_ptr() for name, weight in model.state_dict().items() if found[name] is not None}
    for name, weight in model.state_dict().items():
        kept = found[name]
        if kept is None:
            assert weight.data_ptr() in here, f"{name} is in no file, and was made up"
        else:
            same = torch.equal(weight.nan_to_num(), kept.to(weight.dtype).nan_to_num())
            assert same, f"{name} is not what the file says"
