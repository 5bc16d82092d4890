"""A decoding step as one compiled graph: all layers, the states updated in place, the head.

A bounded state has the same shapes after ten tokens and after ten million. So one graph serves every length: two of
them, for one row and for any number of rows, are all that a model needs. torch.export traces the model as it is, and
inductor makes a library of it (AOTInductor), which is kept on disk. The weights are not in it: the graph reads the
model's own.

    compile_decoding(model)                   from now on, calls with one token a row and a state run the graph
    model.generate(..., compiled=True)        the same, as an option

Everything else (prompts, training, layers whose memory grows) runs as it did.
"""

from __future__ import annotations

import hashlib
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from abc_attn.core import Memory
from abc_attn.files import whole_folder
from abc_attn.hf.cache import BoundedCache, BoundedLayer
from abc_attn.hf.int8 import linear
from abc_attn.kernels import describe_backend
from abc_attn.progress import waiting
from abc_attn.provenance import cpu
from abc_attn.state import State

ONE, MANY = 1, 3  # rows of the inputs that the two graphs are traced with
MOST_ROWS = 1 << 16
_GRAPH, _CONSTANTS = "step.pt2", "constants.safetensors"
# The weights stay outside, all of them: inductor would put those of up to eight numbers, and those that are all alike
# (a norm that was never trained), into the code, and the graph would be wrong for another model of the same shapes.
_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}
# Arguments of a call that a graph takes, or that say nothing about one token after others.
_TAKEN = {"input_ids", "decoder_input_ids", "position_ids", "attention_mask", "decoder_attention_mask"}
_TAKEN |= {"past_key_values", "encoder_outputs", "use_cache", "return_dict", "logits_to_keep", "cache_position"}


class NotCompiled(Exception):
    """Why a model has no compiled step."""


def compile_decoding(model: PreTrainedModel, rows: int | None = None) -> None:
    """Let steps of decoding run as a compiled graph from now on; NotCompiled says why they cannot.

    rows: compile now for so many sequences (batch times beams); one graph serves 1, another any number from 2 on.
    None: compile when the first step comes. Graphs are kept on disk (`cache_folder`) and compiled once a machine.
    """
    check_compilable(model)
    steps = _STEPS.setdefault(model, {})
    for kind, step in [*steps.items()]:  # its weights may have been moved since, or have another dtype
        if step is not None and step.key != _key(model, kind):
            del steps[kind]
        elif step is not None:
            step.bind(model)
    kind = ONE if rows == 1 else MANY
    if rows is not None and steps.get(kind) is None:
        steps[kind] = _Step(model, kind)


def stop_compiled(model: PreTrainedModel) -> None:
    """Undo `compile_decoding`."""
    _STEPS.pop(model, None)


def check_compilable(model: PreTrainedModel) -> None:
    """NotCompiled if a model cannot have a compiled step on this machine."""
    if not _causal(model):
        raise NotCompiled(f"a {type(model).__name__} has no bounded memory to decode with: convert the model first")
    for attention in _causal(model):
        if attention.control.grows:
            raise NotCompiled(
                "a layer is exact ('softmax'): what it keeps grows with the text, and a graph has fixed shapes"
            )
    if model.device.type != "cpu":
        raise NotCompiled(f"the model is on {model.device.type}; graphs are compiled for the CPU")
    if model.training:
        raise NotCompiled("the model is in training mode: call .eval()")
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # inductor's own, and what a broken compiler may raise
        raise NotCompiled("no C++ compiler was found: install g++, or name one by CXX") from error


