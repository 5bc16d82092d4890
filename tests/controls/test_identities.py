"""Every control is a textbook form. The right-hand sides here write that form out literally, in plain torch.

Axes: b batch, h heads, t tokens, n slots, d width.
"""

import math
from functools import partial

import pytest
import torch
from contract import error, gradient_error, gradients
from torch import Tensor, nn
from torch.nn import functional as F

from abc_attn import CONTROLS, BoundedAttention

B, T, HEADS, WIDTH = 2, 13, 2, 4
EMBED = HEADS * WIDTH
Memories = list[tuple[Tensor, Tensor, Tensor]]  # K, V and which slots are filled, after each token


def attention(control: str, slots: int | None = None, *, causal: bool = True, **options) -> BoundedAttention:
    torch.manual_seed(0)
    return BoundedAttention(EMBED, HEADS, control, slots, causal=causal, **options).double()


def tokens(t: int = T, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, t, EMBED, dtype=torch.float64, generator=generator).requires_grad_()


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


def project(attn: BoundedAttention, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    context = x if context is None else context
    return split_heads(attn.q_proj(x)), split_heads(attn.k_proj(context)), split_heads(attn.v_proj(context))


def finish(attn: BoundedAttention, out: Tensor) -> Tensor:
    return attn.out_proj(out.transpose(1, 2).flatten(2))


def assert_same(out: Tensor, expected: Tensor, attn: nn.Module, *inputs: Tensor) -> None:
    """In the outputs, and in the gradients of everything the two depend on."""
    assert error(out, expected) < 1e-10
    assert gradient_error(gradients(out, attn, *inputs), gradients(expected, attn, *inputs)) < 1e-10


def assert_form(attn: BoundedAttention, x: Tensor, form) -> None:
    """attn(x) is form(q, k, v) between the projections."""
    assert_same(attn(x), finish(attn, form(*project(attn, x))), attn, x)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(d)) v over what is seen; zeros where nothing is."""
    weights = (q @ k.mT / WIDTH**0.5).exp()
    weights = weights if seen is None else weights * seen
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1) @ v


def read_each(q: Tensor, memories: Memories) -> Tensor:
    """Query t reads the memory after token t."""
    return torch.cat([attend(q[:, :, t : t + 1], *memory) for t, memory in enumerate(memories)], dim=2)


def distance(t: int) -> Tensor:
    """t - j, of query t from key j."""
    return torch.arange(t)[:, None] - torch.arange(t)


def gates(attn: BoundedAttention, x: Tensor) -> Tensor:
    """g = sigmoid(w x + bias), b h t 1."""
    gate = attn.control.gate
    return torch.sigmoid(x @ gate.weight.T + gate.bias).mT[..., None]


# softmax and window


@pytest.mark.parametrize(("control", "slots", "t"), [("softmax", None, 13), ("window", 13, 13), ("window", 80, 70)])
def test_enough_slots_make_it_causal_softmax_attention(control, slots, t):
    assert_form(attention(control, slots), tokens(t), partial(F.scaled_dot_product_attention, is_causal=True))


@pytest.mark.parametrize("control", ["softmax", "window"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_scale_replaces_that_of_the_width(control, backend):
    attn = attention(control, scale=0.3, backend=backend)
    assert_form(attn, tokens(), partial(F.scaled_dot_product_attention, is_causal=True, scale=0.3))


def test_global_and_window_are_softmax_attention_up_to_their_slots():
    attn, x = attention("global:4+window:60"), tokens(80)
    expected = finish(attn, F.scaled_dot_product_attention(*project(attn, x), is_causal=True))
    assert error(attn(x)[:, :64], expected[:, :64]) < 1e-10
    assert error(attn(x)[:, 64:], expected[:, 64:]) > 1e-3


@pytest.mark.parametrize("n", [1, 3, 5])
def test_window_is_banded_attention(n):
    band = (distance(70) >= 0) & (distance(70) < n)
    assert_form(attention("window", n), tokens(70), partial(F.scaled_dot_product_attention, attn_mask=band))


def queue(k: Tensor, v: Tensor, n: int, gate: Tensor | None = None) -> Memories:
    """Section 3.3: K_t = U K_{t-1} + e_n (x) k_t, its last t slots filled; with a gate, g U K_{t-1} + (1 - g) ..."""
    U, e_n = torch.ones(n - 1).diag(1).double(), torch.eye(n)[:, -1:].double()
    K = V = torch.zeros(B, HEADS, n, WIDTH, dtype=torch.float64)
    memories = []
    for t in range(k.shape[2]):
        keep, share = (1, 1) if gate is None else (gate[:, :, t, None], 1 - gate[:, :, t, None])
        K = keep * (U @ K) + share * e_n * k[:, :, t, None]
        V = keep * (U @ V) + share * e_n * v[:, :, t, None]
        memories.append((K, V, torch.arange(n) >= n - 1 - t))
    return memories


@pytest.mark.parametrize("n", [1, 4])
def test_window_is_the_upper_shift_recurrence(n):
    assert_form(attention("window", n), tokens(), lambda q, k, v: read_each(q, queue(k, v, n)))


def test_window_over_a_whole_sequence_holds_its_last_tokens():
    assert_form(attention("window", 4, causal=False), tokens(), lambda q, k, v: attend(q, k[:, :, -4:], v[:, :, -4:]))


# dilated


def test_dilated_is_the_two_queues_of_the_appendix():
    def two_queues(q, k, v):
        odd, even = (queue(k[:, :, i::2], v[:, :, i::2], 3) for i in (0, 1))  # the paper counts from 1
        return read_each(q, [(even if t % 2 else odd)[t // 2] for t in range(q.shape[2])])

    assert_form(attention("dilated", 3), tokens(), two_queues)


def test_dilated_is_a_strided_mask():
    apart = distance(20)
    mask = (apart >= 0) & (apart % 3 == 0) & (apart < 3 * 2)
    assert_form(attention("dilated", 2, dilation=3), tokens(20), lambda q, k, v: attend(q, k, v, mask))


def test_dilated_over_a_whole_sequence_reads_the_queue_of_its_last_token():
    kept = [6, 9, 12]
    attn = attention("dilated", 3, dilation=3, causal=False)
    assert_form(attn, tokens(), lambda q, k, v: attend(q, k[:, :, kept], v[:, :, kept]))


# global


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("slots", "options", "held"),
    [
        (4, {}, [0, 1, 2, 3]),
        (3, {"positions": [2, 7, 9]}, [2, 7, 9]),
        (3, {"every": 4}, [0, 4, 8]),
        (20, {"every": 5}, [0, 5, 10]),
    ],
)
def test_global_is_attention_over_the_chosen_tokens(slots, options, held, causal):
    seen = torch.arange(T)[:, None] >= torch.tensor(held) if causal else None
    attn = attention("global", slots, causal=causal, **options)
    assert_form(attn, tokens(), lambda q, k, v: attend(q, k[:, :, held], v[:, :, held], seen))


# compressive


def test_compressive_is_mean_pooling():
    def pooled(q, k, v):
        return attend(q, *(y.view(B, HEADS, 4, 3, WIDTH).mean(3) for y in (k, v)))

    assert_form(attention("compressive", 4, causal=False), tokens(12), pooled)


@pytest.mark.parametrize(("options", "c"), [({}, 4), ({"ratio": 3}, 3)])
def test_causal_compressive_keeps_the_last_groups_and_the_sum_of_the_open_one(options, c):
    n = 2

    def groups(q, k, v):
        memories = []
        for t in range(q.shape[2]):
            starts = range(0, t + 1, c)[-n:]
            K, V = (torch.stack([y[:, :, s : min(s + c, t + 1)].sum(2) / c for s in starts], dim=2) for y in (k, v))
            memories.append((K, V, torch.ones(len(starts))))
        return read_each(q, memories)

    assert_form(attention("compressive", n, **options), tokens(23), groups)


# linformer


def test_linformer_projects_keys_and_values_along_time():
    attn = attention("linformer", 3, causal=False, max_length=20)
    W = attn.control.weight[:, :T]
    assert_form(attn, tokens(), lambda q, k, v: attend(q, W @ k, W @ v))


@pytest.mark.parametrize("causal", [True, False])
def test_linformer_that_starts_as_the_identity_has_each_token_in_a_slot(causal):
    attn = attention("linformer", 20, causal=causal, max_length=45, start="identity")
    _, state = attn(tokens(), return_state=True)
    k, v = project(attn, tokens())[1:]
    assert error(state.memory.k, F.pad(k, (0, 0, 0, 20 - T))) < 1e-12
    assert error(state.memory.v, F.pad(v, (0, 0, 0, 20 - T))) < 1e-12
    assert torch.equal(attn.control.weight[:, 20:40], attn.control.weight[:, :20])


def test_causal_linformer_sums_the_prefix():
    attn = attention("linformer", 3, max_length=20)
    W = attn.control.weight

    def prefixes(q, k, v):
        K, V = ((W[:, :T].T[:, :, None] * y[:, :, :, None]).cumsum(2) for y in (k, v))  # sum_i W[:, i] (x) k_i
        return read_each(q, [(K[:, :, t], V[:, :, t], torch.ones(3)) for t in range(T)])

    assert_form(attn, tokens(), prefixes)


# cluster


def k_means(k: Tensor, n: int, iterations: int) -> list[int]:
    """Which cluster each key of `t d` belongs to, starting from evenly spaced tokens."""
    t = len(k)
    centroids = [k[j * t // n] for j in range(n)]
    for _ in range(iterations):
        member = [min(range(n), key=lambda j: float((k[i] - centroids[j]).square().sum())) for i in range(t)]
        for j in set(member):
            centroids[j] = torch.stack([k[i] for i in range(t) if member[i] == j]).mean(0)
    return member


@pytest.mark.parametrize(("t", "n", "iterations"), [(24, 4, 10), (24, 4, 1), (24, 1, 10), (3, 5, 10)])
def test_cluster_is_attention_over_centroids(t, n, iterations):
    def centroids(q, k, v):
        out = torch.empty_like(q)
        for b in range(B):
            for h in range(HEADS):
                member = torch.tensor(k_means(k[b, h].detach(), n, iterations))
                opened = member.unique()
                K, V = (torch.stack([y[b, h][member == j].mean(0) for j in opened]) for y in (k, v))
                out[b, h] = attend(q[b, h], K, V)
        return out

    options = {} if iterations == 10 else {"iterations": iterations}  # 10 is the default
    assert_form(attention("cluster", n, causal=False, **options), tokens(t), centroids)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("t", "n"), [(24, 4), (3, 5)])
def test_causal_cluster_is_sequential_k_means(t, n, gated):
    """The first n tokens open a cluster each, the others join the nearest mean; a gate fades sums and sizes alike."""
    attn, x = attention("cluster", n, gate=gated), tokens(t)
    keep, share = (gates(attn, x), 1 - gates(attn, x)) if gated else (torch.ones(B, HEADS, t, 1),) * 2

    def one_head(q, k, v, keep, share):
        K, V, sizes, rows = torch.zeros(0, WIDTH), torch.zeros(0, WIDTH), torch.zeros(0, 1), []
        for i in range(t):
            if i < n:
                j = i
                K, V, sizes = (torch.cat([y, torch.zeros(1, y.shape[1])]) for y in (K, V, sizes))
            else:
                j = int((K / sizes - k[i]).square().sum(-1).argmin())
            new = share[i] * (torch.arange(len(K)) == j)[:, None]
            K, V, sizes = keep[i] * K + new * k[i], keep[i] * V + new * v[i], keep[i] * sizes + new
            rows.append(attend(q[i : i + 1], K / sizes, V / sizes))
        return torch.cat(rows)

    def sequential(*parts):
        heads = [one_head(*(part[b, h] for part in (*parts, keep, share))) for b in range(B) for h in range(HEADS)]
        return torch.stack(heads).view_as(parts[0])

    assert_form(attn, x, sequential)


# mlp

ACTIVATIONS = {"exp": torch.exp, "relu": torch.relu, "sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(-1)}


def alphas(attn: BoundedAttention, x: Tensor) -> Tensor:
    """act(W_phi x), b h t n."""
    logits = torch.einsum("btm,hnm->bhtn", x, attn.control.proj.weight.view(HEADS, -1, EMBED))
    return ACTIVATIONS[attn.control.activation](logits / attn.control.temperature)


def weighted_means(alpha: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> Memories:
    """Appendix B.1, token by token: A_t = g A_{t-1} + (1 - g) alpha_t for K, V and the sum that divides them."""
    K = V = total = 0
    memories = []
    for t in range(k.shape[2]):
        keep, share = (1, 1) if gate is None else (gate[:, :, t, None], 1 - gate[:, :, t, None])
        new = share * alpha[:, :, t, :, None]
        K, V, total = keep * K + new * k[:, :, t, None], keep * V + new * v[:, :, t, None], keep * total + new
        divisor = torch.where(total > 0, total, 1)
        memories.append((K / divisor, V / divisor, (total > 0).mT))
    return memories


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_causal_mlp_is_appendix_b1(activation):
    attn, x = attention("mlp", 3, activation=activation), tokens()
    assert_form(attn, x, lambda q, k, v: read_each(q, weighted_means(alphas(attn, x), k, v)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normalization", ["mean", "write"])
def test_mlp_is_section_4(activation, normalization):
    attn, x = attention("mlp", 3, causal=False, activation=activation, normalization=normalization), tokens()
    phi = alphas(attn, x) / alphas(attn, x).sum(2, keepdim=True)
    assert_form(attn, x, lambda q, k, v: attend(q, phi.mT @ k, phi.mT @ v))


def test_mlp_normalised_as_it_writes_is_the_footnote():
    attn, x = attention("mlp", 3, normalization="write"), tokens()
    phi = alphas(attn, x) / alphas(attn, x).cumsum(2)

    def footnote(q, k, v):
        K, V = ((phi[..., None] * y[:, :, :, None]).cumsum(2) for y in (k, v))
        return read_each(q, [(K[:, :, t], V[:, :, t], torch.ones(3)) for t in range(T)])

    assert_form(attn, x, footnote)


def test_each_mlp_slot_is_attention_with_a_pseudo_query():
    attn, x = attention("mlp", 3, causal=False), tokens()
    _, k, v = project(attn, x)
    _, state = attn(x, return_state=True)
    w_phi = attn.control.proj.weight.view(1, HEADS, 3, EMBED).expand(B, -1, -1, -1)
    seen = x[:, None].expand(-1, HEADS, -1, -1)
    stored = torch.cat([state.memory.k, state.memory.v], dim=-1)
    assert_same(stored, F.scaled_dot_product_attention(w_phi, seen, torch.cat([k, v], dim=-1), scale=1.0), attn, x)


# gate


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlp_gates_numerator_and_denominator(activation):
    attn, x = attention("mlp", 3, gate=True, activation=activation), tokens()
    assert_form(attn, x, lambda q, k, v: read_each(q, weighted_means(alphas(attn, x), k, v, gates(attn, x))))


def test_a_gate_over_a_whole_sequence_weighs_and_forgets_nothing():
    attn, x = attention("mlp", 3, gate=True, causal=False), tokens()
    weights = alphas(attn, x) * (1 - gates(attn, x))
    assert_form(attn, x, lambda q, k, v: attend(q, *weighted_means(weights, k, v)[-1]))


def kept(attn: BoundedAttention, x: Tensor) -> Tensor:
    """f = sigmoid(W x + b)^(1/exponent), b h t n."""
    gate = attn.control.gate
    logits = (x @ gate.weight.T + gate.bias).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return torch.sigmoid(logits) ** (1 / attn.control.exponent)


def forgetting_means(alpha: Tensor, f: Tensor, k: Tensor, v: Tensor) -> Memories:
    """Slot by slot: A_t = f A_{t-1} + (1 - f) alpha_t for K, V and the sum that divides them."""
    K = V = total = 0
    memories = []
    for t in range(k.shape[2]):
        keep = f[:, :, t, :, None]
        new = (1 - keep) * alpha[:, :, t, :, None]
        K, V, total = keep * K + new * k[:, :, t, None], keep * V + new * v[:, :, t, None], keep * total + new
        memories.append((K / total, V / total, (total > 0).mT))
    return memories


def test_mlp_with_a_gate_for_each_slot():
    attn, x = attention("mlp", 3, gate="slot", half_life=16.0), tokens()
    assert_form(attn, x, lambda q, k, v: read_each(q, forgetting_means(alphas(attn, x), kept(attn, x), k, v)))


def test_slots_are_mlp_whose_alphas_are_equal():
    attn, x = attention("slots", 3, half_life=16.0), tokens()
    f = kept(attn, x)
    assert_form(attn, x, lambda q, k, v: read_each(q, forgetting_means(torch.ones_like(f), f, k, v)))


def test_slots_over_a_whole_sequence_weigh_and_forget_nothing():
    attn, x = attention("slots", 3, causal=False), tokens()
    assert_form(attn, x, lambda q, k, v: attend(q, *weighted_means(1 - kept(attn, x), k, v)[-1]))


@pytest.mark.parametrize("exponent", [1.0, 8.0])
def test_half_lives_of_slots_are_spread_from_one_token_to_the_longest(exponent):
    attn = attention("slots", 7, half_life=64.0, exponent=exponent)
    f = kept(attn, torch.zeros(1, 1, EMBED, dtype=torch.float64))[0, 0, 0]
    assert error(-math.log(2) / f.log(), torch.tensor([1.0, 2, 4, 8, 16, 32, 64]).double()) < 1e-6


@pytest.mark.parametrize("n", [1, 5, T, T + 4])
def test_placed_slots_are_means_around_their_places(n):
    attn, x = attention("placed", n, causal=False, width=0.7), tokens()
    with torch.no_grad():
        attn.control.proj.weight.mul_(20)
        attn.control.log_width.add_(torch.tensor([0.0, 0.5]))
    logits = attn.control.proj(x).unflatten(-1, (HEADS, n)).transpose(1, 2)
    taken = min(n, T)  # slots; with fewer tokens than slots the others are empty
    place = (torch.arange(T).double() + 0.5) / T * taken - 0.5
    away = (place[:, None] - torch.arange(n)) / attn.control.log_width.exp()[:, None, None]
    alpha = (logits - away**2 / 2).exp()[..., :taken]
    assert_form(attn, x, lambda q, k, v: attend(q, *weighted_means(alpha, k, v)[-1]))


def test_narrow_placed_slots_are_exact_attention_while_the_text_fits():
    attn, x = attention("placed", T, causal=False, width=0.05), tokens()
    assert_form(attn, x, attend)


@pytest.mark.parametrize("n", [1, 4, T - 1, T, T + 3])
def test_landmarks_share_tokens_out_and_count_them(n):
    attn, x = attention("landmarks", n, causal=False, sharpness=3.0), tokens()
    with torch.no_grad():
        attn.control.log_sharpness.add_(torch.tensor([0.0, 0.7]))

    def oracle(q, k, v):
        taken = min(n, T)
        center = k[:, :, [i * T // taken for i in range(taken)]]
        spread = (k - k.mean(2, keepdim=True)).square().sum(-1).mean(2)[..., None, None]
        apart = (k[:, :, :, None] - center[:, :, None]).square().sum(-1)
        alpha = (-attn.control.log_sharpness.exp()[:, None, None] * apart / (2 * spread)).softmax(-1)
        mass = alpha.sum(2)[..., None]  # b h n 1
        weights = (q @ (alpha.mT @ k / mass).mT * k.shape[-1] ** -0.5).exp() * mass.mT
        return weights / weights.sum(-1, keepdim=True) @ (alpha.mT @ v / mass)

    assert_form(attn, x, oracle)


def test_landmarks_are_exact_attention_while_the_text_fits():
    attn, x = attention("landmarks", T, causal=False, sharpness=5000.0), tokens()
    assert_form(attn, x, attend)


def test_a_landmark_of_like_tokens_counts_for_all_of_them():
    """Tokens that are the same: exact attention with a slot for each kind, however many there are of it."""
    attn = attention("landmarks", 2, causal=False, sharpness=5000.0)
    x = tokens()[:, :2].repeat_interleave(torch.tensor([4, 4]), dim=1)
    assert_form(attn, x, attend)
    x = torch.cat([x, x[:, -1:].expand(-1, 3, -1)], dim=1)  # 4 and 7: the second landmark is at token 5
    assert_form(attn, x, attend)


@pytest.mark.parametrize("causal", [True, False])
def test_gated_mlp_slots_stay_means(causal):
    _, state = attention("mlp", 3, gate=True, causal=causal)(tokens(), return_state=True)
    assert error(state.memory.mass, torch.ones(B, HEADS, 3)) < 1e-10


def test_gated_window_fades():
    attn, x = attention("window", 4, gate=True), tokens()
    assert_form(attn, x, lambda q, k, v: read_each(q, queue(k, v, 4, gates(attn, x))))


def test_gated_kernel_method_fades():
    attn, x = attention("rfa", 6, gate=True), tokens()
    g, f = gates(attn, x), attn.control.control

    def recurrence(q, k, v):
        phi, S, z, out = rfa(f, k), 0, 0, []
        for t in range(T):
            g_t, new = g[:, :, t, :, None], (1 - g[:, :, t, :, None]) * phi[:, :, t, :, None]
            S, z = g_t * S + new * v[:, :, t, None], g_t * z + new
            out.append(rfa(f, q)[:, :, t, None] @ S / (rfa(f, q)[:, :, t, None] @ z))
        return torch.cat(out, dim=2)

    assert_form(attn, x, recurrence)


# random


def random_slots(attn: BoundedAttention, t: int) -> Tensor:
    """The slot of positions 0 .. t - 1."""
    start = attn.control.begin(1, 1, torch.zeros(()))
    write, _ = attn.control(torch.zeros(1, t, EMBED), torch.zeros(1, 1, t, WIDTH), None, start)
    assert (write.phi.sum(-1) == 1).all()
    return write.phi[0, 0].argmax(-1)


def test_random_sums_tokens_into_slots():
    attn = attention("random", 3)
    slot = random_slots(attn, T)

    def sums(q, k, v):
        memories = []
        for t in range(1, T + 1):
            tokens_in = [slot[:t] == i for i in range(3)]
            K, V = (torch.stack([y[:, :, :t][:, :, inside].sum(2) for inside in tokens_in], dim=2) for y in (k, v))
            memories.append((K, V, torch.stack(tokens_in).any(1)))
        return read_each(q, memories)

    assert_form(attn, tokens(), sums)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**40])
def test_random_slots_are_uniform_and_unrelated_to_their_neighbours(seed):
    slot = random_slots(attention("random", 8, seed=seed), 65_536)
    for counts in (slot.bincount(minlength=8), (8 * slot[1:] + slot[:-1]).bincount(minlength=64)):
        expected = counts.sum() / len(counts)
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        freedom = len(counts) - 1
        assert abs(chi_square - freedom) < 4.5 * (2 * freedom) ** 0.5


def test_random_slots_differ_by_seed():
    same = random_slots(attention("random", 8, seed=0), 4096) == random_slots(attention("random", 8, seed=1), 4096)
    assert abs(float(same.double().mean()) - 1 / 8) < 0.03


def test_random_slot_is_a_function_of_the_position_alone():
    attn = attention("random", 8)
    control, alone = attn.control, random_slots(attn, 40)
    padding = torch.zeros(3, 50, dtype=torch.bool)  # ten of each row: left, right, and in between
    padding[0, :10] = padding[1, 40:] = padding[2, 5:25:2] = True
    state, slots = control.begin(3, 1, torch.zeros(())), []
    for part in padding.split([1, 7, 42], dim=1):
        t = part.shape[1]
        write, state = control(torch.randn(3, t, EMBED), torch.zeros(3, 1, t, WIDTH), part, state)
        slots.append(write.phi[:, 0].argmax(-1))
    for row, padded in zip(torch.cat(slots, dim=1), padding, strict=True):
        assert row[~padded].tolist() == alone.tolist()


# kernel methods


def quadratic(fq: Tensor, fk: Tensor, v: Tensor, causal: bool = True, floor: float = 0.0) -> Tensor:
    """The weights f(q_t) . f(k_j), masked, over their row sums, at least `floor`; zeros where that sum is zero."""
    weights = fq @ fk.mT
    weights = weights.tril() if causal else weights
    total = weights.sum(-1, keepdim=True)
    return weights @ v / (total.clamp(min=floor) if floor else total.where(total != 0, 1))


def elu(control, x):
    return F.elu(x) + 1


def rfa(control, x):
    angles = (x / x.norm(dim=-1, keepdim=True) * control.sigma) @ control.directions.T
    return torch.cat([angles.sin(), angles.cos()], dim=-1) / len(control.directions) ** 0.5


def t2r(control, x):
    return torch.einsum("bhtd,hdn->bhtn", x, control.weight).add(control.bias).relu()


def favor(control, x):
    x = x / WIDTH**0.25
    return (x @ control.directions.T - x.pow(2).sum(-1, keepdim=True) / 2).exp() / len(control.directions) ** 0.5


def dpfp(control, x):
    r = torch.cat([x, -x], dim=-1).relu()
    return torch.stack([r[..., i] * r[..., (i + nu) % (2 * WIDTH)] for nu in (1, 2) for i in range(2 * WIDTH)], dim=-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("control", "slots", "f"),
    [("elu", None, elu), ("rfa", 6, rfa), ("t2r", 5, t2r), ("favor", 7, favor), ("dpfp", 16, dpfp)],
)
def test_kernel_methods_are_the_quadratic_form_of_their_features(control, slots, f, causal):
    attn = attention(control, slots, causal=causal)
    assert_form(attn, tokens(70), lambda q, k, v: quadratic(f(attn.control, q), f(attn.control, k), v, causal))


def test_rfa_divides_by_no_less_than_its_floor():
    """70 tokens weigh more than the floor, the first few weigh less; those alone are not what they are without it."""
    attn, free, x = attention("rfa", 6, floor=5.0), attention("rfa", 6), tokens(70)
    f = partial(rfa, attn.control)
    assert_form(attn, x, lambda q, k, v: quadratic(f(q), f(k), v, floor=5.0))
    same = error(attn(x)[:, :4], free(x)[:, :4]), error(attn(x)[:, -4:], free(x)[:, -4:])
    assert same[0] > 0.1
    assert same[1] < 1e-12


def test_favor_approximates_softmax_attention():
    attn, x = attention("favor", 4096), tokens()
    assert error(attn(x), finish(attn, F.scaled_dot_product_attention(*project(attn, x), is_causal=True))) < 0.1


def test_favor_directions_are_as_likely_as_their_opposites():
    """exp(w . u) is exp(|u|^2 / 2) in the mean, whatever the direction of u: what makes the approximation unbiased."""
    w = attention("favor", 65_536).control.directions
    assert error(torch.cat([w, -w], dim=1).exp().mean(0), torch.full((2 * WIDTH,), 0.5).exp()) < 0.03


# luna and workspace


def packed_write(attn: BoundedAttention, P: Tensor, k: Tensor, topk: int = T) -> Tensor:
    """Appendix A.5: softmax over the tokens of P x, among the topk best of each slot. b h n t"""
    scores = split_heads(attn.control.query(P)) @ k.mT / WIDTH**0.5
    losers = torch.full_like(scores, -torch.inf).scatter(-1, scores.topk(topk).indices, 0.0)
    return (scores + losers).softmax(-1)


@pytest.mark.parametrize(("control", "options", "topk"), [("luna", {}, T), ("workspace", {"topk": 5}, 5)])
def test_luna_and_workspace_are_a_softmax_over_tokens(control, options, topk):
    attn = attention(control, 3, causal=False, **options)

    def nested(q, k, v):
        phi = packed_write(attn, attn.control.packed.expand(B, -1, -1), k, topk)
        return attend(q, phi @ k, phi @ v)

    assert_form(attn, tokens(), nested)


def test_workspace_without_competition_is_luna():
    luna, workspace, x = attention("luna", 3, causal=False), attention("workspace", 3, causal=False, topk=T), tokens()
    workspace.load_state_dict(luna.state_dict())
    assert error(workspace(x), luna(x)) < 1e-10


def test_luna_carries_its_memory_from_layer_to_layer():
    first, second, x = attention("luna", 3, causal=False), attention("luna", 3, causal=False), tokens()
    nn.init.normal_(second.k_proj.weight)  # not the first layer's
    y, state = first(x, return_state=True)
    out, last = second(y, below=state.packed, return_state=True)

    P, inputs = first.control.packed.expand(B, -1, -1), x
    for layer in (first, second):
        q, k, v = project(layer, inputs)
        phi = packed_write(layer, P, k)
        P, inputs = finish(layer, phi @ v), finish(layer, attend(q, phi @ k, phi @ v))
    assert_same(torch.cat([out, last.packed], dim=1), torch.cat([inputs, P], dim=1), nn.ModuleList([first, second]), x)


@pytest.mark.parametrize("control", ["luna", "workspace"])
def test_what_is_packed_of_a_context_of_another_width_feeds_the_next_layer(control):
    first, second = (attention(control, 3, causal=False, context_dim=5) for _ in range(2))
    context = torch.randn(B, 7, 5, dtype=torch.float64)
    _, state = first(tokens(), context, return_state=True)
    _, last = second(tokens(), context, below=state.packed, return_state=True)
    assert state.packed.shape == last.packed.shape == (B, 3, EMBED)
    _, k, v = project(second, tokens(), context)
    assert error(last.packed, finish(second, packed_write(second, state.packed, k, topk=7) @ v)) < 1e-10


@pytest.mark.parametrize("control", ["luna", "workspace"])
def test_nothing_is_packed_of_padding(control):
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0] = True
    _, state = attention(control, 3, causal=False)(tokens(), key_padding_mask=padding, return_state=True)
    assert (state.packed[0] == 0).all()
    assert (state.packed[1] != 0).all()


# composition


def test_composition_is_one_softmax_over_all_slots():
    attn, x = attention("window:3+mlp:2"), tokens()
    alpha = torch.einsum("btm,hnm->bhtn", x, attn.control.parts[1].proj.weight.view(HEADS, 2, EMBED)).exp()

    def side_by_side(q, k, v):
        memories = []
        for t, (K, V, _) in enumerate(weighted_means(alpha, k, v)):
            recent = slice(max(0, t - 2), t + 1)
            K, V = torch.cat([k[:, :, recent], K], dim=2), torch.cat([v[:, :, recent], V], dim=2)
            memories.append((K, V, torch.ones(K.shape[2])))
        return read_each(q, memories)

    assert_form(attn, x, side_by_side)


def test_a_token_held_by_a_global_part_is_not_in_the_window_too():
    seen, held = torch.zeros(T, T), {0, 3}
    for t in range(T):
        past = set(range(t + 1))
        seen[t, [*(past & held), *sorted(past - held)[-3:]]] = 1
    attn = attention("global:2+window:3", positions=[0, 3])
    assert_form(attn, tokens(), lambda q, k, v: attend(q, k, v, seen))


# grouped heads


@pytest.mark.parametrize("control", list(CONTROLS))
def test_grouped_heads_are_repeated_heads(control):
    causal = CONTROLS[control].online
    torch.manual_seed(0)
    grouped = BoundedAttention(16, 4, control, causal=causal, num_kv_heads=2).double()
    repeated = BoundedAttention(16, 4, control, causal=causal).double()
    ours, theirs = grouped.state_dict(), repeated.state_dict()
    for name, full in theirs.items():  # whatever belongs to a key head comes first, head by head
        by_head = ours[name] if ours[name].shape == full.shape else ours[name].unflatten(0, (2, -1))
        full.copy_(by_head if by_head is ours[name] else by_head.repeat_interleave(2, 0).flatten(0, 1))
    x = torch.randn(B, T, 16, dtype=torch.float64)
    assert error(grouped(x), repeated(x)) < 1e-10


# cross-attention


ENCODING = [name for name, control in CONTROLS.items() if not control.sees_queries]


@pytest.mark.parametrize("control", ENCODING)
def test_cross_attention_reads_what_the_context_writes_alone(control):
    attn, x, context = attention(control, causal=False), tokens(5, seed=2), tokens()
    _, state = attn(context, return_state=True)
    q, memory = split_heads(attn.q_proj(x)), state.memory
    if attn.control.linear:
        f = attn.control.features(q)
        out = f @ memory.v / (f @ memory.mass[..., None])
    else:
        seen = memory.used if attn.control.mask_empty else torch.ones_like(memory.used)
        seen = seen if state.readable is None else seen & state.readable
        seen = state.inner[0].exp() if attn.control.counts else seen
        out = attend(q, memory.k, memory.v, seen[:, :, None])
    assert_same(attn(x, context), finish(attn, out), attn, x, context)


APPENDING = [(name, {}) for name in ENCODING if attention(name, causal=False).control.appends]


@pytest.mark.parametrize(
    ("control", "options"),
    [*APPENDING, ("mlp", {"gate": True}), ("compressive:3", {"ratio": 2}), ("window:3+mlp:2", {})],
)
def test_a_context_may_come_in_two_calls(control, options):
    attn = attention(control, causal=False, **options)
    x, context = tokens(5, seed=2), tokens()
    whole, expected = attn(x, context, return_state=True)
    _, state = attn(x, context[:, :4], return_state=True)
    out, state = attn(x, context[:, 4:], state=state, return_state=True)
    assert_same(out, whole, attn, x, context)
    assert state.length.tolist() == expected.length.tolist() == [T] * B
    assert error(attn(x, state=state), whole) < 1e-10  # and without a context it only reads
