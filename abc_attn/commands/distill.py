"""The command for learned memory in a pretrained model: distill."""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import fields
from typing import Any

from abc_attn import paths
from abc_attn.commands.errors import CommandError, explained, resumable
from abc_attn.commands.models import hugging_face
from abc_attn.commands.user_controls import check_controls, import_controls


def distill(arguments: argparse.Namespace) -> None:
    """Put bounded attention with a learned control into a causal language model, and train the control: in each layer
    it learns to give what the exact attention gives on the same input. All other weights stay as they are. The result
    is a model as `convert` writes it; beside it are checkpoints and metrics.jsonl, with the error of each layer."""
    target = arguments.target
    with explained():
        source = paths.model_source(arguments.source, arguments.gguf_file)
        paths.writable_folder(target)
        if target.is_dir() and any(target.iterdir()) and not (target / "run.json").is_file():
            raise CommandError(f"{target} exists and is not a run of abc-attn distill: name a new folder")
        for file in arguments.file:
            if not file.is_file():
                raise FileNotFoundError(f"no text file at {file}")
        if source.gguf_file is not None and importlib.util.find_spec("gguf") is None:
            raise CommandError(f"{source} is read by the package gguf: pip install 'abc-attn[gguf]'")
    import_controls(arguments)
    check_controls(arguments.control)
    with hugging_face(fetch=not source.local), resumable():
        from abc_attn.hf.sources import load_source, load_source_tokenizer
        from abc_attn.training.distilling import Distillation, check_target, distill, read_texts

        settings = {field.name: getattr(arguments, field.name, None) for field in fields(Distillation)}
        how = Distillation(**settings | {"options": {name: _value(text) for name, text in arguments.set}})
        how.check()
        if check_target(target, how, arguments.resume):
            print(f"{target} holds this run, finished: nothing to do")
            return
        text = read_texts(arguments.file)
        original, tokenizer = load_source(source, dtype="float32"), load_source_tokenizer(source)
        if tokenizer is None or not original.can_generate() or original.config.is_encoder_decoder:
            raise CommandError(f"{source}: a causal language model (...ForCausalLM) with its tokenizer is needed")
        original.name_or_path = source.name
        model = distill(original, tokenizer, text, target, how)
    learned = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    print(f"{target}: {type(model).__name__}, {learned:,} weights learned from {how.steps * how.segment:,} tokens")


def _value(text: str) -> Any:
    """A value on the command line: JSON, or else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
