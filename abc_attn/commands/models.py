"""The commands for Hugging Face models: convert, generate, evaluate."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abc_attn import paths
from abc_attn.commands.errors import CommandError, explained
from abc_attn.commands.user_controls import check_controls, check_saved_controls, import_controls
from abc_attn.files import whole_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "chat_template.jinja")
_NOT_NUMBERS = "the model's outputs are not numbers (NaN): its weights or its config.json are damaged"
LABELS = {"perplexity": "perplexity per token", "word perplexity": "perplexity per word"}


@contextmanager
def hugging_face(*, fetch: bool = False) -> Iterator[None]:
    """For commands that run transformers: nothing is fetched, unless `fetch`, and transformers logs errors only."""
    if not fetch:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with explained("hf"):
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield


def convert(arguments: argparse.Namespace) -> None:
    """Put bounded attention into a Hugging Face model (Llama, Qwen3, Gemma 3, BERT and others: docs/huggingface.md),
    keep its weights, and save the result. The model is a folder, a .gguf file, or a name on the hub, which is fetched
    if it is not on this machine."""
    target = arguments.target
    with explained():
        source = paths.model_source(arguments.source, arguments.gguf_file)
        paths.new_folder(target)
        if source.gguf_file is not None and importlib.util.find_spec("gguf") is None:
            raise CommandError(f"{source} is read by the package gguf: pip install 'abc-attn[gguf]'")
    folder = Path(source.place) if source.local and source.gguf_file is None else None
    saved = {} if folder is None else paths.saved_model(folder)
    if "control" in saved:
        raise CommandError(f"{source} is a bounded model already (control {saved['control']!r}): convert the original")
    import_controls(arguments)
    check_controls(arguments.control)
    with hugging_face(fetch=not source.local), _shown_warnings():
        from abc_attn.hf import convert
        from abc_attn.hf.sources import load_source, load_source_tokenizer
        from abc_attn.models.saved import load_model, load_tokenizer

        given = {name: getattr(arguments, name) for name in ("control", "slots", "where", "positions", "dtype")}
        given |= {"layers": "all" if "all" in (arguments.layers or ()) else arguments.layers}
        given |= {"tie_control": not arguments.untied}
        original = load_source(source, dtype=arguments.dtype) if folder is None else load_model(folder)
        model, tokenizer = convert(original, **given), None
        model.config.source_model = source.name
        if folder is None:
            tokenizer = load_source_tokenizer(source)
        elif any((folder / name).exists() for name in TOKENIZER_FILES):
            tokenizer = load_tokenizer(folder)
        with whole_folder(target) as partial:
            model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
    new = sum(control.numel() for name, control in model.named_parameters() if "controls" in name.split("."))
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"{target}: {type(model).__name__}, {total:,} parameters, {new:,} of them new")
    if windows := model.own_windows():
        print(
            f"{len(windows)} layers are sliding windows in the source and keep their window (--layers all replaces it)"
        )


@contextmanager
def _shown_warnings() -> Iterator[None]:
    """Warnings of the library as lines of ours, without the place in the code that they come from."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"abc-attn: warning: {message}", file=sys.stderr)
        yield


