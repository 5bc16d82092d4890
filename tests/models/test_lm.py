"""AdaptiveLM: the sizes of the paper, the adaptive softmax against the plain one, generation, and checkpoints."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from abc_attn import CONTROLS
from abc_attn.hf import AdaptiveLM, AdaptiveLMConfig
from abc_attn.hf.cache import BoundedCache

# Every control that can be causal, and a composition.
WIDTHS = {"softmax": "", "elu": "", "dpfp": ""}  # those that do not take any number of slots
ONLINE = [name for name, control in CONTROLS.items() if control.online and control.__module__.startswith("abc_attn")]
SPECS = [*(name + WIDTHS.get(name, ":8") for name in ONLINE), "window:4+mlp:4"]


def tiny(control="mlp:8", **options):
    sizes = {
        "vocab_size": 97, "cutoffs": (20, 50), "div_val": 2, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 64, "control": control,
    }  # fmt: skip
    return AdaptiveLM(AdaptiveLMConfig(**sizes | options))


def count(**options):
    with torch.device("meta"):
        return sum(weight.numel() for weight in AdaptiveLM(AdaptiveLMConfig(**options)).parameters())


@pytest.mark.parametrize(("layers", "expected"), [(16, 246_932_928), (32, 448_472_512)])
def test_parameters_of_the_papers_settings(layers, expected):
    """By the sizes that the paper gives. It says ~242M and ~484M; the second is no more than twice the first, as if the
    embeddings doubled with the layers."""
    width, ffn, words = 1024, 4096, 267_735
    layer = 4 * width * (width + 1) + width * ffn + ffn + ffn * width + width + 4 * width
    widths, sizes = (1024, 256, 64), (20_000, 40_000, words - 60_000)
    vocabulary = sum(n * w + w * width for n, w in zip(sizes, widths, strict=True)) + 2 * width
    assert expected == layers * layer + vocabulary
    assert count(num_hidden_layers=layers, control="softmax") == expected
    for slots in (32, 64):
        learned = count(num_hidden_layers=layers, control="mlp", slots=slots)
        assert learned == expected + width * 8 * slots
        assert learned < 1.01 * expected


def test_untied_controls_are_one_for_each_layer():
    assert count(control="mlp:64", tie_control=False) - count(control="softmax") == 16 * 1024 * 8 * 64


def test_the_loss_is_that_of_the_full_softmax():
    model = tiny().double().eval()
    words = torch.randint(97, (3, 30))
    assert words.unique().numel() > 40  # all bands
    full = model(words).logits
    torch.testing.assert_close(full.logsumexp(-1), torch.zeros(3, 30, dtype=torch.float64), atol=1e-12, rtol=0)
    labels = words.masked_fill(torch.rand(3, 30) < 0.2, -100)
    expected = F.cross_entropy(full[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model(words, labels=labels).loss, expected, rtol=1e-12, atol=0)
    shifted = model(words[:, :-1], shift_labels=labels[:, 1:])
    torch.testing.assert_close(shifted.loss, expected, rtol=1e-12, atol=0)
    assert shifted.logits is None


def test_a_batch_without_rare_words_has_a_loss():
    model = tiny()
    words = torch.randint(20, (2, 8))
    model(words, labels=words).loss.backward()
    assert model.vocabulary.tables[0].weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="got both"):
        model(words, labels=words, shift_labels=words)


@pytest.mark.parametrize("control", SPECS)
def test_generation_with_the_state_is_generation_without(control):
    model = tiny(control, pad_token_id=0).double().eval()
    prompts = torch.randint(1, 97, (2, 9))
    for options in ({}, {"num_beams": 3}):
        settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompts)} | options
        cached = model.generate(prompts, **settings)
        assert torch.equal(cached, model.generate(prompts, use_cache=False, **settings))
    padded = F.pad(prompts, (4, 0))
    mask = F.pad(torch.ones_like(prompts), (4, 0))
    left = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
    alone = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)
    assert torch.equal(left[:, 4:], alone)


def test_another_cache_is_refused():
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        tiny().generate(torch.ones(1, 3, dtype=torch.int64), cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="continuous batching"):
        tiny().generate_batch([[3, 4]])


@pytest.mark.parametrize("control", SPECS)
@pytest.mark.parametrize("tie_control", [True, False])
def test_saved_and_loaded(control, tie_control, tmp_path):
    model = tiny(control, tie_control=tie_control).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is AdaptiveLM
    words = torch.randint(97, (2, 12))
    torch.testing.assert_close(again(words).logits, model(words).logits, rtol=0, atol=0)
    card = (tmp_path / "README.md").read_text()
    assert f"| control | `{control}` |" in card
    assert ("keeps every key and value" in card) == (control == "softmax")


def test_the_card_has_the_slots(tmp_path):
    tiny("mlp", slots=6).save_pretrained(tmp_path)
    assert "| slots | `6` |" in (tmp_path / "README.md").read_text()


def test_each_layer_may_have_its_own_control(tmp_path):
    model = tiny(["window:3", "mlp:5"], control_options=None).eval()
    assert [(type(layer.attention.control).name, layer.attention.control.slots) for layer in model.layers] == [
        ("window", 3),
        ("mlp", 5),
    ]
    model.save_pretrained(tmp_path)
    words = torch.randint(97, (2, 12))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(words).logits, model(words).logits, rtol=0, atol=0)
    torch.testing.assert_close(model(words, use_cache=True).logits, model(words, use_cache=False).logits)


@pytest.mark.parametrize("control", ["softmax", "mlp:5", "window:4+mlp:4", ["window:3", "window:9"]])
@pytest.mark.parametrize("heads", [2, [2, 1]], ids=str)
def test_heads_may_share_keys_and_values(control, heads):
    model = tiny(control, num_key_value_heads=heads, local_heads=3).eval()
    attention = model.layers[0].attention
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (16, 32)
    words = torch.randint(97, (2, 12))
    whole = model(words, use_cache=True)
    assert [layer.state.memory.k.shape[1] for layer in whole.past_key_values.layers] == [2, heads if heads == 2 else 1]
    cache, parts = None, []
    for word in words.split(1, dim=1):
        step = model(word, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole.logits, rtol=0, atol=1e-5)


def test_t2r_starts_from_a_trained_softmax(tmp_path):
    source = tiny("softmax")
    source.save_pretrained(tmp_path)
    config = tiny("t2r:8").config
    model = AdaptiveLM.from_pretrained(tmp_path, config=config, allow_new_controls=True)
    for name, weight in source.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name
    assert 0.5 < model.control.weight.std() * 8**0.5 < 2  # as t2r itself starts
    assert (model.control.bias == 0).all()


@pytest.mark.parametrize("tie_control", [True, False])
def test_all_but_the_control_starts_alike(tie_control):
    started = []
    for control in ("softmax", "mlp:8", "window:4+mlp:4"):
        torch.manual_seed(3)
        started.append(dict(tiny(control, tie_control=tie_control, control_options=None).named_parameters()))
    for other in started[1:]:
        for name, weight in started[0].items():
            assert torch.equal(weight, other[name]), name
    torch.manual_seed(3)
    gated = tiny("mlp:8", control_options={"gate": True})
    assert gated.control.gate.bias.min() == 2  # the gate's own start, not that of any Linear
    assert 0.5 < gated.control.proj.weight.std() * 32**0.5 < 2


@pytest.mark.parametrize("positions", ["rotary", "none"])
@pytest.mark.parametrize("control", ["softmax", "window:4", "slots:8"])
def test_other_positions_in_pieces_and_under_padding(positions, control):
    model = tiny(control, positions=positions).double().eval()
    words = torch.randint(1, 97, (2, 12))
    whole = model(words).logits
    first = model(words[:, :7], use_cache=True)
    later = model(words[:, 7:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(later, whole[:, 7:], rtol=0, atol=1e-9)
    mask = F.pad(torch.ones_like(words), (4, 0))
    torch.testing.assert_close(model(F.pad(words, (4, 0)), attention_mask=mask).logits[:, 4:], whole, rtol=0, atol=1e-9)


def test_rotary_positions_tell_distances_alone():
    """The same words further on in a text, of which a window sees nothing more, have the same logits."""
    model = tiny("window:4", positions="rotary", num_hidden_layers=1).double().eval()
    words = torch.randint(1, 97, (1, 9))
    before = torch.randint(1, 97, (1, 20))
    late = model(torch.cat([before, words], dim=1)).logits[:, -6:]
    torch.testing.assert_close(late, model(words).logits[:, -6:], rtol=0, atol=1e-9)
    shuffled = model(words[:, [1, 0, *range(2, 9)]]).logits[:, 3]  # all four that the window sees, in another order
    assert (shuffled - model(words).logits[:, 3]).abs().max() > 1e-3


def test_without_positions_exact_attention_knows_no_order_and_a_gate_does():
    words = torch.randint(1, 97, (1, 9))
    swapped = words[:, [1, 0, *range(2, 9)]]
    for control, moves in (("softmax", False), ("slots:8", True)):
        model = tiny(control, positions="none", num_hidden_layers=1).double().eval()
        apart = (model(swapped).logits - model(words).logits)[:, -1].abs().max()
        assert (apart > 1e-6) == moves, control


def test_positions_run_in_a_circle():
    model = tiny(position_period=64).eval()
    position = torch.arange(64)[None]
    here = model._sinusoids(position)
    torch.testing.assert_close(model._sinusoids(position + 64 * 10**9), here, rtol=0, atol=0)
    dots = here[0] @ here[0].mT  # what a dot product sees is the distance along the circle, also across its seam
    torch.testing.assert_close(dots.roll((1, 1), (0, 1)), dots, rtol=0, atol=1e-9)
    assert (dots - dots.diagonal()[:, None]).fill_diagonal_(-math.inf).max() < -1e-3  # no two positions are alike


def test_a_training_text_starts_anywhere_in_the_circle():
    model, words = tiny(position_period=64), torch.zeros(500, 3, dtype=torch.long)
    starts = model._positions(words, None, None)
    assert torch.equal(starts - starts[:, :1], torch.arange(3).expand(500, -1))
    assert set(starts[:, 0].tolist()) == set(range(64))
    assert model._positions(words, None, BoundedCache()).tolist() == [[0, 1, 2]]  # carried on, it starts with its state
    assert model.eval()._positions(words, None, None).tolist() == [[0, 1, 2]]


def test_positions_of_a_long_text_are_exact():
    model = tiny()
    far = model._sinusoids(torch.tensor([[10**6]]))[0, 0]
    assert math.isclose(far[0].item(), math.sin(10**6), abs_tol=1e-9)


@pytest.mark.parametrize("position_period", [None, 256])
def test_local_heads_start_by_looking_back(position_period):
    model = tiny("softmax", hidden_size=64, local_heads=2, position_period=position_period).eval()
    layer = model.layers[0]
    positions = torch.arange(100, 140)[None]
    x = layer.attention_norm(model._sinusoids(positions).float())  # a word's vector adds noise to all of them alike
    q, k = (
        project(x).unflatten(-1, (4, 16)).transpose(1, 2)
        for project in (layer.attention.q_proj, layer.attention.k_proj)
    )
    nearest = (q @ k.mT)[0].tril(-1).argmax(-1)
    here = torch.arange(40)
    for head in range(2):
        assert torch.equal(nearest[head, 5:], here[5:] - 1 - head)
    assert not torch.equal(nearest[2, 5:], here[5:] - 3)  # the other heads start at random
    words = model.vocabulary.embed(torch.arange(97)[None])[0] * 8
    assert 0.7 < words.square().sum(-1).mean() / (64 / 2) < 1.4  # as long as a sinusoid


def test_layer_dropout_leaves_out_layers_in_training_only():
    model = tiny(layerdrop=0.5, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, adaptive_dropout=0.0)
    words = torch.randint(97, (1, 6))
    losses = {model(words, labels=words).loss.item() for _ in range(40)}
    assert len(losses) == 4  # two layers, each there or not
    model.eval()
    assert len({model(words, labels=words).loss.item() for _ in range(5)}) == 1


def same_weights(model, **options):
    """A model with these options and, beyond what they add, the weights of `model`."""
    other = tiny(**options).double().eval()
    assert not other.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    return other


@torch.no_grad()
def test_what_attention_gives_may_be_gated_or_normed_and_queries_scaled():
    plain, words = tiny().double().eval(), torch.randint(97, (2, 12))
    expected = plain(words).logits
    gated = same_weights(plain, attention_output="gate")
    assert not torch.allclose(gated(words).logits, expected)
    for layer in gated.layers:  # open
        layer.output_gate.weight.zero_()
        layer.output_gate.bias.fill_(100)
    torch.testing.assert_close(gated(words).logits, expected)

    normed = same_weights(plain, attention_output="norm")
    before = normed(words).logits
    assert not torch.allclose(before, expected)
    for layer in normed.layers:  # what is normed has no length
        layer.attention.out_proj.weight.mul_(100)
        layer.attention.out_proj.bias.mul_(100)
    torch.testing.assert_close(normed(words).logits, before, rtol=1e-2, atol=1e-2)

    scaled = same_weights(plain, attention_scale=2 * 8**-0.5)
    assert not torch.allclose(scaled(words).logits, expected)
    for layer in scaled.layers:
        layer.attention.q_proj.weight.div_(2)
        layer.attention.q_proj.bias.div_(2)
    torch.testing.assert_close(scaled(words).logits, expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cutoffs": (50, 20)}, "cutoffs must rise"),
        ({"cutoffs": (20, 200)}, "vocab_size=97"),
        ({"hidden_size": 4}, "no width"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"position_period": 1}, "position_period"),
        ({"attention_output": "sum"}, "plain, gate, norm"),
        ({"positions": "alibi"}, "sinusoids, rotary, none"),
        ({"positions": "none", "local_heads": 2}, "local_heads=2 are for positions='sinusoids'"),
        ({"positions": "rotary", "position_period": 64}, "position_period=64"),
        ({"local_heads": 5}, "num_attention_heads=4"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"control": "luna"}, "cannot be causal"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads=4, got 3"),
        ({"num_key_value_heads": [2, 0]}, "num_key_value_heads must divide num_attention_heads=4, got 0"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads must be one for all layers or a list"),
        ({"control": ["window:4"] * 3}, "num_hidden_layers=2, got 3"),
    ],
)
def test_a_wrong_setting_is_an_error(options, said):
    with pytest.raises(ValueError, match=said):
        tiny(**({"div_val": 4} if "hidden_size" in options else {}) | options)
