"""Exact wherever floating point allows: logits of any size, endless streams, empty denominators, slots that stay apart.

Axes: b batch, h heads, t tokens, n slots, d width.
"""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest
import torch
from contract import WIDTHS, error, gradient_error, gradients, vector_width
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from abc_attn import BoundedAttention, Memory, Write, kernels, mlp_attention, normaliser, read, scan
from abc_attn.core import Reading
from abc_attn.kernels import describe_backends

PACKAGE = Path(normaliser.__file__).parent
EACH = [name for name, available, _ in describe_backends() if available and name != "native"]
EACH += [f"native-{width}" for width in WIDTHS]
with_each = pytest.mark.parametrize("backend", EACH, indirect=True)
B, H, N, D = 1, 2, 3, 4


@pytest.fixture
def backend(request):
    """A backend by its name; of the native one, "native-avx2" is the one of that vector width."""
    name, _, width = request.param.partition("-")
    with vector_width(width or None):
        yield name


def closed_form(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, causal: bool) -> Tensor:
    """Appendix B.1 in one expression: every slot of every query is a softmax over the tokens. t x t x n, fp64."""
    q, k, v, logits = (x.double() for x in (q, k, v, logits))
    t = k.shape[2]
    scores = logits.mT[:, :, None].expand(-1, -1, t, -1, -1)  # b h t n j
    if causal:
        scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril()[:, None], -torch.inf)
    phi = scores.softmax(-1)
    K, V = phi @ k[:, :, None], phi @ v[:, :, None]  # b h t n d
    weights = (K @ q[..., None] * D**-0.5).softmax(-2)
    return (weights * V).sum(-2)


