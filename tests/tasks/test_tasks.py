"""A new task is one file and one line of registration; a new table is a folder."""

import json
import re
from pathlib import Path

import pytest

from abc_attn import tasks
from abc_attn.training import load_recipe, tables, train

# Another model than the package's own, whole batches as items, and a score of its own.
DUMMY = '''
from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from abc_attn.tasks import base
from abc_attn.tasks.base import Task, TrainingSet, setting


@dataclass(frozen=True)
class Settings(base.Settings):
    length: int = setting(5, "of a sequence", minimum=2)


class Batches(torch.utils.data.Dataset):
    def __init__(self, length, total, seed):
        self.length, self.total, self.seed = length, total, seed

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        words = torch.randint(7, (3, self.length), generator=torch.Generator().manual_seed(self.seed * 1000 + index))
        return {"input_ids": words, "labels": words}


class Dummy(Task):
    settings_class = Settings
    defaults = {"learning_rate": 1e-3, "logging_steps": 1, "save_steps": 2}
    decided = {"per_device_train_batch_size": (1, "an item is a batch")}

    @classmethod
    def config_class(cls):
        return GPT2Config

    def check(self):
        if self.settings.length > 20:
            raise ValueError("length is too long")

    def check_scores(self, names):
        assert set(names) <= {"test/loss"}

    def build_model(self, start):
        return GPT2LMHeadModel(GPT2Config(**self.model_values, bos_token_id=0, eos_token_id=0))

    def load_model(self, folder):
        return GPT2LMHeadModel.from_pretrained(folder)

    def training_set(self, total, seed):
        length = self.settings.length
        return TrainingSet(Batches(length, total, seed), lambda items: items[0], 3 * length, None)

    def quick_score(self, model, batch_size):
        with torch.no_grad():
            return {"loss": float(model.eval()(**Batches(self.settings.length, 1, 9)[0]).loss)}

    def scores(self, model, names):
        return {"test/loss": self.quick_score(model, 1)["loss"]}
'''  # fmt: skip
RECIPE = "task: dummy\nmax_steps: 2\nvocab_size: 7\nn_embd: 8\nn_layer: 1\nn_head: 2\nn_positions: 20\nuse_cpu: true\n"


@pytest.fixture
def dummy(tmp_path, monkeypatch):
    """The task, registered, and a recipe of it in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("dummy_task.py").write_text(DUMMY)
    monkeypatch.setitem(tasks.TASKS, "dummy", "dummy_task:Dummy")
    Path("mine.yaml").write_text(RECIPE)


def test_a_task_is_a_file_and_a_line(dummy):
    done = train(load_recipe("mine.yaml", {"output_dir": "run"}))
    assert done["steps"] == 2
    assert done["tokens"] == 2 * 3 * 5
    assert done["validation"].keys() == {"loss"}
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2
    assert not any("perplexity" in key for record in records for key in record)
    assert "length" in tasks.keys_help()
    for changes, said in (
        ({"per_device_train_batch_size": 2}, "a recipe cannot choose per_device_train_batch_size: an item is a batch"),
        ({"length": 1}, "length must be a whole number from 2, got 1"),
        ({"block_size": 1}, "unknown key 'block_size'; it is a key of task language-modelling"),
        ({"length": 30}, "length is too long"),
    ):
        with pytest.raises(ValueError, match=said):
            train(load_recipe("mine.yaml", {"output_dir": "other"} | changes))


def test_a_table_is_a_folder(dummy):
    """table.yaml and a file a row; nothing is registered."""
    Path("new/small").mkdir(parents=True)
    Path("new/small/row.yaml").write_text(RECIPE)
    Path("new/table.yaml").write_text(
        "title: New\ntask: dummy\nreading: Loss.\ncolumns: {test/loss: loss}\n"
        "plot: {kind: bars, column: test/loss, label: loss}\n"
    )
    page = tables.reproduce("new", "small", tables.plan("new", "small", recipes=Path(".")))
    assert re.search(r"^\| row \| - \| - \| 1 \| \d\.\d\d \|$", page.read_text(), re.M)
    assert page.with_suffix(".png").is_file()
