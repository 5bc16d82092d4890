"""Windows as banded attention: that they are, in blocks of any size, from any state, and against the loop."""

from __future__ import annotations

import pytest
import torch
from contract import WIDTHS, Case, assert_same_state, build, error, gradient_error, gradients, tokens, vector_width

from abc_attn import CONTROLS, BoundedAttention, Memory, make_control
from abc_attn.controls.positional import Window
from abc_attn.core import Band, Reading, empty_memory
from abc_attn.kernels import banded, blocks, native
from abc_attn.kernels.banded import Place, Stretch, Token
from abc_attn.kernels.door import Declined

BANDED = [
    Case("window:{n}"),
    Case("dilated:{n}"),
    Case("dilated:{n}", {"dilation": 3}),
    Case("global:1+window:{n}"),
    Case("global:4+window:{n}"),
]
every_band = pytest.mark.parametrize("case", BANDED, ids=str)


@pytest.fixture(params=[4, 7, 192])
def block(request, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", request.param)


@pytest.fixture
def calls(monkeypatch):
    """The bands that were attended to."""
    found = []

    def spy(q, k, v, band, *rest, **options):
        answer = original(q, k, v, band, *rest, **options)
        found.extend([] if isinstance(answer, Declined) else [band])
        return answer

    original = banded.banded
    monkeypatch.setattr("abc_attn.attention.banded", spy)
    return found


def both(case, n, **options):
    return [build(case, n, backend=backend, **options) for backend in ("reference", "auto")]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    ("control", "options", "band"),
    [
        ("window:5", {}, (0, 5, 1)),
        ("dilated:5", {"dilation": 3}, (0, 5, 3)),
        ("global:2+window:5", {}, (2, 5, 1)),
        ("window:5+global:2", {}, (2, 5, 1)),
    ],
)
def test_the_banded_path_is_taken(calls, backend, control, options, band):
    attention = BoundedAttention(8, 2, control, causal=True, backend=backend, **options)
    _, state = attention(torch.randn(1, 9, 8), return_state=True)
    attention(torch.randn(1, 1, 8), state=state)
    assert calls == [band, band]


@pytest.mark.parametrize(
    ("control", "options"),
    [
        ("window:5", {"gate": True}),
        ("window:5", {"backend": "reference"}),
        ("window:5", {"causal": False}),
        ("window:5+mlp:3", {}),
        ("global:2+window:5", {"gate": True}),
        ("global:2+window:5", {"every": 2}),
        ("global:2+window:5", {"positions": (1,)}),
        ("global:2+dilated:5", {}),
        ("global:2+dilated:5", {"dilation": 1}),
        ("global:2", {}),
        ("global:2+global:2", {}),
    ],
)
def test_what_is_no_band_is_written_slot_by_slot(calls, control, options):
    BoundedAttention(8, 2, control, **{"causal": True} | options)(torch.randn(1, 9, 8))
    assert not calls


def test_a_subclass_may_decide_otherwise(calls):
    class Last(Window):
        def decide(self, position, count, like):
            return super().decide(position * 0, count, like)

    sizes = {"embed_dim": 8, "num_heads": 2, "head_dim": 4, "causal": True}
    x = torch.randn(1, 6, 8)
    attention = BoundedAttention(8, 2, Last(3, **sizes), causal=True)
    last = BoundedAttention(8, 2, make_control("window:1", **sizes), causal=True)
    last.load_state_dict(attention.state_dict())
    assert error(attention(x), last(x)) <= 1e-6
    assert len(calls) == 1
    assert all(control.band is CONTROLS[name].band for name, control in CONTROLS.items())


@every_band
@pytest.mark.parametrize("n", [1, 3, 20, 64])
def test_blocks_are_the_loop_from_any_state(case, n, block):
    """Outputs, memory and gradients, those of the incoming state among them; rows stand at different positions."""
    padding = torch.zeros(3, 30, dtype=torch.bool)
    padding[0, :], padding[1, 2:] = True, True
    loop, attention = both(case, n)
    _, start = loop(tokens(3, 30), key_padding_mask=padding, return_state=True)
    results = []
    for each in (loop, attention):
        x = tokens(3, 41, seed=4).requires_grad_()
        k, v = (part.detach().requires_grad_() for part in start.memory[:2])
        seen = (part.where(start.memory.used[..., None], 0) for part in (k, v))  # no one may care what unused rows hold
        y, state = each(x, state=start._replace(memory=Memory(*seen, *start.memory[2:])), return_state=True)
        mixed = torch.cat([y.flatten(), state.memory.k.flatten(), state.memory.v.flatten()])
        results.append((y, state, gradients(mixed, each, x, k, v)))
    (y, state, found), (expected_y, expected_state, expected) = results[1], results[0]
    assert error(y, expected_y) <= 1e-12
    assert_same_state(state, expected_state, 1e-12)
    assert gradient_error(found, expected) <= 1e-11
    assert n == 1 or any(g.any() for g in expected[1:3])


