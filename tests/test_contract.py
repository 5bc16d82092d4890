"""What every control promises, in every form. A control is tested here by being registered."""

from __future__ import annotations

import pytest
import torch
from contract import CASES, CAUSAL, accepted, build, error, few, gradient_error, gradients, tokens

from abc_attn import Memory, State
from abc_attn.core import prepare, write_token
from abc_attn.kernels.native import LIBRARY

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_causal = pytest.mark.parametrize("case", CAUSAL, ids=str)
NATIVE = (torch.float32, 1e-5)
needs_native = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))
in_every_form = pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("torch", torch.float64, 1e-10), pytest.param("native", *NATIVE, marks=needs_native)],
    ids=["torch", "native"],
)


def assert_same_state(a: State, b: State, tolerance: float) -> None:
    assert a.control == b.control
    for name, part in b._tensors().items():
        other = a._tensors()[name]
        finite = part.isfinite()  # the logarithm of an empty sum is -inf
        assert torch.equal(finite, other.isfinite()), name
        assert error(other.where(finite, 0).double(), part.where(finite, 0).double()) <= tolerance, name


@every_causal
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        ("torch", torch.float64, 1e-10),
        ("torch", torch.float32, 1e-5),
        pytest.param("native", *NATIVE, marks=needs_native),
    ],
    ids=["torch-fp64", "torch-fp32", "native"],
)
def test_backend_is_the_reference(case, backend, dtype, tolerance):
    # With few features a denominator of rfa may come near zero, and no fp32 arithmetic is good to 1e-5 there.
    near_zero = case.control.startswith("rfa") and "floor" not in case.options and dtype == torch.float32
    for n in accepted(case)[-1:] if near_zero else accepted(case):
        for t, b in ((1, 1), (max(1, n - 1), 2), (n, 1), (67, 2)):
            for earlier in (0, 6):
                results = []
                for each in ("reference", backend):
                    attention = build(case, n, dtype=dtype, backend=each)
                    x = tokens(b, earlier + t, dtype).requires_grad_()
                    y, state = attention(x[:, :earlier], return_state=True) if earlier else (x[:, :0], None)
                    y, state = attention(x[:, earlier:], state=state, return_state=True)
                    results.append((y, gradients(y, attention, x), state))
                (reference, expected, expected_state), (y, found, state) = results
                where = f"n={n} t={t} earlier={earlier}"
                assert error(y, reference) <= tolerance, where
                assert gradient_error(found, expected) <= tolerance, where
                assert_same_state(state, expected_state, tolerance)


@every_case
def test_writing_all_at_once_is_the_loop(case, monkeypatch):
    """The non-causal memory is the one that the write rule leaves after the last token."""

    def loop(k, v, write, memory=None, *, key_padding_mask=None) -> Memory:
        k, v, write, memory = prepare(k, v, write, memory, key_padding_mask)
        for t in range(k.shape[2]):
            log_decay = None if write.log_decay is None else write.log_decay[:, :, t]
            memory = write_token(memory, k[:, :, t], v[:, :, t], write.phi[:, :, t], log_decay)
        return memory

    for n in accepted(case):
        results = []
        for patched in (False, True):
            if patched:
                monkeypatch.setattr("abc_attn.attention.write", loop)
            attention = build(case, n, causal=False, backend="reference" if patched else "auto")
            x = tokens(2, 23).requires_grad_()
            padding = torch.zeros(2, 23, dtype=torch.bool)
            padding[1, 9:] = True
            y, state = attention(x, key_padding_mask=padding, return_state=True)
            results.append((y, gradients(y, attention, x), state))
        monkeypatch.undo()
        (y, found, state), (reference, expected, expected_state) = results
        assert error(y, reference) <= 1e-10
        assert gradient_error(found, expected) <= 1e-10
        assert_same_state(state, expected_state, 1e-10)