def extreme_logits(pattern: str, t: int = 64) -> Tensor:
    """Over +-1e4 in 16 levels; the tokens of a level compete, so that more than the top one matters."""
    rising = torch.linspace(-1e4, 1e4, 16).repeat_interleave(t // 16)
    levels = {"rising": rising, "falling": rising.flip(0), "random": rising[torch.randperm(t)]}
    return levels[pattern][:, None] + torch.randn(B, H, t, N)


# Logits of any size


@pytest.mark.parametrize("growth", [29.0, 31.0], ids=["sums over sums", "decays"])
def test_the_torch_backend_takes_sums_unless_a_total_grows_too_much(growth, monkeypatch):
    """Either form is right on its side of the limit, the slot that nothing writes at first included."""
    taken = []
    monkeypatch.setattr(kernels, "running_mean", lambda *a, **b: taken.append(1) or normaliser.running_mean(*a, **b))
    inputs = [torch.randn(B, H, 150, width) for width in (D, D, D, N)]
    inputs[3] = inputs[3].clamp(-0.4, 0.4)
    inputs[3][:, :, :70, 1], inputs[3][:, :, :90, 2] = -growth, -torch.inf
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        found = []
        for backend in ("torch", "reference"):
            taken.clear()
            each = [x.to(dtype).requires_grad_() for x in inputs]
            out, memory, log_total = kernels.mean_attention(
                *each, None, None, Reading(mask_empty=True), causal=True, backend=backend
            )
            assert bool(taken) == (backend == "reference" or growth > 30)
            results = (out, memory.k, memory.v, memory.mass, log_total)
            loss = sum((part.sin() * part.detach().cos()).sum() for part in results)
            found.append((results, torch.autograd.grad(loss, each)))
        for ours, theirs in zip(*found, strict=True):
            assert all(error(a, b) <= tolerance for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("pattern", ["rising", "falling", "random"])
@pytest.mark.parametrize(
    ("causal", "backend"), [*((True, each) for each in EACH), (False, "auto")], indirect=["backend"]
)
def test_logits_over_the_whole_range_inside_one_chunk(pattern, causal, backend):
    logits = extreme_logits(pattern)
    inputs = [x.requires_grad_() for x in (*(torch.randn(B, H, 64, D) for _ in range(3)), logits)]
    out, _ = mlp_attention(*inputs, causal=causal, backend=backend)
    expected = closed_form(*inputs, causal=causal)
    assert error(out, expected) < 1e-4
    mixture = torch.randn(out.shape)
    found = torch.autograd.grad((out * mixture).sum(), inputs)
    wanted = torch.autograd.grad((expected * mixture).sum(), inputs)
    for name, ours, theirs in zip(("q", "k", "v", "logits"), found, wanted, strict=True):
        assert error(ours, theirs) < 1e-4, name


@with_each
def test_a_jump_from_lowest_to_highest_and_back(backend):
    """One-hot in effect: the top tokens alone are read as soon as they are there."""
    logits = torch.full((B, H, 9, N), -1e4)
    logits[:, :, 4] = 1e4
    q, k, v = torch.randn(3, B, H, 9, D)
    out, _ = mlp_attention(q, k, v, logits.requires_grad_(), backend=backend)
    assert error(out[:, :, 4:], v[:, :, 4:5].expand(-1, -1, 5, -1)) < 1e-6
    assert error(out[:, :, :4], v[:, :, :4].cumsum(2) / torch.arange(1, 5)[:, None]) < 1e-6
    assert torch.autograd.grad(out.sum(), logits)[0].isfinite().all()


# Endless streams


def streams(t: int) -> list[Tensor]:
    """q, k, v and logits. Head 0 has logits near 0, head 1 near 1e4, where fp32 numbers are 1e-3 apart."""
    means = (0, 1, 1, torch.tensor([0.0, 1e4])[:, None, None])  # keys and values far from 0, for errors to show in
    return [mean + torch.randn(1, 2, t, 2) for mean in means]


def running(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
    """Appendix B.1 in prefix sums, fp64."""
    weights = (logits.double() - logits.amax(2, keepdim=True)).exp()
    K, V = ((weights[..., None] * x[:, :, :, None]).cumsum(2) / weights.cumsum(2)[..., None] for x in (k, v))
    read_weights = (K @ q.double()[..., None] * q.shape[-1] ** -0.5).softmax(-2)
    return (read_weights * V).sum(-2)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["reference", "auto"], indirect=True)
@pytest.mark.parametrize(
    ("first", "tolerance"),
    [(57_344, 2e-5), pytest.param(0, 1e-4, marks=pytest.mark.nightly)],
    ids=["the last 8192", "all"],
)
def test_65536_tokens_one_at_a_time(first, tolerance, backend):
    """A decay of 1 - 1/t, rounded to fp32, is off the same way at thousands of steps; late ones, where 1/t is small."""
    inputs, state, steps = streams(65_536), None, []
    with torch.no_grad():
        if first:
            _, state = mlp_attention(*(x[:, :, :first] for x in inputs))
        for token in zip(*(x[:, :, first:].split(1, dim=2) for x in inputs), strict=True):
            out, state = mlp_attention(*token, state, backend=backend)
            steps.append(torch.cat([out, state[0].mass[:, :, None]], dim=-1))
    out, mass = torch.cat(steps, dim=2).chunk(2, dim=-1)
    expected = running(*inputs)[:, :, first:]
    assert error(mass, torch.ones_like(mass)) < tolerance
    assert error(out, expected) < tolerance
    assert error(out[:, :, -1000:], expected[:, :, -1000:]) < tolerance  # first outputs are the largest


@pytest.mark.parametrize("backend", [each for each in EACH if each != "reference"], indirect=True)
def test_65536_tokens_at_once(backend):
    inputs = streams(65_536)
    with torch.no_grad():
        out, (memory, _) = mlp_attention(*inputs, backend=backend)
    expected = running(*inputs)
    assert error(memory.mass, torch.ones_like(memory.mass)) < 1e-4
    assert error(out[:, :, -1000:], expected[:, :, -1000:]) < 1e-4


# Decays of any size


@with_each
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("sizes", [(0.0, -1e-3, -1.0, -80.0, -1e4), (0.0, -0.1, -torch.inf), (-0.3,), (-1e4,)])
def test_decays_of_any_size_inside_one_chunk(sizes, linear, backend):
    """fp32 against the fp64 loop."""
    t = 64
    log_decay = torch.tensor(sizes)[torch.randint(len(sizes), (B, H, t, N))]
    q = torch.rand(B, H, t, N) if linear else torch.randn(B, H, t, D)
    k, v, phi = torch.randn(B, H, t, D), torch.randn(B, H, t, D), torch.rand(B, H, t, N)
    inputs = [x.requires_grad_() for x in (q, k, v, phi)]

    def run(backend: str, dtype: torch.dtype):
        qkv, decided = (x.to(dtype) for x in (q, k, v)), Write(phi.to(dtype), log_decay.to(dtype))
        return scan(*qkv, decided, linear=linear, mask_empty=not linear, backend=backend)

    (out, memory), (expected, last) = run(backend, torch.float32), run("reference", torch.float64)
    assert error(out, expected) < 1e-5
    assert error(memory.v, last.v) < 1e-5
    assert torch.equal(memory.used, last.used)
    found, wanted = (torch.autograd.grad(y.sin().sum(), inputs, materialize_grads=True) for y in (out, expected))
    assert gradient_error(found, wanted) < 1e-4


@with_each
def test_minus_infinity_in_the_middle_of_a_chunk_forgets_all_before(backend):
    t, cut = 64, 20
    log_decay = torch.zeros(B, H, t, N)
    log_decay[:, :, cut] = -torch.inf
    q, k, v, phi = (*torch.randn(3, B, H, t, D), torch.rand(B, H, t, N))
    whole, _ = scan(q, k, v, Write(phi, log_decay), backend=backend)
    alone, _ = scan(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], Write(phi[:, :, cut:]), backend=backend)
    assert error(whole[:, :, cut:], alone) < 1e-5


def set_gate(attention: BoundedAttention, logit: float) -> None:
    with torch.no_grad():
        attention.control.gate.weight.zero_()
        attention.control.gate.bias.fill_(logit)


@pytest.mark.parametrize("control", ["mlp:3", "cluster:3", "elu"])
def test_a_gate_that_keeps_everything_changes_nothing(control):
    """1 - sigmoid(50) is 2e-22, times every token alike."""
    gated, plain = (BoundedAttention(8, 2, control, causal=True, gate=gate) for gate in (True, False))
    plain.load_state_dict({name: weight for name, weight in gated.state_dict().items() if "gate" not in name})
    set_gate(gated, 50.0)
    x = torch.randn(2, 70, 8)
    assert error(gated(x), plain(x)) < 1e-5


@pytest.mark.parametrize("control", ["mlp:3", "elu", "rfa:4"])
def test_a_gate_that_keeps_nothing_leaves_the_present(control):
    attention = BoundedAttention(8, 2, control, causal=True, gate=True)
    set_gate(attention, -50.0)
    x = torch.randn(2, 70, 8)
    assert error(attention(x), attention.out_proj(attention.v_proj(x))) < 1e-5


# Empty denominators


@with_each
def test_a_linear_denominator_of_zero_gives_zeros(backend):
    q, k, v, phi = torch.rand(B, H, 6, N), torch.randn(B, H, 6, D), torch.randn(B, H, 6, D), torch.rand(B, H, 6, N)
    q[:, :, 2], phi[:, :, 0] = 0, 0  # a query of zeros; a first token that writes nothing
    inputs = [x.requires_grad_() for x in (q, v, phi)]
    out, memory = scan(q, k, v, Write(phi), linear=True, backend=backend)
    assert (out[:, :, [0, 2]] == 0).all()
    assert (out[:, :, [1, 3, 4, 5]] != 0).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), inputs, retain_graph=True))
    assert (read(q, memory, linear=True)[:, :, 2] == 0).all()


