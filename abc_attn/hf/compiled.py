"""A decoding step as one compiled graph: all layers, the states updated in place, the head.

A bounded state has the same shapes after ten tokens and after ten million. So one graph serves every length: two of
them, for one row and for any number of rows, are all that a model needs. torch.export traces the model as it is, and
inductor makes a library of it (AOTInductor), which is kept on disk. The weights are not in it: the graph reads the
model's own.

    compile_decoding(model)                   from now on, calls with one token a row and a state run the graph
    model.generate(..., compiled=True)        the same, for this call

Everything else (prompts, training, layers whose memory grows) runs as it did. So do inputs that a graph was not traced
for: the uncompiled model works, or raises its own error, where inductor's check of an index would end the process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from abc_attn.attention import MemoryAttention
from abc_attn.core import Band, Memory
from abc_attn.files import whole_folder
from abc_attn.hf.cache import BoundedCache, BoundedLayer
from abc_attn.hf.int8 import linear
from abc_attn.kernels import describe_backend
from abc_attn.progress import waiting
from abc_attn.provenance import cpu
from abc_attn.state import MOST_TOKENS, State

ONE, MANY = 1, 3  # rows of the inputs that the two graphs are traced with
MOST_ROWS = 1 << 10  # more run uncompiled: some operators change with the size, which a graph cannot
_GRAPH, _CONSTANTS = "step.pt2", "constants.safetensors"
# The weights stay outside, all of them: inductor would put those of up to eight numbers, and those that are all alike
# (a norm that was never trained), into the code, and the graph would be wrong for another model of the same shapes.
_OPTIONS = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
_OPTIONS |= {"joint_graph_constant_folding": False}
# Arguments of a call that a graph takes, or that say nothing about one token after others.
_TAKEN = {"input_ids", "decoder_input_ids", "position_ids", "attention_mask", "decoder_attention_mask"}
_TAKEN |= {"past_key_values", "encoder_outputs", "use_cache", "return_dict", "logits_to_keep", "cache_position"}
# Where the classes of a model may come from without a look into their files.
_VERSIONED = {"torch", "transformers", "abc_attn", *sys.stdlib_module_names} - {"builtins"}


class NotCompiled(Exception):
    """Why a model has no compiled step."""


def compile_decoding(model: PreTrainedModel, rows: int | None = None) -> None:
    """Let steps of decoding run as a compiled graph from now on; NotCompiled says why they cannot.

    rows: compile now for so many sequences (batch times beams); one graph serves 1, another any number from 2 on.
    None: compile when the first step comes. Graphs are kept on disk (`cache_folder`) and compiled once a machine.
    """
    steps = _renewed(model)
    if rows is not None:
        steps.need(model, ONE if rows == 1 else MANY)
    steps.always = True


def stop_compiled(model: PreTrainedModel) -> None:
    """Undo `compile_decoding`, and forget the graphs and why others could not be made."""
    _STEPS.pop(model, None)


@contextmanager
def compiled_call(model: PreTrainedModel) -> Iterator[list[str]]:
    """Let steps run compiled while this lasts, in this thread; gives the known reasons why some cannot."""
    try:
        found = [step.reason for step in _renewed(model).of_kind.values() if isinstance(step, _Failed)]
        token = _CALLED.set(model)
    except NotCompiled as reason:
        found, token = [str(reason)], _CALLED.set(None)
    try:
        yield list(dict.fromkeys(found))
    finally:
        _CALLED.reset(token)


def check_compilable(model: PreTrainedModel) -> None:
    """NotCompiled if a model cannot have a compiled step, whatever the machine has installed."""
    if not _causal(model):
        raise NotCompiled(f"a {type(model).__name__} has no bounded memory to decode with: convert the model first")
    if any(attention.control.grows for attention in _causal(model)):
        raise NotCompiled("a layer is exact ('softmax'): what it keeps grows with the text, and no graph can grow")
    if model.device.type != "cpu":
        raise NotCompiled(f"the model is on {model.device.type}; graphs are compiled for the CPU")
    if model.training:
        raise NotCompiled("the model is in training mode: call .eval()")
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        why = "whose scale would be a constant of the graph"
        raise NotCompiled(f"the model has PEFT adapters, {why}: merge them first (merge_and_unload)")
    _sources(model)


def check_compiler() -> None:
    """NotCompiled if there is no C++ compiler. To make a graph takes one; to load it from disk does not."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # inductor's own, and what a broken compiler may raise
        raise NotCompiled("no C++ compiler was found: install g++, or name one by CXX") from error


