"""Controls that keep what matters: what that is, by the rule written out token by token; and any split of a text."""

from __future__ import annotations

import math
import random

import pytest
import torch
from contract import error
from torch.nn import functional as F

from abc_attn import BoundedAttention, State, make_control
from abc_attn.controls.keeping import PIECE
from abc_attn.kernels import kept

HEADS, WIDTH = 2, 16
SIZES = {"embed_dim": HEADS * WIDTH, "num_heads": HEADS, "causal": True}


def attention(control: str, **options) -> BoundedAttention:
    torch.manual_seed(0)
    return BoundedAttention(HEADS * WIDTH, HEADS, control, causal=True, **options).double()


def tokens(t: int, b: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(b, t, HEADS * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seen_by_hand(
    rule: str,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    sinks: int,
    window: int,
    most: int,
    block: int,
) -> torch.Tensor:
    """Which tokens each query of one key head reads, `t t`, from its keys and values `t d` and queries `g t d`."""
    t = len(keys)
    seen, kept, waiting = torch.zeros(t, t, dtype=torch.bool), [], []
    attention = {token: [] for token in range(t)}  # what the queries since the last decision have given to it
    mean, left = torch.zeros_like(keys[0]), 0
    for now in range(t):
        if now > sinks and (now - sinks) % block == 0:
            out = [token for token in waiting if token < now - window]
            waiting = waiting[len(out) :]
            for token in out:
                left += 1
                mean = mean + (F.normalize(keys[token], dim=0) - mean) / left
            worth = {token: -F.cosine_similarity(keys[token], mean, dim=0) for token in kept + out}
            if rule == "knorm":
                worth = {token: -keys[token].norm() for token in kept + out}
            if rule == "tova":
                got = {token: sum(attention[token]) / len(attention[token]) for token in kept + out}
                worth = {token: (round(4096 * math.log2(got[token])), token) for token in got}  # ties: the later
            if rule == "leverage" and out:
                ends = F.pad(values, (0, 1), value=1.0)
                gone = ends[sinks : out[-1] + 1]  # all that have left
                moment = gone.T @ gone
                moment += torch.diag(F.pad((gone[:, :-1] ** 2).sum(0).mean().expand(values.shape[1]), (0, 1))) * 1e-3
                of = {token: ends[token] @ torch.linalg.solve(moment, ends[token]) for token in kept + out}
                worth = {token: (round(1024 * math.log2(of[token])), token) for token in of}
            attention = {token: [] for token in range(t)}
            kept = sorted(kept + out, key=worth.__getitem__)[-most:]
        if now >= sinks:
            waiting.append(now)
            own = kept + waiting
            weights = (queries[:, now] @ keys[own].mT * keys.shape[1] ** -0.5).softmax(-1).mean(0)
            for token, weight in zip(own, weights, strict=True):
                attention[token].append(weight)
        seen[now, [*range(min(now + 1, sinks)), *kept, *waiting]] = True
    return seen


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("control", "sizes"),
    [
        ("keydiff:5", (0, 0, 5, 4)),
        ("global:3+window:6+keydiff:5", (3, 6, 5, 4)),
        ("window:3+knorm:4", (0, 3, 4, 7)),
        ("leverage:5", (0, 0, 5, 4)),
        ("global:3+window:6+leverage:5", (3, 6, 5, 4)),
        ("tova:5", (0, 0, 5, 4)),
        ("global:3+window:6+tova:5", (3, 6, 5, 4)),
        ("window:3+tova:4", (0, 3, 4, 7)),
    ],
)
@pytest.mark.parametrize("heads", [HEADS, 1], ids=["", "grouped"])
def test_what_is_kept_by_the_rule(control, sizes, heads, backend):
    attn, x = attention(control, block=sizes[3], backend=backend, num_kv_heads=heads), tokens(90)
    rule = control.split("+")[-1].split(":")[0]
    with torch.no_grad():
        q, k, v = (attn._heads(project(x)) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
        by_key = q[0].unflatten(0, (heads, -1))
        seen = torch.stack([seen_by_hand(rule, *pair, *sizes) for pair in zip(k[0], v[0], by_key, strict=True)])
        assert seen.sum(-1).max() == attn.control.rows  # never more than declared, and all of it is used
        group = HEADS // heads
        k, v, seen = (part.repeat_interleave(group, -3) for part in (k, v, seen))
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None])
        y = attn(x)
        expected = attn.out_proj(expected.transpose(1, 2).flatten(2))
        assert error(y, expected) <= 1e-12
        assert error(attn.float()(x.float()).double(), expected) <= 1e-5  # heads of 16 channels: native bands too


@pytest.mark.parametrize("rule", ["keydiff", "leverage"])
def test_no_token_stays_longer_than_the_longest(rule):
    """A token that is too old goes as others come: after as many as there are slots, and a block, it is gone."""
    ages = {}
    for longest in (None, 20):
        attn, x = attention(f"window:3+{rule}:5", block=4, longest=longest), tokens(400)
        with torch.no_grad():
            _, state = attn(x, return_state=True)
        ages[longest] = 400 - int(state.inner[1][state.inner[1] >= 0].min())
    assert ages[20] <= 20 + 5 + 2 * 4 < ages[None]
    check_splits(20, f"window:3+{rule}:5", block=4, t=60, longest=20)