@with_each
def test_a_linear_denominator_close_to_underflow_stays_a_mean(backend):
    """1e-40 over 1e-40 is 1, though 1 over 1e-40 is more than fp32 can hold."""
    q, v, phi, log_decay = torch.tensor([[1.0, 1, 1], [3, 0, 0], [1, 0, 0], [0, -46, -46]]).view(4, 1, 1, 3, 1)
    out, memory = scan(q, v, v, Write(phi, log_decay), linear=True, backend=backend)
    assert error(out, torch.full_like(out, 3.0)) < 1e-3  # so small a number has few digits
    assert error(read(q, memory, linear=True), torch.full_like(out, 3.0)) < 1e-3


@with_each
def test_features_of_any_sign_keep_theirs(backend):
    """No eps: a denominator of -1e-20 divides as it is."""
    q, v, phi = torch.tensor([[[[1.0]]]]), torch.tensor([[[[3.0]]]]), torch.tensor([[[[-1e-20]]]])
    out, _ = scan(q, v, v, Write(phi), linear=True, backend=backend)
    assert error(out, v) < 1e-6


@pytest.mark.parametrize("causal", [True, False])
def test_relu_slots_that_never_fire_are_not_read(causal):
    attention, smaller = (BoundedAttention(8, 1, "mlp", n, activation="relu", causal=causal) for n in (3, 2))
    with torch.no_grad():
        attention.control.proj.weight[0] = -1
        weights = attention.state_dict()
        weights["control.proj.weight"] = weights["control.proj.weight"][1:]
        smaller.load_state_dict(weights)
    x = torch.rand(2, 20, 8)
    assert error(attention(x), smaller(x)) < 1e-6


