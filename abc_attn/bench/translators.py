"""Whole models for `abc-attn bench translate`: one Marian, exact and with bounded memories, that decodes step by step.

Exact models differ in their cache alone. A decoding starts at the beginning of the target or near its end, from a cache
that holds what came before: one row is read, and repeated over the batch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import MarianConfig, MarianMTModel, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from abc_attn.allocator import give_back_memory
from abc_attn.bench.measure import high_water
from abc_attn.bench.models import PreallocatedLayer
from abc_attn.bench.translation import Method
from abc_attn.hf.cache import state_bytes
from abc_attn.hf.compiled import NotCompiled, compile_decoding
from abc_attn.hf.convert import convert
from abc_attn.memory_limit import FLOAT

END, UNKNOWN = 0, 1  # the last word is the padding, as in every Marian
EXACT = ("dynamic", "static", "preallocated")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Marian, the same in encoder and decoder."""

    layers: int
    width: int
    heads: int
    inner: int
    words: int
    positions: int

    @property
    def nbytes(self) -> int:
        """Of the weights: 4 matrices for each attention, of which an encoder's layer has one and a decoder's two."""
        layers = self.layers * (12 * self.width + 4 * self.inner)
        return FLOAT * self.width * (self.words + 2 * self.positions + layers)

    def bytes_of_keys_and_values(self, batch: int, tokens: int) -> int:
        """Of one of the two attentions of a decoder, in all layers."""
        return 2 * FLOAT * batch * tokens * self.width * self.layers

    def bytes_of_scores(self, batch: int, tokens: int) -> int:
        """Of every token with every other, in one layer."""
        return FLOAT * batch * self.heads * tokens**2


def make_marian(shape: Shape) -> MarianMTModel:
    """Random weights from one seed, large enough for attention to matter."""
    both = {"layers": shape.layers, "attention_heads": shape.heads, "ffn_dim": shape.inner}
    config = MarianConfig(
        vocab_size=shape.words,
        d_model=shape.width,
        max_position_embeddings=shape.positions,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=shape.words - 1,
        decoder_start_token_id=shape.words - 1,
        eos_token_id=END,
        forced_eos_token_id=None,
        init_std=2 * shape.width**-0.5,
        **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in both.items()},  # type: ignore[arg-type]
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MarianMTModel(config).eval()


def words_of(shape: Shape) -> list[str]:
    """The vocabulary: what a token is called where words are asked for."""
    return ["</s>", "<unk>", *map(str, range(2, shape.words - 1)), "<pad>"]


def save(model: PreTrainedModel, shape: Shape, folder: Path) -> None:
    """The model and a tokenizer, as another program wants to find them."""
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words_of(shape))}, unk_token="<unk>"))
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def prepare(model: MarianMTModel, method: Method) -> PreTrainedModel:
    """The model as it is, or with bounded memories in its decoder; it consumes `model`."""
    if method.control is None or method.slots is None:
        return model
    slots = dict(zip(("cross", "self"), method.slots, strict=True))
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of the control
        return convert(model, method.control, slots, where=("cross", "self"), weights=method.weights)


def compile_step(model: PreTrainedModel, rows: int) -> str:
    """Let the model decode by a compiled step; what to say if it cannot be compiled."""
    try:
        compile_decoding(model, rows)
    except NotCompiled as reason:
        return f"skipped: not compiled: {reason}"
    return ""


# Texts and caches.


class Text(NamedTuple):
    """A source as the encoder gives it, and the beginning of a target, of one row."""

    source: Tensor  # 1 t
    encoded: Tensor  # 1 t D
    target: Tensor  # 1 p: the token that starts a target, then words


@torch.no_grad()
def make_text(model: Any, length: int, seen: int) -> Text:
    """`length` words to read, and a target of which `seen` words are written."""
    generator = torch.Generator().manual_seed(length)
    source, target = (
        torch.randint(UNKNOWN + 1, model.config.vocab_size - 1, (1, count), generator=generator)
        for count in (length, seen)
    )
    source[:, -1] = END
    start = torch.full((1, 1), model.config.decoder_start_token_id)
    return Text(source, model.get_encoder()(source).last_hidden_state, torch.cat([start, target], dim=1))


def empty_cache(model: Any, method: str, room: int) -> EncoderDecoderCache:
    """A cache for targets of up to `room` tokens. What is read of the source is written once, in any of them."""
    if method not in EXACT:
        return model.new_cache()
    own: Cache = DynamicCache(config=model.config)
    if method == "static":
        own = StaticCache(config=model.config, max_cache_len=room)
    elif method == "preallocated":
        own = Cache(layers=[PreallocatedLayer(room) for _ in range(model.config.decoder_layers)])
    return EncoderDecoderCache(own, DynamicCache(config=model.config))


