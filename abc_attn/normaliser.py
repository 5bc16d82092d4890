"""The running mean of appendix B.1: each slot holds sum_j w_j [k_j, v_j] / sum_j w_j over the tokens so far.

The weights are given by their logarithms and the running sum is kept as its logarithm, in fp64. In fp32 that would not
do: at logits near 1e4 the spacing of fp32 is 1e-3, and phi + decay = 1 would be off by as much at every step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from abc_attn.core import Mean, Write, has_values, transformed


def empty_total(batch: int, heads: int, slots: int, like: Tensor) -> Tensor:
    """The logarithm of an empty sum: b h n, fp64."""
    return like.new_full((batch, heads, slots), -torch.inf, dtype=torch.float64)


def running_mean(
    mean: Mean,
    log_total: Tensor,
    key_padding_mask: Tensor | None = None,
    *,
    causal: bool,
) -> tuple[Write, Tensor]:
    """The write that keeps every slot a weighted mean, and the new log_total `b h n`, fp64.

    If not `causal` only the memory after the last token is meant, so the sum over all tokens divides at once. It is
    read as a whole: there is no order in it to forget by, and 1 - f only weighs.
    """
    keep = None if mean.log_keep is None else mean.log_keep.double()
    log_weights = weights_of(mean._replace(log_keep=keep)).double()
    dtype = torch.promote_types(torch.float32, next(x.dtype for x in mean if x is not None))
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, :, None]
        log_weights = log_weights.masked_fill(padding, -torch.inf)
        keep = None if keep is None else keep.masked_fill(padding, 0)
    if causal:
        return _prefixes(log_weights, log_total, keep, dtype)
    return _whole(log_weights, log_total, key_padding_mask, dtype)


def weights_of(mean: Mean) -> Tensor:
    """The logarithm of what a token adds to the sums: w, or (1 - f) w; `b h t n`."""
    if mean.log_keep is None:
        assert mean.log_weights is not None
        return mean.log_weights
    entering = log_forgotten(mean.log_keep)
    return entering if mean.log_weights is None else mean.log_weights + entering


# The kernels put theirs here, where they were compiled: log_sigmoid in one pass over memory; None of what they decline.
fused_log_sigmoid: Callable[[Tensor, float], Tensor | None] = lambda logit, exponent: None  # noqa: E731


def log_sigmoid(logit: Tensor, exponent: float = 1.0) -> Tensor:
    """log f of a gate, f = sigmoid(logit)^(1/exponent)."""
    found = fused_log_sigmoid(logit, exponent)
    if found is not None:
        return found
    return F.logsigmoid(logit) if exponent == 1 else F.logsigmoid(logit) / exponent


def log_forgotten(log_keep: Tensor) -> Tensor:
    """log(1 - f) from log f <= 0; -inf, with a zero gradient, where nothing is forgotten."""
    nothing = log_keep == 0
    return log_keep.masked_fill(nothing, -1).expm1().neg().log().masked_fill(nothing, -torch.inf)


def _prefixes(log_weights: Tensor, log_total: Tensor, keep: Tensor | None, dtype: torch.dtype) -> tuple[Write, Tensor]:
    if keep is not None:  # measured against the gates passed so far, a gated sum is a plain one
        passed = keep.cumsum(2)
        log_weights = log_weights - passed
    totals = running_logsumexp(log_weights, log_total)
    before = torch.cat([log_total[:, :, None], totals[:, :, :-1]], dim=2)
    # -inf - -inf: a slot with nothing in it yet; it takes no share, and there is nothing to decay.
    phi = (log_weights - totals).masked_fill(log_weights == -torch.inf, -torch.inf).exp()
    log_decay = (before - totals).masked_fill(before == -torch.inf, 0)
    last = totals[:, :, -1]
    if keep is not None:
        last = last + passed[:, :, -1]
    return Write(phi.to(dtype), log_decay.to(dtype)), last.clone()


def _whole(
    log_weights: Tensor, log_total: Tensor, key_padding_mask: Tensor | None, dtype: torch.dtype
) -> tuple[Write, Tensor]:
    total = logsumexp(torch.cat([log_total[:, :, None], log_weights], dim=2))
    phi = (log_weights - total[:, :, None]).masked_fill(log_weights == -torch.inf, -torch.inf).exp()
    if has_values(log_total) and bool((log_total == -torch.inf).all()):  # nothing was there before
        return Write(phi.to(dtype)), total
    # What was there before decays once, as the first real token enters.
    once = (log_total - total).masked_fill(log_total == -torch.inf, 0)[:, :, None]
    if key_padding_mask is None:
        log_decay = F.pad(once, (0, 0, 0, log_weights.shape[2] - 1))
    else:
        first = ~key_padding_mask & ((~key_padding_mask).cumsum(1) == 1)
        log_decay = torch.where(first[:, None, :, None], once, 0)
    return Write(phi.to(dtype), log_decay.to(dtype)), total


def unit(log_weights: Tensor, log_total: Tensor) -> Tensor:
    """The `top` of every slot, b h n: measured in exp(top), no weight and not the total so far is larger than 1."""
    # As wide as the weights, so that differences from it are exact; a constant, as it cancels in the end.
    top = torch.maximum(log_weights.detach().amax(2), log_total.detach().to(log_weights.dtype))
    return top.masked_fill(top == -torch.inf, 0)


def log_in_unit(total: Tensor, top: Tensor) -> Tensor:
    """The logarithm of a total in the unit exp(top); -inf, with a zero gradient, of an empty one."""
    empty = total == 0
    return (total.masked_fill(empty, 1).log() + top).masked_fill(empty, -torch.inf)


def logsumexp(x: Tensor) -> Tensor:
    """Over the t axis; -inf, with a zero gradient, where there is nothing to sum (torch's gradient there is NaN)."""
    top = x.detach().amax(2, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    return log_in_unit((x - top).exp().sum(2), top[:, :, 0])


def running_logsumexp(x: Tensor, first: Tensor) -> Tensor:
    """log(exp(first) + sum_{j <= t} exp(x_j)) for every t: x `b h t n` and first `b h n`, fp64."""
    if x.shape[2] == 1:
        return logsumexp(torch.stack([first, x[:, :, 0]], dim=2))[:, :, None]
    if transformed():  # which the operator below does not support: plain operations, each prefix by itself
        whole = torch.cat([first[:, :, None], x], dim=2)
        return torch.stack([logsumexp(whole[:, :, : t + 1]) for t in range(1, whole.shape[2])], dim=2)
    return _running_logsumexp(x, first)


# torch.logcumsumexp would do, but its backward takes seven times as long as its forward and turns -inf into NaN. Here
# t = segments x steps, about sqrt(t) each: one loop over the steps of all segments at once, one over the segments.
# As an operator of its own, torch.compile sees one node instead of both loops unrolled.


@torch.library.custom_op("abc_attn::running_logsumexp", mutates_args=())
def _running_logsumexp(x: Tensor, first: Tensor) -> Tensor:
    t = x.shape[2]
    steps, x = _segments(x, -torch.inf)
    each = logsumexp(x.transpose(2, 3).flatten(3))  # of every segment as a whole: b h (segments n)
    top = torch.empty_like(x[:, :, :, 0])
    for s, segment in enumerate(each.unflatten(2, (-1, x.shape[-1])).unbind(2)):
        top[:, :, s] = first  # what a segment starts from
        first = torch.logaddexp(first, segment)
    total = (top != -torch.inf).to(x.dtype)
    tops, totals = torch.empty_like(x), torch.empty_like(x)
    for i in range(steps):
        old, top = top, torch.maximum(top, x[:, :, :, i])
        finite = top.masked_fill(top == -torch.inf, 0)
        total = total * (old - finite).exp() + (x[:, :, :, i] - finite).exp()
        tops[:, :, :, i], totals[:, :, :, i] = top, total
    return (tops + totals.log()).flatten(2, 3)[:, :, :t].contiguous()


@_running_logsumexp.register_fake
def _(x: Tensor, first: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("abc_attn::running_logsumexp_backward", mutates_args=())
def _running_logsumexp_backward(grad: Tensor, x: Tensor, first: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    # d totals_t / d x_j = exp(x_j - totals_t), t >= j. With r_j = grad_j + exp(totals_j - totals_{j+1}) r_{j+1}
    # the gradient is exp(x_j - totals_j) r_j: no exponent is ever positive.
    t = x.shape[2]
    following = torch.cat([totals[:, :, 1:], totals[:, :, -1:]], dim=2)
    decay = (totals - following).masked_fill(totals == -torch.inf, 0).exp()
    steps, decay = _segments(decay, 1.0)
    _, grad = _segments(grad, 0.0)
    inside, product = torch.empty_like(grad), torch.empty_like(decay)
    inside[:, :, :, -1], product[:, :, :, -1] = grad[:, :, :, -1], decay[:, :, :, -1]
    for i in range(steps - 2, -1, -1):
        inside[:, :, :, i] = grad[:, :, :, i] + decay[:, :, :, i] * inside[:, :, :, i + 1]
        product[:, :, :, i] = decay[:, :, :, i] * product[:, :, :, i + 1]
    after = torch.zeros_like(inside[:, :, :, 0])
    for s in range(inside.shape[2] - 2, -1, -1):
        after[:, :, s] = inside[:, :, s + 1, 0] + product[:, :, s + 1, 0] * after[:, :, s + 1]
    r = (inside + product * after[:, :, :, None]).flatten(2, 3)[:, :, :t]
    grad_x = (x - totals).masked_fill(x == -torch.inf, -torch.inf).exp() * r
    grad_first = (first - totals[:, :, 0]).masked_fill(first == -torch.inf, -torch.inf).exp() * r[:, :, 0]
    return grad_x.contiguous(), grad_first.contiguous()


@_running_logsumexp_backward.register_fake
def _(grad: Tensor, x: Tensor, first: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), first.new_empty(first.shape)


def _keep_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, output)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    return _running_logsumexp_backward(grad.contiguous(), *ctx.saved_tensors)


def _no_second_derivative(ctx, *_):  # type: ignore[no-untyped-def]
    raise NotImplementedError(
        "a running mean on the reference backend has second derivatives under torch.func only: nest torch.func.grad "
        "there, or use backend='torch'"
    )


_running_logsumexp_backward.register_autograd(_no_second_derivative)
_running_logsumexp.register_autograd(_backward, setup_context=_keep_for_backward)


def _segments(x: Tensor, fill: float) -> tuple[int, Tensor]:
    """`b h t n` -> `b h segments steps n`, filled up at the end."""
    t = x.shape[2]
    steps = 1 << ((t - 1).bit_length() + 1) // 2
    return steps, F.pad(x, (0, 0, 0, -t % steps), value=fill).unflatten(2, (-1, steps))
