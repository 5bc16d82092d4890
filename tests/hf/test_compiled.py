"""The compiled decoding step: the tokens, logits and states of the uncompiled model; and what happens without one.

Most tests run the traced graph by torch instead of compiling it, which takes a second instead of a minute: what could
differ from the uncompiled model is in the graph. Some compile it too, one of them outside the nightly tests.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

transformers = pytest.importorskip("transformers")

from hf_sources import BODIES, SPECS, batch, save, source  # noqa: E402

from abc_attn import CONTROLS  # noqa: E402
from abc_attn.bench import models as bench_models  # noqa: E402
from abc_attn.bench import peers  # noqa: E402
from abc_attn.hf import BoundedCache, NotCompiled, compile_decoding, compiled, convert  # noqa: E402
from abc_attn.hf.models import BOUNDED  # noqa: E402
from abc_attn.hf.streaming import Stream  # noqa: E402

LLAMA, MARIAN = transformers.LlamaForCausalLM, transformers.MarianMTModel
nightly = pytest.mark.nightly


class Traced:
    """In the place of a compiled graph: the same one, run operator by operator."""

    def __init__(self, model, kind):
        program = compiled.trace(model, kind)
        self.run, self.spec, self.loader, self.calls = program.module(), program.call_spec.in_spec, self, 0

    def get_constant_fqns(self):
        return []

    def load_constants(self, weights, **options):
        assert not weights

    def boxed_run(self, flat):
        self.calls += 1
        arguments, _ = pytree.tree_unflatten(flat, self.spec)
        with torch.no_grad():
            return [self.run(*arguments)]


@pytest.fixture
def traced(monkeypatch):
    """Steps run traced graphs; a list of those, one for each model, kind and dtype."""
    graphs, known = [], {}

    def load(model, kind):
        key = model, kind, model.dtype
        if key not in known:
            known[key] = Traced(model, kind)
            graphs.append(known[key])
        return known[key], {}

    monkeypatch.setattr(compiled, "_load_or_compile", load)
    return graphs


def compare(model, given, **options):
    """generate() with and without the step: the same tokens and logits, and states."""
    options |= {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(**given, **options)
    found = model.generate(**given, **options, compiled=True)
    compiled.stop_compiled(model)
    assert torch.equal(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()
    parts = [found.past_key_values, expected.past_key_values]
    if model.config.is_encoder_decoder:
        parts = [part.self_attention_cache for part in parts]
    for ours, theirs in zip(*(part.layers for part in parts), strict=True):
        assert ours.columns == theirs.columns
        wanted = theirs.state._tensors()
        assert ours.state._tensors().keys() == wanted.keys()
        for name, part in ours.state._tensors().items():
            assert part.shape == wanted[name].shape, name
            assert part.dtype == wanted[name].dtype, name
            torch.testing.assert_close(part, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


QUICK = (("Llama", "global:2+window:4"), ("Marian", "window:3+mlp:4"))
CASES = [
    pytest.param(cls, control, marks=() if (BOUNDED[cls].family.name, control) in QUICK else nightly)
    for cls in BODIES
    for control in ("global:2+window:4", "window:3+mlp:4")
]


@pytest.mark.parametrize(("cls", "control"), CASES)
def test_every_family_writes_the_same_in_batches_and_beams(cls, control, traced):
    model = convert(source(cls), control)
    given = batch(left=not model.config.is_encoder_decoder)
    compare(model, given)
    steps = traced[0].calls
    compare(model, given, num_beams=5)
    assert steps == 11
    assert traced[0].calls == 22  # one graph for 3 rows and for 15


@nightly
@pytest.mark.parametrize(("control", "slots", "options"), [spec for spec in SPECS if spec[0] != "softmax"], ids=str)
def test_every_control_writes_the_same(control, slots, options, traced):
    compare(convert(source(LLAMA), control, slots, **options), batch(left=True))
    one = {"input_ids": batch(left=True)["input_ids"][:1]}
    compare(convert(source(LLAMA), control, slots, **options), one)
    assert all(graph.calls for graph in traced)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_one_row_from_before_the_memory_is_full(weights, traced):
    model = convert(source(LLAMA), "global:2+window:6", positions="slot", weights=weights)
    compare(model, {"input_ids": torch.tensor([[5, 9, 11]])})  # 3 tokens to 15, of 8 slots
    assert traced[0].calls == 11


@pytest.mark.parametrize("rows", [1, 3])
def test_heads_of_16_channels_are_traced_too(rows, traced):
    """Uncompiled, they take a native kernel, which is called by pointers and cannot be in a graph."""
    model = convert(source(LLAMA, head_dim=16), "global:2+window:6", positions="slot")
    compare(model, {"input_ids": torch.randint(3, 50, (rows, 9), generator=torch.Generator().manual_seed(0))})
    assert traced[0].calls == 11


def test_a_stream_goes_on_from_any_state(traced, tmp_path):
    model = convert(source(LLAMA), "global:2+window:4", positions="slot")
    plain, ours = Stream(model), Stream(model)
    plain.ends = ours.ends = set()
    plain.add([5, 6, 7])
    expected = list(plain.write(20))
    ours.add([5, 6, 7])
    assert list(ours.write(5)) == expected[:5]
    compile_decoding(model)
    assert list(ours.write(5)) == expected[5:10]
    ours.save(tmp_path / "state")
    ours.load(tmp_path / "state")
    compiled.stop_compiled(model)
    assert list(ours.write(10)) == []  # nothing is pending after a save
    assert traced[0].calls == 6
    compile_decoding(model)
    given = {"past_key_values": ours.cache, "use_cache": True}
    with torch.no_grad():
        copied = copy.deepcopy(ours.cache)
        logits = model(input_ids=torch.tensor([[9]]), **given).logits
        compiled.stop_compiled(model)
        assert torch.allclose(logits, model(input_ids=torch.tensor([[9]]), past_key_values=copied).logits, atol=1e-5)


def test_what_is_no_step_runs_uncompiled(traced):
    model = convert(source(LLAMA), "window:4")
    compile_decoding(model)
    ids, cache = torch.tensor([[5]]), BoundedCache()
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)  # the first token: there is no state yet
        model(input_ids=torch.tensor([[5, 6]]), past_key_values=cache)
        assert model(input_ids=ids, past_key_values=cache, output_hidden_states=True).hidden_states is not None
        model(input_ids=ids, past_key_values=cache, attention_mask=torch.tensor([[1, 1, 1, 1, 0]]))
    model(input_ids=ids, past_key_values=cache).logits.sum().backward()  # gradients are wanted
    assert not traced


def test_why_a_model_is_not_compiled(monkeypatch):
    plain, exact, bounded = source(LLAMA), convert(source(LLAMA), "softmax"), convert(source(LLAMA), "window:4")
    with pytest.raises(NotCompiled, match=r"LlamaForCausalLM has no bounded memory .* convert the model"):
        compile_decoding(plain)
    with pytest.raises(NotCompiled, match=r"'softmax'.*grows"):
        compile_decoding(exact)
    with pytest.raises(NotCompiled, match=r"\.eval\(\)"):
        compile_decoding(convert(source(LLAMA), "window:4").train())
    expected = bounded.generate(**batch(left=True))
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")

    def fails(model, kind):
        raise RuntimeError("some\nreason")

    with monkeypatch.context() as patched:
        patched.setattr(compiled, "_load_or_compile", fails)
        with pytest.warns(UserWarning, match="decoding goes on uncompiled: RuntimeError: some reason"):
            assert torch.equal(bounded.generate(**batch(left=True), compiled=True), expected)
        compiled.stop_compiled(bounded)

    no_compiler(monkeypatch)
    with pytest.warns(UserWarning, match="goes on uncompiled: no C.. compiler was found"):
        assert torch.equal(bounded.generate(**batch(left=True), compiled=True), expected)


def no_compiler(monkeypatch):
    def missing():
        raise FileNotFoundError("g++")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)


def opened(model, rows=1):
    """A call of `model` with one more token for each row, after a cache that has read one; and that cache."""
    ids, cache = torch.full((rows, 1), 5), model.new_cache()
    crossed = model.config.is_encoder_decoder
    given = {"past_key_values": cache, "use_cache": True}
    if crossed:
        given["encoder_outputs"] = (model.get_encoder()(input_ids=ids.expand(-1, 4)).last_hidden_state,)
    name = "decoder_input_ids" if crossed else "input_ids"

    def call(tokens=5, **more):
        ids = tokens if isinstance(tokens, torch.Tensor) else torch.full((rows, 1), tokens)
        return model(**{name: ids}, **(given | more)).logits

    call()
    return call, cache


@torch.no_grad()
def test_tokens_and_positions_that_no_table_has_raise_the_errors_of_the_uncompiled_model(traced):
    """Inductor's check of an index throws in a thread of OpenMP, which ends the process."""
    for cls in (MARIAN, transformers.GPT2LMHeadModel):
        model = convert(source(cls), "mlp", 4)
        call, cache = opened(model)
        compile_decoding(model)
        call()
        for token in (61, -1):
            with pytest.raises(IndexError):
                call(token)
        layers = (cache.self_attention_cache if cls is MARIAN else cache).layers
        state = layers[0].state
        layers[0].columns = 128
        layers[0].state = state._replace(loaded=True)  # as from a file, after much padding
        with pytest.raises(ValueError, match="this model has positions for 128"):
            call()
        for layer in layers:  # a text as long as the table
            layer.state, layer.columns = layer.state._replace(length=state.length + 126, loaded=False), 128
        with pytest.raises(IndexError):
            call(**({} if cls is MARIAN else {"position_ids": torch.tensor([[128]])}))
        assert traced[-1].calls == 1


