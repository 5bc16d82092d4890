"""transformers' Trainer with checkpoints that are whole or absent, the scores of a task, and progress."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from abc_attn.files import write_whole
from abc_attn.hf.trainer import Trainer
from abc_attn.training.checkpoints import publish

METRICS = "metrics.jsonl"
PARTIAL = ".partial"  # what is not whole yet


class RunTrainer(Trainer):
    """Trains on the batches of a data set that knows its own order; `score` is what `evaluate` reports."""

    def __init__(self, *arguments: Any, score: Callable[[], dict[str, float]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.score = score
        self._saving = False

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any) -> Tensor:
        loss = super().training_step(model, inputs, *arguments)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}: training was stopped. Try a smaller "
                "learning_rate, more warmup_steps or a smaller max_grad_norm, with another output_dir"
            )
        return loss

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        metrics = {f"eval_{name}": value for name, value in self.score().items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints: written under another name and moved when they are whole.

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, PARTIAL) if self._saving else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(str(self.args.output_dir))
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        except RuntimeError as error:
            if "PytorchStreamWriter" in str(error) or "inline_container" in str(error):  # torch's words for it
                raise OSError(f"a checkpoint cannot be written into {folder}: is the disk full?") from error
            raise
        finally:
            self._saving = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            publish(folder / PARTIAL / name, folder / name)
            rotate_checkpoints(output_dir=str(folder), save_total_limit=self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        # A pickle that nobody should load; run.json says the same in plain text.
        Path(output_dir or str(self.args.output_dir), "training_args.bin").unlink(missing_ok=True)


class Report(TrainerCallback):
    """metrics.jsonl, and progress: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, folder: Path, tokens_per_step: float, steps_per_pass: float, perplexity: str | None) -> None:
        """perplexity: what exp(loss) is called; None leaves it out."""
        self.path, self.perplexity = folder / METRICS, perplexity
        self.tokens_per_step, self.steps_per_pass = tokens_per_step, steps_per_pass
        self.seconds_before = 0.0  # of a run that was interrupted
        self.note = ""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        kept = [record for record in read_metrics(self.path) if record["step"] <= state.global_step]
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self.seconds_before = max((record.get("seconds", 0.0) for record in kept), default=0.0)
        self.started = self.logged = time.monotonic()
        self.first = self.logged_step = state.global_step
        terminal = sys.stderr.isatty()
        columns = min(120, shutil.get_terminal_size().columns)
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, unit=" steps", ncols=columns, disable=not terminal
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        logs = dict(logs or {})
        if not state.is_world_process_zero or "train_runtime" in logs:  # the Trainer's own summary, of this start only
            return
        now = time.monotonic()
        logs |= {"step": state.global_step, "epoch": round(state.global_step / self.steps_per_pass, 4)}
        logs["seconds"] = round(self.seconds_before + now - self.started, 2)
        if "loss" in logs:
            steps = state.global_step - self.logged_step
            shown = f"loss {logs['loss']:.3f}"
            if self.perplexity is not None:
                logs[self.perplexity] = math.exp(min(logs["loss"], 700.0))
                shown += f", {self.perplexity} {logs[self.perplexity]:.1f}"
            logs["tokens_per_second"] = round(steps * self.tokens_per_step / max(1e-9, now - self.logged), 1)
            self.logged_step = state.global_step
            left = (now - self.started) / max(1, state.global_step - self.first) * (state.max_steps - state.global_step)
            self._show(state, f"{shown}, {logs['tokens_per_second']:,.0f} tokens/s", left)
        else:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in logs.items() if name.startswith("eval_"))
            self._show(state, shown, None)
        self.logged = time.monotonic()  # an evaluation's time is not the next steps'
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(logs) + "\n")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self.bar.close()

    def _show(self, state: TrainerState, note: str, seconds_left: float | None) -> None:
        if not self.bar.disable:
            if seconds_left is None:
                self.bar.write(f"step {state.global_step}: {note}", file=sys.stderr)
            else:
                self.bar.set_postfix_str(note)
            return
        left = "" if seconds_left is None else f", {clock(seconds_left)} left"
        print(f"step {state.global_step}/{state.max_steps}: {note}{left}", file=sys.stderr, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, up to one that is damaged: a kill may have cut the last line."""
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        numbers = [record.get("step"), record.get("seconds", 0)] if isinstance(record, dict) else [None]
        if not all(isinstance(number, (int, float)) for number in numbers):
            break
        records.append(record)
    return records


def clock(seconds: float) -> str:
    """A duration as people write it: 1:05, or 2:01:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
