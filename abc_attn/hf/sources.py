"""Models to convert, from wherever they are: a folder, a name on the hub, or a GGUF file.

A hub is asked only for a model that the caller names. No code of a checkpoint's is run.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import cached_file

from abc_attn.hf.loading import check_loaded, check_sizes, check_weights, some
from abc_attn.hf.models import BOUNDED, BoundedConfig, unsupported
from abc_attn.paths import Source, model_source

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_source(
    source: Source | str | os.PathLike[str],
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """The model that is to be converted, whole and with floating-point weights, ready to evaluate.

    gguf_file: the file of weights in `source`, dequantised. dtype: of the weights; by default as they are saved, and
    float32 from GGUF.
    """
    if not isinstance(source, Source):
        source = model_source(source, gguf_file)
    options: dict[str, Any] = {}
    if source.gguf_file is not None:
        if importlib.util.find_spec("gguf") is None:
            raise ImportError(needs_gguf(source), name="gguf")
        options["gguf_file"] = source.gguf_file
    with _explained(source):
        config = transformers.AutoConfig.from_pretrained(source.place, **options, trust_remote_code=False)
        cls = _class_of(source, config)
        if source.local and source.gguf_file is None:
            check_weights(source.place)
        options["dtype"] = as_dtype(dtype) or (torch.float32 if source.gguf_file else "auto")
        load: Any = cls.from_pretrained
        model, info = load(source.place, **options, output_loading_info=True, ignore_mismatched_sizes=True)
        check_sizes(info, source)
        check_loaded(model, info, source)
        if source.gguf_file is not None:
            _check_shapes(source, cls, model)
            del model.hf_quantizer, model.config.quantization_config  # of the file; here the weights are floats
    return model.eval()


def load_source_tokenizer(source: Source) -> Any | None:
    """The tokenizer of a name on the hub, or of a GGUF file; None, with a warning, if it has none that can be read."""
    options = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source.place, **options, trust_remote_code=False)
        if source.gguf_file is not None and _begins_texts(source):  # transformers does not read this
            tokenizer.add_bos_token = True
        return tokenizer
    except Exception as error:  # of whatever kind: the model is converted all the same
        said = " ".join(str(error).split())
        warnings.warn(f"{source} has no tokenizer that can be read: {type(error).__name__}: {said}", stacklevel=2)
        return None


def _begins_texts(source: Source) -> bool:
    """Whether a GGUF file says that every text begins with a token of its own."""
    import gguf

    file = str(cached_file(source.place, str(source.gguf_file)))
    field = gguf.GGUFReader(file).get_field("tokenizer.ggml.add_bos_token")
    return field is not None and bool(field.contents())


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The type of weights that is meant by its name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(repr, DTYPES))}, got {dtype!r}")
    return DTYPES[dtype]


def needs_gguf(source: Source) -> str:
    """What to say where the package that reads GGUF is missing."""
    return f"{source} is read by the package gguf, which is not installed: pip install 'abc-attn[gguf]'"


def _check_shapes(source: Source, cls: type[PreTrainedModel], model: PreTrainedModel) -> None:
    """Refuse weights of other sizes than the config's: transformers takes those of a GGUF file as they are."""
    with torch.device("meta"):
        expected = dict(cls(model.config).named_parameters())
    wrong = [
        f"{name} is {tuple(found.shape)}, not {tuple(expected[name].shape)}"
        for name, found in model.named_parameters()
        if found.shape != expected[name].shape
    ]
    if wrong:
        raise ValueError(f"{source} has weights of other sizes than transformers reads from its header: {some(wrong)}")


def _class_of(source: Source, config: Any) -> type[PreTrainedModel]:
    if isinstance(config, BoundedConfig):
        raise ValueError(f"{source} is a bounded model already (control {config.control!r}): convert the original")
    if source.gguf_file is not None:  # it has no name of a class: it is for programs that generate
        auto: Any = transformers.AutoModelForCausalLM
        names = [auto._model_mapping[type(config)].__name__] if type(config) in auto._model_mapping else []
    else:
        names = config.architectures or []
    cls = next((cls for cls in BOUNDED if cls.__name__ in names), None)
    if cls is None:
        named = " and ".join(map(str, names)) or "a model of no named architecture"
        raise ValueError(f"{source}: {unsupported(named, config.model_type)}")
    return cls


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    """What goes wrong becomes a ValueError or an OSError of one line that names the source."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        if str(source) in said and isinstance(error, ValueError):
            raise ValueError(said) from error
        if not source.local and isinstance(error, OSError):
            offline = (
                " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") in ("1", "ON", "YES", "TRUE") else ""
            )
            raise OSError(
                f"{source} is no folder here, and as a name on the hub it cannot be loaded{offline}: check the name "
                f"and the connection, or name a folder or a .gguf file. The hub's answer: {said}"
            ) from error
        if source.gguf_file is not None:
            raise ValueError(f"{source} cannot be read as a GGUF model: {type(error).__name__}: {said}") from error
        raise ValueError(f"{source} cannot be loaded: {said}") from error