def cache_folder() -> Path:
    """Where compiled graphs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "abc-attn" / "decoding"


# Models whose steps run compiled, and their graphs by the rows they were traced with; None where compiling has failed.
_STEPS: weakref.WeakKeyDictionary[nn.Module, dict[int, Any]] = weakref.WeakKeyDictionary()


def run_compiled(model: PreTrainedModel, arguments: Sequence[Any], given: dict[str, Any]) -> Any:
    """The output of a call that is a step of decoding; None if it is not, or not of a compiled model."""
    if torch.compiler.is_compiling():  # by torch.compile, or by `trace`
        return None
    steps = _STEPS.get(model)
    if len(arguments) == 1 and not model.config.is_encoder_decoder and "input_ids" not in given:  # model(ids, ...)
        given, arguments = given | {"input_ids": arguments[0]}, ()
    if steps is None or arguments or torch.is_grad_enabled() or model.training:
        return None
    ids = given.get("decoder_input_ids" if model.config.is_encoder_decoder else "input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1 or not len(ids):
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
    kind = ONE if len(ids) == 1 else MANY
    if kind not in steps:
        try:
            steps[kind] = _Step(model, kind)
        except NotCompiled as reason:
            warnings.warn(f"decoding goes on uncompiled: {reason}", stacklevel=2)
            steps[kind] = None
    step = steps[kind]
    if step is None or len(layers.own) != len(step.attentions):
        return None
    logits = step(ids, given.get("position_ids"), layers)[:, None]
    if model.config.is_encoder_decoder:
        return Seq2SeqLMOutput(logits=logits, past_key_values=cache)
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def _causal(model: nn.Module) -> list[MemoryAttention]:
    """The attentions that keep a state while a text is written, in the order of their layers."""
    return [module for module in model.modules() if isinstance(module, MemoryAttention) and module.causal]


class _Layers(NamedTuple):
    """The layers of a cache: those that a step writes, and those of a cross-attention, that it reads."""

    own: list[BoundedLayer]
    cross: list[BoundedLayer]


def _filled_layers(cache: Any) -> _Layers | None:
    crossed = isinstance(cache, EncoderDecoderCache)
    parts: list[Any] = [cache.self_attention_cache, cache.cross_attention_cache] if crossed else [cache]
    found = []
    for part in parts:
        if not isinstance(part, Cache):
            return None
        layers: list[Any] = part.layers
        if not layers or any(getattr(layer, "state", None) is None for layer in layers):
            return None
        found.append(layers)
    return _Layers(found[0], found[1] if crossed else [])


# What a graph takes and gives. The tokens read so far (`length`) are the same in all layers.


def _own_parts(attention: MemoryAttention, state: State) -> list[Tensor]:
    """What a step changes, in place. Of a memory that holds tokens whole, the rest follows from the length."""
    if attention._band is not None:
        return [state.memory.k, state.memory.v]
    return [*state.memory, *(state.inner or ()), *([] if state.readable is None else [state.readable])]


def _state_of(attention: MemoryAttention, like: State, parts: list[Tensor], length: Tensor) -> State:
    """The state with these parts after `length` `b` tokens; else as `like`."""
    band = attention._band
    if band is not None:
        k, v = parts
        used = band.in_use(length)[:, None].expand(k.shape[:3])
        inner = (length, (length - band.sinks).clamp(min=0))[: 2 if band.sinks else 1]
        return State(Memory(k, v, used.to(k.dtype), used), inner, length, like.control)
    readable = None if like.readable is None else parts[-1]
    inner = tuple(parts[4:] if readable is None else parts[4:-1])
    return State(Memory(*parts[:4]), None if like.inner is None else inner, length, like.control, readable)


class _Graph(nn.Module):
    """What is traced: a model that reads one token a row."""

    def __init__(self, model: PreTrainedModel, layers: _Layers) -> None:
        super().__init__()
        self.model = model
        self.attentions = _causal(model)  # in a list, where torch finds no module: their names are those in the model
        self.own: list[Any] = [layer.state for layer in layers.own]  # only what they look like
        self.cross: list[Any] = [layer.state for layer in layers.cross]

    def forward(
        self, ids: Tensor, position: Tensor, length: Tensor, own: list[list[Tensor]], cross: list[list[Tensor]]
    ) -> Tensor:
        """ids and position `b 1`, length `b`; the parts of each layer. The logits of what follows, `b v`."""
        written, read = BoundedCache(), BoundedCache()
        for attention, like, parts in zip(self.attentions, self.own, own, strict=True):
            _append(written, _state_of(attention, like, parts, length))
        for like, parts in zip(self.cross, cross, strict=True):
            _append(
                read,
                like._replace(
                    memory=Memory(*parts[:4]), inner=tuple(parts[4:]) if like.inner else like.inner, loaded=False
                ),
            )
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
        decoder: Any = self.model.get_decoder()
        handle = decoder.embed_positions.register_forward_pre_hook(
            lambda module, arguments, given: (arguments, given | {"position_ids": position}), with_kwargs=True
        )
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


class _Step:
    """A compiled graph, with the weights of one model."""

    def __init__(self, model: PreTrainedModel, kind: int) -> None:
        self.attentions, self.key = _causal(model), _key(model, kind)
        self.first = _first_position(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about what it does
                self.graph, self.constants = _load_or_compile(model, kind)
            self.bind(model)
        except NotCompiled:
            raise
        except Exception as error:  # tracing runs the model, and inductor and the compiler may fail in any way
            said = " ".join(str(error).split()) or "no reason given"
            raise NotCompiled(f"{type(error).__name__}: {said:.300}") from error

    def bind(self, model: PreTrainedModel) -> None:
        """Let the graph read the weights of the model, where they lie."""
        held = {f"model.{name}": tensor.detach() for name, tensor in _tensors(model)} | self.constants
        self.weights = {
            name: held[name] for name in self.graph.get_constant_fqns()
        }  # kept: the graph has only pointers
        self.graph.load_constants(self.weights, check_full_update=True, user_managed=True)

    def __call__(self, ids: Tensor, position: Tensor | None, layers: _Layers) -> Tensor:
        own = []
        seen: set[int] = set()
        for attention, layer in zip(self.attentions, layers.own, strict=True):
            state = layer.state
            assert state is not None
            attention.check_state(state, len(ids), False)
            own.append([_owned(part, seen) for part in _own_parts(attention, state)])
        length: Tensor = layers.own[0].state.length  # type: ignore[union-attr]
        if position is None:
            counted = None if self.first is None else self.first + length[:, None]
            position = torch.full_like(ids, layers.own[0].columns) if counted is None else counted
        cross = [part.contiguous() for layer in layers.cross for part in _cross_parts(layer.state)]  # type: ignore[arg-type]
        parts = [part for of_layer in own for part in of_layer]
        position = position[:, -1:].expand(len(ids), 1).contiguous()
        (logits,) = self.graph.loader.boxed_run([ids.contiguous(), position, length.contiguous(), *parts, *cross])
        after, least = length + 1, int(length.min()) + 1
        for attention, layer, written in zip(self.attentions, layers.own, own, strict=True):
            assert layer.state is not None
            layer.keep(_after(attention, layer.state, written, after, least), 1)
        return logits


def _cross_parts(state: State) -> list[Tensor]:
    return [*state.memory, *(state.inner or ())]


def _owned(part: Tensor, seen: set[int]) -> Tensor:
    """A part that a graph may write into: contiguous, and no other part's memory."""
    owned = part.contiguous()
    if owned.data_ptr() in seen and owned.numel():
        owned = owned.clone()
    seen.add(owned.data_ptr())
    return owned


