"""What the command evaluate does. Errors that a user can mend are OSError or ValueError."""

from __future__ import annotations

import math
import time
from pathlib import Path

from abc_attn.evaluation.scoring import PAPERS_WINDOW, perplexity, token_nll
from abc_attn.hf.commands import load_model, load_tokenizer
from abc_attn.hf.models import has_bounded_state, most_tokens
from abc_attn.models.adaptive_lm import AdaptiveLM


def evaluate_file(folder: Path, file: Path, *, window: int | None, tokens: int | None) -> dict[str, float]:
    """The perplexity of a text file: per token, per word (as WikiText counts, by blanks), and bits per byte.

    Three quarters of a window are context. Without one the text is a stream, if the model's memory is bounded and its
    positions do not end; else the windows are as long as it has positions, or as the paper's if it has no such number.
    A model of `abc-attn train` predicts the ends of lines as words, so they are counted too.
    """
    if not file.is_file():
        raise FileNotFoundError(f"no text file at {file}")
    text = file.read_text(encoding="utf-8")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "AdaptiveLM")):
        raise ValueError(f"{folder} holds a {type(model).__name__}; perplexity is that of a causal language model")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0][:tokens]
    if not len(ids):
        raise ValueError(f"{file} has no text to score")
    if tokens is not None:
        text = tokenizer.decode(ids)
    limit = most_tokens(model)
    if window is None and (limit is not None or not has_bounded_state(model)):
        window = limit or getattr(model.config, "max_position_embeddings", None) or PAPERS_WINDOW
    words = len(text.split()) + (text.count("\n") if isinstance(model, AdaptiveLM) else 0)
    started = time.perf_counter()
    nll = token_nll(model, ids, window=window, context=0 if window is None else window - max(1, window // 4))
    return {
        "perplexity": perplexity(nll),
        "word perplexity": perplexity(nll, max(1, words)),
        "bits per byte": float(nll.sum()) / math.log(2) / len(text.encode()),
        "tokens": len(ids),
        "seconds": time.perf_counter() - started,
    }
