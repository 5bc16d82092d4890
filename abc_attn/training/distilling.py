"""Distillation by attention transfer: the controls of a bounded model learn from the exact model, layer by layer.

Only the controls have gradients, and each layer reads what the exact model's layer reads. So a step is one pass of the
exact model and, for each layer, one attention forward and backward.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from abc_attn.controls import make_control
from abc_attn.data.segments import TextSegments
from abc_attn.data.text import json_object as json_line
from abc_attn.files import FolderLock, whole_folder, write_whole
from abc_attn.hf.convert import convert
from abc_attn.hf.models import BoundedModel
from abc_attn.hf.positions import check_slots
from abc_attn.models.transfer import Comparison
from abc_attn.paths import json_object, text_file, text_lines
from abc_attn.progress import Progress
from abc_attn.provenance import commit, cpu, now
from abc_attn.training.checkpoints import STATE, last_whole_checkpoint, publish
from abc_attn.training.run import FINISHED, STARTED
from abc_attn.training.trainer import METRICS, PARTIAL, clock, read_metrics

WEIGHTS, MOMENTS = "controls.safetensors", "optimizer.safetensors"
WARMUP = 0.05  # of the steps; the learning rate then falls to 0, linearly


@dataclass(frozen=True)
class Distillation:
    """What decides the result, beside the model and the text."""

    control: str
    options: dict[str, Any]
    tokens: int
    positions: str = "absolute"  # of the model that is written; it learns from segments short enough for absolute ones
    segment: int = 2048  # tokens of a step, one segment
    queries: int = 128  # positions of a segment at which controls that choose tokens are compared, in each update
    updates: int = 2  # of every control, for each segment: the exact model's pass takes most of the time
    learning_rate: float = 5e-3
    seed: int = 0
    bfloat16: bool = False  # the exact model's own pass
    save_steps: int = 20

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.segment)

    def check(self) -> None:
        """Refuse a control that has nothing to learn, before a model is loaded."""
        tried = make_control(self.control, embed_dim=2, num_heads=1, head_dim=2, causal=True, **self.options)
        if not any(True for _ in tried.parameters()):
            raise ValueError(f"{tried.title()} has no weights to learn: abc-attn convert is all that it needs")
        if self.positions == "slot":
            check_slots(tried)
        if self.segment <= tried.slots:
            raise ValueError(
                f"a segment of {self.segment} tokens fits into the {tried.slots} slots of {tried.title()}, so that "
                "nothing is to be forgotten: give a longer segment"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = max(1, round(WARMUP * self.steps))
        return self.learning_rate * min((step + 1) / warm, (self.steps - step) / max(1, self.steps - warm))


def read_texts(files: list[Path]) -> str:
    """All texts in a row; of JSON lines the member "text"."""
    texts = []
    for file in files:
        if ".jsonl" not in file.suffixes:
            texts.append(text_file(file))
            continue
        if not file.is_file():
            raise FileNotFoundError(f"no text file at {file}")
        for number, line in enumerate(text_lines(file), 1):
            text = json_line(file, number, line).get("text")
            if not isinstance(text, str):
                raise ValueError(f"{file}, line {number} must be a JSON object with a text in 'text'")
            texts.append(text)
    return "\n\n".join(texts)


def check_target(folder: Path, how: Distillation, resume: bool) -> bool:
    """Whether the run in `folder` is finished; ValueError if it is another, or is there and not to be resumed."""
    if not (folder / STARTED).is_file():
        return False
    started = json_object(folder / STARTED).get("distillation")
    if started != asdict(how):
        raise ValueError(f"{folder} holds another run, with {started}: name another folder")
    if (folder / FINISHED).is_file():
        return True
    if not resume:
        raise ValueError(f"{folder} holds a run that is not finished: continue it with --resume, or name another")
    return False


def distill(original: PreTrainedModel, tokenizer: Any, text: str, folder: Path, how: Distillation) -> BoundedModel:
    """The model with bounded attention, its controls trained; it and its tokenizer are saved in `folder`.

    A run that was interrupted there goes on from its last checkpoint, to the same weights bit by bit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder)
    try:
        return _Run(original, tokenizer, text, folder, how).train()
    finally:
        lock.release()


