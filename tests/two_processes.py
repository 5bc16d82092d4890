"""Training in two processes, as torchrun would have it."""

import multiprocessing
import os
import socket
from typing import Any

from abc_attn.training import load_recipe, train


def train_in_two(changes: dict[str, Any]) -> None:
    """Train tiny.yaml of this folder, with these changes, as both processes of two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=run_as, args=(rank, port, changes)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0


def run_as(rank: int, port: int, changes: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train(load_recipe("tiny.yaml", changes))
