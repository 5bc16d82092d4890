"""generate() in its modes with the bounded state as its cache, and the state kept between processes."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import batch, inputs, source  # noqa: E402

from abc_attn import BoundedAttention  # noqa: E402
from abc_attn.hf import BoundedCache, convert, load_state, save_state, state_bytes  # noqa: E402

LLAMA, MARIAN = transformers.LlamaForCausalLM, transformers.MarianMTModel
CONTROLS = ["window:3+mlp:4", "global:2+window:4"]
either = pytest.mark.parametrize("control", CONTROLS)


def prompt(tokens=12):
    return torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(tokens))


@either
@pytest.mark.parametrize("cls", [LLAMA, MARIAN], ids=lambda cls: cls.__name__)
def test_sampling_and_several_returned_sequences(cls, control):
    model = convert(source(cls), control)
    given = batch(left=cls is LLAMA)
    for options in ({"do_sample": True, "num_return_sequences": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        torch.manual_seed(1)
        cached = model.generate(**given, **options)
        torch.manual_seed(1)
        assert torch.equal(cached, model.generate(**given, **options, use_cache=False))
        assert len(cached) == 3 * options["num_return_sequences"]


@either
def test_a_prompt_in_chunks_is_the_prompt(control):
    model = convert(source(LLAMA), control)
    whole = model.generate(**batch(left=True), return_dict_in_generate=True, output_logits=True)
    for size in (1, 5):
        chunks = model.generate(
            **batch(left=True), prefill_chunk_size=size, return_dict_in_generate=True, output_logits=True
        )
        assert torch.equal(chunks.sequences, whole.sequences)
        for a, b in zip(chunks.logits, whole.logits, strict=True):
            assert (a - b).abs().max() < 1e-4


@either
def test_a_returned_cache_goes_on(control):
    model = convert(source(LLAMA), control)
    given = batch(left=True)
    first = model.generate(**given, return_dict_in_generate=True)
    more = torch.cat([first.sequences, torch.randint(3, 60, (3, 4))], dim=1)
    mask = torch.cat([given["attention_mask"], torch.ones(3, 12, dtype=torch.int64)], dim=1)
    anew = model.generate(more, attention_mask=mask)
    size = state_bytes(first.past_key_values)
    cache = copy.deepcopy(first.past_key_values)
    assert torch.equal(model.generate(more, attention_mask=mask, past_key_values=cache), anew)
    assert state_bytes(cache) == size
    # ... or with the new tokens alone: what was read before need not be kept.
    cache = first.past_key_values
    short = model.generate(more[:, cache.get_seq_length() :], attention_mask=mask, past_key_values=cache)
    assert torch.equal(short[:, -8:], anew[:, -8:])


def test_the_cross_memory_is_written_once(monkeypatch):
    model = convert(source(MARIAN), "mlp:4")
    written = []
    mlp = type(model.controls["cross"])
    monkeypatch.setattr(mlp, "mean", _count(mlp.mean, written))  # asked for wherever tokens are written
    result = model.generate(**batch(left=False), return_dict_in_generate=True)
    layers = model.config.decoder_layers
    assert sum(not causal for causal in written) == layers + model.config.encoder_layers
    cross = result.past_key_values.cross_attention_cache
    assert [layer.get_seq_length() for layer in cross.layers] == [12] * layers
    assert all(result.past_key_values.is_updated.values())


def _count(method, written):
    def counted(self, *arguments, **options):
        written.append(self.causal)
        return method(self, *arguments, **options)

    return counted


@pytest.mark.parametrize(
    "cls", [LLAMA, pytest.param(MARIAN, marks=pytest.mark.processes)], ids=lambda cls: cls.__name__
)
def test_a_saved_state_goes_on_in_another_process(cls, tmp_path):
    model = convert(source(cls), "window:3+mlp:4")
    model.save_pretrained(tmp_path / "model")
    sizes = []
    for tokens in (5, 100):
        given = {"input_ids": prompt(tokens)}
        if cls is MARIAN:
            given = inputs(model) | {"decoder_input_ids": prompt(tokens).expand(3, -1), "decoder_attention_mask": None}
        with torch.no_grad():
            cache = model(**given, use_cache=True).past_key_values
        save_state(cache, tmp_path / "state.safetensors")
        sizes.append((tmp_path / "state.safetensors").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 100  # a few digits in the header
    code = f"""
