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
from abc_attn.tasks import CLASSIFICATION, MASKED_LM, TRANSLATION

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "chat_template.jinja")
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

        options = ("control", "slots", "where", "positions", "dtype", "weights")
        given = {name: getattr(arguments, name) for name in options}
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
    """Continue a prompt, or answer it (--chat), and print the text as it is made; then, on stderr, tokens per second
    and the size of the state. --save-state and --load-state carry on from one call to the next."""
    folder, tokens = arguments.model, arguments.tokens
    with explained():
        saved = paths.saved_model(folder)
        check_state_file(arguments.load_state)
        if arguments.save_state is not None:
            paths.new_file(arguments.save_state)
    if arguments.system is not None and (not arguments.chat or arguments.load_state is not None):
        raise CommandError("--system is for the beginning of a chat: give it with --chat, and without --load-state")
    prompt = _read_standard_input() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise CommandError("the prompt is empty; give at least one word")
    if arguments.chat:
        with explained():
            paths.check_chat_template(folder)
    import_controls(arguments)
    check_saved_controls(folder, saved)
    with hugging_face():
        from abc_attn.hf.streaming import Chat, Stream, as_text
        from abc_attn.models.saved import damaged

        model, tokenizer = load_causal(folder)
        if arguments.compile:
            compile_steps(model, 1)
        stream = Stream(model, temperature=arguments.temperature, seed=arguments.seed)
        if arguments.load_state is not None:
            stream.load(arguments.load_state)
        if arguments.chat:
            Chat(stream, tokenizer, arguments.system).ask(prompt, tokens)
        else:
            if getattr(tokenizer, "chat_template", None):
                print(
                    "abc-attn: this model has a chat template: with --chat the prompt is a question to answer, without "
                    "it a text to continue",
                    file=sys.stderr,
                )
            with damaged(f"the tokenizer in {folder} fails"):
                ids = tokenizer(prompt, add_special_tokens=not stream.length).input_ids
            stream.add(ids, tokens)
        if not stream.pending:
            raise CommandError("the prompt is empty; give at least one word")
        read = len(stream.pending)
        for piece in as_text(tokenizer, stream.write(tokens)):
            print(piece, end="", flush=True)
        print(flush=True)  # what follows goes to stderr, and may be the same file
        if arguments.save_state is not None:
            stream.save(arguments.save_state)
        written = f"{stream.written} written, {f'{stream.speed:.1f} tokens/s' if stream.speed else 'one token'}"
        if not stream.written:
            written = "none written: the model ended the text at once"
            if not arguments.chat and getattr(tokenizer, "chat_template", None):
                written += " (with --chat it answers the prompt)"
        print(f"{read} tokens read, {written}, {describe_cache(model, stream.cache)}", file=sys.stderr)


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure the perplexity of a text (--file), per token and per word: as one stream in constant memory, or in
    windows of --window tokens. Or BLEU and chrF of a translator (--source, --reference), loss and accuracy of a masked
    language model (--file), accuracy of a classifier (--file with --columns)."""
    if arguments.task == TRANSLATION:
        from abc_attn.commands.translation import evaluate_translation

        evaluate_translation(arguments)
        return
    if arguments.task in (MASKED_LM, CLASSIFICATION):
        from abc_attn.commands.encoders import evaluate_classifier, evaluate_masked

        (evaluate_masked if arguments.task == MASKED_LM else evaluate_classifier)(arguments)
        return
    if arguments.file is None:
        raise CommandError("--file is needed: the text to score")
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
        windows = {"window": arguments.window, "scored": arguments.scored}
        found = score_text(model, tokenizer, text, **windows, tokens=arguments.tokens)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{LABELS.get(name, name):20} {value:,.4f}" if isinstance(value, float) else f"{name:20} {value:,}")


def score_text(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    *,
    window: int | None = None,
    scored: int | None = None,
    tokens: int | None = None,
) -> dict[str, float]:
    """The perplexity of a text: per token, per word (as WikiText counts them, by blanks), and bits per byte.

    The last `scored` tokens of a window are scored (default: a quarter). Without a window the text is a stream, if the
    model's memory is bounded and its positions do not end; else the windows are as long as it has positions, or as the
    paper's if it has no such number. A model of `abc-attn train` predicts the ends of lines as words, so they are
    counted too. `tokens` limits the text to its first so many.
    """
    from abc_attn.evaluation.scoring import PAPERS_WINDOW, perplexity, token_nll
    from abc_attn.hf import AdaptiveLM
    from abc_attn.hf.models import has_bounded_state, most_tokens
    from abc_attn.hf.streaming import NOT_NUMBERS, check_token
    from abc_attn.models.saved import damaged

    with damaged("the tokenizer fails"):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0][:tokens]
    if not len(ids):
        raise ValueError("the tokenizer finds no token in the text: there is nothing to score")
    check_token(model, int(ids.max()))
    if tokens is not None:
        text = tokenizer.decode(ids)
    limit = most_tokens(model)
    if window is None and (limit is not None or not has_bounded_state(model)):
        window = limit or getattr(model.config, "max_position_embeddings", None) or PAPERS_WINDOW
    if scored is None:
        scored = None if window is None else max(1, window // 4)
    elif window is None or scored > window:
        raise ValueError(f"scored={scored} is a part of each window: give a window of at least {scored} tokens")
    words = len(text.split()) + (text.count("\n") if isinstance(model, AdaptiveLM) else 0)
    started = time.perf_counter()
    nll = token_nll(model, ids, window=window, context=0 if window is None or scored is None else window - scored)
    if bool(nll.isnan().any()):
        raise ValueError(NOT_NUMBERS)
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


def load_saved(arguments: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """The model and the tokenizer in the folder `arguments.model`, which belong together."""
    folder: Path = arguments.model
    with explained():
        saved = paths.saved_model(folder)
    import_controls(arguments)
    check_saved_controls(folder, saved)
    with hugging_face():
        model, tokenizer = _load(folder)
    if len(tokenizer) > model.config.vocab_size:
        raise CommandError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model {model.config.vocab_size} (vocab_size in "
            "config.json): they do not belong together"
        )
    return model, tokenizer


def check_state_file(file: Path | None) -> None:
    """Refuse a state that is not there."""
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"no state at {file}: --save-state FILE, or /save FILE in a chat, writes one")


def load_causal(folder: Path) -> tuple[PreTrainedModel, Any]:
    """A causal language model that can generate, and its tokenizer."""
    model, tokenizer = _load(folder)
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise CommandError(
            f"{folder} holds a {type(model).__name__}; a causal language model (...ForCausalLM) is needed"
        )
    return model, tokenizer


def compile_steps(model: PreTrainedModel, rows: int) -> None:
    """--compile: decoding steps of so many rows as one graph; where that cannot be, a line says why."""
    from abc_attn.hf import NotCompiled, compile_decoding

    try:
        compile_decoding(model, rows)
    except NotCompiled as reason:
        print(f"abc-attn: going on uncompiled: {reason}", file=sys.stderr)


def describe_cache(model: PreTrainedModel, cache: Any) -> str:
    """What a state or a cache takes, in words."""
    from abc_attn.hf import state_bytes
    from abc_attn.hf.models import has_bounded_state
    from abc_attn.hf.stateful import Stateful

    if not isinstance(model, Stateful):
        kept = sum(2 * layer.keys.nbytes for layer in cache.layers if layer.keys is not None)
        return f"keys and values {kept:,} bytes, growing"
    grows = "whatever the length" if has_bounded_state(model) else "growing where attention is exact"
    return f"state {state_bytes(cache):,} bytes, {grows}"
