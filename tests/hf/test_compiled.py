"""The compiled decoding step: the tokens, logits and states of the uncompiled model; and what happens without one.

Most tests run the traced graph by torch instead of compiling it, which takes a second instead of a minute: what could
differ from the uncompiled model is in the graph. Some compile it too, one of them outside the nightly tests.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

transformers = pytest.importorskip("transformers")

from hf_sources import BODIES, SPECS, batch, save, source  # noqa: E402

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
    """Steps run traced graphs; a list of those, one for each model and kind."""
    graphs, known = [], {}

    def load(model, kind):
        if (model, kind) not in known:
            known[model, kind] = Traced(model, kind)
            graphs.append(known[model, kind])
        return known[model, kind], {}

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

    def missing():
        raise FileNotFoundError("g++")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    with pytest.warns(UserWarning, match="goes on uncompiled: no C.. compiler was found"):
        assert torch.equal(bounded.generate(**batch(left=True), compiled=True), expected)


def compile_and_compare(model, given, folder, monkeypatch):
    """Compiled, and compiled again from the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    compare(model, given)
    monkeypatch.setattr(compiled, "trace", None)  # it is on the disk now
    compare(model, given)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():  # norms, that are all ones, and scales of eight numbers among them
            if parameter.is_floating_point():
                parameter.mul_(1.1)
    compare(other, given)  # the same graph with other weights


def tiny(**changed):
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return source(LLAMA, **(sizes | {"num_key_value_heads": 1} | changed))


def test_compiled_by_inductor(tmp_path, monkeypatch):
    model = convert(tiny(), "global:2+window:4", positions="slot", weights="int8")
    compile_and_compare(model, {"input_ids": torch.tensor([[5, 9, 11]])}, tmp_path, monkeypatch)


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
