"""Learned memory in SmolLM2-135M against a window with as many rows: perplexity of a book and of WikiText-2.

    python benchmarks/distilled.py --data ../shared/data --learned results/distill/keep-252

`--learned` is what abc-attn distill wrote, or of that run.json, metrics.jsonl and the controls.safetensors of its last
checkpoint. The original has its full context (windows of 8,192 tokens, of which the first three quarters are not
scored); the others read each text as one stream. What is measured goes into perplexity.json in the folder of
`--learned`, after each figure: a figure that is there is not measured again. The training curve goes beside it.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from abc_attn.bench.models import load_original, smollm2
from abc_attn.controls import make_control
from abc_attn.evaluation import perplexity, token_nll
from abc_attn.files import whole_file, write_whole
from abc_attn.hf import convert
from abc_attn.paths import json_object
from abc_attn.provenance import commit, cpu, now
from abc_attn.training.checkpoints import all_checkpoints
from abc_attn.training.distilling import WEIGHTS
from abc_attn.training.trainer import read_metrics

LONGEST = 8192  # tokens that SmolLM2 was trained to read


def texts(data: Path, book: int, wiki: int) -> dict[str, Tensor]:
    """The first tokens of the first validation book and of the test text of WikiText-2."""
    folder, file = smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    with lzma.open(data / "books" / "valid.jsonl.xz", "rt", encoding="utf-8") as opened:
        found = {"book": (json.loads(opened.readline())["text"], book)}
    with lzma.open(data / "wikitext-2" / "wiki.test.tokens.xz", "rt", encoding="utf-8", newline="\n") as opened:
        found["WikiText-2"] = opened.read(20 * wiki), wiki
    return {
        f"{name}, {count:,} tokens": tokenizer(
            text[: 20 * count], add_special_tokens=False, return_tensors="pt", verbose=False
        ).input_ids[0][:count]
        for name, (text, count) in found.items()
    }


def learned_model(folder: Path, original: PreTrainedModel, positions: str) -> PreTrainedModel:
    """The model with the control of a run of abc-attn distill, which learnt from segments where both kinds of positions
    are nearly the same."""
    how = json_object(folder / "run.json")["distillation"]
    weights = [*folder.glob(WEIGHTS), *(path / WEIGHTS for path in all_checkpoints(folder))]
    model: Any = convert(original, how["control"], tie_control=False, positions=positions, **how["options"])
    model.controls.load_state_dict(load_file(weights[-1]))
    return model


def draw_curve(folder: Path) -> None:
    """The error of the attentions over the tokens read: of each layer, and the mean."""
    from matplotlib.figure import Figure

    records = read_metrics(folder / "metrics.jsonl")
    tokens = [record["tokens"] for record in records]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for layer in range(len(records[0]["layers"])):
        axes.semilogy(tokens, [record["layers"][layer] for record in records], color="tab:gray", linewidth=0.5)
    axes.semilogy(tokens, [record["loss"] for record in records], color="tab:blue", linewidth=2, label="mean of layers")
    axes.set_xlabel("tokens")
    axes.set_ylabel("squared error of an attention's output,\nas a share of the output's square")
    axes.legend()
    with whole_file(folder / "error.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with books/ and wikitext-2/")
    parser.add_argument("--learned", type=Path, required=True, help="a run of abc-attn distill from SmolLM2")
    parser.add_argument("--book-tokens", type=int, default=20_000)
    parser.add_argument("--wiki-tokens", type=int, default=10_000)
    arguments = parser.parse_args()
    folder = arguments.learned
    draw_curve(folder)
    control = json_object(folder / "run.json")["distillation"]["control"]
    sizes: dict[str, Any] = {"embed_dim": 2, "num_heads": 1, "head_dim": 2, "causal": True}
    window = f"global:4+window:{make_control(control, **sizes).rows - 4}"
    source = load_original(None)
    models = {
        control: lambda original: learned_model(folder, original, "slot"),
        f"{control}, absolute positions": lambda original: learned_model(folder, original, "absolute"),
        window: lambda original: convert(original, window, positions="slot"),
        f"{window}, absolute positions": lambda original: convert(original, window),
        "exact": lambda original: original,
    }
    file = folder / "perplexity.json"
    found: dict[str, Any] = json_object(file) if file.is_file() else {}
    for name, ids in texts(arguments.data, arguments.book_tokens, arguments.wiki_tokens).items():
        for kind, made_from in models.items():
            if kind in found.setdefault(name, {}):
                continue
            model, started = made_from(copy.deepcopy(source)), time.perf_counter()
            options = {"window": LONGEST, "context": LONGEST * 3 // 4} if kind == "exact" else {}
            nll = token_nll(model, ids, **options)
            about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "commit": commit(), "cpu": cpu()}
            about |= {"measured": now(), "seconds": round(time.perf_counter() - started, 1)}
            by_quarter = [perplexity(part) for part in nll.chunk(4)]
            found[name][kind] = {"perplexity": perplexity(nll), "by quarter": by_quarter, "with": about}
            write_whole(file, json.dumps(found, indent=2) + "\n")
            print(f"{name}: {kind}: {found[name][kind]['perplexity']:.3f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