def _after(attention: MemoryAttention, state: State, parts: list[Tensor], length: Tensor, least: int) -> State:
    """The state after a step that has written `parts`; `least` is the smallest length."""
    band = attention._band
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


def _first_position(model: Any) -> int | None:
    """The position of a text's first token, if positions count tokens; None if they count columns of the input."""
    if model.config.is_encoder_decoder:
        return None if model.family.decoder is None else 0
    family = getattr(model, "family", None)
    return 0 if family is None else family.positions_without_token(model.config)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


# Compiling, and what is kept on disk.


def _key(model: PreTrainedModel, kind: int) -> str:
    """A name for the graph: of all that it depends on, except the weights' values."""
    config = {
        name: value for name, value in model.config.to_dict().items() if name not in ("source_model", "_name_or_path")
    }
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _tensors(model)]
    machine = [cpu(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), describe_backend()[0]]
    versions = [torch.__version__, transformers.__version__]
    digest = hashlib.sha256(repr([type(model).__name__, config, shapes, machine, versions, kind]).encode())
    package = Path(__file__).parents[1]
    for place in ("*.py", "controls/*.py", "kernels/*.py", "hf/**/*.py"):  # a change in the code may change the graph
        for file in sorted(package.glob(place)):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


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
                torch._inductor.aoti_compile_and_package(
                    program,
                    package_path=str(partial / _GRAPH),
                    inductor_configs=_OPTIONS,
                )
                save_file(constants, partial / _CONSTANTS)
    return torch._inductor.aoti_load_package(str(folder / _GRAPH)), load_file(folder / _CONSTANTS)


def trace(model: PreTrainedModel, kind: int) -> torch.export.ExportedProgram:
    """The graph of a step, before it is compiled."""
    layers = _example(model, kind)
    own = [
        [part.contiguous().clone() for part in _own_parts(attention, layer.state)]  # type: ignore[arg-type]
        for attention, layer in zip(_causal(model), layers.own, strict=True)
    ]
    cross = [[part.contiguous() for part in _cross_parts(layer.state)] for layer in layers.cross]  # type: ignore[arg-type]
    ids = torch.zeros(kind, 1, dtype=torch.int64)
    length: Tensor = layers.own[0].state.length.clone()  # type: ignore[union-attr]
    shapes: Any = None
    if kind == MANY:
        rows = {0: torch.export.Dim("rows", min=2, max=MOST_ROWS)}
        shapes = (
            rows,
            rows,
            rows,
            [[rows for _ in parts] for parts in own],
            [[rows for _ in parts] for parts in cross],
        )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = _Graph(model, layers).eval()
        return torch.export.export(graph, (ids, ids + 1, length, own, cross), dynamic_shapes=shapes, strict=False)