@every_band
@pytest.mark.parametrize("n", [1, 5])
def test_padding_anywhere_is_the_loop(case, n, block):
    padding = torch.rand(5, 26, generator=torch.Generator().manual_seed(0)) < 0.4
    padding[0], padding[1, :9], padding[2, 9:], padding[3, 7:11] = True, True, True, True
    x = tokens(5, 52)
    results = []
    for each in both(case, n):
        given = x.clone().requires_grad_()
        first, state = each(given[:, :26], key_padding_mask=padding, return_state=True)
        second, state = each(given[:, 26:], key_padding_mask=padding, state=state, return_state=True)
        y = torch.cat([first, second], 1)
        results.append((y, state, gradients(y, each, given)))
    (expected_y, expected_state, expected), (y, state, found) = results
    assert error(y, expected_y) <= 1e-12
    assert_same_state(state, expected_state, 1e-12)
    assert gradient_error(found, expected) <= 1e-11


@every_band
def test_states_are_exchanged_with_the_loop_in_mid_sequence(case, block):
    x = tokens(2, 40)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[1, [0, 7, 8, 19, 30]] = True  # 7 and 19 are steps of one token
    loop, attention = both(case, 5)
    expected, end = loop(x, key_padding_mask=padding, return_state=True)
    for offset in (0, 1):
        parts, state = [], None
        stretches = zip(x.tensor_split([7, 8, 19, 20, 21], 1), padding.tensor_split([7, 8, 19, 20, 21], 1), strict=True)
        for i, (stretch, mask) in enumerate(stretches):
            part, state = (loop, attention)[(i + offset) % 2](
                stretch, key_padding_mask=mask, state=state, return_state=True
            )
            parts.append(part)
        assert error(torch.cat(parts, 1), expected) <= 1e-12
        assert_same_state(state, end, 1e-12)


@every_band
def test_a_step_leaves_the_state_it_was_given(case):
    attention = build(case, 3)
    _, state = attention(tokens(2, 9), return_state=True)
    before = [part.clone() for part in state._tensors().values()]
    _, after = attention(tokens(2, 1), state=state, return_state=True)
    assert all(torch.equal(a, b) for a, b in zip(before, state._tensors().values(), strict=True))
    assert after.nbytes == state.nbytes


@every_band
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_steps_in_place_are_the_loop(case, n, mode):
    padding = torch.zeros(3, 25, dtype=torch.bool)
    padding[1, :8], padding[2, [5, 6, 7, 20]] = True, True
    loop, attention = both(case, n)
    attention.in_place = True
    with mode():
        x, expected, state, memory = tokens(3, 25), None, None, None
        for stretch in torch.arange(25).split([1] * 6 + [5] + [1] * 14):
            mask = padding[:, stretch] if padding[:, stretch].any() else None
            old, expected = loop(x[:, stretch], key_padding_mask=mask, state=expected, return_state=True)
            new, state = attention(x[:, stretch], key_padding_mask=mask, state=state, return_state=True)
            assert error(new, old) <= 1e-12
            assert_same_state(state, expected, 1e-12)
            assert len(stretch) > 1 or memory in (None, state.memory.k.data_ptr())
            memory = state.memory.k.data_ptr()


def test_a_state_of_inference_mode_may_be_continued_outside_of_it():
    attention = BoundedAttention(8, 2, "window:3", causal=True)
    attention.in_place = True
    x = torch.randn(1, 5, 8)
    with torch.inference_mode():
        _, state = attention(x[:, :4], return_state=True)
    with torch.no_grad():
        assert error(attention(x[:, 4:], state=state), attention(x)[:, 4:]) <= 1e-6


