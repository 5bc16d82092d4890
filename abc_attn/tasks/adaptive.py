"""What the tasks of AdaptiveLM have in common: its config, its checks, and a start from a trained model."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from abc_attn.memory_limit import FLOAT, check_fits
from abc_attn.paths import saved_model
from abc_attn.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from abc_attn.hf import AdaptiveLMConfig

# A trained model must have the same, to be started from. The vocabulary is known once the data is.
_SHAPE = ("vocab_size", "cutoffs", "div_val", "hidden_size", "num_hidden_layers", "intermediate_size")


class AdaptiveTask(Task):
    """A task whose model is AdaptiveLM."""

    perplexity = "perplexity per token"
    tiny: ClassVar[dict[str, Any]] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "control": "mlp:4",
    }

    @classmethod
    def config_class(cls) -> type[PreTrainedConfig]:
        from abc_attn.hf import AdaptiveLMConfig

        return AdaptiveLMConfig

    def check(self) -> None:
        """The config, and a model of it with one layer (all, if they differ) and next to no vocabulary."""
        from abc_attn.hf import AdaptiveLM

        values = self.model_values | self.provisional_vocabulary()
        config = self._config(values)
        self._check_memory(config)
        layers = config.num_hidden_layers
        if not isinstance(config.control, list) and not isinstance(config.num_key_value_heads, list):
            layers = 1
        AdaptiveLM(
            self._config(values | {"vocab_size": 2, "cutoffs": (), "intermediate_size": 1, "num_hidden_layers": layers})
        )

    def _check_memory(self, config: AdaptiveLMConfig) -> None:
        """Refuse sizes that cannot be held: of the model, with its gradients, or of what a batch leaves for them."""
        layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
        words = self.words() * config.hidden_size
        weights = 2 * (config.num_hidden_layers * layer + words)
        check_fits("the weights of this model and their gradients", weights * FLOAT)
        tokens = self.training_values.get("per_device_train_batch_size", 8) * self.length()
        kept = tokens * config.hidden_size * config.num_hidden_layers
        check_fits(f"a batch of {tokens} tokens in this model", kept * FLOAT)

    @abstractmethod
    def length(self) -> int:
        """The tokens of a sequence."""

    def words(self) -> int:
        """The words of the vocabulary, where they are known without the data."""
        return 0

    def provisional_vocabulary(self) -> dict[str, Any]:
        """vocab_size and cutoffs for a config before the data is opened."""
        return {}

    def vocabulary(self) -> dict[str, Any]:
        """What the data decides of the config."""
        return {}

    def build_model(self, start: Path | None) -> PreTrainedModel:
        from abc_attn.hf import AdaptiveLM, AdaptiveLMConfig
        from abc_attn.models.saved import damaged

        config = self._config(self.model_values | self.vocabulary())
        if start is None:
            return AdaptiveLM(config)
        saved_model(start)
        with damaged(f"{start} does not hold an AdaptiveLM"):
            theirs = AdaptiveLMConfig.from_pretrained(start)
        for name in _SHAPE:
            mine, other = _plain(getattr(config, name)), _plain(getattr(theirs, name))
            if mine != other:
                raise ValueError(
                    f"init_from={self.settings.init_from!r} has {name}={other}, this recipe {mine}: they must agree"
                )
        with damaged(f"{start} does not hold a whole AdaptiveLM"):
            return AdaptiveLM.from_pretrained(start, config=config, allow_new_controls=True)

    def load_model(self, folder: Path) -> PreTrainedModel:
        from abc_attn.hf import AdaptiveLM

        return AdaptiveLM.from_pretrained(folder)

    @staticmethod
    def _config(values: dict[str, Any]) -> AdaptiveLMConfig:
        from huggingface_hub.errors import StrictDataclassError

        from abc_attn.hf import AdaptiveLMConfig

        try:
            return AdaptiveLMConfig(**values)
        except StrictDataclassError as error:  # a value of the wrong type
            raise ValueError(" ".join(str(error).split())) from None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
