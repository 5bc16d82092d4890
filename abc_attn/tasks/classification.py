"""Classification: a label for a text or a pair of texts, by an encoder. GLUE's tasks, or labelled files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abc_attn.tasks import base
from abc_attn.tasks.base import Figures, TrainingSet, setting
from abc_attn.tasks.encoder import EncoderTask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from abc_attn.data.labelled import Labelled, LabelledSource


@dataclass(frozen=True)
class Settings(base.Settings):
    """The names are those of transformers' run_classification.py where it has one."""

    train_file: str | None = setting(None, "labelled texts: .tsv, .csv or .jsonl", source=True, place=True)
    test_file: str | None = setting(None, "the same; scored at the end, and never before", source=True, place=True)
    glue: str | None = setting(None, "a task of GLUE instead, such as sst2; with data_dir or dataset_name")
    data_dir: str | None = setting(
        None, "the folder with GLUE's folders; the dev text is scored", source=True, place=True
    )
    dataset_name: str | None = setting(None, "GLUE by the `datasets` library, such as nyu-mll/glue", source=True)
    text_column: str = setting("text", "of train_file and test_file")
    text_pair_column: str | None = setting(None, "the second text, if there are two")
    label_column: str = setting("label", "the label")
    held_out: float = setting(0.1, "share of the training text that is not trained on, but scored to compare runs")
    drop_shared: bool = setting(False, "leave out training texts that are among those to be scored")
    train_embeddings: bool = setting(True, "false: those of words stay as they are, which makes short steps faster")
    max_length: int = setting(128, "tokens of an example; what is beyond is cut off", minimum=4)
    cache_dir: str = setting("~/.cache/abc-attn", "where unpacked models are kept", place=True)