@every_causal
@in_every_form
def test_whole_is_split_is_one_by_one(case, backend, dtype, tolerance):
    n, t = few(case), 41
    attention = build(case, n, backend=backend, dtype=dtype)
    x = tokens(2, t, dtype)
    y, end = attention(x, return_state=True)
    for cuts in ([k] for k in range(1, t, 7)), [[*range(1, t)]], [[3, 20, 21, 37]]:
        for cut in cuts:
            parts, state = [], None
            for piece in x.tensor_split(cut, dim=1):
                part, state = attention(piece, state=state, return_state=True)
                parts.append(part)
            assert error(torch.cat(parts, 1), y) <= tolerance, cut
            assert_same_state(state, end, tolerance)
            assert state.nbytes == end.nbytes
    assert torch.equal(end.length, torch.tensor([t, t]))


@every_causal
@in_every_form
def test_only_the_past_matters(case, backend, dtype, tolerance):
    attention = build(case, few(case), backend=backend, dtype=dtype)
    x = tokens(1, 30, dtype)
    y = attention(x)
    for t in (0, 11, 28):
        future = x.clone()
        future[:, t + 1 :] += tokens(1, 29 - t, dtype, seed=5)
        assert error(attention(future)[:, : t + 1], y[:, : t + 1]) <= (1e-12 if dtype == torch.float64 else tolerance)
        past = x.clone()
        past[:, :t] += tokens(1, t, dtype, seed=6)
        if t:
            assert error(attention(past)[:, t], y[:, t]) > 1e-4


@every_case
@in_every_form
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
def test_padding_is_not_there(case, causal, backend, dtype, tolerance):
    if causal and case not in CAUSAL:
        pytest.skip("not an online control")
    attention = build(case, few(case), causal=causal, backend=backend, dtype=dtype)
    lengths, t = (9, 23, 14), 23
    rows = [tokens(1, length, dtype, seed=length)[0] for length in lengths]

    def run(place):
        x = torch.full((len(rows), t, rows[0].shape[-1]), 7.0, dtype=dtype)  # what padding holds must not matter
        padding = torch.ones(len(rows), t, dtype=torch.bool)
        spans = [place(length) for length in lengths]
        for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
            x[i, span], padding[i, span] = row, False
        x.requires_grad_()
        y, state = attention(x, key_padding_mask=padding, return_state=True)
        assert (y[padding] == 0).all()
        real = torch.cat([y[i, span] for i, span in enumerate(spans)])
        grad_x, *grads = gradients(real, attention, x)
        assert (grad_x[padding] == 0).all()
        return real, [torch.cat([grad_x[i, span] for i, span in enumerate(spans)]), *grads], state

    right, right_grads, right_state = run(lambda length: slice(0, length))
    left, left_grads, left_state = run(lambda length: slice(t - length, t))
    assert error(left, right) <= tolerance
    assert gradient_error(left_grads, right_grads) <= tolerance
    assert_same_state(left_state, right_state, tolerance)
    assert right_state.length.tolist() == list(lengths)

    alone = [attention(row[None], return_state=True) for row in rows]
    assert error(torch.cat([y[0] for y, _ in alone]), right) <= tolerance
    for i, (_, state) in enumerate(alone):
        if case.control != "softmax":  # its memory is as long as the longest row
            assert_same_state(state, right_state.reorder(torch.tensor([i])), tolerance)


@every_causal
@in_every_form
def test_padding_in_the_middle_of_a_continued_sequence(case, backend, dtype, tolerance):
    attention = build(case, few(case), backend=backend, dtype=dtype)
    x = tokens(2, 18, dtype)
    padding = torch.zeros(2, 18, dtype=torch.bool)
    padding[:, [7, 8, 11, 12, 13]] = True
    _, state = attention(x[:, :7], return_state=True)
    y, end = attention(x[:, 7:], key_padding_mask=padding[:, 7:], state=state, return_state=True)
    alone, alone_end = attention(x[:, ~padding[0]], return_state=True)
    assert error(y[:, ~padding[0, 7:]], alone[:, 7:]) <= tolerance
    assert_same_state(end, alone_end, tolerance)


