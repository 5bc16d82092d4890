"""The command bench."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from contextlib import nullcontext
from typing import Any

from abc_attn import paths
from abc_attn.commands.errors import CommandError, explained
from abc_attn.commands.models import hugging_face

WHOLE_MODELS = ("generate", "translate", "encode-model")  # of transformers
OURS = ("command", "run", "benchmark", "threads", "output")  # arguments that are not sizes of a benchmark


def bench(arguments: argparse.Namespace) -> None:
    """Measure speed and memory against torch's scaled_dot_product_attention (SDPA) and plain softmax attention."""
    options = {name: value for name, value in vars(arguments).items() if name not in OURS}
    if arguments.benchmark == "recall":
        recall(arguments, options)
        return
    with explained():
        if arguments.output is not None:
            paths.writable_folder(arguments.output)
        given = options.get("model") or []
        for folder in given if isinstance(given, list) else [given]:
            paths.saved_model(folder)
        if options.get("peer") and options["model"] is not None:
            raise CommandError("--peer llama-cpp reads the GGUF file of SmolLM2: leave --model out")
        if options.get("peer") and importlib.util.find_spec("llama_cpp") is None:
            raise CommandError(
                "--peer llama-cpp needs the package llama-cpp-python, which is compiled as it is installed, in about "
                "five minutes: pip install 'abc-attn[peers]'"
            )
        if "control" in options:
            from abc_attn.controls import make_control

            make_control(options["control"], embed_dim=2, num_heads=1, causal=True)  # one that is unknown or too large
    try:
        with hugging_face() if arguments.benchmark in WHOLE_MODELS else nullcontext():
            import torch

            from abc_attn.bench import run_bench

            if arguments.threads:
                torch.set_num_threads(arguments.threads)
            passed = run_bench(arguments.benchmark, options, arguments.output)
    except MemoryError as error:  # sizes that this machine cannot hold
        raise CommandError(error) from None
    if not passed:
        sys.exit(1)


def recall(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Measure what a converted model remembers."""
    with explained():
        if arguments.output is not None:
            paths.writable_folder(arguments.output)
        source, book = paths.model_source(options.pop("model")), paths.text_file(arguments.file)
        if arguments.learned is not None:
            paths.saved_model(arguments.learned)
        with hugging_face(fetch=not source.local):
            import torch

            from abc_attn.bench.recall import run_recall

            if arguments.threads:
                torch.set_num_threads(arguments.threads)
            run_recall(source, book, options, arguments.output)