@pytest.mark.parametrize("causal", [True, False])
def test_relu_slots_of_which_none_fires_read_nothing(causal):
    attention = BoundedAttention(8, 2, "mlp", 3, activation="relu", causal=causal)
    with torch.no_grad():
        attention.control.proj.weight.fill_(-1)
    x = torch.rand(2, 20, 8, requires_grad=True)
    y = attention(x)
    assert error(y, attention.out_proj.bias.expand_as(y)) < 1e-6
    assert all(grad.isfinite().all() for grad in gradients(y, attention, x))


@pytest.mark.parametrize("causal", [True, False])
def test_sigmoid_far_below_zero_is_exp(causal):
    """sigmoid(s) = exp(s) (1 - exp(s) ...): at -1e4 both underflow, and their ratios do not."""
    sigmoid, exp = (BoundedAttention(8, 2, "mlp", 3, activation=each, causal=causal) for each in ("sigmoid", "exp"))
    with torch.no_grad():
        sigmoid.control.proj.weight[:, 0] = -1e4
    exp.load_state_dict(sigmoid.state_dict())
    x = torch.randn(2, 20, 8)
    x[..., 0] = 1
    assert error(sigmoid(x), exp(x)) < 1e-6


# Policy


SOURCES = [
    PACKAGE / "core.py",
    PACKAGE / "normaliser.py",
    *sorted((PACKAGE / "kernels").glob("*.py")),
    *sorted((PACKAGE / "controls").glob("*.py")),
]
SUSPECT = re.compile(r"clamp|clip|hardtanh|nan_to_num|finfo|(^|_)eps(ilon)?($|_)")
WHOLE_NUMBERS = (  # positions, indices, counts: nothing that is learned or read
    "(count[:, None] + real - 1).clamp(min=0)",
    "torch.searchsorted(held, position.contiguous()).clamp(max=len(held) - 1)",
    "((count + self.slots - 1) // self.slots).clamp(min=1)",
    "size.clamp(min=1)",
    "(at - before[:, None]).clamp(0, new - 1)",
    "start - place.clamp(min=0).maximum(start - self.block)",
    "count - (count - 1).clamp(min=0) // self.block * self.block",
    "read.clamp(min=0)",
    "count.clamp(min=0)",
    "(real - 1).clamp(min=0)",
    "(end - band.sinks).clamp(min=0)",
    "(end - 1).clamp(min=0)",
    "(entered - begin[:, None] + lead).clamp(0, k.shape[2] - 1)",
    "(sink - count[:, None]).clamp(0, k.shape[2] - 1)",
    "count + tokens.clamp(max=start",
    "(place // self.block - (before // self.block)[:, None]).clamp(max=table.source.shape[2] - 1)",
    "torch.maximum(start, before[:, None, None]).clamp(min=0)",
    "(end.clamp(min=0), place, *others)",
    "self.rows + new.clamp(max=last)",
    "((count - 1).clamp(min=0) // self.block) * self.block - self.window).clamp(min=0)",
    "local.clamp(max=self.slots)[:, None]",
    "return score.nan_to_num(0, _MOST, -_MOST).clamp(-_MOST, _MOST).round().long()",  # an order of tokens
    "(end - sinks).clamp(min=0)",
    "(most + window - start).clamp(min=0)",
    "(torch.arange(length, device=x.device) - by[:, None]).clamp(0, t - 1)",
    "table.line[..., size:].clamp(max=all_k.shape[2] - 1)",
)