@torch.no_grad()
def test_inputs_of_another_type_or_shape_run_uncompiled(traced):
    model = convert(source(MARIAN), "mlp", 4)
    other = convert(source(MARIAN), "mlp", {"self": 4, "cross": 6, "encoder": 4})
    call, cache = opened(model)
    compile_decoding(model)
    call()
    assert call(torch.full((1, 1), 5, dtype=torch.int32)).dtype == torch.float32
    for layer in cache.self_attention_cache.layers:
        layer.state = layer.state.to(torch.float64)
    call()
    assert cache.self_attention_cache.layers[0].state.memory.v.dtype == torch.float64
    call, cache = opened(model)
    cross = cache.cross_attention_cache.layers
    for wrong in (opened(model, rows=2)[1], opened(other)[1]):  # another batch; another number of slots
        right = cross[0].state
        cross[0].state = wrong.cross_attention_cache.layers[0].state
        with pytest.raises(ValueError, match="this state"):
            call()
        cross[0].state = right
    cross[0].state = right._replace(loaded=True)  # of a file: checked once, by the uncompiled model
    call()
    assert not cross[0].state.loaded
    assert traced[0].calls == 1
    call()
    assert traced[0].calls == 2


def test_a_memory_of_the_encoder_that_is_read_in_part(traced):
    model = convert(source(MARIAN), "dilated", 4)
    compare(model, {"input_ids": batch(left=False)["input_ids"][:1]})
    assert traced[0].calls == 11