class _Run:
    def __init__(self, original: PreTrainedModel, tokenizer: Any, text: str, folder: Path, how: Distillation) -> None:
        config = original.config
        start = config.eos_token_id if config.bos_token_id is None else config.bos_token_id
        self.segments = TextSegments(text, tokenizer, start, how.segment, how.seed)
        self.tokenizer, self.folder, self.how = tokenizer, folder, how
        teacher = convert(copy.deepcopy(original), "softmax")
        torch.manual_seed(how.seed)
        self.model = convert(original, how.control, tie_control=False, positions=how.positions, **how.options)
        self.model.requires_grad_(False)
        self.controls: Any = self.model.controls.requires_grad_(True)
        self.comparison = Comparison(self.model, teacher, torch.bfloat16 if how.bfloat16 else None)
        self.optimizer = torch.optim.Adam(self.controls.parameters(), betas=(0.9, 0.98))

    def train(self) -> BoundedModel:
        step, seconds = self._continue()
        how, started, kept = self.how, time.monotonic(), read_metrics(self.folder / METRICS)
        write_whole(self.folder / METRICS, "".join(json.dumps(x) + "\n" for x in kept if x["step"] <= step))
        first = step
        with Progress("distilling", how.steps) as progress:
            progress.count = step
            progress.bar.update(step)
            while step < how.steps:
                begun = time.monotonic()
                layers = self._step(step)
                step += 1
                took, all_took = time.monotonic() - begun, time.monotonic() - started
                loss, speed = sum(layers) / len(layers), how.segment / took
                record = {"step": step, "tokens": step * how.segment, "loss": loss, "layers": layers}
                record |= {"seconds": round(seconds + all_took, 2), "tokens_per_second": round(speed, 1)}
                with open(self.folder / METRICS, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                left = clock(all_took / (step - first) * (how.steps - step))
                progress(f"error of attentions {loss:.4f}, {speed:,.0f} tokens/s, {left} left")
                if step % how.save_steps == 0 or step == how.steps:
                    self._save_checkpoint(step)
        self._finish(seconds + time.monotonic() - started)
        return self.model

    def _step(self, step: int) -> list[float]:
        """One segment: the error of each layer, while its control moves."""
        how, found = self.how, []
        random = torch.Generator().manual_seed(how.seed * 2**32 + step)
        for group in self.optimizer.param_groups:
            group["lr"] = how.rate(step)
        for compared in self.comparison(input_ids=self.segments[step][None], use_cache=False):
            errors = []
            for _ in range(how.updates):
                query = torch.randperm(how.segment, generator=random)[: how.queries].sort().values
                error = compared.error(query)
                errors.append(error.item())
                if not error.requires_grad:  # a layer that keeps a window of its own
                    break
                self.optimizer.zero_grad(set_to_none=True)  # layers have nothing in common: only this one moves
                error.backward()
                self.optimizer.step()
            found.append(sum(errors) / len(errors))
        if not all(map(math.isfinite, found)):
            raise FloatingPointError(
                f"the error of a layer is not finite at step {step + 1}: training was stopped. Try a smaller "
                "--learning-rate, in another folder"
            )
        return found

    # Checkpoints.

    def _save_checkpoint(self, step: int) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        with whole_folder(self.folder / PARTIAL / name) as partial:
            save_file(self.controls.state_dict(), partial / WEIGHTS)
            save_file(self._moments(), partial / MOMENTS)
            write_whole(partial / STATE, json.dumps({"global_step": step}) + "\n")
        publish(self.folder / PARTIAL / name, self.folder / name)

    def _moments(self) -> dict[str, Tensor]:
        parts = self.optimizer.state_dict()["state"]
        return {f"{index}.{name}": part for index, own in parts.items() for name, part in own.items()}

    def _continue(self) -> tuple[int, float]:
        """Load the last checkpoint; the steps and the seconds that are done."""
        checkpoint, damaged = last_whole_checkpoint(self.folder)
        for line in damaged:
            print(f"abc-attn: {line}: an earlier checkpoint is used", file=sys.stderr)
        if checkpoint is None:
            about = {"distillation": asdict(self.how), "source": self.model.config.source_model}
            about |= {"commit": commit(), "cpu": cpu(), "torch": torch.__version__, "started": now()}
            about["threads"] = torch.get_num_threads()
            write_whole(self.folder / STARTED, json.dumps(about, indent=2) + "\n")
            return 0, 0.0
        self.controls.load_state_dict(load_file(checkpoint / WEIGHTS))
        state = self.optimizer.state_dict()
        moments: dict[int, dict[str, Tensor]] = {}
        for name, part in load_file(checkpoint / MOMENTS).items():
            index, _, kind = name.partition(".")
            moments.setdefault(int(index), {})[kind] = part
        self.optimizer.load_state_dict(state | {"state": moments})
        step = json_object(checkpoint / STATE)["global_step"]
        done = [record for record in read_metrics(self.folder / METRICS) if record["step"] <= step]
        return step, max((record["seconds"] for record in done), default=0.0)

    def _finish(self, seconds: float) -> None:
        with whole_folder(self.folder / PARTIAL / "model") as partial:
            self.model.save_pretrained(partial)
            self.tokenizer.save_pretrained(partial)
        saved = self.folder / PARTIAL / "model"
        for file in sorted(saved.iterdir(), key=lambda file: file.name == "config.json"):  # what makes it a model
            file.replace(self.folder / file.name)
        saved.rmdir()
        (self.folder / PARTIAL).rmdir()
        about = {"steps": self.how.steps, "tokens": self.how.steps * self.how.segment, "seconds": round(seconds, 1)}
        write_whole(self.folder / FINISHED, json.dumps(about, indent=2) + "\n")