import torch, abc_attn.hf
model = abc_attn.hf.{type(model).__name__}.from_pretrained({str(tmp_path / "model")!r})
cache = abc_attn.hf.load_state({str(tmp_path / "state.safetensors")!r})
new = torch.arange(3, 6)[None].expand(len(cache.layers[0].state.length) if {cls is LLAMA} else 3, -1)
given = {{"input_ids": new}} if {cls is LLAMA} else {{
    "decoder_input_ids": new, "encoder_outputs": (torch.zeros(3, 12, 32),)}}
with torch.no_grad():
    torch.save(model(**given, past_key_values=cache).logits, {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    new = torch.arange(3, 6)[None]
    with torch.no_grad():
        if cls is LLAMA:
            expected = model(new, past_key_values=cache).logits
        else:
            given = {"decoder_input_ids": new.expand(3, -1), "encoder_outputs": (torch.zeros(3, 12, 32),)}
            expected = model(**given, past_key_values=cache).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_what_a_bounded_memory_cannot_do_is_refused(tmp_path):
    model = convert(source(LLAMA), "mlp:4")
    ids = prompt()
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        model.generate(ids, prompt_lookup_num_tokens=2)
    for name in ("static", "offloaded", "quantized"):
        with pytest.raises(ValueError, match=f"{name}.*leave cache_implementation out"):
            model.generate(ids, cache_implementation=name)
    with pytest.raises(ValueError, match="continuous batching"):
        model.generate_batch([[3, 4]])
    with pytest.raises(TypeError, match="StaticCache"):
        model(ids, past_key_values=transformers.StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(ValueError, match="packed"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]), use_cache=False)
    with pytest.raises(ValueError, match="attention_mask of shape"):
        model(ids, attention_mask=torch.ones(1, 1, 12, 12))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="leave attn_implementation out"):
        type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    cache = model(ids).past_key_values
    with pytest.raises(ValueError, match="cannot forget its last tokens"):
        cache.crop(-1)
    with pytest.raises(TypeError, match="ordinary attention"):
        source(LLAMA)(ids, past_key_values=BoundedCache())
    with pytest.raises(TypeError, match="another model's ordinary attention"):
        model(ids, past_key_values=source(LLAMA)(ids).past_key_values)
    with pytest.raises(ValueError, match="'window:4'"):
        convert(source(LLAMA), "window:4")(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="nothing has been read yet"):
        save_state(BoundedCache(), tmp_path / "state")
    BoundedAttention(8, 2, "mlp:4", causal=True)(torch.zeros(1, 2, 8), return_state=True)[1].save(tmp_path / "single")
    with pytest.raises(ValueError, match=r"State\.load"):
        load_state(tmp_path / "single")


def test_the_rows_of_a_cache_are_chosen_and_repeated():
    model = convert(source(LLAMA), "window:3+mlp:4")
    given = batch(left=False)
    with torch.no_grad():
        cache = model(**given).past_key_values
        cache.batch_select_indices(torch.tensor([True, False, True]))
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 4
        again = model(given["input_ids"][[0, 0, 2, 2]], attention_mask=given["attention_mask"][[0, 0, 2, 2]])
        new = torch.tensor([[5]] * 4)
        expected = model(new, past_key_values=again.past_key_values).logits
        assert torch.equal(model(new, past_key_values=cache).logits, expected)
    cache.reset()
    assert cache.get_seq_length() == 0
