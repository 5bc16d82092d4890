"""Tasks that ask for memory and nothing else: associative recall and copying, scored by the share of right answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from abc_attn.tasks import base
from abc_attn.tasks.adaptive import AdaptiveTask
from abc_attn.tasks.base import Figures, TrainingSet, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from abc_attn.data import synthetic

_HELD_OUT = 1_000_003  # added to the seed, so that no scored item is a training item
_SCORED_ITEMS = 256


@dataclass(frozen=True)
class Settings(base.Settings):
    items: int = setting(32, "how much there is to remember", minimum=1)
    filler: int = setting(0, "words without meaning, among which the items are at random places", minimum=0)


class Synthetic(AdaptiveTask):
    """Sequences that are made on the spot, with labels at the answers."""

    settings_class = Settings
    settings: Settings
    tiny = AdaptiveTask.tiny | {"items": 4, "vocab_size": 64}

    @abstractmethod
    def _items(self, total: int, seed: int) -> synthetic.Sequences: ...

    def check(self) -> None:
        super().check()
        self._items(1, 0)

    def check_scores(self, names: Sequence[str]) -> None:
        if unknown := sorted(set(names) - {"accuracy"}):
            raise ValueError(f"no score {unknown[0]!r}: there is accuracy")

    def length(self) -> int:
        return 4 * self.settings.items + self.settings.filler  # at most: a pair, and again

    def words(self) -> int:
        return self.vocab_size

    def provisional_vocabulary(self) -> dict[str, Any]:
        return self.vocabulary()

    def vocabulary(self) -> dict[str, Any]:
        return {} if "cutoffs" in self.model_values else {"cutoffs": ()}

    @property
    def vocab_size(self) -> int:
        return self._config(self.model_values | self.vocabulary()).vocab_size

    def training_set(self, total: int, seed: int) -> TrainingSet:
        from transformers import default_data_collator

        items = self._items(total, seed)
        return TrainingSet(items, default_data_collator, len(items[0]["input_ids"]), None)

    def quick_score(self, model: PreTrainedModel, batch_size: int) -> dict[str, float]:
        from abc_attn.evaluation import answer_accuracy

        held_out = self._items(_SCORED_ITEMS, self.training_values["seed"] + _HELD_OUT)
        return {"accuracy": answer_accuracy(model, held_out, batch_size)}

    def scores(self, model: PreTrainedModel, names: Sequence[str]) -> Figures:
        return dict(self.quick_score(model, self.training_values.get("per_device_eval_batch_size", 8)))


class Recall(Synthetic):
    def _items(self, total: int, seed: int) -> synthetic.Sequences:
        from abc_attn.data import Recall

        return Recall(self.settings.items, self.vocab_size, total, seed, self.settings.filler)


class Copy(Synthetic):
    def _items(self, total: int, seed: int) -> synthetic.Sequences:
        from abc_attn.data import Copy

        return Copy(self.settings.items, self.vocab_size, total, seed, self.settings.filler)
