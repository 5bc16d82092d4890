"""Masked language modelling: the hidden tokens of a text, by an encoder that reads all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from abc_attn.paths import saved_model
from abc_attn.tasks import base
from abc_attn.tasks.base import Figures, TrainingSet, setting
from abc_attn.tasks.encoder import EncoderTask

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from abc_attn.data.blocks import EncodedText, FixedBlocks

MEASURES = ("loss", "accuracy")
ALL, HEAD, CONTROL = "all", "head", "control"
MASKED, TRANSFER = "masked", "transfer"
RANDOM, POSITIONS = "random", "positions"
_TOKENS_OF_A_LENGTH = 8192  # that are read to learn positions


@dataclass(frozen=True)
class Settings(base.Settings):
    """The names are those of transformers' run_mlm.py where it has one."""

    block_size: int = setting(512, "tokens of a block, the first and the last one of which are not text", minimum=8)
    data_dir: str | None = setting(
        None, "a folder with train and valid text, or several with commas between", source=True, place=True
    )
    train_file: str | None = setting(
        None, "a text file (or JSON lines with 'text'); with validation_file", source=True, place=True
    )
    validation_file: str | None = setting(None, "a text file", source=True, place=True)
    cache_dir: str = setting("~/.cache/abc-attn", "where tokenized text and unpacked models are kept", place=True)
    mlm_probability: float = setting(0.15, "share of tokens to predict: 80 % hidden, 10 % replaced, 10 % as they are")
    trainable: str = setting(
        ALL, "all; head: everything else is frozen; control: the same", choices=(ALL, HEAD, CONTROL)
    )
    objective: str = setting(
        MASKED,
        "masked: predict hidden tokens; transfer: each attention learns to give what init_from's exact one gives",
        choices=(MASKED, TRANSFER),
    )
    control_start: str = setting(
        RANDOM,
        "random: as controls start; positions: mlp's slots look for positions, which init_from's hidden states tell",
        choices=(RANDOM, POSITIONS),
    )
    eval_blocks: int | None = setting(None, "scores are of so many blocks of the validation text", minimum=1)


