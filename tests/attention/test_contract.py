"""What every control promises, in every form: backend, precision, vector width. A control is tested here by being
registered, and so is a backend. What is allowed, and why, is said in contract.py."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from contract import (
    BF16,
    CASES,
    CAUSAL,
    ENCODING,
    FORMS,
    SLOTS,
    TALLY,
    Expected,
    Results,
    accepted,
    as_parameters,
    assert_same_state,
    build,
    compare,
    error,
    few,
    gradient_error,
    gradients,
    judge,
    results,
    shared,
    tokens,
    vector_width,
)

from abc_attn import Memory
from abc_attn.core import prepare, write_token
from abc_attn.kernels import native_gate

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_encoding = pytest.mark.parametrize("case", ENCODING, ids=str)
every_causal = pytest.mark.parametrize("case", CAUSAL, ids=str)
# The decorator on top varies fastest: the forms of a case follow one another and share what is expected of it.
in_every_form = pytest.mark.parametrize("form", as_parameters(FORMS), indirect=True)
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "encoder"])
remembered = lru_cache(maxsize=64)


@pytest.fixture
def form(request, monkeypatch):
    monkeypatch.setattr(native_gate, "LEAST", 1)  # the gates of short texts in one pass too
    monkeypatch.setattr(native_gate, "NARROWEST", 1)
    with vector_width(request.param.width):
        yield request.param


def skip_unless_able(case, causal):
    if causal and case not in CAUSAL:
        pytest.skip("not an online control")
    if not causal and case not in ENCODING:
        pytest.skip("a control for causal attention alone")


# Every number of slots, of tokens below and above it, from nothing and from a state


def sizes(n: int) -> list[tuple[int, int, int]]:
    """Tokens, rows, tokens before them."""
    return [
        (t, b, earlier) for t, b in dict.fromkeys([(1, 1), (max(1, n - 1), 2), (n, 1), (67, 2)]) for earlier in (0, 6)
    ]


def one_pass(case, n, t, b, earlier, backend, dtype=torch.float64) -> Results:
    attention = shared(case, n, dtype=dtype, backend=backend)
    x = tokens(b, earlier + t, dtype).requires_grad_()
    state = attention(x[:, :earlier], return_state=True)[1] if earlier else None
    y, state = attention(x[:, earlier:], state=state, return_state=True)
    return results(y, gradients(y, attention, x), state)


@remembered
def expected_of_one_pass(*size) -> Expected:
    return Expected(lambda backend: one_pass(*size, backend))


MOST = max(SLOTS)  # takes longer than all others


@in_every_form
@pytest.mark.parametrize(
    ("case", "slots"),
    [
        *(pytest.param(case, ns, id=str(case)) for case in CAUSAL if (ns := [n for n in accepted(case) if n < MOST])),
        *(
            pytest.param(case, [MOST], id=f"{case}:{MOST}", marks=pytest.mark.thorough)
            for case in CAUSAL
            if MOST in accepted(case)
        ),
    ],
)
def test_backend_is_the_reference(case, slots, form):
    for n in slots:
        for t, b, earlier in sizes(n):
            found = one_pass(case, n, t, b, earlier, form.backend, form.dtype)
            where = f"{case} n={n} t={t} earlier={earlier}"
            expected = expected_of_one_pass(case, n, t, b, earlier)
            assert found.keys() == expected.results.keys(), where
            judge(found, expected, form, where)


@every_encoding
def test_writing_all_at_once_is_the_loop(case, monkeypatch):
    """The non-causal memory is the one that the write rule leaves after the last token."""

    def loop(k, v, write, memory=None, *, key_padding_mask=None) -> Memory:
        k, v, write, memory = prepare(k, v, write, memory, key_padding_mask)
        for t in range(k.shape[2]):
            log_decay = None if write.log_decay is None else write.log_decay[:, :, t]
            memory = write_token(memory, k[:, :, t], v[:, :, t], write.phi[:, :, t], log_decay)
        return memory

    for n in accepted(case):
        found = []
        for patched in (False, True):
            if patched:
                monkeypatch.setattr("abc_attn.attention.write", loop)
            attention = build(case, n, causal=False, backend="reference" if patched else "auto")
            x = tokens(2, 23).requires_grad_()
            padding = torch.zeros(2, 23, dtype=torch.bool)
            padding[1, 9:] = True
            y, state = attention(x, key_padding_mask=padding, return_state=True)
            found.append((y, gradients(y, attention, x), state))
        monkeypatch.undo()
        (y, grads, state), (reference, expected, expected_state) = found
        assert error(y, reference) <= 1e-10
        assert gradient_error(grads, expected) <= 1e-10
        assert_same_state(state, expected_state, 1e-10)


# A sequence in one call or in several


@remembered
def expected_of_whole(case, t=41) -> Expected:
    def run(backend):
        y, state = shared(case, few(case), backend=backend)(tokens(2, t), return_state=True)
        return results(y, state=state)

    return Expected(run)


@in_every_form
@every_causal
def test_whole_is_split_is_one_by_one(case, form):
    t = 41
    attention = shared(case, few(case), backend=form.backend, dtype=form.dtype)
    x = tokens(2, t, form.dtype)
    y, end = attention(x, return_state=True)
    judge(results(y, state=end), expected_of_whole(case), form, f"{case} whole")
    for cut in (*([k] for k in range(1, t, 7)), [*range(1, t)], [3, 20, 21, 37]):
        parts, state = [], None
        for chunk in x.tensor_split(cut, dim=1):
            part, state = attention(chunk, state=state, return_state=True)
            parts.append(part)
        judge(results(torch.cat(parts, 1), state=state), expected_of_whole(case), form, f"{case} cut at {cut}")
        assert state.nbytes == end.nbytes
        assert state.control == end.control
    assert torch.equal(end.length, torch.tensor([t, t]))


@in_every_form
@every_causal
def test_only_the_past_matters(case, form):
    attention = shared(case, few(case), backend=form.backend, dtype=form.dtype)
    x, whole = tokens(2, 30, form.dtype), expected_of_whole(case, 30)
    y, expected = attention(x), whole.results["outputs"]
    for t in (0, 11, 28):
        future = x.clone()
        future[:, t + 1 :] += tokens(2, 29 - t, form.dtype, seed=5)
        found = attention(future)[:, : t + 1]
        if form.dtype == torch.float64:
            assert error(found, y[:, : t + 1]) <= 1e-12
        # What comes after t is that of the reference, so that the whole can be judged by what is expected of it.
        joined = torch.cat([found.double(), expected[:, t + 1 :]], 1)
        judge(results(joined), whole, form, f"{case} other tokens after {t}")
        past = x.clone()
        past[:, :t] += tokens(2, t, form.dtype, seed=6)
        if t:
            assert error(attention(past)[:, t], y[:, t]) > 1e-4


# Padding

LENGTHS, LONGEST = (9, 23, 14), 23


def padded(attention, dtype, place):
    """Outputs of the real tokens, gradients and state of rows of LENGTHS, of which `place` says where they stand."""
    rows = [tokens(1, length, dtype, seed=length)[0] for length in LENGTHS]
    x = torch.full((len(rows), LONGEST, rows[0].shape[-1]), 7.0, dtype=dtype)  # what padding holds must not matter
    padding = torch.ones(len(rows), LONGEST, dtype=torch.bool)
    spans = [place(length) for length in LENGTHS]
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        x[i, span], padding[i, span] = row, False
    x.requires_grad_()
    y, state = attention(x, key_padding_mask=padding, return_state=True)
    assert (y[padding] == 0).all()
    real = torch.cat([y[i, span] for i, span in enumerate(spans)])
    grad_x, *grads = gradients(real, attention, x)
    assert (grad_x[padding] == 0).all()
    assert state.length.tolist() == list(LENGTHS)
    return results(real, [torch.cat([grad_x[i, span] for i, span in enumerate(spans)]), *grads], state)


def on_the_right(length):
    return slice(0, length)


def on_the_left(length):
    return slice(LONGEST - length, LONGEST)


@remembered
def expected_of_padded(case, causal) -> Expected:
    return Expected(
        lambda backend: padded(shared(case, few(case), causal=causal, backend=backend), torch.float64, on_the_right)
    )


@in_every_form
@causal_or_not
@every_case
def test_padding_is_not_there(case, causal, form):
    skip_unless_able(case, causal)
    attention = shared(case, few(case), causal=causal, backend=form.backend, dtype=form.dtype)
    expected = expected_of_padded(case, causal)
    where = f"{case} {'causal' if causal else 'encoder'}"
    judge(padded(attention, form.dtype, on_the_right), expected, form, f"{where} padding on the right")
    judge(padded(attention, form.dtype, on_the_left), expected, form, f"{where} padding on the left")
    alone = [
        results(y[0], state=state)
        for y, state in (attention(tokens(1, n, form.dtype, seed=n), return_state=True) for n in LENGTHS)
    ]
    if case.control == "softmax":  # its memory is as long as the longest row
        alone = [{"outputs": row["outputs"]} for row in alone]
    joined = {name: torch.cat([row[name] for row in alone]) for name in alone[0]}
    judge(joined, expected, form, f"{where} row by row")


@remembered
def expected_without_padding(case) -> Expected:
    def run(backend):
        real = torch.ones(18, dtype=torch.bool)
        real[[7, 8, 11, 12, 13]] = False
        y, state = shared(case, few(case), backend=backend)(tokens(2, 18)[:, real], return_state=True)
        return results(y[:, 7:], state=state)

    return Expected(run)


@in_every_form
@every_causal
def test_padding_in_the_middle_of_a_continued_sequence(case, form):
    attention = shared(case, few(case), backend=form.backend, dtype=form.dtype)
    x = tokens(2, 18, form.dtype)
    padding = torch.zeros(2, 18, dtype=torch.bool)
    padding[:, [7, 8, 11, 12, 13]] = True
    _, state = attention(x[:, :7], return_state=True)
    y, end = attention(x[:, 7:], key_padding_mask=padding[:, 7:], state=state, return_state=True)
    found = results(y[:, ~padding[0, 7:]], state=end)
    judge(found, expected_without_padding(case), form, f"{case} padding in the middle")


@remembered
def expected_from_nothing(case) -> Expected:
    return Expected(lambda backend: results(shared(case, few(case), backend=backend)(tokens(2, 5, seed=9)[:1])))


@in_every_form
@causal_or_not
@every_case
def test_rows_of_padding_give_zeros(case, causal, form):
    skip_unless_able(case, causal)
    attention = shared(case, few(case), causal=causal, backend=form.backend, dtype=form.dtype)
    x = tokens(2, 12, form.dtype).requires_grad_()
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0] = True
    y, state = attention(x, key_padding_mask=padding, return_state=True)
    assert (y[0] == 0).all()
    assert (y[1] != 0).any()
    assert state.length.tolist() == [0, 12]
    assert all(g.isfinite().all() for g in gradients(y, attention, x))
    if causal:  # the padded row is as good as new
        later = attention(tokens(2, 5, form.dtype, seed=9), state=state)[:1]
        judge(results(later), expected_from_nothing(case), form, f"{case} after a row of padding")


@causal_or_not
@every_case
def test_gradcheck(case, causal):
    skip_unless_able(case, causal)
    attention = build(case, accepted(case)[0] if len(accepted(case)) == 1 else accepted(case)[1], causal=causal)
    padding = torch.tensor([[False] * 7, [True, True] + [False] * 5])
    x = tokens(2, 7).requires_grad_()

    def forward(x, *parameters):
        return torch.func.functional_call(
            attention, dict(zip(names, parameters, strict=True)), x, {"key_padding_mask": padding}
        )

    names = [name for name, _ in attention.named_parameters()]
    assert torch.autograd.gradcheck(forward, (x, *attention.parameters()), fast_mode=True)


@causal_or_not
@every_case
def test_bf16_autocast(case, causal):
    skip_unless_able(case, causal)
    for n in accepted(case):

        def run(backend, n=n):
            with torch.no_grad():
                return results(shared(case, n, causal=causal, backend=backend)(tokens(2, 21)))

        attention = build(case, n, causal=causal, dtype=torch.float32)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = attention(tokens(2, 21, torch.float32), return_state=True)
        (outputs,) = compare(results(y), Expected(run, BF16))
        where = f"{case} {'causal' if causal else 'encoder'} n={n}"
        TALLY.add("auto-bf16", 1, outputs.ratio, where)
        assert outputs.error <= outputs.allowed, f"{where}: error {outputs.error:.3g}, allowed {outputs.allowed:.3g}"
        assert state.memory.k.dtype == state.memory.v.dtype == state.memory.mass.dtype == torch.float32


@every_encoding
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
