"""Damaged and hostile files of a whole model's state (abc_attn.hf.load_state): refused, or the model goes on."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load
from torch import Tensor

from abc_attn.hf import convert, load_state, save_state
from abc_attn.hf.models import BOUNDED
from fuzz import states
from fuzz.states import REFUSED, Saved, canonical, written

NAME = "caches"
VOCABULARY, BATCH = 61, 2
MODELS: list[tuple[Any, str]] = [
    (transformers.LlamaForCausalLM, "global:2+window:4"),
    (transformers.LlamaForCausalLM, "window:3+mlp:4"),
    (transformers.GPT2LMHeadModel, "mlp:4"),
    (transformers.MarianMTModel, "mlp:4"),
]


class SavedCache(NamedTuple):
    """A good file and the model that wrote it."""

    model: Any
    file: Saved


@functools.cache
def saved() -> list[SavedCache]:
    """The state of each model after 3 and after 12 tokens."""
    transformers.logging.set_verbosity_error()
    found = []
    for number, (cls, control) in enumerate(MODELS):
        torch.manual_seed(number)
        tokens = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
        config = cls.config_class(**BOUNDED[cls].family.tiny, **tokens)
        model = convert(cls(config).eval(), control)
        for t in (3, 12):
            ids = torch.randint(3, VOCABULARY, (BATCH, t))
            given = {"input_ids": ids, "decoder_input_ids": ids} if config.is_encoder_decoder else {"input_ids": ids}
            with torch.no_grad():
                cache = model(**given, use_cache=True).past_key_values
            found.append(SavedCache(model, file_of(cache)))
    return found


def file_of(cache: Any) -> Saved:
    with tempfile.TemporaryDirectory() as folder:
        save_state(cache, Path(folder) / "state")
        content = canonical((Path(folder) / "state").read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    facts = {name: fact for name, fact in header["__metadata__"].items() if name not in ("version", "checksum")}
    tensors = dict(sorted(load(content).items()))
    return Saved(None, content, tensors, dict(sorted(facts.items())), torch.empty(0))  # type: ignore[arg-type]


def run(case: int, folder: Path) -> str:
    """Make the file of this case, load it, and go on from it if it loads."""
    chance = random.Random(case)
    model, good = chance.choice(saved())
    make = chance.choices(list(KINDS), list(KINDS.values()))[0]
    content, kind = make(chance, good), make.__name__.replace("_", " ")
    file = folder / "state.safetensors"
    file.write_bytes(content)
    try:
        cache = load_state(file)
    except REFUSED as error:
        if content == good.content:
            raise AssertionError("a good file was refused") from error
        return f"{kind}: refused"
    assert make not in states.DAMAGES or content == good.content, f"{kind} went unnoticed"
    assert cache.get_seq_length() >= 0
    own = model
    if chance.random() < 0.3:
        model = chance.choice(saved()).model  # which must see that it is another's, or go on
    ids = torch.randint(3, VOCABULARY, (BATCH, chance.choice((1, 3))), generator=torch.Generator().manual_seed(case))
    given: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        given = {"decoder_input_ids": ids, "encoder_outputs": (torch.zeros(BATCH, 12, model.config.d_model),)}
    try:
        with torch.no_grad():
            logits = model(**given, past_key_values=cache).logits
    except REFUSED as error:
        if content == good.content and model is own:
            raise AssertionError("a good file was refused by its own model") from error
        return f"{kind}: refused by the model"
    assert bool(logits.isfinite().all()), f"{kind}: logits are not finite"
    return f"{kind}: went on"


def other_layers(chance: random.Random, good: Saved) -> bytes:
    """Layers have other names, are missing, or are there twice."""
    tensors, facts = dict(good.tensors), dict(good.facts)
    old = chance.choice(["self.0.", "self.1.", "cross.0."])
    numbers = ("-1", "1", "2", "3", "20000000", "00", "0x1", "", "1.5", "٣", "9" * 5000)
    new = chance.choice([f"{chance.choice(('self', 'cross', 'zzz', ''))}.{n}." for n in numbers] + ["", "self.", "a"])
    how = chance.randrange(3)
    kept = {name: part for name, part in tensors.items() if how == 1 or not name.startswith(old)}
    told = {name: fact for name, fact in facts.items() if how == 1 or not name.startswith(old)}
    if how < 2:
        kept |= {new + name.removeprefix(old): part for name, part in tensors.items() if name.startswith(old)}
        told |= {new + name.removeprefix(old): fact for name, fact in facts.items() if name.startswith(old)}
    return written({name: part.clone() for name, part in kept.items()}, told)


def other_columns(chance: random.Random, good: Saved) -> bytes:
    columns = (
        "-5",
        "-1",
        "0",
        "1",
        "12",
        "13",
        "127",
        "128",
        "100000",
        str(2**31),
        str(2**53 - 1),
        str(2**53),
        "9" * 30,
        "x",
        "",
    )
    said = chance.choice(columns)
    names = [name for name in good.facts if name.endswith("columns")]
    chosen = names if chance.random() < 0.5 else [chance.choice(names)]
    return written(good.tensors, good.facts | dict.fromkeys(chosen, said))


def other_lengths(chance: random.Random, good: Saved) -> bytes:
    """Every length, or that of one layer, is another; so are the counts of controls and the columns, at times."""
    length = chance.choice((*states.INTEGERS, chance.randrange(40)))
    only = chance.choice(("", "self.0.", "self.1."))
    tensors: dict[str, Tensor] = {}
    for name, part in good.tensors.items():
        counts = part.dtype == torch.int64 and name.startswith(only)
        tensors[name] = torch.full_like(part, length) if counts else part
    facts = dict(good.facts)
    if chance.random() < 0.7:
        facts |= {name: str(length) for name in facts if name.endswith("columns")}
    return written(tensors, facts, chance.choice("221"))


Make = Callable[[random.Random, Saved], bytes]
KINDS: dict[Make, int] = {
    states.a_bit_flipped: 20,
    states.bytes_overwritten: 5,
    states.cut_or_extended: 5,
    states.other_numbers: 20,
    states.other_shapes: 10,
    states.other_facts: 5,
    states.other_header: 5,
    states.nothing: 2,
    other_layers: 15,
    other_columns: 10,
    other_lengths: 10,
}