def cache_folder() -> Path:
    """Where compiled graphs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "abc-attn" / "decoding"


class _Failed(NamedTuple):
    """A graph that could not be made: compiling again would take a minute and fail again."""

    key: str
    reason: str


class _Steps:
    """The graphs of one model, by the rows that they were traced with."""

    def __init__(self) -> None:
        self.always = False  # not only in calls of generate(compiled=True)
        self.of_kind: dict[int, _Step | _Failed] = {}

    def need(self, model: PreTrainedModel, kind: int) -> _Step:
        """The graph, loaded or compiled if it is not there; NotCompiled if that cannot be, or could not be before."""
        step = self.of_kind.get(kind)
        if step is None:
            key = _key(model, kind)
            try:
                self.of_kind[kind] = step = _Step(model, kind, key)
            except NotCompiled as reason:
                self.of_kind[kind] = _Failed(key, str(reason))
                raise
        if isinstance(step, _Failed):
            raise NotCompiled(step.reason)
        return step


_STEPS: weakref.WeakKeyDictionary[nn.Module, _Steps] = weakref.WeakKeyDictionary()
# The model whose generate(compiled=True) is under way. Another thread may decode with the same model uncompiled.
_CALLED: ContextVar[nn.Module | None] = ContextVar("called", default=None)


def _renewed(model: PreTrainedModel) -> _Steps:
    """The graphs of a model, for its weights as they are now; those for other shapes or types are dropped."""
    check_compilable(model)
    steps = _STEPS.setdefault(model, _Steps())
    for kind, step in [*steps.of_kind.items()]:
        if step.key != _key(model, kind):
            del steps.of_kind[kind]
        elif isinstance(step, _Step):
            step.bind(model)
    return steps


def run_compiled(model: PreTrainedModel, arguments: Sequence[Any], given: dict[str, Any]) -> Any:
    """The output of a call that is a step of decoding; None if it is not, or not of a compiled model."""
    if torch.compiler.is_compiling():  # by torch.compile, or by `trace`
        return None
    steps = _STEPS.get(model)
    if steps is None or not (steps.always or _CALLED.get() is model):
        return None
    if len(arguments) == 1 and not model.config.is_encoder_decoder and "input_ids" not in given:  # model(ids, ...)
        given, arguments = given | {"input_ids": arguments[0]}, ()
    if arguments or torch.is_grad_enabled() or model.training:
        return None
    ids = given.get("decoder_input_ids" if model.config.is_encoder_decoder else "input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1 or not 0 < len(ids) <= MOST_ROWS:
        return None
    if any(value is not None and value is not False for name, value in given.items() if name not in _TAKEN):
        return None
    cache = given.get("past_key_values")
    layers = _filled_layers(cache)
    mask = given.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    if layers is None or given.get("return_dict") is False or given.get("use_cache") is False:
        return None
    if mask is not None and not (mask.dim() == 2 and bool(mask[:, -1].all())):  # padding is read now
        return None
    step = _current_step(model, steps, ONE if len(ids) == 1 else MANY)
    logits: Any = None if step is None else step(ids, given.get("position_ids"), layers)
    if logits is None:
        return None
    output = Seq2SeqLMOutput if model.config.is_encoder_decoder else CausalLMOutputWithPast
    return output(logits=logits[:, None], past_key_values=cache)


def _current_step(model: PreTrainedModel, steps: _Steps, kind: int) -> _Step | None:
    """The graph, with the weights as they are now; None, with a warning the first time, if it cannot be made."""
    step = steps.of_kind.get(kind)
    if isinstance(step, _Failed):
        return None
    if step is None or step.places.changed():
        try:
            return _renewed(model).need(model, kind)
        except NotCompiled as reason:
            if not isinstance(steps.of_kind.get(kind), _Failed):  # nothing failed: it was moved to a GPU, for instance
                stop_compiled(model)
            warnings.warn(f"decoding goes on uncompiled: {reason}", stacklevel=4)
            return None
    return step


def _causal(model: nn.Module) -> list[MemoryAttention]:
    """The attentions that keep a state while a text is written, in the order of their layers."""
    return [module for module in model.modules() if isinstance(module, MemoryAttention) and module.causal]


class _Layers(NamedTuple):
    """The layers of a cache, each a BoundedLayer with a state: those that a step writes, and those of a
    cross-attention, that it reads."""

    own: list[Any]
    cross: list[Any]


def _filled_layers(cache: Any) -> _Layers | None:
    crossed = isinstance(cache, EncoderDecoderCache)
    parts: list[Any] = [cache.self_attention_cache, cache.cross_attention_cache] if crossed else [cache]
    found: list[Any] = [part.layers if isinstance(part, Cache) else [] for part in parts]
    if not all(found) or any(getattr(layer, "state", None) is None for layer in chain(*found)):
        return None
    return _Layers(found[0], found[1] if crossed else [])


# What a graph takes and gives. The tokens read so far (`length`) are the same in all layers.


def _held(state: State) -> list[Tensor]:
    return [*state.memory, *(state.inner or ()), *([] if state.readable is None else [state.readable])]


def _holding(like: State, parts: list[Tensor]) -> State:
    """The state that `_held` gives these parts of; else as `like`."""
    inner = None if like.inner is None else tuple(parts[4 : 4 + len(like.inner)])
    readable = None if like.readable is None else parts[-1]
    return like._replace(memory=Memory(*parts[:4]), inner=inner, readable=readable, loaded=False)


def _band(attention: MemoryAttention) -> Band | None:
    """The first and the last tokens, if they are all that is kept: every other part then follows from the length."""
    band = attention._band
    return band if band is not None and band.dilation == 1 else None


def _own_parts(attention: MemoryAttention, state: State) -> list[Tensor]:
    """What a step changes, in place."""
    return _held(state) if _band(attention) is None else [state.memory.k, state.memory.v]


def _state_of(attention: MemoryAttention, like: State, parts: list[Tensor], length: Tensor) -> State:
    """The state with these parts after `length` `b` tokens; else as `like`."""
    band = _band(attention)
    if band is None:
        return _holding(like, parts)._replace(length=length)
    k, v = parts
    used = band.in_use(length)[:, None].expand(k.shape[:3])
    inner = (length, (length - band.sinks).clamp(min=0))[: 2 if band.sinks else 1]
    return State(Memory(k, v, used.to(k.dtype), used), inner, length, like.control)


def _parts(attentions: list[MemoryAttention], layers: _Layers) -> tuple[Tensor, list[list[Tensor]], list[list[Tensor]]]:
    """What a graph takes of a cache: the length, what it writes in each layer, and what it reads of the encoder."""
    own = [_own_parts(attention, layer.state) for attention, layer in zip(attentions, layers.own, strict=True)]
    return layers.own[0].state.length, own, [_held(layer.state) for layer in layers.cross]


class _Graph(nn.Module):
    """What is traced: a model that reads one token a row."""

    def __init__(self, model: PreTrainedModel, layers: _Layers) -> None:
        super().__init__()
        self.model = model
        self.attentions = _causal(model)  # in a list, where torch finds no module: their names are those in the model
        self.own = [layer.state for layer in layers.own]  # only what they look like
        self.cross = [layer.state for layer in layers.cross]

    def forward(
        self, ids: Tensor, position: Tensor, length: Tensor, own: list[list[Tensor]], cross: list[list[Tensor]]
    ) -> Tensor:
        """ids and position `b 1`, length `b`; the parts of each layer. The logits of what follows, `b v`."""
        written, read = BoundedCache(), BoundedCache()
        for attention, like, parts in zip(self.attentions, self.own, own, strict=True):
            _append(written, _state_of(attention, like, parts, length))
        for like, parts in zip(self.cross, cross, strict=True):
            _append(read, _holding(like, parts))
        with _Linear(), self._placed(position) as given:
            if self.cross:
                # Its memory is written: what the encoder gave is not read again.
                nothing: Any = torch.zeros(ids.shape[0], 1, self.model.config.hidden_size, dtype=self.model.dtype)
                given |= {"encoder_outputs": BaseModelOutput(nothing), "decoder_input_ids": ids}
                cache: Cache = EncoderDecoderCache(written, read)
            else:
                cache = written
                given |= {"input_ids": ids}
            logits = self.model(**given, past_key_values=cache, use_cache=True).logits[:, -1]
        layer: Any
        for attention, parts, layer in zip(self.attentions, own, written.layers, strict=True):
            for old, new in zip(parts, _own_parts(attention, layer.state), strict=True):
                if new is not old:
                    old.copy_(new)
        return logits

    @contextmanager
    def _placed(self, position: Tensor) -> Iterator[dict[str, Any]]:
        """The positions as an argument of the model; of a decoder that has none, given to its embeddings."""
        if not self.model.config.is_encoder_decoder:
            yield {"position_ids": position}
            return
        model: Any = self.model
        table = model.get_decoder().embed_positions
        placed = {"position_ids": position[0] if model.family.decoder is None else position}  # BART's: one for all rows
        handle = table.register_forward_pre_hook(lambda _, args, given: (args, given | placed), with_kwargs=True)
        try:
            yield {}
        finally:
            handle.remove()


def _append(cache: BoundedCache, state: State) -> None:
    layer = BoundedLayer()
    layer.keep(state, 1)  # how many columns there were is not asked for: positions are given
    cache.layers.append(layer)


class _Linear(TorchFunctionMode):
    """Linear layers for few rows: the native kernel; of one row, loops that inductor joins with what stands around."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), given: Any = None) -> Any:
        return (linear if function is F.linear else function)(*arguments, **(given or {}))