@torch.no_grad()
def read_cache(model: Any, method: str, text: Text) -> EncoderDecoderCache:
    """A cache of one row that holds all of the target except its last token."""
    cache = empty_cache(model, "dynamic" if method in EXACT else method, room=0)
    model.get_decoder()(text.target[:, :-1], encoder_hidden_states=text.encoded, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def full_cache(model: Any, method: str, read: EncoderDecoderCache, batch: int, room: int) -> EncoderDecoderCache:
    """What one row has read, for each of `batch` equal rows; `read` stays as it is."""
    if method not in EXACT:
        full = copy.deepcopy(read)
        full.self_attention_cache.batch_repeat_interleave(batch)
        full.cross_attention_cache.batch_repeat_interleave(batch)
        return full
    full = empty_cache(model, method, room)
    for part, given in (
        (full.self_attention_cache, read.self_attention_cache),
        (full.cross_attention_cache, read.cross_attention_cache),
    ):
        layers: Any = given.layers
        for index, layer in enumerate(layers):
            part.update(layer.keys.repeat_interleave(batch, 0), layer.values.repeat_interleave(batch, 0), index)
            full.is_updated[index] = True
    return full


def bytes_held(cache: EncoderDecoderCache, method: str) -> int:
    """Of everything that attention reads at each step."""
    if method not in EXACT:
        return state_bytes(cache)
    layers: Any = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return sum(part.untyped_storage().nbytes() for layer in layers for part in (layer.keys, layer.values))


# Decoding.


class Turn(NamedTuple):
    """One greedy decoding of a batch."""

    first: float  # seconds to the first token: at the start of a target, the encoder's output is read
    steps: list[float]  # seconds of each step after it
    tokens: list[int]  # of the first row


class Clock(StoppingCriteria):
    """Notes when each token is there; it stops nothing."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _output(encoded: Any) -> BaseModelOutput:
    """What an encoder gave, as generate() takes it."""
    return BaseModelOutput(last_hidden_state=encoded)


@torch.no_grad()
def decode(model: Any, encoded: Tensor, last: int, cache: EncoderDecoderCache, steps: int) -> Turn:
    """generate() from a cache that has read all before the token `last`: one token and `steps` more."""
    clock = Clock()
    found = model.generate(
        encoder_outputs=_output(encoded),
        decoder_start_token_id=last,  # of every row: decoder_input_ids would get another start in front of them
        past_key_values=cache,
        max_new_tokens=steps + 1,
        min_new_tokens=steps + 1,
        do_sample=False,
        num_beams=1,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    times = clock.times
    taken = [later - earlier for earlier, later in pairwise(times)]
    return Turn(taken[0], taken[1:], found[0, 1:].tolist())


class Decoder:
    """One method at one length: it decodes from the start of a target and near its end, as often as it is asked to.

    It holds one row of keys and values. Those of a whole batch are there only while they are used: three exact methods
    with 16 rows of 4,096 tokens would take 10 GB.
    """

    def __init__(self, model: Any, method: str, text: Text, batch: int, steps: int) -> None:
        self.model, self.method, self.batch, self.steps = model, method, batch, steps
        self.encoded, self.target = text.encoded, text.target
        self.room = text.target.shape[1] + steps + 1
        self.read = read_cache(model, method, text)

    def full(self) -> EncoderDecoderCache:
        """The cache of a batch near the end of a target."""
        return full_cache(self.model, self.method, self.read, self.batch, self.room)

    def start(self) -> Turn:
        return self._decode(0, empty_cache(self.model, self.method, self.room))

    def end(self, cache: EncoderDecoderCache) -> Turn:
        return self._decode(-1, cache)

    def _decode(self, last: int, cache: EncoderDecoderCache) -> Turn:
        encoded = self.encoded.repeat(self.batch, 1, 1)
        return decode(self.model, encoded, int(self.target[0, last]), cache, self.steps)


@torch.no_grad()
def encoder_seconds(model: Any, source: Tensor, batch: int) -> float:
    """How long the encoder takes to read `batch` rows."""
    rows = source.repeat(batch, 1)
    started = time.perf_counter()
    model.get_encoder()(rows)
    return time.perf_counter() - started


def ready(shape: Shape, method: Method, text: tuple[int, int], batch: int, steps: int) -> Callable[[], object]:
    """For a process that measures memory: the model has run once; the call decodes near the end of a target.

    What reading one row took before is not counted.
    """
    model = prepare(make_marian(shape), method)
    if method.compiled:
        compile_step(model, batch)  # it was compiled before, and is on disk
    short = Decoder(model, method.name, make_text(model, 4, 2), min(batch, 2), 1)
    short.end(short.full())
    read = make_text(model, *text)
    give_back_memory()

    def run() -> None:
        decoder = Decoder(model, method.name, read, batch, steps)
        cache = decoder.full()
        give_back_memory()
        high_water(reset=True)
        decoder.end(cache)

    return run


# The checks before any figure.


@torch.no_grad()
def check_state(model: Any, method: str, text: Text, rows: int) -> tuple[Tensor, Tensor]:
    """The logits of the last step of a target, from a cache; and of the whole target read at once without one.

    The step is one of `rows` equal rows, because a step is compiled for one row or for several.
    """
    cache = full_cache(model, method, read_cache(model, method, text), rows, text.target.shape[1] + 1)
    given: dict[str, Any] = {"encoder_outputs": _output(text.encoded.repeat(rows, 1, 1))}
    step = model(decoder_input_ids=text.target[:, -1:].repeat(rows, 1), past_key_values=cache, **given).logits
    hidden = model.get_decoder()(text.target, encoder_hidden_states=text.encoded, use_cache=False).last_hidden_state
    return step, model.lm_head(hidden[:, -1:]) + model.final_logits_bias


@torch.no_grad()
def log_likelihoods(model: Any, text: Text) -> Tensor:
    """log p of each word of a target, and of its end, among all words except the padding, which is never written."""
    encoded = _output(text.encoded)
    logits = model(decoder_input_ids=text.target, encoder_outputs=encoded, use_cache=False).logits
    wanted = torch.cat([text.target[:, 1:], torch.full((1, 1), END)], dim=1)
    return logits[..., :-1].log_softmax(-1).take_along_dim(wanted[..., None], -1)[0, :, 0]