ORDERING = "_RIDGE = 1e-3"  # in the order of tokens that `leverage` makes; no output is divided by it


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_clamp_and_no_eps(path):
    """Code only: what strings and comments say about them does not count."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        where = f"{path.name}:{token.start[0]}: {token.line.strip()}"
        if token.type == tokenize.NAME and SUSPECT.search(token.string):
            assert any(allowed in token.line for allowed in WHOLE_NUMBERS), where
        if token.type == tokenize.NUMBER and re.fullmatch(r"[0-9_.]+(e[-+]?[0-9]+)?", token.string):
            assert float(token.string) == 0 or float(token.string) > 1e-3 or ORDERING in token.line, where


# Slots that stay apart


def spread(memory: Memory) -> float:
    """The smallest distance between two slots of one head, over the size of the largest slot."""
    slots = torch.cat([memory.k, memory.v], dim=-1).detach()
    apart = (slots[:, :, :, None] - slots[:, :, None]).norm(dim=-1)
    return float((apart + torch.eye(slots.shape[2]) * 1e9).min() / slots.norm(dim=-1).max())


def test_mlp_slots_differ_at_first_and_after_training():
    attention = BoundedAttention(32, 4, "mlp", 8, causal=True)
    x = torch.randn(4, 128, 32)
    logits = attention.control.logits(x)
    assert 0.8 < logits.std() < 1.25
    assert logits.std(-1).min() > 0.1  # ... among the slots, for every token
    assert spread(attention(x, return_state=True)[1].memory) > 0.05

    target = torch.roll(x, 3, dims=1).cumsum(1) / torch.arange(1, 129)[:, None]
    optimizer, losses = torch.optim.Adam(attention.parameters(), lr=1e-2), []
    for _ in range(20):
        loss = F.mse_loss(attention(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert spread(attention(x, return_state=True)[1].memory) > 0.05


# Linear in t


class LargestStorage(TorchDispatchMode):
    """How many elements the largest tensor made by any operation holds; views of small ones are small."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.untyped_storage().nbytes() // part.element_size())
        return result


@pytest.mark.parametrize("kind", ["mlp", "softmax read", "decaying", "linear"])
def test_nothing_larger_than_linear_is_made(kind):
    """t n d, t t and chunk chunk n are each more than ten times t max(chunk, 2 d + 1), the largest that is made."""
    b, h, t, n, d, chunk = 1, 2, 2048, 32, 32, 64
    q, k, v, phi = (torch.rand(b, h, t, width, requires_grad=True) for width in (d, d, d, n))
    log_decay = {"decaying": torch.full((b, h, t, n), -3.0), "linear": torch.full((b, h, t, n), -0.01)}.get(kind)
    with LargestStorage() as largest:
        if kind == "mlp":
            out, _ = mlp_attention(q, k, v, phi, backend="torch")
            # An operator of our own is seen from outside only: its insides are run once more.
            normaliser._running_logsumexp._init_fn(phi.detach().double(), torch.zeros(b, h, n).double())
        else:
            out, _ = scan(q, k, v, Write(phi, log_decay), linear=kind == "linear", mask_empty=True, backend="torch")
        out.sum().backward()
    assert b * h * t * d <= largest.elements <= b * h * t * max(chunk, 2 * d + 1)