@every_case
@in_every_form
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
def test_rows_of_padding_give_zeros(case, causal, backend, dtype, tolerance):
    if causal and case not in CAUSAL:
        pytest.skip("not an online control")
    attention = build(case, few(case), causal=causal, backend=backend, dtype=dtype)
    x = tokens(2, 12, dtype).requires_grad_()
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0] = True
    y, state = attention(x, key_padding_mask=padding, return_state=True)
    assert (y[0] == 0).all()
    assert (y[1] != 0).any()
    assert state.length.tolist() == [0, 12]
    assert all(g.isfinite().all() for g in gradients(y, attention, x))
    if causal:  # the padded row is as good as new
        later = tokens(2, 5, dtype, seed=9)
        assert error(attention(later, state=state)[0], attention(later[:1])[0]) <= tolerance


@every_case
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
def test_gradcheck(case, causal):
    if causal and case not in CAUSAL:
        pytest.skip("not an online control")
    attention = build(case, accepted(case)[0] if len(accepted(case)) == 1 else accepted(case)[1], causal=causal)
    padding = torch.tensor([[False] * 7, [True, True] + [False] * 5])
    x = tokens(2, 7).requires_grad_()

    def forward(x, *parameters):
        return torch.func.functional_call(
            attention, dict(zip(names, parameters, strict=True)), x, {"key_padding_mask": padding}
        )

    names = [name for name, _ in attention.named_parameters()]
    assert torch.autograd.gradcheck(forward, (x, *attention.parameters()), fast_mode=True)


@every_case
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
def test_bf16_autocast(case, causal):
    if causal and case not in CAUSAL:
        pytest.skip("not an online control")
    name = case.control.split(":")[0]
    for n in accepted(case)[-1:] if name in AT_MOST_SLOTS else accepted(case):
        attention = build(case, n, causal=causal, dtype=torch.float32)
        x = tokens(2, 21, torch.float32)
        reference = attention(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = attention(x, return_state=True)
        assert error(y.float(), reference) <= 2e-2, n
        assert state.memory.k.dtype == state.memory.v.dtype == state.memory.mass.dtype == torch.float32


# Functions that no arithmetic can follow from rounded keys where slots are few; they are compared with the most slots.
AT_MOST_SLOTS = {
    "cluster": "not continuous: a rounded key may join another cluster",
    "rfa": "weights of both signs: with few features a denominator may come near zero",
    "t2r": "rectified: with few features all of a query's may come near zero",
}


@every_case
def test_cross_attention(case):
    """A context is written, then read by other queries; a state without context is only read."""
    attention = build(case, few(case), causal=False, context_dim=EMBED_CONTEXT)
    context = torch.randn(2, 17, EMBED_CONTEXT, dtype=torch.float64)
    x = tokens(2, 5)
    y, state = attention(x, context, return_state=True)
    one_by_one = torch.cat([attention(x[:, t, None], state=state) for t in range(5)], dim=1)
    assert error(one_by_one, y) <= 1e-10

    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[:, :3] = True
    left = attention(x, torch.cat([torch.full_like(context[:, :3], 9.0), context], 1), key_padding_mask=padding)
    right = attention(
        x, torch.cat([context, torch.full_like(context[:, :3], 9.0)], 1), key_padding_mask=padding.flip(1)
    )
    assert error(left, y) <= 1e-10
    assert error(right, y) <= 1e-10

    _, first = attention(x, context[:, :6], return_state=True)
    if attention.control.appends:
        appended, both = attention(x, context[:, 6:], state=first, return_state=True)
        assert error(appended, y) <= 1e-10
        assert_same_state(both, state, 1e-10)
    else:
        with pytest.raises(ValueError, match="whole sequence"):
            attention(x, context[:, 6:], state=first)


EMBED_CONTEXT = 12
