"""What the tasks of encoders have in common: a start from a pretrained model, its tokenizer, and a new control."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from abc_attn.memory_limit import FLOAT, check_fits
from abc_attn.paths import saved_model
from abc_attn.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# A pretrained model says these; a recipe may repeat them.
_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "hidden_act", "layer_norm_eps",
)  # fmt: skip
# What belongs to a control: a recipe that names one says all of it.
_OF_CONTROL = ("control", "slots", "control_options", "tie_control", "layers", "where", "control_modules")
# What a config has beyond a recipe: it would be another kind of model.
_DECIDED = {"is_decoder", "add_cross_attention", "source_model", "positions"}
_OF_FILE = ("model_type", "architectures", "auto_map", "transformers_version", "quantization_config", "dtype")


class EncoderTask(Task):
    """A task whose model is an encoder: a new RoBERTa, or any that transformers has and `convert` knows."""

    head: ClassVar[str]  # how the names of its models' classes end
    optim: ClassVar[dict[str, Any]] = {"optim": "adamw_torch_fused", "adam_beta2": 0.98, "adam_epsilon": 1e-6}
    sizes: ClassVar[dict[str, Any]] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "vocab_size": 270,
        "control": "mlp",
        "slots": 2,
        "cache_dir": "cache",
    }

    @classmethod
    def config_class(cls) -> type[PreTrainedConfig]:
        from abc_attn.hf.models import CLASSES

        return CLASSES["BoundedRobertaConfig"]

    @classmethod
    def model_keys(cls) -> set[str]:
        return super().model_keys() - _DECIDED

    @abstractmethod
    def length(self) -> int:
        """The most tokens of a sequence."""

    def more_config(self) -> dict[str, Any]:
        """What the data decides of the config."""
        return {}

    def start(self) -> Path | None:
        from abc_attn.hf.packs import PACKS, unpacked

        if self.settings.init_from in PACKS:
            return unpacked(self.settings.init_from, Path(self.settings.cache_dir).expanduser())
        return super().start()

    def check(self) -> None:
        """The config, and a model of it with one layer (all, if some are chosen) and few words."""
        from abc_attn.data.blocks import check_vocabulary
        from abc_attn.hf.packs import PACKS

        start = None
        if self.settings.init_from not in PACKS:  # that would be unpacked
            with suppress(FileNotFoundError):  # not trained yet: `prepare` says so, once all else is right
                start = self.start()
        if self.settings.init_from is None:
            check_vocabulary(self.model_values.get("vocab_size"))
        config, kind = self._config(start)
        if start is not None or self.settings.init_from is None:
            self._check_positions(config, kind)
        self._check_memory(config)
        few = {"vocab_size": 8, "intermediate_size": 1}
        if config.layers is None:
            few["num_hidden_layers"] = 1
        small: Any = type(config)
        model = kind(small(**self._values(config) | few))
        self.check_model(model, start)
        lengths = [module.max_length for module in model.modules() if hasattr(module, "max_length")]
        if lengths and min(lengths) < self.length():
            raise ValueError(
                f"sequences of {self.length()} tokens are longer than the control's max_length={min(lengths)} "
                "(control_options)"
            )

    def check_model(self, model: PreTrainedModel, start: Path | None) -> None:
        """What a task asks of its model, of which `model` is a small one. start: None if it is not known yet."""

    def _check_positions(self, config: Any, kind: Any) -> None:
        most = config.max_position_embeddings - kind.family.positions_without_token(config)
        if self.length() > most:
            raise ValueError(f"sequences of {self.length()} tokens need as many positions, and the model has {most}")

    def _check_memory(self, config: Any) -> None:
        width, layers = config.hidden_size, config.num_hidden_layers
        weights = 4 * (layers * (4 * width**2 + 2 * width * config.intermediate_size) + config.vocab_size * width)
        check_fits("the weights of this model, their gradients and the optimizer's state", weights * FLOAT)
        tokens = self.training_values.get("per_device_train_batch_size", 8) * self.length()
        kept = tokens * layers * (4 * width + 2 * config.intermediate_size)
        check_fits(f"a batch of {tokens} tokens in this model", kept * FLOAT)

    # The model.

    def _config(self, start: Path | None) -> tuple[Any, Any]:
        """The config, and the class of the model; of the family of the model in `start`."""
        from huggingface_hub.errors import StrictDataclassError

        from abc_attn.hf.models import CLASSES

        kind, values = CLASSES[f"BoundedRoberta{self.head}"], dict(self.model_values)
        if start is not None:
            kind, theirs = self._source(start)
            values = self._merged(theirs, values)
        elif self.settings.init_from is None:
            values |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
        make: Any = kind
        try:
            return make.config_class(**values | self.more_config()), make
        except StrictDataclassError as error:  # a value of the wrong type
            raise ValueError(" ".join(str(error).split())) from None

    def _source(self, start: Path) -> tuple[Any, dict[str, Any]]:
        """The class that a model in `start` becomes, and what its config says."""
        import transformers

        from abc_attn.hf.families import FAMILIES
        from abc_attn.hf.models import CLASSES, unsupported
        from abc_attn.models.saved import damaged

        saved = saved_model(start)
        with damaged(f"{start} does not hold an encoder"):
            theirs = transformers.AutoConfig.from_pretrained(start, trust_remote_code=False)
        name = theirs.model_type.removeprefix("bounded_")
        families = [each for each in FAMILIES if getattr(transformers, each.class_name("Config")).model_type == name]
        kind = CLASSES.get(f"Bounded{families[0].name}{self.head}") if families else None
        if kind is None or getattr(theirs, "is_decoder", False):
            shown = " and ".join(map(str, saved.get("architectures") or ["a model of no named architecture"]))
            raise ValueError(f"init_from={self.settings.init_from!r}: {unsupported(shown, name)}; an encoder is needed")
        return kind, self._values(theirs)

    @staticmethod
    def _values(config: Any) -> dict[str, Any]:
        return {name: value for name, value in config.to_dict().items() if name not in _OF_FILE}

    def _merged(self, theirs: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
        where = f"init_from={self.settings.init_from!r}"
        for name in _SHAPE:
            if name in mine and mine[name] != theirs.get(name):
                raise ValueError(f"{where} has {name}={theirs.get(name)}, this recipe {mine[name]}: they must agree")
        if "control" in mine:
            theirs = {name: value for name, value in theirs.items() if name not in _OF_CONTROL}
        elif "control" not in theirs:
            raise ValueError(f"{where} has exact attention: the recipe must name a control (softmax keeps it exact)")
        return theirs | mine

    def tokenizer_of_start(self) -> Any | None:
        """The tokenizer of the model to start from; None if one is to be learned."""
        start = self.start()
        if start is None:
            return None
        from abc_attn.models.saved import load_tokenizer

        found, words = load_tokenizer(start), self._config(start)[0].vocab_size
        for name in ("cls", "sep", "pad", "mask"):
            if getattr(found, f"{name}_token_id") is None:
                raise ValueError(f"the tokenizer in {start} has no {name}_token, which an encoder needs")
        if len(found) > words:
            raise ValueError(f"the tokenizer in {start} has {len(found)} tokens, and the model {words}")
        return found

    def build_model(self, start: Path | None) -> PreTrainedModel:
        from abc_attn.models.saved import damaged

        if start is None:
            assert self.tokenizer is not None
            self.model_values["vocab_size"] = len(self.tokenizer)
        config, kind = self._config(start)
        if start is None:
            return kind(config)
        with damaged(f"{start} does not hold a whole encoder"):
            return kind.from_pretrained(start, config=config, allow_new_controls=True)

    def load_model(self, folder: Path) -> PreTrainedModel:
        from abc_attn.models.saved import load_model

        return load_model(folder)