class _Places:
    """Where the modules and the weights of a model stand, to see at every step whether they are still there.

    .to(dtype) and load_state_dict(assign=True) put new memory in the place of old, which a graph would go on reading.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        children = [(module._modules, name) for module in modules for name in module._modules]
        holders = [held for module in modules for held in (module._parameters, module._buffers)]
        weights = [(held, name) for held in holders for name, tensor in held.items() if tensor is not None]
        # In two columns each, for `map`: three hundred weights are looked up in tens of microseconds.
        self._children, self._weights = [*zip(*children, strict=True)], [*zip(*weights, strict=True)]
        self._found = self._look()

    def _look(self) -> tuple[list[Any], list[int]]:
        weights: Any = map(getitem, *self._weights)
        return [*map(getitem, *self._children)], [*map(Tensor.data_ptr, weights)]

    def changed(self) -> bool:
        try:
            return self._look() != self._found
        except (KeyError, TypeError):  # one is gone
            return True


class _Step:
    """A compiled graph, with the weights of one model."""

    def __init__(self, model: PreTrainedModel, kind: int, key: str) -> None:
        self.attentions, self.key = _causal(model), key
        try:
            self.tables = _Tables(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about what it does
                self.graph, self.constants = _load_or_compile(model, kind)
                layers = _example(model, kind)
            length, own, cross = _parts(self.attentions, layers)
            self.parts = [(part.dtype, part.device, part.shape[1:]) for part in (length, *chain(*own, *cross))]
            self.expected: dict[int, list[Any]] = {}  # the same with a number of rows
            self.cross = [layer.state.control for layer in layers.cross]
            self.bind(model)
        except NotCompiled:
            raise
        except Exception as error:  # tracing runs the model, and inductor and the compiler may fail in any way
            said = " ".join(str(error).split()) or "no reason given"
            raise NotCompiled(f"{type(error).__name__}: {said:.300}") from error

    def bind(self, model: PreTrainedModel) -> None:
        """Let the graph read the weights of the model, where they lie."""
        held = {f"model.{name}": tensor.detach() for name, tensor in _tensors(model)} | self.constants
        # Kept: the graph has only pointers. And while these are here, no other tensor can lie where they do.
        self.weights = {name: held[name] for name in self.graph.get_constant_fqns()}
        self.graph.load_constants(self.weights, check_full_update=True, user_managed=True)
        self.places = _Places(model)

    def __call__(self, ids: Tensor, position: Tensor | None, layers: _Layers) -> Tensor | None:
        """The logits `b v`, with the states updated; None, and nothing done, if these are not inputs of the graph."""
        rows, first, tables = len(ids), layers.own[0], self.tables
        if (len(layers.own), len(layers.cross)) != (len(self.attentions), len(self.cross)):
            return None
        for attention, layer in zip(self.attentions, layers.own, strict=True):
            attention.check_state(layer.state, rows, False)
        for control, layer in zip(self.cross, layers.cross, strict=True):
            state = layer.state
            if state.control != control or not state.cross or state.loaded:  # uncompiled, a loaded one is checked once
                return None
        length, own, cross = _parts(self.attentions, layers)
        if rows not in self.expected:
            self.expected[rows] = [(dtype, device, (rows, *shape)) for dtype, device, shape in self.parts]
        if [(part.dtype, part.device, part.shape) for part in (length, *chain(*own, *cross))] != self.expected[rows]:
            return None
        if position is None:
            if first.state.loaded and first.columns >= tables.tokens:  # the uncompiled model refuses it
                return None
            position = torch.full_like(ids, first.columns) if tables.first is None else tables.first + length[:, None]
        if position.shape not in ((1, 1), (rows, 1)):
            return None
        bounds = (ids, tables.words), (position, tables.positions), (length, MOST_TOKENS)
        if not all(_within(*bound) for bound in bounds):
            return None
        seen: set[int] = set()
        own = [[_owned(part, seen) for part in parts] for parts in own]
        given = [part.contiguous() for part in (ids, position.expand(rows, 1), length, *chain(*cross))]
        (logits,) = self.graph.loader.boxed_run([*given[:3], *chain(*own), *given[3:]])
        after, least = length + 1, int(length.min()) + 1
        for attention, layer, written in zip(self.attentions, layers.own, own, strict=True):
            layer.keep(_after(attention, layer.state, written, after, least), 1)
        return logits


def _within(numbers: Tensor, end: int) -> bool:
    """Whether whole numbers may be looked up in a table of so many rows."""
    if numbers.dtype != torch.int64 or not numbers.is_cpu:
        return False
    low, high = numbers.aminmax()
    return int(low) >= 0 and int(high) < end


def _owned(part: Tensor, seen: set[int]) -> Tensor:
    """A part that a graph may write into: contiguous, and no other part's memory."""
    owned = part.contiguous()
    if owned.data_ptr() in seen and owned.numel():
        owned = owned.clone()
    seen.add(owned.data_ptr())
    return owned


