"""Converted models that keep what matters: generating, padding, beams and files, where decisions fall all the time."""

from __future__ import annotations

import pytest
import torch
from contract import error

transformers = pytest.importorskip("transformers")

from abc_attn.hf import BoundedCache, convert, load_state, save_state, state_bytes  # noqa: E402

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
every_way = pytest.mark.parametrize(
    ("control", "positions"),
    [
        ("global:2+window:5+keydiff:6", "absolute"),
        ("global:2+window:5+keydiff:6", "slot"),
        ("window:5+knorm:6", "slot"),
        ("global:2+window:5+leverage:6", "absolute"),
        ("global:2+window:5+leverage:6", "slot"),
        ("global:2+window:5+tova:6", "absolute"),
        ("global:2+window:5+tova:6", "slot"),
    ],
)


def bounded(control: str, positions: str):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).eval()
    return convert(model, control, positions=positions, block=4).eval()


def text(t: int, b: int = 1) -> torch.Tensor:
    return torch.randint(3, 50, (b, t), generator=torch.Generator().manual_seed(1))


@every_way
@torch.no_grad()
def test_one_by_one_is_the_whole(control, positions):
    """Single steps, in place and by the compiled kernels, across many decisions."""
    model, ids = bounded(control, positions), text(60, 2)
    whole, cache = model(ids, use_cache=False).logits, BoundedCache()
    steps = [model(part, past_key_values=cache).logits for part in ids.split([3, *[1] * 57], dim=1)]
    assert error(torch.cat(steps, 1), whole) <= 1e-5


@every_way
@torch.no_grad()
def test_padding_beams_and_files(control, positions, tmp_path):
    model, ids = bounded(control, positions), text(40)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(ids, **options)[:, 40:]
    assert torch.equal(alone, model.generate(ids, use_cache=False, **options)[:, 40:])
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), ids], dim=1)
    rows = torch.cat([padded, text(49)])
    mask = torch.cat([(padded != 0).long(), torch.ones(1, 49, dtype=torch.int64)])
    assert torch.equal(model.generate(rows, attention_mask=mask, **options)[:1, 49:], alone)
    beams = {name: model.generate(ids, num_beams=3, use_cache=name == "cached", **options) for name in ("cached", "")}
    assert torch.equal(beams["cached"], beams[""])

    cache = BoundedCache()
    model(ids, past_key_values=cache)
    save_state(cache, tmp_path / "state")
    loaded = load_state(tmp_path / "state")
    assert state_bytes(loaded) == state_bytes(cache)
    assert torch.equal(
        model(ids[:, :7], past_key_values=loaded).logits, model(ids[:, :7], past_key_values=cache).logits
    )


@pytest.mark.parametrize("kept", ["keydiff", "leverage", "tova"])
@torch.no_grad()
def test_what_fits_is_exact(kept):
    """Until the memory is full, it is the source model."""
    torch.manual_seed(0)
    source = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).eval()
    ids = text(60)
    expected = source(ids).logits
    found = convert(source, f"global:4+window:20+{kept}:40", positions="slot", block=8).eval()(ids).logits
    assert error(found, expected) <= 1e-5
