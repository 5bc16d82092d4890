"""Kernels against the fp64 loop: outputs, gradients and states, with threads. A case is run by the torch backend and by
the native one in one of its vector widths.

What is allowed follows the rule of docs/numerics.md: 1e-5, and SLACK times what one fp32 rounding of everything that
goes from one step of the loop to the next moves the fp64 result by, at most.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from abc_attn import Memory, Write, scan
from abc_attn.core import Mean, Reading, divide, group_heads, prepare, query_scale, softmax_weights, write_token
from abc_attn.kernels import describe_backends, mean_attention, native
from abc_attn.normaliser import empty_total, running_logsumexp, weights_of

NAME = "kernels"
FLOOR, UNIT = 1e-5, 2.0**-24
SLACK = 16  # the contract has 8; of 100,000 cases a few need as much as 9
DRAWS = 64  # at most: a few are not the worst, and of a million results some need more than a few
BACKENDS = [name for name, available, _ in describe_backends() if available and name != "reference"]
DECAYS = (None, (1e-3,), (0.3,), (30.0,), (0.0, 1e-3, 1.0, 80.0), (0.0, 200.0), (0.0, torch.inf), (5.0, 1e4))


class _Off(torch.autograd.Function):
    """x times 1 + unit * u, with u uniform in [-1, 1], and 0 below fp32's range; its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: float, draw: torch.Generator) -> Tensor:
        ctx.unit, ctx.draw = unit, draw
        off = x * (1 + unit * (2 * torch.rand(x.shape, generator=draw, dtype=x.dtype) - 1))
        return off.masked_fill(off.abs() < torch.finfo(torch.float32).tiny, 0)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> Any:
        return _Off.forward(ctx, d_x, ctx.unit, ctx.draw), None, None


