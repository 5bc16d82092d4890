"""Language modelling: the next token of running text, scored by perplexity per word."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abc_attn.tasks import base
from abc_attn.tasks.adaptive import AdaptiveTask
from abc_attn.tasks.base import Figures, TrainingSet, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from abc_attn.data import Corpus, Source

STREAM, WHOLE_STREAM = "stream", "whole stream"
ALONE = " alone"  # "64 alone": with hardly more context than 64 tokens ...
SCORED_TOGETHER = 32  # ... for so many are scored in a window
SCORED = ("validation", "test")


@dataclass(frozen=True)
class Settings(base.Settings):
    """The names are those of transformers' run_clm.py where it has one."""

    block_size: int = setting(512, "tokens of a training segment", minimum=1)
    data_dir: str | None = setting(None, "a folder with train, valid and test text", source=True, place=True)
    train_file: str | None = setting(None, "a text file; with validation_file and test_file", source=True, place=True)
    validation_file: str | None = setting(None, "a text file", source=True, place=True)
    test_file: str | None = setting(None, "a text file", source=True, place=True)
    dataset_name: str | None = setting(None, "a data set of the `datasets` library with a column text", source=True)
    dataset_config_name: str | None = setting(None, "its configuration, such as wikitext-2-v1", source=True)
    cache_dir: str = setting("~/.cache/abc-attn", "where tokenized text is kept", place=True)
    tokenizer: str = setting("word", "word, or bpe with vocab_size byte-level tokens", choices=("word", "bpe"))
    eval_tokens: int | None = setting(
        None, "final scores are of the first so many tokens of a text; all, if left out", minimum=1
    )


class LanguageModelling(AdaptiveTask):
    """Running text, cut into segments of block_size tokens."""

    settings_class = Settings
    settings: Settings
    corpus: Corpus
    tiny = AdaptiveTask.tiny | {"data_dir": "text", "cache_dir": "cache", "block_size": 16, "cutoffs": [10, 20]}

    def check(self) -> None:
        super().check()
        from abc_attn.data import check_tokenizer

        check_tokenizer(self.settings.tokenizer, self.model_values.get("vocab_size"))
        self._source()

    def length(self) -> int:
        return self.settings.block_size

    def provisional_vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": self.model_values.get("vocab_size", 10**9)}

    def check_scores(self, names: Sequence[str]) -> None:
        from abc_attn.evaluation.scoring import PAPERS_WINDOW

        for name in names:
            split, _, how = name.partition("/")
            tokens = how.removesuffix(ALONE)
            context = tokens.isdecimal() and int(tokens) < PAPERS_WINDOW
            if split not in SCORED or not (context or how in (STREAM, WHOLE_STREAM)):
                raise ValueError(
                    f"no score {name!r}: it is validation or test, a slash, and tokens of context (from 0 to "
                    f'{PAPERS_WINDOW - 1}; "64{ALONE}" for hardly more than that), {STREAM!r} or {WHOLE_STREAM!r}'
                )

    def open(self) -> None:
        from abc_attn.data import build_corpus

        settings = self.settings
        cache = Path(settings.cache_dir).expanduser()
        self.corpus = build_corpus(self._source(), cache, settings.tokenizer, self.model_values.get("vocab_size"))

    def _source(self) -> Source:
        """Where the text is; its files exist."""
        from abc_attn.data import SPLITS, Source, find_files

        settings = self.settings
        files = [settings.train_file, settings.validation_file, settings.test_file]
        given = [settings.data_dir is not None, any(files), settings.dataset_name is not None]
        if sum(given) != 1:
            raise ValueError(
                "a recipe needs one source of text: data_dir, or train_file, validation_file and test_file, or "
                f"dataset_name; {sum(given)} were given"
            )
        if settings.data_dir is not None:
            return Source(find_files(Path(settings.data_dir).expanduser()))
        if settings.dataset_name is not None:
            return Source(dataset_name=settings.dataset_name, dataset_config_name=settings.dataset_config_name)
        if not all(files):
            raise ValueError("train_file, validation_file and test_file are all needed")
        source = Source(dict(zip(SPLITS, (Path(str(file)).expanduser() for file in files), strict=True)))
        source.check()
        return source

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.corpus.tokenizer

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    def vocabulary(self) -> dict[str, Any]:
        end = self.corpus.tokenizer.eos_token_id
        return {"vocab_size": len(self.corpus.tokenizer), "eos_token_id": end, "bos_token_id": end}

    def training_set(self, total: int, seed: int) -> TrainingSet:
        from transformers import default_data_collator

        from abc_attn.data import Segments

        tokens, length = self.corpus.tokens["train"], self.settings.block_size
        segments = Segments(tokens, length, total, seed)
        return TrainingSet(segments, default_data_collator, length, len(tokens) / length)

    def quick_score(self, model: PreTrainedModel, batch_size: int) -> dict[str, float]:
        """Of the validation text in segments as long as those of training."""
        from abc_attn.evaluation import perplexity, token_nll

        tokens, words = self.corpus.tokens["validation"], self.corpus.words["validation"]
        nll = token_nll(model, tokens, window=self.settings.block_size, batch_size=batch_size)
        return {"loss": float(nll.mean()), "perplexity per word": perplexity(nll, words)}

    def scores(self, model: PreTrainedModel, names: Sequence[str]) -> Figures:
        """Perplexity per word. "test/480": after 480 tokens of context, in windows as long as the paper's.

        "test/64 alone": in windows of 64 tokens and the 32 that are scored. "test/stream": read once from end to end;
        the figure is of the tokens that the scores with context are of. "test/whole stream": of all tokens.
        """
        from abc_attn.evaluation.scoring import PAPERS_WINDOW, perplexity, token_nll

        figures: Figures = {}
        for split in SCORED:
            wanted = [name.partition("/")[2] for name in names if name.startswith(f"{split}/")]
            tokens, words = self.corpus.beginning(split, self.settings.eval_tokens)
            streams = [how for how in wanted if how in (STREAM, WHOLE_STREAM)]
            for how in (how for how in wanted if how not in streams):
                started = time.monotonic()
                context = int(how.removesuffix(ALONE))
                window = context + SCORED_TOGETHER if how.endswith(ALONE) else PAPERS_WINDOW
                nll = token_nll(model, tokens, window=window, context=context)
                figures[f"{split}/{how}"] = perplexity(nll, words)
                _say(split, f"{how} tokens of context", figures[f"{split}/{how}"], started)
            if streams and not can_stream(model):
                figures |= {f"{split}/{how}": None for how in streams}
            elif streams:
                started = time.monotonic()
                nll = token_nll(model, self.corpus.tokens[split])
                for how in streams:
                    whole = how == WHOLE_STREAM
                    scored, count = (nll, self.corpus.words[split]) if whole else (nll[: len(tokens)], words)
                    figures[f"{split}/{how}"] = perplexity(scored, count)
                    _say(split, how, figures[f"{split}/{how}"], started)
        return figures


def can_stream(model: PreTrainedModel) -> bool:
    """Whether a model can read a text of any length: its memory is bounded, and no control ends at a `max_length`."""
    from abc_attn.hf.models import has_bounded_state

    return has_bounded_state(model) and not any(hasattr(module, "max_length") for module in model.modules())


def _say(split: str, how: str, figure: float | None, started: float) -> None:
    shown = "beyond floating point" if figure == math.inf else f"{figure:.2f}"
    seconds = time.monotonic() - started
    print(f"  {split}, {how}: perplexity per word {shown} ({seconds:.0f} s)", file=sys.stderr, flush=True)
