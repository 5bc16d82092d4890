"""What only the native kernels can get wrong: odd sizes, instruction sets, threads, operators, raw pointers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from contract import WIDTHS, error, gradient_error, vector_width

from abc_attn import BoundedAttention, Memory, Write, mlp_attention, scan
from abc_attn.core import Reading
from abc_attn.kernels.door import Declined
from abc_attn.kernels.library import load
from abc_attn.kernels.native import LIBRARY, _forward, _shards, mean_step, rotate

pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


def inputs(b=2, h=2, g=1, t=70, n=33, d=24, e=40, scale=1.0):
    shapes = (b, h * g, t, d), (b, h, t, d), (b, h, t, e), (b, h, t, n)
    q, k, v, logits = (torch.randn(shape) for shape in shapes)
    return q, k, v, logits * scale


def outcome(backend, dtype, tensors, **options):
    """Outputs, state and gradients of mlp_attention continued from a state."""
    tensors = [x.to(dtype).requires_grad_() for x in tensors]
    first = [x[:, :, :9] for x in tensors]
    _, state = mlp_attention(*first, backend=backend, **options)
    out, (memory, _) = mlp_attention(*(x[:, :, 9:] for x in tensors), state, backend=backend, **options)
    mixture = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad((out * mixture).sum() + memory.k.sin().sum() + memory.v.sin().sum(), tensors)
    return [x.double() for x in (out, memory.k, memory.v, memory.mass)], [x.double() for x in grads]


def in_every_width(run, expected):
    """`run()` gives what is expected, in each vector width that this machine has."""
    for width in WIDTHS:
        with vector_width(width):
            assert_close(run(), expected)


def assert_close(found, expected, tolerance=1e-5):
    for a, b in zip(found[0], expected[0], strict=True):
        assert error(a, b) <= tolerance
    assert gradient_error(found[1], expected[1]) <= tolerance


SIZES = [
    *({"n": n} for n in (1, 5, 8, 33, 64, 128, 200)),
    *({"d": d, "e": d} for d in (1, 7, 16, 31, 64, 100, 128)),
    {"g": 3},
    {"g": 3, "n": 64, "d": 64, "e": 64},
    {"n": 3, "e": 64},
    {"n": 64, "d": 3},
    {"t": 10},
    {"t": 600, "n": 8},
    {"scale": 100.0},
    {"scale": 1e4},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes):
    tensors = inputs(**sizes)
    expected = outcome("reference", torch.float64, tensors)
    in_every_width(lambda: outcome("native", torch.float32, tensors), expected)


@pytest.mark.parametrize(("sizes", "sharp"), [({"n": 3}, 4), ({"g": 2, "n": 20, "e": 64}, 20)], ids=str)
@pytest.mark.parametrize("t", [5, 41, 300])
def test_decays_that_cut_chunks_anywhere(t, sizes, sharp):
    """Now and then a token takes most of a slot's place: what can be computed as one chunk ends wherever that is."""
    q, k, v, logits = inputs(t=t, **sizes)
    logits[..., 3:] -= 2  # three slots are written over and over
    alpha = (sharp * logits).softmax(-1).clamp(max=0.99)
    alpha[:, :, 3] = 0.0
    log_decay = torch.log1p(-alpha)
    if t > 16:  # far below what one chunk may hold (-16), yet not at every token
        assert log_decay[:, :, 1:16].sum(2).amin() < -20

    def decayed(backend, dtype):
        tensors = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, alpha, log_decay)]
        out, memory = scan(*tensors[:3], Write(*tensors[3:]), backend=backend)
        grads = torch.autograd.grad(out.sin().sum() + memory.k.sin().sum() + memory.v.sin().sum(), tensors)
        return [x.double() for x in (out, memory.k, memory.v, memory.mass)], [x.double() for x in grads]

    in_every_width(lambda: decayed("native", torch.float32), decayed("reference", torch.float64))