def by_two_queries(q, to_sinks, k, v, sinks, window):
    """Row by row: the first tokens are seen by to_sinks, the last by q."""
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    sink = torch.arange(k.shape[2]) < sinks
    seen = (distance >= 0) & (sink | (distance < window))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.where(sink, to_sinks @ k.mT, q @ k.mT) * 0.3
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("sinks", "window"), [(2, 5), (4, 1), (6, 6)])
@pytest.mark.parametrize("stretches", [[30], [1] * 30, [3, 1, 12, 1, 1, 12]])
@pytest.mark.parametrize("in_place", [False, True])
def test_sinks_may_have_a_query_of_their_own(sinks, window, stretches, in_place, block):
    q, to_sinks, k, v = (torch.randn(2, heads, 30, 4, dtype=torch.float64) for heads in (4, 4, 2, 2))
    expected = by_two_queries(q, to_sinks, k, v, sinks, window)
    options = {"reading": Reading(scale=0.3), "control": "", "in_place": in_place}
    state, out = None, []
    with torch.no_grad():
        for stretch in torch.arange(30).split(stretches):
            given = [x[:, :, stretch] for x in (q, k, v)]
            found, state = banded.banded(
                *given, Band(sinks, window), state, to_sinks=to_sinks[:, :, stretch], **options
            )
            out.append(found)
    assert error(torch.cat(out, 2), expected) <= 1e-12


@pytest.mark.skipif(native.unavailable() is not None, reason="the native kernels are not there")
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("sinks", "window"), [(0, 37), (4, 16), (3, 130)])
@pytest.mark.parametrize(("d", "e"), [(16, 16), (64, 64), (32, 80)])
def test_native_steps_of_a_full_ring(groups, sinks, window, d, e):
    rows = torch.tensor([sinks, sinks + window - 1])[:, None, None, None]
    q, to_sinks = 3 * torch.randn(2, 2, 3 * groups, 1, d)
    k, v = torch.randn(2, 3, 1, d), torch.randn(2, 3, 1, e)
    memory = empty_memory(k, v, sinks + window)
    memory = Memory(torch.randn_like(memory.k), torch.randn_like(memory.v), memory.mass + 1, memory.used | True)
    second = to_sinks if sinks else None
    after_k, after_v = (
        x.scatter(2, rows.expand(2, 3, 1, x.shape[-1]), new) for x, new in ((memory.k, k), (memory.v, v))
    )
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (after_k, after_v))
    scores = q.double() @ keys.mT * 0.3
    scores[..., :sinks] = to_sinks.double() @ keys[:, :, :sinks].mT * 0.3

    def step(q=q, k=k, memory=memory, rows=rows):
        place = Place(rows[:, 0, 0, 0], rows, True, rows[:, 0, 0, 0] + 1, (), None)
        band, reading = Band(sinks, window), Reading(scale=0.3)
        return native.band_step(Token(q, second, k, v, memory, place, band, reading, None, in_place=True))

    expected, before = scores.softmax(-1) @ values, memory
    for width in WIDTHS:
        memory = Memory(*(x.clone() for x in before))
        with vector_width(width):
            found, _ = step(memory=memory)
        assert error(found.double(), expected) <= 2e-6, width
        assert torch.equal(memory.k, after_k)
        assert torch.equal(memory.v, after_v)
    # What does not fit together is not touched.
    shorter = memory._replace(v=memory.v[:, :, 1:].contiguous())
    for unfit in ({"memory": shorter}, {"rows": rows[:1]}, {"q": q[:1]}, {"k": k[:, :1]}):
        assert isinstance(step(**unfit), Declined)