class _OffBack(_Off):
    """x as it is; its gradient off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: float, draw: torch.Generator) -> Tensor:
        ctx.unit, ctx.draw = unit, draw
        return x.view_as(x)


def loop(tensors: dict[str, Tensor | None], how: dict[str, Any], unit: float, seed: int) -> dict[str, Tensor]:
    """The loop of core.py in fp64, with every number that one step leaves to the next off by up to `unit`."""
    draw = torch.Generator().manual_seed(seed)

    def off(x: Tensor) -> Tensor:
        return _Off.apply(x, unit, draw) if unit and x.is_floating_point() else x

    given = {name: None if x is None else off(x) for name, x in tensors.items()}
    reading: Reading = how["reading"]
    q, k, v, padding = given["q"], given["k"], given["v"], tensors["padding"]
    memory = Memory(*(given[f"memory.{field}"] for field in Memory._fields)) if how["memory"] else None
    if how["mean"]:
        start = given["log_total"] if how["memory"] else empty_total(*k.shape[:2], how["slots"], k)
        keep = given["log_decay"]
        weights = weights_of(Mean(given["phi"], keep))
        back = (lambda x: _OffBack.apply(x, unit, draw)) if unit else (lambda x: x)
        decided, log_total = _mean(weights, keep, start, padding, back)
        decided = Write(off(decided.phi), off(decided.log_decay))
    else:
        decided, log_total = Write(given["phi"], given["log_decay"], tensors["readable"]), None
    k, v, decided, memory = prepare(k, v, decided, memory, padding)
    outs = []
    for t in range(q.shape[2]):
        decay = None if decided.log_decay is None else decided.log_decay[:, :, t]
        memory = Memory(*map(off, write_token(memory, k[:, :, t], v[:, :, t], decided.phi[:, :, t], decay)))
        seen = memory.used[:, :, None] if reading.mask_empty else None
        if decided.readable is not None:
            readable = decided.readable[:, :, t, None]
            seen = readable if seen is None else readable & seen
        grouped = group_heads(q[:, :, t, None], k.shape[1]).flatten(2, 3)
        if reading.linear:
            features = grouped if seen is None else grouped.masked_fill(~seen, 0)
            total = off(features @ memory.mass[..., None])
            out = divide(off(features @ memory.v), total, reading.floor)
        else:
            scores = off(grouped * query_scale(q, reading.scale) @ memory.k.mT)
            out = off(softmax_weights(scores, seen, 0.0)) @ memory.v
        outs.append(out.reshape(*q.shape[:2], 1, v.shape[-1]))
    out = off(torch.cat(outs, dim=2))
    if padding is not None:
        out = out.masked_fill(padding[:, None, :, None], 0)
    found = {"outputs": out} | {f"memory.{name}": x for name, x in memory._asdict().items()}
    return found if log_total is None else found | {"log_total": log_total}


def _mean(
    log_weights: Tensor, log_keep: Tensor | None, start: Tensor, padding: Tensor | None, back: Any
) -> tuple[Write, Tensor]:
    """normaliser.running_mean, with the gradient of each side of its differences off, as a kernel computes them."""
    if padding is not None:
        log_weights = log_weights.masked_fill(padding[:, None, :, None], -torch.inf)
        log_keep = None if log_keep is None else log_keep.masked_fill(padding[:, None, :, None], 0)
    if log_keep is not None:
        passed = log_keep.cumsum(2)
        log_weights = log_weights - back(passed)
    totals = running_logsumexp(back(log_weights), start)
    before = torch.cat([start[:, :, None], totals[:, :, :-1]], dim=2)
    phi = (back(log_weights) - back(totals)).masked_fill(log_weights == -torch.inf, -torch.inf).exp()
    log_decay = (back(before) - back(totals)).masked_fill(before == -torch.inf, 0)
    last = totals[:, :, -1].clone()
    return Write(phi, log_decay), last if log_keep is None else last + passed[:, :, -1]


def fast(tensors: dict[str, Tensor | None], how: dict[str, Any], backend: str) -> dict[str, Tensor]:
    memory = Memory(*(tensors[f"memory.{field}"] for field in Memory._fields)) if how["memory"] else None
    q, k, v, phi = (tensors[name] for name in ("q", "k", "v", "phi"))
    reading: Reading = how["reading"]
    if how["mean"]:
        options = {"causal": True, "key_padding_mask": tensors["padding"], "backend": backend}
        options |= {"log_keep": tensors["log_decay"]}
        out, memory, log_total = mean_attention(q, k, v, phi, memory, tensors["log_total"], reading, **options)
        return {"outputs": out, "log_total": log_total} | {f"memory.{f}": x for f, x in memory._asdict().items()}
    options = reading._asdict() | {"key_padding_mask": tensors["padding"], "backend": backend}
    out, memory = scan(q, k, v, Write(phi, tensors["log_decay"], tensors["readable"]), memory, **options)
    return {"outputs": out} | {f"memory.{field}": x for field, x in memory._asdict().items()}


def make(case: int) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """The inputs of a case, fp32 numbers, and how they are read."""
    draw, dice = torch.Generator().manual_seed(case), random.Random(case)
    b, h, g = dice.choice((1, 1, 2, 3)), dice.choice((1, 2, 3)), dice.choice((1, 1, 2, 3))
    n, d, e = dice.choice((1, 3, 8, 16, 17, 33, 64)), dice.choice((0, 1, 4, 16, 24, 64)), dice.choice((1, 5, 16, 40))
    t = dice.choice((1, 2, 3, 3, 5, 5, 7, 9) if dice.random() < 0.8 else (16, 17, 19, 33, 65))  # the loop is slow
    mean, linear = dice.random() < 0.4, dice.random() < 0.4
    linear = linear and not mean
    d = d if mean or d else 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def chance(share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=draw) < share

    tensors: dict[str, Tensor | None] = dict.fromkeys(("log_decay", "readable", "padding", "log_total"))
    size = dice.choice((1.0, 1.0, 1000.0))
    tensors |= {"k": normal(b, h, t, d or 1), "v": size * normal(b, h, t, e)}
    tensors["q"] = normal(b, h * g, t, n).abs() if linear else normal(b, h * g, t, d or 1)
    if mean:
        tensors["phi"] = dice.choice((0.1, 1.0, 10.0, 100.0)) * normal(b, h, t, n)
        forgets = dice.choice(("", "head", "slot", "tied"))
        if forgets:  # a mixture of sizes: some tokens forget nothing, some all
            sizes = torch.tensor(dice.choice(((1e-3,), (0.3,), (3.0,), (0.0, 1e-3, 1.0, 20.0), (0.0, 90.0, 1e3))))
            shape = (b, h, t, 1 if forgets == "head" else n)
            which = torch.randint(len(sizes), shape, generator=draw)
            tensors["log_decay"] = -sizes[which] * torch.rand(shape, generator=draw)
        if forgets == "tied":
            tensors["phi"] = None
    else:
        phi = normal(b, h, t, n) * t**-0.5
        phi = phi.abs() if linear and dice.random() < 0.8 else phi
        tensors["phi"] = phi.masked_fill(chance(0.5, *phi.shape), 0) if dice.random() < 0.3 else phi
        sizes = dice.choice(DECAYS)
        if sizes is not None:
            which = torch.randint(len(sizes), (b, h, t, n), generator=draw)
            tensors["log_decay"] = -torch.tensor(sizes)[which]
        tensors["readable"] = chance(0.7, b, h, t, n) if dice.random() < 0.2 else None
    tensors["padding"] = chance(0.3, b, t) if dice.random() < 0.3 else None
    memory = dice.random() < 0.5
    if memory:
        used = chance(0.8, b, h, n) if not mean else torch.ones(b, h, n, dtype=torch.bool)
        mass = normal(b, h, n).abs() if not mean else torch.ones(b, h, n)
        stored = {"k": normal(b, h, n, d or 1), "v": size * normal(b, h, n, e), "mass": mass}
        tensors |= {f"memory.{name}": x * used.view(*used.shape, *[1] * (x.dim() - 3)) for name, x in stored.items()}
        tensors |= {"memory.used": used, "log_total": normal(b, h, n).double() if mean else None}
    floor = dice.choice((0.0, 0.0, 1.0)) if linear else 0.0
    reading = Reading(linear, floor, not linear and not mean and dice.random() < 0.5, dice.choice((None, 0.5)))
    how = {"reading": reading, "mean": mean, "memory": memory, "slots": n}
    return tensors, how | {"threads": dice.choice((1, 1, 1, 2)), "width": dice.randrange(3)}


def with_gradients(run: Any, tensors: dict[str, Tensor | None], how: dict[str, Any]) -> dict[str, Tensor]:
    """What `run` gives, and the gradients of a fixed mixture of it, as one."""
    names = [name for name in ("q", "k", "v", "phi", "log_decay") if tensors[name] is not None]
    leaves = {name: tensors[name].clone().requires_grad_() for name in names}
    found = run(tensors | leaves)
    draw, total = torch.Generator().manual_seed(1), 0
    for name, x in found.items():
        if x.requires_grad and name != "log_total":
            total = total + (x * torch.randn(x.shape, generator=draw).to(x.dtype)).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    if how["mean"]:  # the gradient of log f is judged as that of a logit, f = sigmoid(logit): a factor of 1 - f
        rates = {name: -leaf.detach().double().expm1() for name, leaf in leaves.items() if name == "log_decay"}
        grads = [x * rates.get(name, 1.0) for name, x in zip(leaves, grads, strict=True)]
    found["gradients"] = torch.cat([x.flatten().double() for x in grads])
    return {name: x.detach() for name, x in found.items()}


def distance(found: Tensor, expected: Tensor, name: str) -> float:
    if found.dtype == torch.bool:
        return 0.0 if torch.equal(found, expected) else 1.0
    found, expected = found.double(), expected.double()
    empty = expected == -torch.inf
    assert torch.equal(found == -torch.inf, empty), "other sums are empty"
    far = (found - expected).masked_fill(empty, 0).abs()
    size = float(expected.masked_fill(empty, 0).abs().max()) if expected.numel() else 0.0
    size = max(size, 1.0) if name == "log_total" else size  # a logarithm: see tests/contract.py
    return float(far.max()) / (size or 1.0) if far.numel() else 0.0


def beyond(expected: Tensor) -> bool:
    """Whether it is out of fp32's range, or so close to an end of it that a product on the way may be: then there is
    nothing to compare with. A gradient of 1e20 comes from a denominator of 1e-20, whose square is divided by."""
    if (expected.isnan() | (expected == torch.inf)).any():
        return True
    size = float(expected.masked_fill(expected == -torch.inf, 0).abs().max()) if expected.numel() else 0.0
    return size > 1e20 or 0 < size < 1e-30


def run(case: int, folder: Path) -> str:
    tensors, how = make(case)
    wide = {name: x if x is None or not x.is_floating_point() else x.double() for name, x in tensors.items()}
    expected = with_gradients(lambda given: loop(given, how, 0.0, 0), wide, how)
    moved, drawn = dict.fromkeys(expected, 0.0), 0
    forms = [("torch", None)] if "torch" in BACKENDS else []
    if "native" in BACKENDS:
        forms += [("native", native.widths()[how["width"] % len(native.widths())])]
    before, width_before = torch.get_num_threads(), native.width() if "native" in BACKENDS else None
    torch.set_num_threads(how["threads"])
    try:
        for backend, width in forms:
            if width is not None:
                native.use_width(width)
            found = with_gradients(lambda given, backend=backend: fast(given, how, backend), tensors, how)
            for name, result in found.items():
                if result.is_floating_point() and beyond(expected[name]):
                    continue
                far = distance(result, expected[name], name)
                while far > FLOOR + SLACK * moved[name] and drawn < DRAWS:
                    draw = with_gradients(lambda given, seed=drawn: loop(given, how, UNIT, seed), wide, how)
                    moved = {key: max(most, distance(draw[key], expected[key], key)) for key, most in moved.items()}
                    drawn += 1
                allowed = FLOOR + SLACK * moved[name]
                assert far <= allowed, f"{backend} {width}: {name} is off by {far:.3g}, {allowed:.3g} is allowed; {how}"
    finally:
        torch.set_num_threads(before)
        if width_before is not None:
            native.use_width(width_before)
    return "ill-conditioned" if drawn else "well-conditioned"