def user_control(file, line):
    """The class that a user's file defines."""
    file.write_text(f"from abc_attn import CONTROLS\n\nclass Mine(CONTROLS['mlp']):\n    {line}\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Mine


def test_the_name_of_a_graph_depends_on_the_code_of_a_users_control(tmp_path, monkeypatch):
    model, keys = convert(source(LLAMA), "mlp", 4), []
    for line in ("pass", "pass", "taste = 2"):
        monkeypatch.delitem(sys.modules, "a_users_control", raising=False)
        model.controls["self"].__class__ = user_control(tmp_path / "a_users_control.py", line)
        keys.append(compiled._key(model, 1))
    assert keys[0] == keys[1]
    assert keys[1] != keys[2]
    (tmp_path / "a_users_control.py").write_text("edited after it was imported")
    assert compiled._key(model, 1) == keys[2]
    typed = {}
    exec("class Typed(Base): pass", {"__name__": "__main__", "Base": CONTROLS["mlp"]}, typed)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)  # a worker of xdist has none
    model.controls["self"].__class__ = typed["Typed"]
    with pytest.raises(NotCompiled, match=r"the source of class Typed cannot be read.*define the class in a file"):
        compile_decoding(model)


@pytest.mark.filterwarnings("default")  # peft's own
def test_adapters_are_merged_first(traced):
    peft = pytest.importorskip("peft", reason="make test-hf installs it")
    model = convert(source(LLAMA), "window:4")
    compile_decoding(model, 1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    with pytest.raises(NotCompiled, match=r"PEFT adapters.*merge them first"):
        compile_decoding(model)
    ids = torch.tensor([[5, 9, 11]])
    with pytest.warns(UserWarning, match="decoding goes on uncompiled: the model has PEFT adapters"):
        adapted.generate(input_ids=ids)
    compare(adapted.merge_and_unload(), {"input_ids": ids})


def test_weights_that_have_moved(traced):
    model = convert(source(LLAMA), "window:4")
    compile_decoding(model, 1)
    given = {"input_ids": torch.tensor([[5, 9, 11]])}
    model.generate(**given)
    assert (len(traced), traced[0].calls) == (1, 7)
    model.to(torch.float64)
    found = model.generate(**given)
    assert (len(traced), traced[0].calls, traced[1].calls) == (2, 7, 7)
    compiled.stop_compiled(model)
    assert torch.equal(model.generate(**given), found)


def test_weights_that_are_no_longer_tied_are_another_graph():
    model = convert(source(LLAMA, tie_word_embeddings=True), "window:4")
    key = compiled._key(model, 1)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert compiled._key(model, 1) != key


def test_a_compile_that_fails_is_not_repeated(monkeypatch):
    model, tried = convert(source(LLAMA), "window:4"), []
    given = {"input_ids": torch.tensor([[5, 9, 11]])}

    def fails(model, kind):
        tried.append(kind)
        raise RuntimeError(f"reason {len(tried)}")

    monkeypatch.setattr(compiled, "_load_or_compile", fails)
    for _ in range(2):
        with pytest.raises(NotCompiled, match="RuntimeError: reason 1"):
            compile_decoding(model, 1)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"generate\(compiled=True\) goes on uncompiled: RuntimeError: reason 1"):
            model.generate(**given, compiled=True)
    compile_decoding(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**given)
    assert tried == [1]
    with pytest.raises(NotCompiled, match="reason 2"):
        compile_decoding(model, 2)
    compiled.stop_compiled(model)
    with pytest.raises(NotCompiled, match="reason 3"):
        compile_decoding(model, 1)


