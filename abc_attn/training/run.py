"""One training run: from a recipe to a folder with the model, its metrics and where they come from."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import Dataset
from transformers import TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging as hf_logging

from abc_attn.data import Copy, Corpus, Recall, Segments, Source, Streams, build_corpus, find_files
from abc_attn.evaluation import perplexity, token_nll
from abc_attn.files import write_whole
from abc_attn.models.adaptive_lm import IGNORED, AdaptiveLM, AdaptiveLMConfig
from abc_attn.provenance import commit, cpu
from abc_attn.training.recipe import Recipe, Settings
from abc_attn.training.trainer import METRICS, PARTIAL, LMTrainer, Report, read_metrics

STARTED, FINISHED = "run.json", "finished.json"
_HELD_OUT = 1_000_003  # added to the seed of the synthetic tasks, so that no test item is a training item
_TEST_ITEMS = 256


def train(recipe: Recipe, *, resume: bool = False) -> dict[str, Any]:
    """Train as the recipe says, into its output_dir; returns what finished.json says. A finished run stays as it is."""
    return prepare(recipe, resume=resume)()


def prepare(recipe: Recipe, *, resume: bool = False) -> Callable[[], dict[str, Any]]:
    """Everything that can be wrong with a recipe or its data is found here; what is returned trains."""
    folder = Path(recipe.values["output_dir"])
    args = TrainingArguments(**_arguments(recipe))
    if args.n_gpu > 1:
        raise ValueError(
            f"one process is to train on {args.n_gpu} GPUs: start one for each with torchrun --nproc_per_node "
            f"{args.n_gpu} -m abc_attn.cli train ..., or choose one with CUDA_VISIBLE_DEVICES"
        )
    if "tensorboard" in (args.report_to or ()) and find_spec("tensorboard") is None:
        raise ValueError("report_to=tensorboard needs tensorboard: pip install tensorboard")
    done = _finished(folder, recipe)
    if done is not None:
        if args.process_index == 0:
            print(f"{folder} holds this run, finished after {done['steps']} steps: nothing to do", file=sys.stderr)
        return lambda: done
    checkpoint = _last_checkpoint(folder, recipe, resume)
    run = _Run(recipe, folder, args)
    if checkpoint is not None and run.corpus is not None:
        recorded = json.loads((folder / STARTED).read_text(encoding="utf-8"))["corpus"]
        if recorded != run.corpus.fingerprint:
            raise ValueError(f"the run in {folder} was started with another text; give another output_dir")
    return lambda: run.train(checkpoint)


class _Run:
    """Everything that training needs, built and checked."""

    def __init__(self, recipe: Recipe, folder: Path, args: TrainingArguments) -> None:
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        self.recipe, self.folder, self.args = recipe, folder, args
        settings = recipe.settings
        with self.args.main_process_first(desc="tokenizing"):
            self.corpus = open_corpus(recipe) if settings.task == "language-modelling" else None
        set_seed(self.args.seed)
        self.model = self._build_model()
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        self.data = self._build_data(batch * self.args.max_steps)
        self.batch, self.length = batch, len(self.data[0]["input_ids"])

    def _build_model(self) -> AdaptiveLM:
        try:
            config = AdaptiveLMConfig(**self._config())
        except StrictDataclassError as error:  # a value of the wrong type
            raise ValueError(" ".join(str(error).split())) from None
        start = self.recipe.settings.init_from
        if start is None:
            return AdaptiveLM(config)
        source = _trained_model(start, self.folder)
        theirs = AdaptiveLMConfig.from_pretrained(source)
        for name in ("vocab_size", "cutoffs", "div_val", "hidden_size", "num_hidden_layers", "intermediate_size"):
            mine, other = getattr(config, name), getattr(theirs, name)
            if (list(mine) if name == "cutoffs" else mine) != (list(other) if name == "cutoffs" else other):
                raise ValueError(f"init_from={start!r} has {name}={other}, this recipe {mine}: they must agree")
        return AdaptiveLM.from_pretrained(source, config=config)

    def _config(self) -> dict[str, Any]:
        config = self.recipe.model()
        if self.corpus is None:
            return {"cutoffs": ()} | config
        size = len(self.corpus.tokenizer)
        end = self.corpus.tokenizer.eos_token_id
        return config | {"vocab_size": size, "eos_token_id": end, "bos_token_id": end}

    def _build_data(self, total: int) -> Dataset[Any]:
        settings, seed = self.recipe.settings, self.args.seed
        if self.corpus is None:
            return _task(settings, self.model.config.vocab_size, total, seed)
        tokens = self.corpus.tokens["train"]
        if settings.carry_state:
            rows = self.args.per_device_train_batch_size
            return Streams(tokens, settings.block_size, total, rows, self.args.world_size)
        return Segments(tokens, settings.block_size, total, seed)

    def score(self) -> dict[str, float]:
        """What is reported of the held-out data during training."""
        if self.corpus is None:
            return {"accuracy": self._accuracy()}
        split = "validation"
        nll = token_nll(
            self.model,
            self.corpus.tokens[split],
            window=self.recipe.settings.block_size,
            batch_size=self.args.per_device_eval_batch_size,
        )
        return {"loss": float(nll.mean()), "perplexity": perplexity(nll, self.corpus.words[split])}

    @torch.no_grad()
    def _accuracy(self) -> float:
        """The share of right answers on items that training has not seen."""
        held_out = _task(self.recipe.settings, self.model.config.vocab_size, _TEST_ITEMS, self.args.seed + _HELD_OUT)
        self.model.eval()
        right = asked = 0
        for start in range(0, _TEST_ITEMS, self.args.per_device_eval_batch_size):
            items = [held_out[i] for i in range(start, min(_TEST_ITEMS, start + self.args.per_device_eval_batch_size))]
            words, labels = (torch.stack([item[key] for item in items]) for key in ("input_ids", "shift_labels"))
            answers = self.model(words.to(self.model.device), use_cache=False).logits.argmax(-1).cpu()
            right += int((answers == labels).sum())
            asked += int((labels != IGNORED).sum())
        return right / asked

    def train(self, checkpoint: str | None) -> dict[str, Any]:
        settings, args, folder = self.recipe.settings, self.args, self.folder
        per_step = self.batch * self.length
        in_a_pass = args.max_steps * per_step if self.corpus is None else len(self.corpus.tokens["train"])
        report = Report(folder, per_step, in_a_pass / per_step)
        trainer = LMTrainer(
            self.model,
            args,
            train_dataset=self.data,
            eval_dataset=self.data,  # never read: `score` has its own
            data_collator=default_data_collator,
            processing_class=None if self.corpus is None else self.corpus.tokenizer,
            callbacks=[report],
            score=self.score,
            carry_state=settings.carry_state,
        )
        main = trainer.is_world_process_zero()
        if main:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)  # left by a run that was killed in a save
            if checkpoint is None:
                about = provenance(self.recipe) | {
                    "parameters": sum(weight.numel() for weight in self.model.parameters()),
                    "corpus": None if self.corpus is None else self.corpus.fingerprint,
                }
                write_whole(folder / STARTED, json.dumps(about, indent=2) + "\n")
        trainer.train(resume_from_checkpoint=checkpoint)
        scores = self.score()
        done: dict[str, Any] = {}
        trainer.save_model(str(folder / PARTIAL / "model"))
        trainer.accelerator.wait_for_everyone()
        if main:
            for file in (folder / PARTIAL / "model").iterdir():
                file.replace(folder / file.name)
            shutil.rmtree(folder / PARTIAL)
            records = read_metrics(folder / METRICS)
            done = {
                "steps": args.max_steps,
                "tokens": args.max_steps * per_step,
                "seconds": max((record["seconds"] for record in records), default=0.0),
                "validation": scores,
            }
            write_whole(folder / FINISHED, json.dumps(done, indent=2) + "\n")
        trainer.accelerator.wait_for_everyone()
        return done or json.loads((folder / FINISHED).read_text(encoding="utf-8"))


def open_corpus(recipe: Recipe) -> Corpus:
    """The text of a recipe as tokens, tokenized now if it has not been before."""
    settings = recipe.settings
    files = [settings.train_file, settings.validation_file, settings.test_file]
    given = [settings.data_dir is not None, any(files), settings.dataset_name is not None]
    if sum(given) != 1:
        raise ValueError(
            "a recipe needs one source of text: data_dir, or train_file, validation_file and test_file, or "
            f"dataset_name; {sum(given)} were given"
        )
    if settings.data_dir is not None:
        source = Source(find_files(Path(settings.data_dir).expanduser()))
    elif settings.dataset_name is not None:
        source = Source(dataset_name=settings.dataset_name, dataset_config_name=settings.dataset_config_name)
    else:
        if not all(files):
            raise ValueError("train_file, validation_file and test_file are all needed")
        paths = [Path(str(file)).expanduser() for file in files]
        source = Source(dict(zip(("train", "validation", "test"), paths, strict=True)))
    cache = Path(settings.cache_dir).expanduser()
    return build_corpus(source, cache, settings.tokenizer, recipe.values.get("vocab_size"))


def provenance(recipe: Recipe) -> dict[str, Any]:
    """What is needed to get a result again."""
    return {
        "recipe": recipe.name,
        "values": recipe.values,
        "seed": recipe.training()["seed"],
        "commit": commit(),
        "machine": {"cpu": cpu(), "threads": torch.get_num_threads(), "platform": platform.platform()},
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _arguments(recipe: Recipe) -> dict[str, Any]:
    fixed = {
        "train_sampling_strategy": "sequential",
        "dataloader_drop_last": True,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "save_strategy": "steps",
    }
    return recipe.training() | fixed


def _task(settings: Settings, vocab_size: int, total: int, seed: int) -> Dataset[Any]:
    return {"recall": Recall, "copy": Copy}[settings.task](settings.items, vocab_size, total, seed)


def _trained_model(start: str, folder: Path) -> Path:
    """A model's folder, or the name of a run beside this one."""
    for candidate in (Path(start).expanduser(), folder.parent / start):
        if (candidate / "config.json").is_file():
            return candidate
    raise FileNotFoundError(
        f"init_from={start!r}: no trained model there, nor beside {folder}; train it first, and give its output_dir"
    )


def _finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    if not (folder / FINISHED).is_file():
        return None
    _same_run(folder, recipe)
    return dict(json.loads((folder / FINISHED).read_text(encoding="utf-8")))


def _last_checkpoint(folder: Path, recipe: Recipe, resume: bool) -> str | None:
    if not (folder / STARTED).is_file():
        return None
    if not resume:
        raise ValueError(f"{folder} holds a run that was not finished: go on with --resume, or give another output_dir")
    _same_run(folder, recipe)
    return get_last_checkpoint(str(folder))


def _same_run(folder: Path, recipe: Recipe) -> None:
    recorded = json.loads((folder / STARTED).read_text(encoding="utf-8"))["values"]
    if different := recipe.differences(recorded):
        shown = ", ".join(f"{key} ({recorded.get(key)} there, {recipe.values.get(key)} here)" for key in different)
        raise ValueError(f"{folder} holds another run, with other values of {shown}; give another output_dir")
