"""Translation, sentence by sentence or with the sentences before: an encoder, a decoder, and BLEU."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from abc_attn.memory_limit import FLOAT, check_fits
from abc_attn.paths import saved_model
from abc_attn.tasks import base
from abc_attn.tasks.base import Figures, Task, TrainingSet, setting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from abc_attn.data import PairCorpus, ParallelSource

SCORED = ("validation", "test")
AFTER_REFERENCES = " after references"  # ends the name of a score: the context of a sentence is not the model's own
# A trained model must have the same, to be started from.
_SHAPE = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim")
# What a config has beyond a recipe: the data, or what a translator is, decides it.
_DECIDED = {
    "decoder_vocab_size", "decoder_start_token_id", "forced_eos_token_id", "is_encoder_decoder", "is_decoder",
    "share_encoder_decoder_embeddings", "source_model", "positions",
}  # fmt: skip


@dataclass(frozen=True)
class Settings(base.Settings):
    """The names are those of transformers' run_translation.py where it has one."""

    source_lang: str = setting("en", "ends the names of the source's files (train.en), or is its key in JSON lines")
    target_lang: str = setting("de", "the same of the target")
    data_dir: str | None = setting(
        None, "a folder with train, valid and test text: train.en and train.de, or train.jsonl", source=True, place=True
    )
    train_source: str | None = setting(
        None, "a file; with the other five, instead of data_dir", source=True, place=True
    )
    train_target: str | None = setting(None, "a file, as long as train_source", source=True, place=True)
    validation_source: str | None = setting(None, "a file", source=True, place=True)
    validation_target: str | None = setting(None, "a file", source=True, place=True)
    test_source: str | None = setting(None, "a file", source=True, place=True)
    test_target: str | None = setting(None, "a file", source=True, place=True)
    dataset_name: str | None = setting(None, "a data set of the `datasets` library, column translation", source=True)
    dataset_config_name: str | None = setting(None, "its configuration, such as de-en", source=True)
    cache_dir: str = setting("~/.cache/abc-attn", "where tokenized text is kept", place=True)
    context_sentences: int = setting(0, "of a document, read and written before each sentence", minimum=0)
    max_tokens: int = setting(4096, "of a batch, on the longer side and with padding", minimum=1)
    max_length: int = setting(256, "pairs with more tokens on a side are left out of the training", minimum=2)
    frequency_bias: bool = setting(
        False, "the bias of the output is the log frequency of each token in the target text"
    )
    num_beams: int = setting(5, "of the beam search", minimum=1)
    length_penalty: float = setting(0.6, "log p of a translation is divided by its length to this power")
    eval_documents: int | None = setting(
        None, "final scores are of the first so many documents; all, if left out", minimum=1
    )


