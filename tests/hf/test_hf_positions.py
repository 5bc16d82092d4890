"""positions="slot" against its definition: every query on its own, with keys at the positions it sees them at.

And the positions of a decoder that is forced through a padded prefix.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import BODIES, SPECS, batch, source  # noqa: E402
from transformers.models.llama.modeling_llama import rotate_half  # noqa: E402

from abc_attn.hf import convert  # noqa: E402

LLAMA = transformers.LlamaForCausalLM


def rotated(x, position, frequencies):
    angle = position[:, None].double() * frequencies.double()
    angle = torch.cat([angle, angle], dim=-1)
    return x.double() * angle.cos() + rotate_half(x.double()) * angle.sin()


def naive(model, x, sinks, window):
    """One layer's attention of x `t D`, query by query: sinks at 0..g-1, the query at min(t, slots - 1)."""
    attention, frequencies = model.model.layers[0].self_attn, model.model.rotary_emb.rotary.inv_freq
    d, slots, out = attention.head_dim, sinks + window, []
    q, k, v = (f(x).unflatten(-1, (-1, d)) for f in (attention.q_proj, attention.k_proj, attention.v_proj))
    for t in range(len(x)):
        seen = sorted({*range(min(sinks, t + 1)), *range(max(sinks, t - window + 1), t + 1)})
        seen = [j for j in seen if j <= t]
        at = torch.tensor([j if j < sinks else min(t, slots - 1) - (t - j) for j in seen])
        heads = []
        for head in range(attention.num_heads):
            group = head // (attention.num_heads // attention.num_kv_heads)
            query = rotated(q[t, head, None], torch.tensor([min(t, slots - 1)]), frequencies)
            scores = rotated(k[seen, group], at, frequencies) @ query[0] * d**-0.5
            heads.append(scores.softmax(0) @ v[seen, group].double())
        out.append(torch.cat(heads))
    return attention.o_proj(torch.stack(out).to(x.dtype))


@pytest.mark.parametrize(("sinks", "window"), [(2, 5), (0, 5), (3, 1)])
@pytest.mark.parametrize("chunks", [[24], [9, 1, 1, 1, 12], [1] * 24, [3, 4, 17]])
def test_it_is_what_it_says_for_every_query_of_every_chunk(sinks, window, chunks):
    control = f"global:{sinks}+window:{window}" if sinks else f"window:{window}"
    model = convert(source(LLAMA), control, positions="slot")
    taken = {}
    first = model.model.layers[0].self_attn
    first.register_forward_hook(
        lambda module, _, given, out: taken.update(x=given["hidden_states"], y=out[0]), with_kwargs=True
    )
    ids, found, cache = torch.randint(3, 60, (1, 24)), [], None
    with torch.no_grad():
        for chunk in ids.split(chunks, dim=1):
            cache = model(chunk, past_key_values=cache).past_key_values
            found.append((taken["x"][0], taken["y"][0]))
        x, y = (torch.cat(parts) for parts in zip(*found, strict=True))
        expected = naive(model, x, sinks, window)
    assert (y - expected).abs().max() / expected.abs().max() < 2e-6


@pytest.mark.parametrize("chunks", [[24], [9, 1, 1, 1, 12], [1] * 24])
@pytest.mark.parametrize("control", ["global:3+window:5", "global:3+keep:5", "global:3+window:2+window:3"])
def test_every_control_beside_the_sinks_reads_them_as_a_band_does(control, chunks):
    """`keep` starts as a window, and two windows hold what the longer one does, twice in part."""
    torch.manual_seed(0)
    given = source(LLAMA)
    ids = torch.randint(3, 60, (2, 24))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0  # padded on the left: its sinks are in the first call too
    found = {}
    for backend in ("reference", "auto"):
        model = convert(copy.deepcopy(given), control, positions="slot").double()
        for attention in model.attentions():
            attention.backend = backend
        cache, parts, read = None, [], 0
        with torch.no_grad():
            for chunk in ids.split(chunks, dim=1):
                read += chunk.shape[1]
                answer = model(chunk, attention_mask=mask[:, :read], past_key_values=cache)
                cache = answer.past_key_values
                parts.append(answer.logits)
        found[backend] = torch.cat(parts, dim=1)[mask.bool()], [layer.state.memory for layer in cache.layers]
    (expected, states), (logits, others) = found["reference"], found["auto"]
    assert (logits - expected).abs().max() < 1e-9
    for memory, other in zip(states, others, strict=True):
        assert (memory.k - other.k).abs().max() < 1e-9
        assert torch.equal(memory.used, other.used)
    if "keep" in control:
        band = convert(copy.deepcopy(given), "global:3+window:5", positions="slot").double()
        with torch.no_grad():
            assert (band(ids, attention_mask=mask).logits[mask.bool()] - expected).abs().max() < 1e-9


def test_infinite_keys_of_the_future_do_not_matter_to_queries_before_them():
    attention = convert(source(LLAMA), "global:3+keep:5", positions="slot").attentions()[0]
    x, q = torch.randn(1, 12, 32), torch.randn(1, attention.num_heads, 12, attention.head_dim)
    k, v = torch.randn(2, 1, attention.num_kv_heads, 12, attention.head_dim)
    with torch.no_grad():
        expected, _ = attention.attend(x, q, k, v, to_sinks=q.flip(-1))
        k[:, :, 2:] = torch.inf  # a sink, and all that follows
        found, _ = attention.attend(x, q, k, v, to_sinks=q.flip(-1))
    assert torch.equal(found[:, :, :2], expected[:, :, :2])
    assert bool(found[:, :, 2:].isnan().all())