def _after(attention: MemoryAttention, state: State, parts: list[Tensor], length: Tensor, least: int) -> State:
    """The state after a step that has written `parts`; `least` is the smallest length."""
    band = _band(attention)
    if band is None:
        return _state_of(attention, state, parts, length)
    if least <= band.rows:  # some row of the memory is in use for the first time
        made = _state_of(attention, state, parts, length)
        mass, used = (part.contiguous() for part in (made.memory.mass, made.memory.used))
        return made._replace(memory=made.memory._replace(mass=mass, used=used))
    inner = (length, length - band.sinks)[: 2 if band.sinks else 1]
    k, v = parts
    memory = state.memory._replace(k=k, v=v)
    return state._replace(memory=memory, inner=inner, length=length, loaded=False)


class _Tables:
    """What a model looks up by number: words, and positions if it has a table of them."""

    def __init__(self, model: Any) -> None:
        from abc_attn.hf.models import most_tokens  # which imports this module

        family, crossed = getattr(model, "family", None), model.config.is_encoder_decoder
        embedding = (model.get_decoder() if crossed else model).get_input_embeddings()
        self.words: int = getattr(embedding, "num_embeddings", model.config.vocab_size)
        before = 0 if family is None else family.positions_without_token(model.config)
        self.tokens = most_tokens(model) or MOST_TOKENS  # that have a position
        self.positions = before + self.tokens
        # The position of a text's first token; None if positions count columns of the input instead of tokens.
        self.first: int | None = None if crossed and getattr(family, "decoder", None) is None else before


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