class MaskedLM(EncoderTask):
    """Whole blocks of text, masked anew in every pass."""

    settings_class = Settings
    settings: Settings
    text: EncodedText
    head = "ForMaskedLM"
    perplexity: ClassVar[str | None] = "perplexity per masked token"
    defaults = EncoderTask.optim | {"lr_scheduler_type": "linear", "weight_decay": 0.01}
    tiny = EncoderTask.sizes | {"data_dir": "text", "block_size": 16}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.settings.objective == TRANSFER:
            self.perplexity = None  # type: ignore[misc] # of an error of attentions it means nothing

    def length(self) -> int:
        return self.settings.block_size

    def check(self) -> None:
        if not 0 < self.settings.mlm_probability < 1:
            raise ValueError(
                f"mlm_probability must be between 0 and 1, both excluded, got {self.settings.mlm_probability}"
            )
        if self.settings.trainable == HEAD and self.settings.init_from is None:
            raise ValueError("trainable=head needs init_from: a new model has nothing to keep")
        if self.settings.trainable == CONTROL and self.model_values.get("control") == "softmax":
            raise ValueError("trainable=control: control softmax has no weights")
        if self.settings.objective == TRANSFER and self.settings.init_from is None:
            raise ValueError("objective=transfer needs init_from, a model with exact attention")
        if self.settings.objective == TRANSFER and self.settings.trainable == HEAD:
            raise ValueError("objective=transfer is about attention: trainable must be control, or all")
        if self.settings.control_start == POSITIONS and self.settings.init_from is None:
            raise ValueError("control_start=positions needs init_from, a model with exact attention")
        self._files()
        super().check()

    def check_model(self, model: Any, start: Path | None) -> None:
        if self.settings.control_start == POSITIONS:
            from abc_attn.models.starting import check_starts

            check_starts(model)
        if start is not None:
            self._check_exact(start)

    def _check_exact(self, start: Path) -> None:
        """What attention is to learn from is exact attention."""
        theirs, transfer = saved_model(start).get("control", "softmax"), self.settings.objective == TRANSFER
        if theirs != "softmax" and (transfer or self.settings.control_start == POSITIONS):
            key = f"objective={TRANSFER}" if transfer else f"control_start={POSITIONS}"
            raise ValueError(f"{key} needs init_from, a model with exact attention; {start} has control {theirs!r}")

    def check_scores(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in {f"validation/{measure}" for measure in MEASURES}:
                raise ValueError(f"no score {name!r}: it is validation, a slash, and one of {', '.join(MEASURES)}")

    def _files(self) -> dict[str, list[Path]]:
        """The files of each split, which exist."""
        from abc_attn.data.blocks import READ, find_text

        settings = self.settings
        files = [settings.train_file, settings.validation_file]
        if (settings.data_dir is not None) == any(files):
            raise ValueError("a recipe needs one source of text: data_dir, or train_file and validation_file")
        if settings.data_dir is not None:
            folders = [Path(part.strip()).expanduser() for part in settings.data_dir.split(",") if part.strip()]
            if not folders:
                raise ValueError("data_dir names no folder")
            return find_text(folders)
        if not all(files):
            raise ValueError("train_file and validation_file are both needed")
        found = {split: [Path(str(file)).expanduser()] for split, file in zip(READ, files, strict=True)}
        for split, paths in found.items():
            if not paths[0].is_file():
                raise FileNotFoundError(f"no {split} text at {paths[0]}")
        return found

    def open(self) -> None:
        from abc_attn.data.blocks import build_text
        from abc_attn.data.segments import Cuts

        cache = Path(self.settings.cache_dir).expanduser()
        tokenizer = self.tokenizer_of_start()
        self.text = build_text(self._files(), cache, tokenizer, self.model_values.get("vocab_size"))
        self._scored()  # a text that is too short is refused now
        Cuts(len(self.text.tokens["train"]), self.settings.block_size - 2, 0)  # ... and one to train on

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.text.tokenizer

    @property
    def fingerprint(self) -> str:
        return self.text.fingerprint

    def build_model(self, start: Path | None) -> PreTrainedModel:
        from abc_attn.evaluation.masked import MaskedOnly, has_new_head, head_of, start_new_head

        model: Any = super().build_model(start)
        if start is not None and has_new_head(model):
            start_new_head(model, self.text.log_frequencies())
        MaskedOnly(model)
        if self.settings.trainable != ALL:
            chosen = head_of(model) if self.settings.trainable == HEAD else model.controls
            body = {id(weight) for weight in model.base_model.parameters()}  # the embeddings, which the head shares
            kept = {id(weight) for weight in chosen.parameters()} - body
            if not kept:
                raise ValueError(f"trainable={self.settings.trainable}: there are no such weights in this model")
            for weight in model.parameters():
                weight.requires_grad_(id(weight) in kept)
        if self.settings.control_start == POSITIONS or self.settings.objective == TRANSFER:
            self._learn_from_exact(model, start)
        return model

    def _learn_from_exact(self, model: Any, start: Path | None) -> None:
        from abc_attn.models.starting import start_at_positions
        from abc_attn.models.transfer import Transfer, exact_twin

        assert start is not None
        self._check_exact(start)
        teacher = exact_twin(model, start)
        if self.settings.control_start == POSITIONS:
            start_at_positions(model, teacher, self._plain_batches())
        if self.settings.objective == TRANSFER:
            Transfer(model, teacher)

    def _plain_batches(self) -> list[Tensor]:
        """Training text without masks, in blocks of block_size tokens, half of that, ... 16."""
        from abc_attn.data.blocks import plain_blocks

        found, length = [], self.settings.block_size
        while length >= min(16, self.settings.block_size):
            count = max(1, _TOKENS_OF_A_LENGTH // length)
            found += plain_blocks(self.text.tokens["train"], length, count, self.tokenizer).split(16)
            length //= 2
        return found

    def training_set(self, total: int, seed: int) -> TrainingSet:
        from transformers import default_data_collator

        from abc_attn.data.blocks import MaskedBlocks

        length, tokens = self.settings.block_size, self.text.tokens["train"]
        blocks = MaskedBlocks(tokens, length, total, seed, self.tokenizer, self.settings.mlm_probability)
        return TrainingSet(blocks, default_data_collator, length, blocks.cuts.per_pass)

    def quick_score(self, model: PreTrainedModel, batch_size: int) -> dict[str, float]:
        """Of validation blocks with masks that are the same in every run."""
        from abc_attn.evaluation.masked import masked_scores

        return masked_scores(model, self._scored(), batch_size)

    def _scored(self) -> FixedBlocks:
        from abc_attn.data.blocks import FixedBlocks

        tokens, settings = self.text.tokens["validation"], self.settings
        size, count = settings.block_size, settings.eval_blocks
        return FixedBlocks(tokens, size, count, self.tokenizer, settings.mlm_probability)

    def scores(self, model: PreTrainedModel, names: Sequence[str]) -> Figures:
        """The loss, and the accuracy times 100, as tables have it."""
        found = self.quick_score(model, self.training_values.get("per_device_eval_batch_size", 8)) if names else {}
        return {name: found["loss"] if name.endswith("loss") else 100 * found["accuracy"] for name in names}
