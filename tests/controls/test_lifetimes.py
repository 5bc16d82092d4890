"""`keep`: which tokens it holds, by the rule written out token by token; and what its choice learns from."""

from __future__ import annotations

import pytest
import torch
from contract import error
from torch.nn import functional as F

from abc_attn import BoundedAttention

HEADS, WIDTH, T = 2, 4, 60


def attention(control: str, seed: int = 0, spread: float = 3.0) -> BoundedAttention:
    """Its lives differ between tokens by factors of about e^spread."""
    torch.manual_seed(seed)
    attn = BoundedAttention(HEADS * WIDTH, HEADS, control, causal=True).double()
    for name, weight in attn.control.named_parameters():
        if name.endswith("proj.weight"):
            torch.nn.init.normal_(weight, std=spread * weight.shape[1] ** -0.5)
    return attn


def tokens(t: int = T, b: int = 1) -> torch.Tensor:
    return torch.randn(b, t, HEADS * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def held_by_hand(priority: list[float], slots: int) -> torch.Tensor:
    """Which tokens of one head are in the memory when each is read, `t t`."""
    held, rows = [], torch.zeros(len(priority), len(priority), dtype=torch.bool)
    for t in range(len(priority)):
        if len(held) == slots:
            held.remove(min(held, key=lambda s: priority[s]))
        held.append(t)
        rows[t, held] = True
    return rows


@pytest.mark.parametrize(("control", "sinks", "slots"), [("keep:7", 0, 7), ("global:3+keep:7", 3, 7), ("keep:1", 0, 1)])
def test_a_token_stays_while_its_priority_is_among_the_highest(control, sinks, slots):
    attn, x = attention(control), tokens()
    keep = attn.control if not sinks else attn.control.parts[1]
    priority = (torch.arange(T - sinks) + keep.life(x[:, sinks:]))[0]
    seen = torch.ones(HEADS, T, T, dtype=torch.bool).tril()
    for head in range(HEADS):
        seen[head, sinks:, sinks:] = held_by_hand(priority[head].tolist(), slots)
    assert slots == 1 or not torch.equal(seen, seen.triu(1 - slots))  # it is no window
    q, k, v = (attn._heads(proj(x)) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))
    expected = attn.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))
    assert error(attn(x), expected) < 1e-12
    query = torch.arange(0, T, 3)
    assert torch.equal(attn.control.chosen(x, query)[0] > 0.5, seen[:, query])  # ... and learns from the same tokens


def test_it_starts_as_a_window():
    attn, window, x = attention("global:3+keep:7", spread=0), attention("global:3+window:7"), tokens()
    window.load_state_dict(attn.state_dict(), strict=False)
    assert error(attn(x), window(x)) < 1e-12


def test_any_split_and_padding_keep_the_same_tokens():
    attn, x = attention("global:2+keep:5"), tokens(b=2)
    whole, state = attn(x, return_state=True)
    parts, carried = [], None
    for part in x.split([1, 20, 1, 3, 35], dim=1):
        out, carried = attn(part, state=carried, return_state=True)
        parts.append(out)
    assert error(torch.cat(parts, dim=1), whole) < 1e-12
    assert torch.equal(carried.inner[1], state.inner[1])
    padding = torch.zeros(2, T + 4, dtype=torch.bool)
    padding[:, [0, 9, 10, 30]] = True
    padded = x.new_full((2, T + 4, x.shape[2]), 7.0)
    padded[~padding] = x.flatten(0, 1)
    assert error(attn(padded, key_padding_mask=padding)[~padding].view_as(whole), whole) < 1e-12


def test_no_token_stays_longer_than_its_longest_life_and_the_window():
    torch.manual_seed(0)
    attn = BoundedAttention(8, 2, "keep:4", causal=True, longest=16).double()
    torch.nn.init.normal_(attn.control.proj.weight, std=20.0)
    age = torch.arange(200)[:, None] - torch.arange(200)
    held = attn.control.chosen(tokens(200), torch.arange(200)) > 0.5
    assert 10 < int((age * held).max()) <= 16 + 4


def test_a_choice_learns_what_its_query_needs_and_rows_stay_as_many():
    attn, x, query = attention("keep:6", spread=0.5), tokens(), torch.tensor([T - 1])
    chosen = attn.control.chosen(x, query)
    assert int(chosen.sum()) == HEADS * 6
    life = attn.control.proj.bias
    (grad,) = torch.autograd.grad(chosen.sum(), life, retain_graph=True)
    assert grad.abs().max() < 1e-6  # what one gains another loses
    needed = 20  # a token that is gone by then
    assert not bool(chosen[0, :, 0, needed].any())
    weight = attn.control.proj.weight
    for _ in range(200):
        chosen = attn.control.chosen(x, query)[0, :, 0, needed]
        if bool((chosen > 0.5).all()):
            return
        (grad,) = torch.autograd.grad(chosen.sum(), weight)
        with torch.no_grad():
            weight += 0.05 * F.normalize(grad, dim=-1)
    raise AssertionError("following the gradient never kept the token")


def test_a_priority_that_no_token_has_is_refused():
    attn = attention("keep:4")
    _, state = attn(tokens(9), return_state=True)
    wrong = state._replace(inner=(state.inner[0] + 1e5, state.inner[1]), loaded=True)
    with pytest.raises(ValueError, match="priority"):
        attn(tokens(1), state=wrong)