# Compiling, and what is kept on disk.


def _key(model: PreTrainedModel, kind: int) -> str:
    """A name for the graph: of all that it depends on, except the weights' values."""
    config = model.config.to_dict() | {"source_model": None, "_name_or_path": None}
    tied: dict[int, str] = {}  # weights that lie in the same place are one input of the graph
    shapes = [
        (name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tied.setdefault(tensor.data_ptr(), name))
        for name, tensor in _tensors(model)
    ]
    machine = [cpu(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), describe_backend()[0]]
    code = [torch.__version__, transformers.__version__, _package_source(), *_sources(model)]
    digest = hashlib.sha256(repr([type(model).__name__, config, shapes, machine, code, kind]).encode())
    return digest.hexdigest()[:32]


# A change in the code may change the graph. Files are read once: what is edited later is not what this process runs.


@functools.cache
def _package_source() -> str:
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    places = ("*.py", "controls/*.py", "kernels/*.py", "hf/**/*.py")
    for file in sorted(file for place in places for file in package.glob(place)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_SOURCES: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()  # by class: a reload makes new ones


def _sources(model: nn.Module) -> list[str]:
    """Checksums of the files that define classes of a model outside the packages whose versions are known: a user's
    control, for instance. NotCompiled if there is no file, as for what is typed into a notebook."""
    found = {cls for kind in {type(module) for module in model.modules()} for cls in kind.__mro__} - {object}
    for cls in found:
        if cls.__module__.partition(".")[0] in _VERSIONED or cls in _SOURCES:
            continue
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        try:
            _SOURCES[cls] = hashlib.sha256(Path(file or "").read_bytes()).hexdigest()
        except OSError:
            why = "and without it a graph could be that of an older version: define the class in a file"
            raise NotCompiled(f"the source of class {cls.__qualname__} cannot be read, {why}") from None
    return sorted({_SOURCES[cls] for cls in found if cls in _SOURCES})


@torch.no_grad()
def _example(model: PreTrainedModel, rows: int) -> _Layers:
    """Layers of a cache that has read a token."""
    ids = torch.zeros(rows, 1, dtype=torch.int64)
    cache: Any = model.new_cache()  # type: ignore[operator]
    given: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
    model(**given, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    layers = _filled_layers(cache)
    if layers is None or len(layers.own) != len(_causal(model)):
        raise NotCompiled(f"a {type(model).__name__} does not keep one bounded state for each layer")
    return layers


def _load_or_compile(model: PreTrainedModel, kind: int) -> tuple[Any, dict[str, Tensor]]:
    """The graph, and those of its constants that are no weights of the model."""
    folder = cache_folder() / _key(model, kind)
    if not (folder / _GRAPH).exists():
        check_compiler()
        what = "one row" if kind == ONE else "several rows"
        with waiting(f"compiling the decoding step for {what} (once on this machine)"):
            program = trace(model, kind)
            known = {f"model.{name}" for name, _ in _tensors(model)}
            constants = {
                name: tensor.detach().clone().contiguous()
                for name, tensor in program.constants.items()
                if isinstance(tensor, Tensor) and name not in known
            }
            with suppress(FileExistsError), whole_folder(folder) as partial:  # another process was faster
                options: Any = {"package_path": str(partial / _GRAPH), "inductor_configs": _OPTIONS}
                torch._inductor.aoti_compile_and_package(program, **options)
                save_file(constants, partial / _CONSTANTS)
    # Not by aoti_load_package: for seconds, it asks the compiler what the processor can do, which `_key` has seen to.
    from torch._inductor.package.package import AOTICompiledModel

    loader = torch._C._aoti.AOTIModelPackageLoader(str(folder / _GRAPH), "model", False, 1, -1)
    return AOTICompiledModel(loader), load_file(folder / _CONSTANTS)


def trace(model: PreTrainedModel, kind: int) -> torch.export.ExportedProgram:
    """The graph of a step, before it is compiled."""
    layers = _example(model, kind)
    length, own, cross = _parts(_causal(model), layers)
    own = [[part.contiguous().clone() for part in parts] for parts in own]
    cross = [[part.contiguous() for part in parts] for parts in cross]
    ids = torch.zeros(kind, 1, dtype=torch.int64)
    shapes: Any = None
    if kind == MANY:
        rows = {0: torch.export.Dim("rows", min=2, max=MOST_ROWS)}
        shapes = (rows, rows, rows, *([[rows for _ in parts] for parts in of] for of in (own, cross)))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = _Graph(model, layers).eval()
        return torch.export.export(
            graph, (ids, ids + 1, length.clone(), own, cross), dynamic_shapes=shapes, strict=False
        )