@pytest.mark.skipif(native.unavailable() is not None, reason="the native kernels are not there")
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sinks", [0, 1, 4, 17])
@pytest.mark.parametrize("window", [1, 7, 64, 230, 600])
@pytest.mark.parametrize(("d", "e"), [(16, 48), (64, 64)])
def test_native_bands_are_those_of_torch(groups, sinks, window, d, e, monkeypatch):
    """Chunks of many lengths, of two sequences of which one has padding; torch in fp64 beside them."""
    taken = []
    original = native.band
    monkeypatch.setattr(native, "band", lambda stretch: taken.append(original(stretch)) or taken[-1])
    forms = [(torch.float64, None), *((torch.float32, width) for width in WIDTHS)]
    states = dict.fromkeys(forms)
    for number, t in enumerate((150, 2, 97, 300)):
        inputs = [torch.randn(2, 2, t, width, dtype=torch.float64) for width in (d, e)]
        q, to_sinks = 3 * torch.randn(2, 2, 2 * groups, t, d, dtype=torch.float64)
        padding = torch.zeros(2, t, dtype=torch.bool)
        padding[1, : t // 3] = number in (1, 2)
        found = {}
        for form in forms:
            dtype, width = form
            k, v, by, second = (x.to(dtype) for x in (*inputs, q, to_sinks))
            with vector_width(width):
                found[form], states[form] = banded.banded(
                    *(by, k, v, Band(sinks, window, 1), states[form]),
                    Reading(scale=0.3),
                    control="",
                    key_padding_mask=padding if padding.any() else None,
                    to_sinks=second if sinks and number else None,
                )
        for form in forms[1:]:
            assert error(found[form].double(), found[forms[0]]) <= 1e-5, form  # the contract's
    assert [isinstance(x, Declined) for x in taken] == [True, *[False] * len(WIDTHS)] * 4


@pytest.mark.skipif(native.unavailable() is not None, reason="the native kernels are not there")
def test_a_native_band_of_what_does_not_fit_is_not_read():
    q, k, v, to_sinks = torch.randn(4, 2, 2, 40, 16)
    count = torch.zeros(2, dtype=torch.int64)
    stretch = Stretch(q, to_sinks, k[:, :, :3], v[:, :, :3], k, v, count, count, Band(3, 8), Reading(scale=1.0))
    assert not isinstance(native.band(stretch), Declined)
    unfit = {"q": q[:1], "to_sinks": q[:, :1], "sink_v": v[:, :, :2], "v": v[:, :, 1:], "k": k[:, :1]}
    for name, wrong in (unfit | {"before": count[:1], "missing": count[:1]}).items():
        assert isinstance(native.band(stretch._replace(**{name: wrong})), Declined), name


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_torch_backend_leaves_bands_to_torch(backend, monkeypatch):
    taken = []
    original = native.band
    monkeypatch.setattr(native, "band", lambda stretch: taken.append(1) or original(stretch))
    attention = BoundedAttention(32, 2, "window:5", causal=True, backend=backend)
    with torch.no_grad():
        attention(torch.randn(1, 12, 32))
    assert bool(taken) == (backend == "auto")


def test_a_native_band_is_left_to_torch_where_gradients_are_asked_for():
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    plain, _ = banded.banded(q, k, v, Band(2, 8, 1), None, control="")
    followed, _ = banded.banded(q, k.requires_grad_(), v, Band(2, 8, 1), None, control="")
    assert not plain.requires_grad
    assert followed.requires_grad
    torch.testing.assert_close(plain, followed.detach())


def test_the_query_of_the_sinks_has_its_gradient(block):
    inputs = [torch.randn(2, heads, 30, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 4, 2, 2)]
    q, to_sinks, k, v = inputs
    mixture = torch.randn(2, 4, 30, 4, dtype=torch.float64)
    out, _ = banded.banded(q, k, v, Band(2, 5), None, Reading(scale=0.3), to_sinks=to_sinks, control="")
    found = torch.autograd.grad((out * mixture).sum(), inputs)
    expected = torch.autograd.grad((by_two_queries(*inputs, 2, 5) * mixture).sum(), inputs)
    assert gradient_error(found, expected) <= 1e-11


@every_band
def test_padding_may_hold_anything(case):
    attention = build(case, 3)
    padding = torch.tensor([[True, False, False, True, False, True]])
    x = tokens(1, 6)
    expected = attention(x, key_padding_mask=padding)
    x[padding] = torch.inf
    x.requires_grad_()
    y = attention(x, key_padding_mask=padding)
    assert error(y, expected) <= 1e-12
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad[~padding].isfinite().all()


def test_dropout_falls_on_the_read_weights(block):
    """A window of one token has one weight, 1: dropped or doubled."""
    attention = BoundedAttention(8, 1, "window:1", causal=True, dropout=0.5, bias=False)
    x = torch.randn(1, 400, 8)
    dropped = attention(x)
    whole = attention.eval()(x)
    silent, doubled = (dropped == 0).all(-1), torch.isclose(dropped, 2 * whole, rtol=1e-4, atol=1e-5).all(-1)
    assert (silent ^ doubled).all()
    assert 100 < silent.sum() < 300


def test_what_is_kept_for_the_backward_pass_grows_with_t_alone():
    kept = {}
    for t in (2048, 4096):
        attention = BoundedAttention(8, 2, "window:16", causal=True)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            attention(torch.randn(1, t, 8))
        kept[t] = sum(sizes)
    assert kept[4096] < 2.2 * kept[2048]
