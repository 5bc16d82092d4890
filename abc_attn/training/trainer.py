"""transformers' Trainer with checkpoints that are whole or absent, our perplexity, and a state that is carried on."""

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
from transformers.cache_utils import Cache
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from abc_attn.files import write_whole
from abc_attn.hf.cache import BoundedCache, bounded_layer, load_state, save_state
from abc_attn.hf.trainer import Trainer

METRICS = "metrics.jsonl"
PARTIAL = ".partial"  # what is not whole yet


class LMTrainer(Trainer):
    """Trains on the batches of a data set that knows its own order; `score` is what `evaluate` reports."""

    def __init__(
        self, *arguments: Any, score: Callable[[], dict[str, float]], carry_state: bool = False, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.score = score
        self.carried: Cache | None = BoundedCache() if carry_state else None
        self._saving = False

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        if self.carried is None:
            return super().compute_loss(model, inputs, *arguments, **options)
        inputs = inputs | {"past_key_values": self.carried, "use_cache": True}
        result = super().compute_loss(model, inputs, *arguments, **options)
        for index in range(len(self.carried)):  # gradients end at the segment's beginning
            layer = bounded_layer(self.carried, index)
            assert layer.state is not None
            layer.state = layer.state._map(Tensor.detach)
        return result

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

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.carried is not None:
            save_state(self.carried, self._carried_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if self.carried is not None and checkpoint is not None:
            self.carried = load_state(self._carried_file(checkpoint), self.args.device)

    def _carried_file(self, folder: str) -> Path:
        return Path(folder, f"carried_state_{self.args.process_index}.safetensors")


def publish(partial: Path, final: Path) -> None:
    """Give a folder its name, once what is in it has reached the disk."""
    for file in partial.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


class Report(TrainerCallback):
    """metrics.jsonl, and progress: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, folder: Path, tokens_per_step: int, steps_per_pass: float) -> None:
        self.path = folder / METRICS
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
            logs["perplexity"] = safe_exp(logs["loss"])
            logs["tokens_per_second"] = round(steps * self.tokens_per_step / max(1e-9, now - self.logged), 1)
            self.logged_step = state.global_step
            left = (now - self.started) / max(1, state.global_step - self.first) * (state.max_steps - state.global_step)
            self._show(
                state, f"loss {logs['loss']:.3f}, perplexity {logs['perplexity']:.1f}, "
                f"{logs['tokens_per_second']:,.0f} tokens/s", left,
            )  # fmt: skip
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
        left = "" if seconds_left is None else f", {_clock(seconds_left)} left"
        print(f"step {state.global_step}/{state.max_steps}: {note}{left}", file=sys.stderr, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that a kill has cut is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def safe_exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