def test_generate_is_compiled_for_the_call_alone(traced):
    model = convert(source(LLAMA), "window:4")
    given = {"input_ids": torch.tensor([[5, 9, 11]])}
    for steps in (7, 14):
        model.generate(**given, compiled=True)
        model.generate(**given)
        assert (len(traced), traced[0].calls) == (1, steps)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(**given, compiled=True, cache_implementation="static")
    model.generate(**given)
    assert traced[0].calls == 14
    compile_decoding(model)
    model.generate(**given, compiled=True)
    model.generate(**given)
    assert traced[0].calls == 28
    compiled.stop_compiled(model)
    model.generate(**given)
    assert traced[0].calls == 28


def test_the_benchmark_refuses_what_it_cannot_compile(monkeypatch):
    monkeypatch.setattr(bench_models, "load_original", lambda folder: pytest.fail("a model is loaded first"))
    no_compiler(monkeypatch)
    with pytest.raises(ValueError, match="the steps cannot be compiled: no C"):
        peers.peer("global:4+window:8", [32], 1, 1)


def test_the_benchmark_compiles_into_empty_caches(tmp_path, monkeypatch):
    seen = []

    def look(model, rows):
        folders = [Path(os.environ[name]) for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")]
        seen.append([any(folder.iterdir()) for folder in folders])
        for folder in folders:
            (folder / "graph").touch()

    (tmp_path / "graph").touch()
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(compiled, "compile_decoding", look)
    for _ in range(2):
        assert len(peers._compile(convert(tiny(), "window:4"))) == 2
    assert seen == [[False, False], [True, True]] * 2
    assert os.environ["XDG_CACHE_HOME"] == os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


def compile_and_compare(model, given, folder, monkeypatch):
    """Compiled, and compiled again from the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    compare(model, given)
    no_compiler(monkeypatch)
    monkeypatch.setattr(compiled, "trace", None)  # it is on the disk now
    compare(model, given)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():  # norms, that are all ones, and scales of eight numbers among them
            if parameter.is_floating_point():
                parameter.mul_(1.1)
    compare(other, given)  # the same graph with other weights
    compile_decoding(model, len(given["input_ids"]))
    model.load_state_dict(other.state_dict(), assign=True)
    options = {"return_dict_in_generate": True, "output_logits": True}
    found = model.generate(**given, **options)
    compiled.stop_compiled(model)
    torch.testing.assert_close(found.logits, model.generate(**given, **options).logits, rtol=1e-4, atol=1e-4)


def tiny(**changed):
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return source(LLAMA, **(sizes | {"num_key_value_heads": 1} | changed))


def test_compiled_by_inductor(tmp_path, monkeypatch):
    model = convert(tiny(), "global:2+window:4", positions="slot", weights="int8")
    compile_and_compare(model, {"input_ids": torch.tensor([[5, 9, 11]])}, tmp_path, monkeypatch)
    with torch.no_grad():
        call, _ = opened(model)
        compile_decoding(model, 1)
        call()
        with pytest.raises(IndexError):
            call(61)  # which would end the process


@nightly
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize(("cls", "control"), [(LLAMA, "window:4"), (MARIAN, "mlp:4"), (LLAMA, "rfa:4")])
def test_compiled_by_inductor_in_batches(cls, control, weights, tmp_path, monkeypatch):
    model = convert(source(cls), control, weights=weights)
    compile_and_compare(model, batch(left=cls is LLAMA), tmp_path, monkeypatch)


@nightly
def test_the_command_compiles_once_and_says_so(tmp_path, monkeypatch, capfd):
    from abc_attn.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = str(save(convert(tiny(), "window:4"), tmp_path / "model"))
    assert main(["generate", folder, "--prompt", "w3 w4", "--tokens", "5"]) == 0
    expected, _ = capfd.readouterr()
    for said in ("done in", ""):
        assert main(["generate", folder, "--prompt", "w3 w4", "--tokens", "5", "--compile"]) == 0
        out, err = capfd.readouterr()
        assert out == expected
        assert said in err
        assert bool(said) == ("compiling the decoding step" in err)
