"""The command demo."""

from __future__ import annotations

import argparse

from abc_attn import paths
from abc_attn.commands.errors import explained


def demo(arguments: argparse.Namespace) -> None:
    """Train five small causal language models that differ in their attention only, on the documentation that ships with
    Python; print their perplexity, decoding speed and state size in one table; write a page with the curves."""
    with explained():
        paths.new_file(arguments.output)

    import torch

    from abc_attn.demo import Settings, run_demo

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    chosen = {"seed": arguments.seed} | ({"steps": arguments.steps} if arguments.steps else {})
    run_demo(Settings(**chosen), arguments.output)