def linear_inputs(g=1, **sizes):
    _, _, v, logits = inputs(**sizes)
    return logits.flip(2).repeat_interleave(g, dim=1), v, logits, torch.randn_like(logits)


def linear_outcome(backend, dtype, tensors, floor=0.0):
    """Outputs, memory and gradients of a linear read with decays."""
    features, v, logits, decays = (x.to(dtype).requires_grad_() for x in tensors)
    write = Write(logits.exp(), torch.nn.functional.logsigmoid(decays + 3))
    out, memory = scan(features.exp(), logits[..., :0], v, write, linear=True, floor=floor, backend=backend)
    grads = torch.autograd.grad(out.sin().sum() + memory.v.sin().sum(), [features, v, logits, decays])
    return [x.double() for x in (out, memory.v, memory.mass)], [x.double() for x in grads]


@pytest.mark.parametrize("sizes", [{"n": 32, "e": 32}, {"g": 2, "n": 5, "e": 64}, {"n": 8, "t": 300}], ids=str)
def test_linear_reads(sizes):
    tensors = linear_inputs(**sizes)
    expected = linear_outcome("reference", torch.float64, tensors)
    in_every_width(lambda: linear_outcome("native", torch.float32, tensors), expected)


@pytest.mark.parametrize("sizes", [{"n": 32, "e": 32}, {"g": 2, "n": 5, "e": 64}, {"n": 8, "t": 300}], ids=str)
def test_linear_reads_with_a_floor(sizes):
    """Half of the denominators lie below it; token by token, without gradients, they do as well."""
    tensors = linear_inputs(**sizes)
    features, v, logits, decays = tensors
    write = Write(logits.exp(), torch.nn.functional.logsigmoid(decays + 3))
    total = scan(features.exp(), logits[..., :0], torch.ones_like(v), write, linear=True, floor=1e9)[0] * 1e9
    ranked = total[..., 0].flatten().sort().values
    floor = float(ranked[len(ranked) // 2 - 1 : len(ranked) // 2 + 1].mean())  # of none of them: there its slope jumps
    expected = linear_outcome("reference", torch.float64, tensors, floor)
    in_every_width(lambda: linear_outcome("native", torch.float32, tensors, floor), expected)
    memory, outs = None, []
    for t in range(v.shape[2]):
        token = (x[:, :, t : t + 1] for x in (features.exp(), logits[..., :0], v))
        one = Write(*(x[:, :, t : t + 1] for x in write[:2]))
        out, memory = scan(*token, one, memory, linear=True, floor=floor, backend="native")
        outs.append(out)
    assert error(torch.cat(outs, 2).double(), expected[0][0]) <= 1e-5


def test_keys_without_width_are_all_alike():
    q, k, v, logits = inputs(d=0)
    found, expected = (mlp_attention(q, k, v, logits, scale=1.0, backend=name)[0] for name in ("native", "reference"))
    assert error(found, expected) <= 1e-5


@pytest.mark.parametrize("d", [2, 6, 64])
def test_one_token_is_rotated_as_torch_would(d):
    x, cos, sin = torch.randn(3, 5, 1, d), torch.randn(3, 1, 1, d), torch.randn(3, 1, 1, d)
    torch.testing.assert_close(rotate(x, cos, sin), x * cos + x.roll(d // 2, -1) * sin)
    apart = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(rotate(apart, cos, sin), rotate(x, cos, sin))
    for unfit in (cos[:1], cos.double(), cos[..., :-1]):
        assert isinstance(rotate(x, unfit, sin), Declined)
    assert isinstance(rotate(x.requires_grad_(), cos, sin), Declined)  # it has no gradient


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sizes", [{}, {"g": 3}, {"b": 1, "h": 1, "n": 1}], ids=str)
@torch.no_grad()
def test_a_step_is_that_of_the_loop(sizes, width):
    tensors = inputs(**sizes)
    _, state = mlp_attention(*(x[:, :, :60] for x in tensors), backend="reference")
    exact = state
    for t in range(60, 70):
        token = [x[:, :, t : t + 1].contiguous() for x in tensors]
        before = [x.clone() for x in (*state[0], state[1])]
        with vector_width(width):
            out, memory, log_total = mean_step(*token, None, *state, Reading())
        assert all(torch.equal(a, b) for a, b in zip((*state[0], state[1]), before, strict=True))  # as it was given
        state = memory, log_total
        expected, exact = mlp_attention(*token, exact, backend="reference")
        assert error(out, expected) <= 1e-5
    for ours, theirs in zip((*state[0], state[1]), (*exact[0], exact[1]), strict=True):
        assert error(ours.double(), theirs.double()) <= 1e-5


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gate", ["", "head", "slot"])
def test_a_step_in_place_is_the_same_step(gate, width):
    tensors = inputs(g=2)
    q, k, v, logits = (x[:, :, :1].contiguous() for x in tensors)
    keep = {"": None, "head": logits[..., :1].contiguous(), "slot": logits.neg()}[gate]
    keep = None if keep is None else torch.nn.functional.logsigmoid(keep)
    with torch.no_grad(), vector_width(width):
        _, (memory, log_total) = mlp_attention(*(x[:, :, 1:] for x in tensors))
        given = (*memory, log_total)
        beside = mean_step(q, k, v, logits, keep, memory, log_total, Reading())
        in_place = mean_step(q, k, v, logits, keep, memory, log_total, Reading(), in_place=True)
    flat = lambda answer: (answer[0], *answer[1], answer[2])  # noqa: E731
    assert all(torch.equal(a, b) for a, b in zip(flat(beside), flat(in_place), strict=True))
    assert all(a is b for a, b in zip(flat(in_place)[1:], given, strict=True))
    # While gradients are recorded, an earlier call may have kept the state for its own.
    before = [x.clone() for x in given]
    after = mlp_attention(q, k, v, logits, (memory, log_total), in_place=True)[1]
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert after[0].k is not memory.k


def test_a_step_leaves_to_the_general_way_what_is_not_ordinary():
    q, k, v, logits = (x[:, :, :1].contiguous() for x in inputs(g=2))
    _, (memory, log_total) = mlp_attention(q, k, v, logits)
    ordinary = {"q": q, "k": k, "v": v, "log_weights": logits, "memory": memory, "log_total": log_total}
    ordinary["log_keep"] = None

    def step(**changed):
        return mean_step(**(ordinary | changed), reading=Reading())

    assert not isinstance(step(), Declined)
    two = [x.expand(-1, -1, 2, -1).contiguous() for x in (q, k, v, logits)]
    odd = [
        {"memory": None, "log_total": None},
        {"memory": tuple(memory)},
        {"memory": memory._replace(k=memory.k[:, :, 1:].contiguous())},
        {"memory": memory._replace(mass=memory.mass.double())},
        {"memory": memory._replace(used=memory.used.byte())},
        {"log_total": log_total.float()},
        {"log_total": log_total[:1]},
        {"q": q.bfloat16()},
        {"q": q[:, :3].contiguous()},
        {"q": q[0]},
        {"q": None},
        {"k": k.to("meta")},
        {"v": torch.cat([v, v], -1)[..., ::2]},  # fits, but for its strides
        {"log_weights": logits.clone().requires_grad_()},
        {"log_keep": -logits.exp().requires_grad_()},
        {"log_keep": -logits.exp().double()},
        {"log_keep": -logits.exp()[..., 1:].contiguous()},
        {"log_weights": None},
        dict(zip(("q", "k", "v", "log_weights"), two, strict=True)),
    ]
    for changed in odd:
        assert isinstance(step(**changed), Declined), changed.keys()


def test_strides_do_not_matter():
    tensors = inputs()
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]  # as heads come out of a projection
    assert_close(outcome("native", torch.float32, transposed), outcome("native", torch.float32, tensors), tolerance=0.0)


def test_bf16_in_and_out():
    tensors = [x.bfloat16() for x in inputs()]
    out, (memory, _) = mlp_attention(*tensors, backend="native")
    expected, _ = mlp_attention(*(x.float() for x in tensors), backend="reference")
    assert out.dtype == torch.bfloat16
    assert memory.k.dtype == torch.float32
    assert error(out.float(), expected) <= 2**-8


def test_the_vector_width_is_chosen_by_name():
    """One that this machine has, of those that exist; any other is refused and changes nothing."""
    assert WIDTHS[-1] == "portable"
    assert {*WIDTHS} <= {"avx512", "avx2", "portable"}
    now = LIBRARY.abc_kind()
    for name in ("avx1024", "", "AVX2", *({"avx512", "avx2"} - {*WIDTHS})):
        assert LIBRARY.abc_use(name.encode()) != 0
        assert LIBRARY.abc_kind() == now
    for width in WIDTHS:
        with vector_width(width):
            assert LIBRARY.abc_kind().decode() == width
    assert LIBRARY.abc_kind() == now


def test_the_environment_chooses_the_vector_width(monkeypatch):
    """As the library is loaded; what this machine does not have is an error that names what it has."""
    with vector_width(WIDTHS[0]):  # which is put back after this test
        for width in WIDTHS:
            monkeypatch.setenv("ABC_ATTN_SIMD", width)
            assert load().abc_kind().decode() == width
        for wrong in ("avx1024", "AVX2"):
            monkeypatch.setenv("ABC_ATTN_SIMD", wrong)
            with pytest.raises(ValueError, match=f"ABC_ATTN_SIMD.*{', '.join(map(repr, WIDTHS))}.*{wrong}"):
                load()


def test_several_python_threads_at_once():
    jobs = [inputs(n=8 + i) for i in range(6)]
    expected = [mlp_attention(*job)[0] for job in jobs]
    found = [None] * len(jobs)

    def work(i):
        for _ in range(5):
            found[i] = mlp_attention(*jobs[i])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads):
    tensors, before = inputs(b=3, h=3), torch.get_num_threads()
    expected = mlp_attention(*tensors)[0]
    torch.set_num_threads(threads)
    try:
        assert torch.equal(mlp_attention(*tensors)[0], expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [{"n": 64}, {"n": 128, "g": 3}])
def test_fewer_rows_than_threads(sizes, causal):
    """Then each thread takes some of the slots, and what they read is joined."""
    tensors, before = inputs(b=1, h=1, **sizes), torch.get_num_threads()
    expected = outcome("reference", torch.float64, tensors, causal=causal)
    torch.set_num_threads(4)
    try:
        assert _shards(1, sizes["n"]) == min(4, sizes["n"] // 16)
        in_every_width(lambda: outcome("native", torch.float32, tensors, causal=causal), expected)
    finally:
        torch.set_num_threads(before)


def test_operator_is_sound():
    """Schema, fake tensors and autograd registration, as torch checks them."""
    q, k, v, logits = (x.requires_grad_() for x in inputs(b=1, h=1, t=5, n=3, d=2, e=2))
    memory = Memory(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3), torch.zeros(1, 1, 3).bool())
    total = torch.full((1, 1, 3), -torch.inf, dtype=torch.float64)
    options = (False, False, True, 0.7, 0.0, True, True)  # linear, mask_empty, causal, scale, floor, saves, joins
    torch.library.opcheck(_forward, (q, k, v, logits, None, None, *memory, total, True, *options))
    torch.library.opcheck(_forward, (q, k, v, logits, -logits.abs().detach(), None, *memory, None, False, *options))
    whole = (False, False, False, 0.7, 0.0, True, False)
    torch.library.opcheck(_forward, (q, k, v, logits, None, None, *memory, total, True, *whole))
    features = logits.detach().clone().requires_grad_()
    linear = (True, False, True, 1.0, 0.5, True, False)
    torch.library.opcheck(_forward, (features, k, v, logits, None, None, *memory, None, False, *linear))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize(
    "sizes", [{}, {"n": 5, "d": 7, "e": 3}, {"n": 64, "d": 64, "e": 64, "t": 300}, {"g": 2, "n": 33}]
)
def test_whole_sequences(sizes, scale):
    """Not causal: continued, with padding and with more queries than tokens, in outputs, states and gradients."""
    tensors = inputs(**sizes, scale=scale)
    queries = torch.cat([tensors[0], tensors[0].flip(2)], dim=2)
    padding = torch.zeros(len(queries), tensors[1].shape[2], dtype=torch.bool)
    padding[0, -9:] = True

    def outcome(backend, dtype):
        q, *rest = leaves = [x.to(dtype).clone().requires_grad_() for x in (queries, *tensors[1:])]
        early, late = ([x[:, :, part] for x in rest] for part in (slice(7), slice(7, None)))
        options = {"causal": False, "backend": backend}
        _, state = mlp_attention(q, *early, **options)
        out, (memory, total) = mlp_attention(q, *late, state, key_padding_mask=padding[:, 7:], **options)
        loss = out.square().sum() + memory.k.sum() + memory.v.square().sum() + total.sin().sum()
        grads = torch.autograd.grad(loss, leaves)
        return [x.detach().double() for x in (out, *memory[:3], total)], [x.double() for x in grads]

    in_every_width(lambda: outcome("native", torch.float32), outcome("reference", torch.float64))


def test_torch_compile():
    tensors = inputs(t=40)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, logits: mlp_attention(q, k, v, logits)[0], backend="aot_eager")
    assert error(compiled(*tensors), mlp_attention(*tensors)[0]) <= 1e-6
    tensors = [x.requires_grad_() for x in tensors]
    found = torch.autograd.grad(compiled(*tensors).sum(), tensors)
    expected = torch.autograd.grad(mlp_attention(*tensors)[0].sum(), tensors)
    assert all(error(a, b) <= 1e-5 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("control", ["mlp:8", "random:8", "global:2+window:8", "dilated:8"])
def test_the_module_compiles_whole(control):
    attention = BoundedAttention(16, 2, control, causal=True)
    x = torch.randn(2, 20, 16)
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert error(compiled(x), attention(x)) <= 1e-6


@pytest.mark.parametrize(("dtype", "dropout", "reason"), [("double", 0.0, "float64"), ("float", 0.5, "dropout")])
def test_what_it_declines_is_an_error_by_name_and_goes_to_torch_by_itself(dtype, dropout, reason):
    q, k, v, phi = (getattr(x, dtype)() for x in inputs(t=20))
    with pytest.raises(ValueError, match=f"'native' does not support this call: .*{reason}.*Use backend='auto'"):
        scan(q, k, v, Write(phi), dropout=dropout, backend="native")
    found = []
    for backend in ("auto", "torch"):
        torch.manual_seed(3)
        found.append(scan(q, k, v, Write(phi), dropout=dropout, backend=backend)[0])
    assert torch.equal(*found)


def test_the_fallback_can_be_forced():
    code = "from abc_attn.kernels import describe_backend; print(*describe_backend())"
    environment = os.environ | {"ABC_ATTN_BACKEND": "torch"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert said.stdout.startswith("torch") and "ABC_ATTN_BACKEND" in said.stdout  # noqa: PT018


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("t", [1, 20])
def test_a_key_that_is_no_number_is_not_passed_over(t, bad, width):
    """Its values may be finite: then only the scores are wrong, and nothing else would show it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, t, 16)
    k[:, :, t // 2] = bad
    logits, log_keep = torch.randn(1, 2, t, 8), -torch.rand(1, 2, t, 8)
    held = Write((torch.arange(t)[:, None] % 8 == torch.arange(8)).float().expand(1, 2, t, 8))
    with vector_width(width):
        found = [mlp_attention(q, k, v, logits, log_keep=gate, backend="native")[0] for gate in (None, log_keep)]
        found.append(scan(q, k, v, held, mask_empty=True, backend="native")[0])
    for out in found:
        assert bool(out[:, :, : t // 2].isfinite().all())
        assert bool(out[:, :, t // 2].isnan().all())
