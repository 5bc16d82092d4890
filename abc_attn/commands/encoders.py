"""The commands of encoders: classify, and what `evaluate` does for classifiers and masked language models."""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abc_attn import paths
from abc_attn.commands.errors import CommandError, explained
from abc_attn.commands.models import hugging_face, load_saved

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINES_AT_ONCE = 256
_BATCH = 32


def classify(arguments: argparse.Namespace) -> None:
    """Label the lines of standard input: for each a line with the label, a tab and its probability. A model of pairs
    takes lines with a tab between the two texts. An empty line stays one."""
    model, tokenizer = _load(arguments, "ForSequenceClassification", "a classifier")
    config: Any = model.config
    pairs = bool(getattr(config, "text_pairs", False))
    refused: list[int] = []
    with hugging_face():
        from abc_attn.evaluation.classifying import encode, predict

        lines = enumerate(sys.stdin.buffer if hasattr(sys.stdin, "buffer") else sys.stdin, 1)
        while some := list(islice(lines, LINES_AT_ONCE)):
            texts = {number: _texts(line, number, pairs, refused) for number, line in some}
            kept = {number: parts for number, parts in texts.items() if parts}
            columns = [list(part) for part in zip(*kept.values(), strict=True)]
            shown = dict.fromkeys(texts, "")
            if kept:
                encoded = encode(tokenizer, columns[0], columns[1] if pairs else None, _longest(model, tokenizer))
                likely, labels = predict(model, tokenizer, encoded, _BATCH).exp().max(-1)
                for number, share, label in zip(kept, likely.tolist(), labels.tolist(), strict=True):
                    shown[number] = f"{config.id2label[label]}\t{share:.4f}"
            print("\n".join(shown.values()), flush=True)
    if refused:
        some_lines = ", ".join(map(str, refused[:5])) + (", ..." if len(refused) > 5 else "")
        were = (
            "1 line was not labelled, and is"
            if len(refused) == 1
            else f"{len(refused)} lines were not labelled, and are"
        )
        raise CommandError(f"{were} empty: {some_lines}")


def _texts(line: bytes | str, number: int, pairs: bool, refused: list[int]) -> tuple[str, ...]:
    """The text of a line, or both; nothing if it is empty or cannot be used."""
    try:
        text = (line if isinstance(line, str) else line.decode("utf-8")).strip("\r\n")
        text = text.removeprefix("\ufeff") if number == 1 else text  # as files may begin that Windows has written
    except UnicodeDecodeError as error:
        said = f"is not UTF-8 text (byte {error.object[error.start]:#04x} at column {error.start})"
        return _refuse(number, said, refused)
    if not text.strip():
        return ()
    parts = tuple(part.strip() for part in text.split("\t")) if pairs else (text.strip(),)
    if pairs and (len(parts) != 2 or not all(parts)):
        return _refuse(number, "must be two texts with a tab between them", refused)
    return parts


def _refuse(number: int, why: str, refused: list[int]) -> tuple[str, ...]:
    print(f"abc-attn: line {number} {why}; an empty line stands for it", file=sys.stderr, flush=True)
    refused.append(number)
    return ()


def evaluate_classifier(arguments: argparse.Namespace) -> None:
    """Accuracy, F1 and Matthews' correlation of a classifier on a labelled file."""
    file, columns = _file(arguments), arguments.columns
    if len(columns) not in (2, 3):
        raise CommandError(
            "--columns names those of the text, of the second text if there is one, and of the label: text label"
        )
    model, tokenizer = _load(arguments, "ForSequenceClassification", "a classifier")
    with hugging_face():
        from abc_attn.data.labelled import check_labels, read_labelled
        from abc_attn.evaluation.classifying import MEASURES, encode, measure, predict

        config: Any = model.config
        pairs = bool(getattr(config, "text_pairs", len(columns) == 3))
        if pairs != (len(columns) == 3):
            raise CommandError(f"this model takes {'two texts' if pairs else 'one text'}: --columns must name as many")
        examples = read_labelled(file, [(name,) for name in columns])
        labels = [config.id2label[place] for place in range(config.num_labels)]
        check_labels(file, examples, labels)
        started = time.perf_counter()
        others = [str(example.pair) for example in examples] if pairs else None
        encoded = encode(tokenizer, [example.text for example in examples], others, _longest(model, tokenizer))
        predicted = predict(model, tokenizer, encoded, _BATCH).argmax(-1).tolist()
        right = [labels.index(example.label) for example in examples]
        found: dict[str, Any] = {name: measure(name, predicted, right, len(labels)) for name in MEASURES}
        _show(found | {"examples": len(right), "seconds": time.perf_counter() - started}, arguments.json)


def evaluate_masked(arguments: argparse.Namespace) -> None:
    """Loss and accuracy of a masked language model on a text, with fixed masks."""
    file = _file(arguments)
    with explained():
        paths.text_file(file)
    model, tokenizer = _load(arguments, "ForMaskedLM", "a masked language model")
    with hugging_face():
        from abc_attn.data.blocks import FixedBlocks, encode_files
        from abc_attn.evaluation.masked import masked_scores

        tokens = encode_files([file], "", tokenizer)[: arguments.tokens]
        size = arguments.window or min(_positions(model), 512)
        if not 8 <= size <= _positions(model):
            raise CommandError(f"--window must be from 8 to {_positions(model)}, got {size}")
        started = time.perf_counter()
        blocks = FixedBlocks(tokens, size, None, tokenizer, 0.15)
        found: dict[str, Any] = dict(masked_scores(model, blocks, _BATCH))
        found |= {"blocks": len(blocks), "seconds": time.perf_counter() - started}
        _show(found, arguments.json)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:20} {value:,.4f}" if isinstance(value, float) else f"{name:20} {value:,}")


def _file(arguments: argparse.Namespace) -> Path:
    file: Path | None = arguments.file
    if file is None:
        raise CommandError("--file is needed")
    if not file.is_file():
        raise CommandError(f"no file at {file}")
    return file


def _load(arguments: argparse.Namespace, ending: str, kind: str) -> tuple[PreTrainedModel, Any]:
    model, tokenizer = load_saved(arguments)
    if not type(model).__name__.endswith(ending):
        raise CommandError(f"{arguments.model} holds a {type(model).__name__}; {kind} (...{ending}) is needed")
    return model, tokenizer


def _positions(model: PreTrainedModel) -> int:
    from abc_attn.hf.models import most_tokens

    return most_tokens(model) or 512


def _longest(model: PreTrainedModel, tokenizer: Any) -> int:
    return min(_positions(model), tokenizer.model_max_length)