class Classification(EncoderTask):
    """Labelled texts. A share of the training text is held out; the test text is read for the final scores alone."""

    settings_class = Settings
    settings: Settings
    head = "ForSequenceClassification"
    # GLUE as RoBERTa was fine-tuned on it (Liu et al., 2019).
    defaults = EncoderTask.optim | {"lr_scheduler_type": "linear", "warmup_steps": 0.06, "weight_decay": 0.1}
    tiny = EncoderTask.sizes | {"train_file": "text/train.tsv", "test_file": "text/test.tsv", "max_length": 32}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.labels: tuple[str, ...] = ()
        self._tokenizer: Any = None

    def length(self) -> int:
        return self.settings.max_length

    def more_config(self) -> dict[str, Any]:
        names = dict(enumerate(self.labels or ("0", "1")))
        kind = {"problem_type": "single_label_classification", "text_pairs": self._source_of_texts().pairs}
        return {"id2label": names, "label2id": {name: place for place, name in names.items()}} | kind

    def check(self) -> None:
        if not 0 < self.settings.held_out < 1:
            raise ValueError(f"held_out must be between 0 and 1, both excluded, got {self.settings.held_out}")
        self._source_of_texts()
        super().check()

    def check_scores(self, names: Sequence[str]) -> None:
        from abc_attn.evaluation.classifying import MEASURES

        for name in names:
            if name not in {f"test/{measure}" for measure in MEASURES}:
                raise ValueError(f"no score {name!r}: it is test, a slash, and one of {', '.join(MEASURES)}")
        if names and self.settings.glue is None and self.settings.test_file is None:
            raise ValueError(f"score {names[0]!r} needs test_file")

    def _source_of_texts(self) -> LabelledSource:
        """Where the labelled texts are; files exist."""
        from abc_attn.data.labelled import LabelledSource, glue_source

        settings = self.settings
        files = [settings.train_file, settings.test_file]
        if settings.glue is not None:
            if any(files) or (settings.data_dir is None) == (settings.dataset_name is None):
                raise ValueError("glue needs data_dir or dataset_name, one of them, and no files")
            folder = None if settings.data_dir is None else Path(settings.data_dir).expanduser()
            source = glue_source(settings.glue, folder, settings.dataset_name)
        elif settings.train_file is None or settings.data_dir is not None or settings.dataset_name is not None:
            raise ValueError("a recipe needs train_file; or glue with data_dir or dataset_name")
        else:
            names = [settings.text_column, settings.text_pair_column, settings.label_column]
            paths = tuple(Path(file).expanduser() for file in files if file is not None)
            source = LabelledSource(tuple((name,) for name in names if name is not None), files=paths)
        source.check()
        return source

    def open(self) -> None:
        from abc_attn.data.blocks import learn_tokenizer
        from abc_attn.data.labelled import split_off, without_shared

        source = self._source_of_texts()
        train, self._scored, self.labels = source.read()
        if self.settings.drop_shared:
            kept = without_shared(train, self._scored)
            if len(kept) < len(train):
                said = f"{len(train) - len(kept)} of {len(train)} training texts are among those to be scored: left out"
                print(f"abc-attn: {said}", file=sys.stderr, flush=True)
            train = kept
        if len(train) < 2:
            raise ValueError("the training text has too few examples: two are needed at least")
        self._train, self._held_out = split_off(train, self.settings.held_out)
        self._fingerprint = source.fingerprint()
        self._tokenizer = self.tokenizer_of_start()
        if self._tokenizer is None:
            texts = (text for each in self._train for text in (each.text, each.pair) if text)
            self._tokenizer = learn_tokenizer(texts, self.model_values["vocab_size"])
        self._tokenizer.model_max_length = self.settings.max_length  # saved with it, for those who classify

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def build_model(self, start: Path | None) -> PreTrainedModel:
        model: Any = super().build_model(start)
        if not self.settings.train_embeddings:
            model.get_input_embeddings().weight.requires_grad_(False)
        return model

    def _encoded(self, examples: Sequence[Labelled]) -> list[dict[str, Any]]:
        from abc_attn.evaluation.classifying import encode

        pairs = [example.pair or "" for example in examples] if examples[0].pair is not None else None
        encoded = encode(self._tokenizer, [example.text for example in examples], pairs, self.settings.max_length)
        number = {label: place for place, label in enumerate(self.labels)}
        return [each | {"labels": number[example.label]} for each, example in zip(encoded, examples, strict=True)]

    def training_set(self, total: int, seed: int) -> TrainingSet:
        from transformers import DataCollatorWithPadding

        from abc_attn.data.labelled import LabelledBatches

        encoded = self._encoded(self._train)
        batches = LabelledBatches(encoded, self.training_values.get("per_device_train_batch_size", 8), total, seed)
        mean = float(batches.lengths.mean())
        return TrainingSet(batches, DataCollatorWithPadding(self._tokenizer), mean, len(encoded))

    def _measured(self, model: PreTrainedModel, examples: Sequence[Labelled], batch_size: int) -> dict[str, float]:
        from abc_attn.evaluation.classifying import MEASURES, measure, predict

        encoded = self._encoded(examples)
        likely = predict(model, self._tokenizer, encoded, batch_size)
        right = [each["labels"] for each in encoded]
        loss = -likely[range(len(right)), right].mean()
        predicted = likely.argmax(-1).tolist()
        return {"loss": float(loss)} | {name: measure(name, predicted, right, len(self.labels)) for name in MEASURES}

    def quick_score(self, model: PreTrainedModel, batch_size: int) -> dict[str, float]:
        """Of the share of the training text that is held out."""
        return self._measured(model, self._held_out, batch_size)

    def scores(self, model: PreTrainedModel, names: Sequence[str]) -> Figures:
        """Of the test text (of GLUE: dev), times 100, as tables have them."""
        if not names:
            return {}
        found = self._measured(model, self._scored, self.training_values.get("per_device_eval_batch_size", 8))
        return {name: 100 * found[name.partition("/")[2]] for name in names}