def generate(arguments: argparse.Namespace) -> None:
    """Continue a prompt and print the text as it is made; then, on stderr, tokens per second and the size of the
    state."""
    folder, tokens = arguments.model, arguments.tokens
    with explained():
        saved = paths.saved_model(folder)
    prompt = _read_standard_input() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise CommandError("the prompt is empty; give at least one word")
    import_controls(arguments)
    check_saved_controls(folder, saved)
    with hugging_face():
        import torch

        from abc_attn.models.saved import damaged

        model, tokenizer = _load(folder)
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise CommandError(
                f"{folder} holds a {type(model).__name__}; a causal language model (...ForCausalLM) is needed"
            )
        with damaged(f"the tokenizer in {folder} fails"):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        _check_tokens(model, ids)
        _check_positions(model, ids.shape[1], tokens)
        cache = _make_cache(model)
        steps = torch.no_grad()(_continue)(model, ids, cache, tokens, arguments.temperature, arguments.seed)
        shown, made, started = "", [], None
        for token in steps:
            started = started or time.perf_counter()  # the first token includes reading the prompt
            made.append(token)
            text = tokenizer.decode(made, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # a character whose other bytes are still to come
                print(text[len(shown) :], end="", flush=True)
                shown = text
        seconds = time.perf_counter() - (started or 0.0)
        print()
        speed = f"{(len(made) - 1) / seconds:.1f} tokens/s" if len(made) > 1 else "one token"
        size = _describe_cache(model, cache)
        print(f"{ids.shape[1]} tokens read, {len(made)} written, {speed}, {size}", file=sys.stderr)


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure the perplexity of a text, per token and per word: as one stream in constant memory, or in windows of
    --window tokens."""
    folder, file = arguments.model, arguments.file
    with explained():
        saved = paths.saved_model(folder)
        text = paths.text_file(file)
    import_controls(arguments)
    check_saved_controls(folder, saved)
    with hugging_face():
        model, tokenizer = _load(folder)
        if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "AdaptiveLM")):
            raise CommandError(f"{folder} holds a {type(model).__name__}; perplexity needs a causal language model")
        found = score_text(model, tokenizer, text, window=arguments.window, tokens=arguments.tokens)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{LABELS.get(name, name):20} {value:,.4f}" if isinstance(value, float) else f"{name:20} {value:,}")


def score_text(
    model: PreTrainedModel, tokenizer: Any, text: str, *, window: int | None = None, tokens: int | None = None
) -> dict[str, float]:
    """The perplexity of a text: per token, per word (as WikiText counts them, by blanks), and bits per byte.

    Three quarters of a window are context. Without one the text is a stream, if the model's memory is bounded and its
    positions do not end; else the windows are as long as it has positions, or as the paper's if it has no such number.
    A model of `abc-attn train` predicts the ends of lines as words, so they are counted too. `tokens` limits the text
    to its first so many.
    """
    from abc_attn.evaluation.scoring import PAPERS_WINDOW, perplexity, token_nll
    from abc_attn.hf import AdaptiveLM
    from abc_attn.hf.models import has_bounded_state, most_tokens
    from abc_attn.models.saved import damaged

    with damaged("the tokenizer fails"):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0][:tokens]
    if not len(ids):
        raise ValueError("the tokenizer finds no token in the text: there is nothing to score")
    _check_tokens(model, ids)
    if tokens is not None:
        text = tokenizer.decode(ids)
    limit = most_tokens(model)
    if window is None and (limit is not None or not has_bounded_state(model)):
        window = limit or getattr(model.config, "max_position_embeddings", None) or PAPERS_WINDOW
    words = len(text.split()) + (text.count("\n") if isinstance(model, AdaptiveLM) else 0)
    started = time.perf_counter()
    nll = token_nll(model, ids, window=window, context=0 if window is None else window - max(1, window // 4))
    if bool(nll.isnan().any()):
        raise ValueError(_NOT_NUMBERS)
    return {
        "perplexity": perplexity(nll),
        "word perplexity": perplexity(nll, max(1, words)),
        "bits per byte": float(nll.sum()) / math.log(2) / len(text.encode()),
        "tokens": len(ids),
        "seconds": time.perf_counter() - started,
    }


def _read_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(f"the prompt on standard input is not UTF-8 text: {error}") from None


def _load(folder: Path) -> tuple[PreTrainedModel, Any]:
    from abc_attn.models.saved import load_model, load_tokenizer

    return load_model(folder), load_tokenizer(folder)


def _check_tokens(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse tokens that the model has no vector for."""
    if ids.numel() and (largest := int(ids.max())) >= model.config.vocab_size:
        raise CommandError(
            f"the tokenizer gives token {largest}, and the model has {model.config.vocab_size} (vocab_size in "
            "config.json): they do not belong together"
        )


def _check_positions(model: PreTrainedModel, read: int, written: int) -> None:
    from abc_attn.hf.models import most_tokens

    if not read:
        raise CommandError("the prompt is empty; give at least one word")
    limit = most_tokens(model)
    if limit is not None and read + written > limit + 1:  # the last token is written and not read
        raise CommandError(
            f"the positions of this {type(model).__name__} end after {limit} tokens: prompt and --tokens may be "
            f"{limit + 1} together, and are {read} and {written}; ask for fewer tokens or shorten the prompt"
        )


def _make_cache(model: PreTrainedModel) -> Any:
    from transformers import DynamicCache

    from abc_attn.hf import BoundedCache
    from abc_attn.hf.stateful import Stateful

    return BoundedCache() if isinstance(model, Stateful) else DynamicCache(config=model.config)


def _describe_cache(model: PreTrainedModel, cache: Any) -> str:
    from abc_attn.hf import state_bytes
    from abc_attn.hf.models import has_bounded_state
    from abc_attn.hf.stateful import Stateful

    if not isinstance(model, Stateful):
        return f"keys and values {sum(2 * layer.keys.nbytes for layer in cache.layers):,} bytes, growing"
    grows = "whatever the length" if has_bounded_state(model) else "growing where attention is exact"
    return f"state {state_bytes(cache):,} bytes, {grows}"


def _continue(
    model: PreTrainedModel, ids: Tensor, cache: Any, tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    """The tokens that follow ids `1 t`, until the model's end of a text."""
    import torch

    random = torch.Generator().manual_seed(seed)
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}  # GenerationConfig takes an int, a list or None
    for _ in range(tokens):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if bool(logits.isnan().any()):
            raise CommandError(_NOT_NUMBERS)
        if temperature:
            # Below the largest, and in fp64: no temperature above 0 overflows.
            apart = (logits - logits.max(-1, keepdim=True).values).double() / temperature
            ids = torch.multinomial(apart.softmax(-1), 1, generator=random)
        else:
            ids = logits.argmax(-1, keepdim=True)
        if int(ids) in ends:
            return
        yield int(ids)
