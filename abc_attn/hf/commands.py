"""What the commands convert and generate do. Errors that a user can mend are OSError or ValueError."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from abc_attn.hf import AdaptiveLM
from abc_attn.hf.cache import BoundedCache, state_bytes
from abc_attn.hf.convert import convert
from abc_attn.hf.models import BOUNDED, CLASSES, BoundedModel, has_bounded_state, most_tokens, unsupported

# A command says what it has to say itself.
logging.set_verbosity_error()
logging.disable_progress_bar()


def convert_folder(source: Path, target: Path, **options: Any) -> BoundedModel:
    """Convert the model saved in `source`, and save it with its tokenizer in `target`."""
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise FileExistsError(f"{target} exists and is not empty: name a new folder")
    bounded = convert(load_model(source), **options)
    bounded.config.source_model = source.resolve().name
    bounded.save_pretrained(target)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "chat_template.jinja"):
        if (source / name).exists():
            load_tokenizer(source).save_pretrained(target)
            break
    return bounded


def load_model(folder: Path) -> PreTrainedModel:
    """The model in a folder, of the class it was saved as; ours, or one that can be converted."""
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no saved model at {folder}: a folder with config.json and weights is needed")
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
    names = saved.get("architectures") or []
    known = {cls.__name__: cls for cls in BOUNDED} | {n: c for n, c in CLASSES.items() if not n.endswith("Config")}
    known |= {AdaptiveLM.__name__: AdaptiveLM}
    cls = next((known[name] for name in names if name in known), None)
    if cls is None:
        name = " and ".join(names) or "a model of no named architecture"
        raise ValueError(f"{folder}: {unsupported(name, saved.get('model_type'))}")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise FileNotFoundError(f"{folder} has a config.json and no weights (*.safetensors)")
    return cls.from_pretrained(folder).eval()


def load_tokenizer(folder: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from None


def generate_text(folder: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> None:
    """Print the continuation of a prompt as it is made; then, to stderr, tokens a second and the size of the state."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"{folder} holds a {type(model).__name__}; a causal language model (...ForCausalLM) is needed")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if not ids.shape[1]:
        raise ValueError("the prompt is empty; give at least one word")
    limit = most_tokens(model)
    if limit is not None and ids.shape[1] + tokens > limit + 1:  # the last token is written and not read
        raise ValueError(
            f"the positions of this {type(model).__name__} end after {limit} tokens: prompt and --tokens may be "
            f"{limit + 1} together, and are {ids.shape[1]} and {tokens}; ask for fewer tokens or shorten the prompt"
        )
    cache = (
        BoundedCache()
        if isinstance(model, BoundedModel | AdaptiveLM)
        else transformers.DynamicCache(config=model.config)
    )
    shown, made, started = "", [], None
    for token in _continue(model, ids, cache, tokens, temperature, seed):
        started = started or time.perf_counter()  # the first has cost the reading of the prompt
        made.append(token)
        text = tokenizer.decode(made, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # the rest of a character is still to come
            print(text[len(shown) :], end="", flush=True)
            shown = text
    seconds = time.perf_counter() - (started or 0.0)
    print()
    if isinstance(model, BoundedModel | AdaptiveLM):
        grows = "whatever the length" if has_bounded_state(model) else "growing where attention is exact"
        size = f"state {state_bytes(cache):,} bytes, {grows}"
    else:
        kept: Any = cache.layers
        size = f"keys and values {sum(2 * layer.keys.nbytes for layer in kept):,} bytes, growing"
    speed = f"{(len(made) - 1) / seconds:.1f} tokens/s" if len(made) > 1 else "one token"
    print(f"{ids.shape[1]} tokens read, {len(made)} written, {speed}, {size}", file=sys.stderr)


@torch.no_grad()
def _continue(
    model: PreTrainedModel, ids: Tensor, cache: Any, tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    random = torch.Generator().manual_seed(seed)
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}
    for _ in range(tokens):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if temperature:
            ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
        else:
            ids = logits.argmax(-1, keepdim=True)
        if int(ids) in ends:
            return
        yield int(ids)