class Translation(Task):
    """Pairs of sentences, or windows of documents, in batches of max_tokens."""

    settings_class = Settings
    settings: Settings
    corpus: PairCorpus
    defaults: ClassVar[dict[str, Any]] = {
        "optim": "adamw_torch_fused",
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-9,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "inverse_sqrt",
    }
    decided: ClassVar[dict[str, tuple[Any, str]]] = {
        "per_device_train_batch_size": (1, "max_tokens says how large a batch is")
    }
    tiny: ClassVar[dict[str, Any]] = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
        "max_length": 64,
        "vocab_size": 270,
        "control": "mlp",
        "slots": {"self": 2, "cross": 4},
        "where": ["self", "cross"],
        "max_tokens": 256,
        "data_dir": "text",
        "cache_dir": "cache",
    }

    @classmethod
    def config_class(cls) -> type[PreTrainedConfig]:
        from abc_attn.hf.models import CLASSES

        return CLASSES["BoundedMarianConfig"]

    @classmethod
    def model_keys(cls) -> set[str]:
        return super().model_keys() - _DECIDED

    def check(self) -> None:
        """The config, and a model of it with one layer (all, if some are chosen), few positions and few words."""
        from abc_attn.data.pairs import check_vocabulary
        from abc_attn.hf.models import CLASSES

        check_vocabulary(self.model_values.get("vocab_size"))
        config = self._config(self.model_values)
        self._check_sizes(config)
        few = {"vocab_size": 8, "max_position_embeddings": 4, "encoder_ffn_dim": 1, "decoder_ffn_dim": 1}
        if config.layers is None:
            few |= {"encoder_layers": 1, "decoder_layers": 1}
        model = CLASSES["BoundedMarianForConditionalGeneration"](self._config(self.model_values | few))
        lengths = [module.max_length for module in model.modules() if hasattr(module, "max_length")]
        if lengths and min(lengths) < self.settings.max_length:
            raise ValueError(
                f"max_length={self.settings.max_length} tokens of a side are more than the control's max_length="
                f"{min(lengths)} (control_options)"
            )
        self._source()

    def _check_sizes(self, config: Any) -> None:
        settings = self.settings
        if settings.max_length > config.max_position_embeddings:
            raise ValueError(
                f"max_length={settings.max_length} tokens of a side need as many positions, and "
                f"max_position_embeddings is {config.max_position_embeddings}"
            )
        if settings.max_tokens < settings.max_length:
            raise ValueError(f"max_tokens={settings.max_tokens} must be at least max_length={settings.max_length}")
        width, layers = config.d_model, config.encoder_layers + config.decoder_layers
        forward = config.encoder_layers * config.encoder_ffn_dim + config.decoder_layers * config.decoder_ffn_dim
        words = config.vocab_size * width
        weights = 2 * (6 * layers * width**2 + 2 * forward * width + words)
        check_fits("the weights of this model and their gradients", weights * FLOAT)
        kept = settings.max_tokens * (layers * width + config.vocab_size)
        check_fits(f"a batch of {settings.max_tokens} tokens in this model", kept * FLOAT)

    def check_scores(self, names: Sequence[str]) -> None:
        from abc_attn.evaluation.bleu import MEASURES

        for name in names:
            split, _, measure = name.partition("/")
            if split not in SCORED or measure.removesuffix(AFTER_REFERENCES) not in MEASURES:
                raise ValueError(
                    f"no score {name!r}: it is validation or test, a slash, and one of {', '.join(MEASURES)}; the same "
                    f"with{AFTER_REFERENCES} has references as context"
                )

    def open(self) -> None:
        from abc_attn.data import build_pairs

        cache = Path(self.settings.cache_dir).expanduser()
        self.corpus = build_pairs(self._source(), cache, self.model_values["vocab_size"], self._tokenizer_of_start())

    def _tokenizer_of_start(self) -> Any | None:
        """That of the model to start from, whose tokens its embeddings are; None if one is to be learned."""
        from abc_attn.data.pairs import read_tokenizer_file
        from abc_attn.models.saved import damaged

        if (start := self.start()) is None:
            return None
        with damaged(f"{start} has no tokenizer that can be loaded"):
            return read_tokenizer_file(start / "tokenizer.json")

    def _source(self) -> ParallelSource:
        """Where the text is; its files exist."""
        from abc_attn.data import SPLITS, ParallelSource, find_parallel_files

        settings = self.settings
        languages = (settings.source_lang, settings.target_lang)
        sides = {split: [getattr(settings, f"{split}_{side}") for side in ("source", "target")] for split in SPLITS}
        named = [file for files in sides.values() for file in files if file]
        given = [settings.data_dir is not None, bool(named), settings.dataset_name is not None]
        if sum(given) != 1:
            raise ValueError(
                "a recipe needs one source of text: data_dir, or train_source, train_target and so on, or "
                f"dataset_name; {sum(given)} were given"
            )
        if settings.dataset_name is not None:
            if settings.context_sentences:
                raise ValueError("context_sentences needs documents, which dataset_name does not give: use data_dir")
            return ParallelSource(
                languages,
                dataset_name=settings.dataset_name,
                dataset_config_name=settings.dataset_config_name,
                dataset_column="translation",
            )
        if settings.data_dir is not None:
            files = find_parallel_files(Path(settings.data_dir).expanduser(), languages)
        elif len(named) < 6:
            raise ValueError("train_source, train_target, validation_source, and so on: all six are needed")
        else:
            files = {split: tuple(Path(file).expanduser() for file in both) for split, both in sides.items()}
        source = ParallelSource(languages, files, blank_lines_end_documents=settings.context_sentences > 0)
        source.check()
        return source

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.corpus.tokenizer

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    def _config(self, values: dict[str, Any]) -> Any:
        """Vaswani's transformer: normed after each part (Marian's only form), sinusoids, one embedding for all."""
        from huggingface_hub.errors import StrictDataclassError

        kind: Any = self.config_class()
        special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}  # data/pairs.py: SPECIAL
        form: dict[str, Any] = {"activation_function": "relu", "scale_embedding": True, "forced_eos_token_id": None}
        # Embeddings start with a deviation of 1 after scaling, as in fairseq, unless the recipe says otherwise.
        form["init_std"] = values.get("d_model", kind.d_model) ** -0.5
        try:
            config = kind(**form | values | special)
        except StrictDataclassError as error:  # a value of the wrong type
            raise ValueError(" ".join(str(error).split())) from None
        config.context_sentences = self.settings.context_sentences  # for those who translate with it
        return config

    def build_model(self, start: Path | None) -> PreTrainedModel:
        from abc_attn.hf.models import CLASSES
        from abc_attn.models.saved import damaged

        kind: Any = CLASSES["BoundedMarianForConditionalGeneration"]
        config = self._config(self.model_values | {"vocab_size": len(self.corpus.tokenizer)})
        if start is None:
            model = kind(config)
            if self.settings.frequency_bias:
                model.final_logits_bias.copy_(self.corpus.target_log_frequencies())
            return model
        saved_model(start)
        with damaged(f"{start} does not hold a translator"):
            theirs = self.config_class().from_pretrained(start)
        for name in _SHAPE:
            if getattr(config, name) != getattr(theirs, name):
                raise ValueError(
                    f"init_from={self.settings.init_from!r} has {name}={getattr(theirs, name)}, this recipe "
                    f"{getattr(config, name)}: they must agree"
                )
        with damaged(f"{start} does not hold a whole translator"):
            return kind.from_pretrained(start, config=config, allow_new_controls=True)

    def load_model(self, folder: Path) -> PreTrainedModel:
        from abc_attn.hf.models import CLASSES

        kind: Any = CLASSES["BoundedMarianForConditionalGeneration"]
        return kind.from_pretrained(folder)

    def training_set(self, total: int, seed: int) -> TrainingSet:
        from abc_attn.data import TokenBatches

        settings = self.settings
        examples, said = self.corpus.usable("train", settings.context_sentences, settings.max_length)
        for line in said:
            print(f"abc-attn: {line}", file=sys.stderr, flush=True)
        batches = TokenBatches(examples, settings.max_tokens, total, seed, **self._special())
        tokens = float(examples.lengths().sum()) / batches.per_pass  # of both sides
        return TrainingSet(batches, _only, tokens, batches.per_pass)

    def _special(self) -> dict[str, int]:
        tokenizer: Any = self.corpus.tokenizer
        pad = tokenizer.pad_token_id
        return {"pad": pad, "separator": tokenizer.sep_token_id, "start": pad}

    def loss_function(self) -> Callable[..., Any]:
        from abc_attn.evaluation.translating import SmoothedLoss

        return SmoothedLoss(self.training_values["label_smoothing_factor"])

    def quick_score(self, model: PreTrainedModel, batch_size: int) -> dict[str, float]:
        """-log p of a token of the validation text, after the reference so far, without label smoothing."""
        from abc_attn.data import TokenBatches
        from abc_attn.evaluation.translating import mean_nll

        settings = self.settings
        examples, _ = self.corpus.usable("validation", settings.context_sentences, settings.max_length)
        loss = mean_nll(model, TokenBatches(examples, settings.max_tokens, 0, 0, **self._special()))
        return {"loss": loss, "perplexity per token": math.exp(min(loss, 700.0))}

    def scores(self, model: PreTrainedModel, names: Sequence[str]) -> Figures:
        """BLEU and chrF of beam search. A sentence's context is what the model has made of the sentences before it, or
        ("test/BLEU after references") their references."""
        from abc_attn.evaluation.bleu import measure, measured_documents
        from abc_attn.evaluation.translating import Translator

        settings = self.settings
        search: dict[str, Any] = {"beams": settings.num_beams, "length_penalty": settings.length_penalty}
        translator = Translator(model, self.corpus.tokenizer, **search, cut=True)
        figures: Figures = {}
        for split in SCORED:
            wanted = [name.partition("/")[2] for name in names if name.startswith(f"{split}/")]
            for ending in ("", AFTER_REFERENCES):
                chosen = [name for name in wanted if name.endswith(AFTER_REFERENCES) == bool(ending)]
                measures = [name.removesuffix(ending) for name in chosen]
                if not measures:
                    continue
                started, context = time.monotonic(), settings.context_sentences
                documents = measured_documents(self._source(), split, context, settings.eval_documents)
                references = [document.target for document in documents] if ending else None
                sources, part = [document.source for document in documents], f"{split}{ending}"
                made = translator.documents(sources, context, references, label=f"  translating {part}")
                for name in measures:
                    figures[f"{split}/{name}{ending}"] = measure(name, documents, made)
                shown = ", ".join(f"{name} {figures[f'{split}/{name}{ending}']:.2f}" for name in measures)
                print(f"  {part}: {shown} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
        return figures

    def signatures(self) -> dict[str, str]:
        from abc_attn.evaluation.bleu import signatures

        return signatures()


def _only(items: list[Any]) -> Any:
    """Of a batch of items, each a whole batch, the one."""
    (item,) = items
    return item