def test_a_stream_of_millions_does_not_wear_out():
    """What is seen from position t depends on the tokens in the memory, not on t."""
    model = convert(source(LLAMA), "global:2+window:6", positions="slot")
    ids = torch.randint(3, 60, (1, 30))
    with torch.no_grad():
        cache = model(ids).past_key_values
        expected = model(ids[:, :5], past_key_values=cache).logits
        far = 16_000_000  # beyond it fp32 cannot tell whole numbers apart
        cache = model(ids[:, :2]).past_key_values
        position = torch.arange(far, far + 33)[None]
        for layer in cache.layers:  # as if the text between had been read
            state = layer.state
            counts = tuple(torch.full_like(count, far) for count in state.inner)
            layer.keep(state._replace(length=torch.full_like(state.length, far), inner=counts), far - 2)
        cache = model(ids[:, 2:], past_key_values=cache, position_ids=position[:, :28]).past_key_values
        found = model(ids[:, :5], past_key_values=cache, position_ids=position[:, 28:]).logits
    assert (found - expected).abs().max() < 1e-4


def test_left_padding_does_not_count():
    model = convert(source(LLAMA), "global:2+window:3", positions="slot")
    given = batch(left=True)
    with torch.no_grad():
        together = model(**given).logits
        for row in range(3):
            real = given["attention_mask"][row].bool()
            alone = model(given["input_ids"][row][None, real]).logits[0]
            assert (together[row][real] - alone).abs().max() < 1e-4
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


@pytest.mark.parametrize("control", ["global:2+window:4", "window:5"])
def test_saved_loaded_and_beams_past_the_slots(control, tmp_path):
    model = convert(source(LLAMA), control, positions="slot")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(3, 60, (2, 30))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        caches = [each(ids).past_key_values for each in (model, loaded)]
        steps = [
            each(ids[:, :3], past_key_values=cache).logits for each, cache in zip((model, loaded), caches, strict=True)
        ]
    assert torch.equal(*steps)
    given = batch(left=True)  # of 12, 7 and 3 tokens, and 12 more
    for beams in (1, 4):
        options = {"num_beams": beams, "max_new_tokens": 12, "min_new_tokens": 12}
        assert torch.equal(loaded.generate(**given, **options), model.generate(**given, **options, use_cache=False))


@pytest.mark.parametrize(
    ("control", "said"),
    [("mlp:4", "'mlp'"), ("global:2", "'global'"), ("random:4", "'random'"), ("softmax", "'softmax'")],
)
def test_it_is_for_tokens_kept_whole(control, said):
    with pytest.raises(ValueError, match="positions='slot' is for tokens kept whole") as error:
        convert(source(LLAMA), control, positions="slot")
    assert said in str(error.value)
    with pytest.raises(ValueError, match="rotary"):
        convert(source(transformers.GPT2LMHeadModel), "window:4", positions="slot")
    with pytest.raises(ValueError, match="'absolute', 'slot'"):
        convert(source(LLAMA), "window:4", positions="slots")


DECODERS = [cls for cls in BODIES if not cls.config_class.is_encoder_decoder]


@pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(("control", "slots", "options"), SPECS, ids=lambda x: x if x is str(x) else "")
def test_padding_on_the_left_moves_no_position(cls, control, slots, options):
    """Linear features under RoPE are not shift-invariant, and tables of positions never are."""
    model = convert(source(cls), control, slots, **options).double().eval()
    given = batch(left=True)
    first = model.family.positions_without_token(model.config)
    position = (given["attention_mask"].cumsum(1) - 1).clamp(min=0) + first
    with torch.no_grad():
        found, told = model(**given).logits, model(**given, position_ids=position).logits
        for row, (ids, mask) in enumerate(zip(given["input_ids"], given["attention_mask"].bool(), strict=True)):
            alone = model(ids[mask][None]).logits[0]
            torch.testing.assert_close(found[row, mask], alone, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(told[row, mask], alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("control", ["softmax", "window:3+mlp:4"])
def test_a_forced_prefix_that_is_padded_counts_its_tokens(control):
    """In the decoder of a Marian with an encoder: at once, and with a cache."""
    model = convert(source(transformers.MarianMTModel), control)
    read = torch.randint(3, 60, (1, 6))
    prefix = torch.randint(3, 60, (1, 5))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prefix], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 5])
    with torch.no_grad():
        alone = model(input_ids=read, decoder_input_ids=prefix).logits
        given = {"input_ids": read, "decoder_attention_mask": mask}
        assert (model(**given, decoder_input_ids=padded).logits[:, 3:] - alone).abs().max() < 1e-5
        earlier = {"decoder_attention_mask": mask[:, :-1], "decoder_input_ids": padded[:, :-1]}
        first = model(input_ids=read, **earlier, use_cache=True)
        last = model(**given, decoder_input_ids=padded[:, -1:], past_key_values=first.past_key_values)
        assert (last.logits - alone[:, -1:]).abs().max() < 1e-5
        columns = model(input_ids=read, decoder_input_ids=padded).logits[:, 3:]
    assert (columns - alone).abs().max() > 1e-3  # without a mask there is no padding
    copy.deepcopy(model)
    pickle.dumps(model)
