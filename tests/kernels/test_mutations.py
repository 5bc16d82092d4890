"""Faults that a backend could have, put into it on purpose: the contract's comparison must find each of them.

A fault is a change of what `abc_attn.attention` gives to a kernel, or of what it gets back, in the fp32 forms of the
contract. Without a fault the same comparison passes.
"""

from __future__ import annotations

import inspect
from functools import lru_cache

import pytest
import torch
from contract import FORMS, Case, Expected, as_parameters, compare, gradients, results, shared, tokens, vector_width

from abc_attn import Write, attention

# The functions that a fault is put into: a module, and what it calls them. Their arguments go by name.
KERNELS = (attention, ("scan", "mean_attention"))
SUMS, MEANS, DECAYS = Case("elu"), Case("mlp:{n}"), Case("elu", {"gate": True})
FORGETS, FORGET_APART, TIED = Case("mlp:{n}", {"gate": True}), Case("mlp:{n}", {"gate": "slot"}), Case("slots:{n}")
POSITIONS = Case("linformer:{n}")
SLOTS, EARLIER, TOKENS = 8, 6, 67


def run(case: Case, backend: str, dtype: torch.dtype = torch.float64):
    """A pass over padded rows from the state of an earlier one: outputs, gradients, state."""
    layer = shared(case, 1 if "{n}" not in case.control else SLOTS, dtype=dtype, backend=backend)
    x = tokens(2, EARLIER + TOKENS, dtype).requires_grad_()
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[1, 20:24] = True
    _, state = layer(x[:, :EARLIER], return_state=True)
    y, state = layer(x[:, EARLIER:], key_padding_mask=padding, state=state, return_state=True)
    return results(y, gradients(y, layer, x), state)


@lru_cache
def expected(case: Case) -> Expected:
    return Expected(lambda backend: run(case, backend))


# The faults. Each is given the kernel and its arguments by name, and does what the kernel would.


def drop_the_decay_of_the_normaliser(kernel, given):
    """A linear read divides by a sum of phi that never forgets."""
    out, memory = kernel(**given)
    q, (phi, log_decay, _), before = given["q"], given["write"], given["memory"]
    if given["key_padding_mask"] is not None:
        padding = given["key_padding_mask"][:, None, :, None]
        phi, log_decay = phi.masked_fill(padding, 0), log_decay.masked_fill(padding, 0)
    start = torch.zeros_like(phi[:, :, 0]) if before is None else before.mass
    right, wrong = [start], [start]
    for share, decay in zip(phi.unbind(2), log_decay.exp().unbind(2), strict=True):
        right.append(decay * right[-1] + share)
        wrong.append(wrong[-1] + share)
    groups = q.shape[1] // phi.shape[1]
    total, other = ((q * torch.stack(x[1:], 2).repeat_interleave(groups, 1)).sum(-1) for x in (right, wrong))
    return out * (total / other)[..., None], memory._replace(mass=wrong[-1])


def forget_nothing_at_the_start_of_a_chunk(kernel, given):
    """The first token of every 16 keeps all of what a mean holds."""
    log_keep = given["log_keep"].clone()
    log_keep[:, :, ::16] = 0
    return kernel(**given | {"log_keep": log_keep})


def skip_a_token_of_a_chunk(kernel, given):
    at = given["k"].shape[2] // 2
    if given.get("log_weights") is None and "log_keep" in given:
        log_keep = given["log_keep"].clone()
        log_keep[:, :, at] = 0  # and what is not kept enters
        return kernel(**given | {"log_keep": log_keep})
    if "log_weights" in given:
        weights = given["log_weights"].clone()
        weights[:, :, at] = -torch.inf
        return kernel(**given | {"log_weights": weights})
    phi = given["write"].phi.clone()
    phi[:, :, at] = 0
    return kernel(**given | {"write": given["write"]._replace(phi=phi)})


def mask_v_only(kernel, given):
    """Padding has no value, but its phi is counted and its decay forgets."""
    padding = given["key_padding_mask"]
    if padding is None:
        return kernel(**given)
    padding = padding[:, None, :, None]
    out, *rest = kernel(**given | {"v": given["v"].masked_fill(padding, 0), "key_padding_mask": None})
    return out.masked_fill(padding, 0), *rest


def lose_the_first_state(kernel, given):
    lost = {name: None for name in ("memory", "log_total") if name in given}
    return kernel(**given | lost)


def sum_in_fp16(kernel, given):
    """The memory is held in fp16 from each chunk of 16 tokens to the next."""
    whole, outs = given, []
    names = {"q", "k", "v", "log_weights", "log_keep", "key_padding_mask", "write"} & given.keys()
    for start in range(0, whole["k"].shape[2], 16):
        chunk = {name: _tokens(whole[name], slice(start, start + 16)) for name in names}
        out, memory, *rest = kernel(**given | chunk)
        memory = type(memory)(*(x.half().to(x.dtype) for x in memory[:3]), memory.used)
        given = given | {"memory": memory} | ({"log_total": rest[0]} if rest else {})
        outs.append(out)
    return torch.cat(outs, 2), memory, *rest


def _tokens(value, part):
    if isinstance(value, Write):
        return Write(*(_tokens(x, part) for x in value))
    return None if value is None else value[:, part] if value.dim() == 2 else value[:, :, part]


FAULTS = {
    drop_the_decay_of_the_normaliser: [DECAYS],
    forget_nothing_at_the_start_of_a_chunk: [FORGETS, FORGET_APART],
    skip_a_token_of_a_chunk: [SUMS, MEANS, DECAYS, FORGETS, FORGET_APART, TIED],
    mask_v_only: [SUMS, MEANS, DECAYS, FORGETS, TIED, POSITIONS],
    lose_the_first_state: [SUMS, MEANS, DECAYS, FORGETS, FORGET_APART, TIED],
    sum_in_fp16: [SUMS, MEANS, DECAYS, FORGETS, FORGET_APART, TIED],
}


def put_in(fault, monkeypatch) -> list[str]:
    """Put a fault into the kernels; the list tells which of them were called with it."""
    module, names = KERNELS
    called = []

    def faulty(name, kernel):
        def wrapped(*args, **options):
            called.append(name)
            given = inspect.signature(kernel).bind(*args, **options)
            given.apply_defaults()
            return fault(kernel, dict(given.arguments))

        return wrapped

    for name in names:
        monkeypatch.setattr(module, name, faulty(name, getattr(module, name)))
    return called


@pytest.mark.parametrize("form", as_parameters([form for form in FORMS if form.dtype == torch.float32]))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault, form, monkeypatch):
    for case in FAULTS[fault]:
        with vector_width(form.width):
            sound = compare(run(case, form.backend, form.dtype), expected(case))
            with monkeypatch.context() as patch:
                called = put_in(fault, patch)
                found = run(case, form.backend, form.dtype)
        assert called
        assert all(each.ratio <= 1 for each in sound), (case, sound)
        # Without the fault again: what is allowed is measured when it is asked for.
        wrong = {each.name: round(each.ratio) for each in compare(found, expected(case)) if each.ratio > 1}
        assert {"outputs", "gradients"} <= wrong.keys(), (case, wrong)