def check_splits(number: int, control: str, block: int, t: int, b: int = 1, longest: int | None = None) -> None:
    """Random splits give the outputs and the state of the whole; no state has more rows than declared."""
    attn, x = attention(control, block=block, longest=longest), tokens(t, b)
    draw = random.Random(0)
    with torch.no_grad():
        y, whole = attn(x, return_state=True)
        for _ in range(number):
            cuts = sorted(draw.sample(range(1, t), draw.choice((1, 2, 3, 8))))
            state, parts = None, []
            for part in x.tensor_split(cuts, dim=1):
                out, state = attn(part, state=state, return_state=True)
                parts.append(out)
                assert state.memory.k.shape[2] == attn.control.rows
                assert state.nbytes == whole.nbytes
            assert error(torch.cat(parts, 1), y) <= 1e-12, cuts
            for (name, part), other in zip(state._tensors().items(), whole._tensors().values(), strict=True):
                same = (
                    torch.allclose(part, other, rtol=0, atol=1e-12) if part.is_floating_point() else part.equal(other)
                )
                assert same, (name, cuts)


RULES = [
    "global:2+window:4+keydiff:5",
    "window:4+knorm:5",
    "global:2+window:4+leverage:5",
    "global:2+window:4+tova:5",
]


@pytest.mark.parametrize("control", [*RULES, "tova:5"])
def test_a_split_changes_nothing(control):
    check_splits(150, control, block=4, t=33)


@pytest.mark.parametrize("control", ["keydiff", "leverage", "tova"])
def test_a_split_inside_long_pieces_changes_nothing(control):
    assert PIECE == kept.PIECE  # tokens that are taken at once
    check_splits(1, f"global:4+window:20+{control}:24", block=64, t=PIECE + 150)


@pytest.mark.nightly
@pytest.mark.parametrize("control", RULES)
def test_ten_thousand_splits_change_nothing(control):
    check_splits(10_000, control, block=4, t=33)


def test_the_same_token_twice_is_a_tie_whatever_the_rounding():
    """A text that repeats itself has equal norms everywhere; the later token stays, in any split."""
    attn = attention("window:3+knorm:4", block=4)
    x = tokens(6).repeat(1, 9, 1)
    with torch.no_grad():
        _, whole = attn(x, return_state=True)
        nudged = attn(x * (1 + 1e-12 * tokens(54, seed=2)), return_state=True)[1]
    assert whole.inner[1].equal(nudged.inner[1])


@pytest.mark.parametrize("control", ["keydiff", "tova"])
def test_rows_that_stand_at_different_places(control):
    """Rows of a batch of which one has padding decide at different tokens, also one at a time."""
    attn, x = attention(f"global:2+window:4+{control}:5", block=4), tokens(40, 2)
    padding = torch.zeros(2, 30, dtype=torch.bool)
    padding[1, :7] = True
    with torch.no_grad():
        _, state = attn(x[:, :30], key_padding_mask=padding, return_state=True)
        together = []
        for t in range(30, 40):
            y, state = attn(x[:, t : t + 1], state=state, return_state=True)
            together.append(y)
        for row, begin in ((0, 0), (1, 7)):
            alone = attn(x[row : row + 1, begin:])[:, -10:]
            assert error(torch.cat(together, 1)[row : row + 1], alone) <= 1e-12


def test_half_precision_has_a_whole_state():
    attn = attention("window:4+keydiff:5", block=4).to(torch.bfloat16)
    with torch.no_grad():
        y, state = attn(tokens(30).bfloat16(), return_state=True)
    assert y.dtype == torch.bfloat16
    assert state.memory.k.dtype == torch.float32


def test_names_and_sizes():
    control = make_control("keydiff:256+global:4+window:252", **SIZES)
    assert control.describe() == "global:4+window:252+keydiff:256"
    assert (control.slots, control.rows) == (512, 576)
    assert make_control("window:8+knorm:8", **SIZES, block=16).rows == 32
    with pytest.raises(ValueError, match="beside one window, got"):
        make_control("window:8+knorm:8+keydiff:8", **SIZES)
    with pytest.raises(ValueError, match="takes no gate"):
        make_control("window:8+knorm:8", **SIZES, gate=True)
    with pytest.raises(ValueError, match="block must be a whole number from 1, got 0"):
        make_control("knorm:8", **SIZES, block=0)
    with pytest.raises(ValueError, match="control 'tova' must be causal: it decides by the queries"):
        make_control("window:8+tova:8", **SIZES | {"causal": False})


def test_attention_that_no_query_gave_is_refused(tmp_path):
    attn = attention("global:2+window:4+tova:5", block=4)
    with torch.no_grad():
        state = attn(tokens(31), return_state=True)[1]
        given = state.inner[-1]
        assert error(given.sum(-1), torch.ones(1, HEADS, dtype=torch.float64)) <= 1e-12  # 29 of its own: 1 in the block
        state._replace(inner=(*state.inner[:-1], given)).save(tmp_path / "state")
        attn(tokens(1), state=State.load(tmp_path / "state"))
        state._replace(inner=(*state.inner[:-1], given * 3)).save(tmp_path / "state")
        with pytest.raises(ValueError, match="attention to rows is not that of the last queries of control 'tova'"):
            attn(tokens(1), state=State.load(tmp_path / "state"))


@pytest.mark.parametrize("change", ["a place twice", "a place to come", "one place too many", "another row in use"])
def test_a_damaged_state_is_refused(change, tmp_path):
    attn = attention("global:2+window:4+keydiff:5", block=4)
    with torch.no_grad():
        state = attn(tokens(31), return_state=True)[1]
    place = state.inner[2].clone()
    empty, filled = place[0, 0].argmin(), place[0, 0].argmax()
    if change == "a place twice":
        place[0, 0, filled] = place[0, 0].sort().values[-2]
    elif change == "a place to come":
        place[0, 0, filled] = 31
    elif change == "one place too many":
        place[0, 0, empty] = 0
    else:
        state.memory.used[0, 0, 2 + empty] = True
    state._replace(inner=(*state.inner[:2], place, *state.inner[3:])).save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"places in the text|memory\.used does not mark"):
        attn(tokens(1), state=State.load(tmp_path / "state"))
