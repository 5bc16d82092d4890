"""Controls that look at the keys, or at the layer below: clustering, landmarks, LUNA and the shared workspace."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from abc_attn.checks import check_count, check_log_total
from abc_attn.controls.base import Control, InnerState, at_least, register_control, whole
from abc_attn.controls.gates import Gate
from abc_attn.controls.positional import count_positions
from abc_attn.core import Mean, Write, full_precision, memory_dtype
from abc_attn.normaliser import empty_total, log_forgotten, running_mean


@register_control("cluster")
class Cluster(Control):
    """Attention over the centroids of the keys: k-means over all of them, or one pass in order if causal."""

    paper = "3.2"
    mask_empty = True

    def __init__(self, slots: int, *, iterations: int = 10, gate: bool = False, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.iterations = at_least(1, iterations=iterations)
        self.gate = Gate(self) if gate else None

    @property
    def appends(self) -> bool:
        return self.causal

    @property
    def causal_states_differ(self) -> bool:
        return True  # running centroids against those of k-means

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        centroids = like.new_zeros(batch, heads, self.slots, self.head_dim, dtype=memory_dtype(like))
        seen = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return centroids, seen, empty_total(batch, heads, self.slots, like)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        check_count(inner[1], length, exact=True)
        check_log_total(inner[2], gated=self.gate is not None)

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        assert state is not None
        centroids, seen, log_total = state
        position, count = count_positions(seen, key_padding_mask, x)
        keep = None if self.gate is None else self.gate.log_keep(x)
        with torch.no_grad(), full_precision(k):  # who belongs where carries no gradient
            keys = k.detach().to(centroids.dtype)
            if self.causal:
                member, centroids = _in_order(keys, position, key_padding_mask, keep, centroids, log_total)
            else:
                member = _k_means(keys, position, count, key_padding_mask, self.slots, self.iterations)
            log_member = torch.zeros_like(member, dtype=keys.dtype).masked_fill(~member, -torch.inf)
        # M_ij / sum_l M_lj is a mean over the members: the running mean of weights that are 0 or 1.
        write, log_total = running_mean(Mean(log_member, keep), log_total, key_padding_mask, causal=self.causal)
        return write, (centroids, count, log_total)


def _in_order(
    keys: Tensor,
    position: Tensor,
    key_padding_mask: Tensor | None,
    log_keep: Tensor | None,
    centroids: Tensor,
    log_total: Tensor,
) -> tuple[Tensor, Tensor]:
    """The cluster of every token in one pass, `b h t`, and the centroids after it.

    The first n tokens open a cluster each; every other one joins the nearest running mean, the lowest index on a tie.
    """
    slots, members = centroids.shape[2], []
    index = torch.arange(slots, device=keys.device)
    for t in range(keys.shape[2]):
        key, time = keys[:, :, t, None], position[:, t, None, None]  # b h 1 d, b 1 1
        apart = (centroids - key).square().sum(-1).masked_fill(index >= time, torch.inf)
        joined = index == torch.where(time < slots, time, apart.argmin(-1, keepdim=True))  # b h n
        if key_padding_mask is not None:
            joined = joined & ~key_padding_mask[:, t, None, None]
        # The centroid moves by the token's share of its cluster, whose (gated) size is kept as its logarithm.
        share = torch.where(joined, 0.0, -torch.inf).to(log_total.dtype)
        if log_keep is not None:
            keep = log_keep[:, :, t].double()
            if key_padding_mask is not None:
                keep = keep.masked_fill(key_padding_mask[:, t, None, None], 0)
            log_total, share = log_total + keep, share + log_forgotten(keep)
        log_total = torch.logaddexp(log_total, share)
        moved = centroids + (share - log_total).exp()[..., None].to(centroids.dtype) * (key - centroids)
        centroids = torch.where(joined[..., None], moved, centroids)
        members.append(joined)
    return torch.stack(members, dim=2), centroids


def _k_means(
    keys: Tensor, position: Tensor, count: Tensor, key_padding_mask: Tensor | None, slots: int, iterations: int
) -> Tensor:
    """Lloyd's iterations from evenly spaced tokens: membership `b h t n`, in which some clusters may be empty."""
    b, _, t, _ = keys.shape
    real = torch.ones(b, t, dtype=torch.bool, device=keys.device) if key_padding_mask is None else ~key_padding_mask
    # b n: the position of the token that each cluster starts from.
    start = torch.arange(slots, device=keys.device) * count[:, None] // slots
    found = (position[:, None] == start[..., None]) & real[:, None]
    centroids = torch.where(found[:, None], 1.0, 0.0).to(keys.dtype) @ keys.masked_fill(~real[:, None, :, None], 0)
    index = torch.arange(slots, device=keys.device)
    for _ in range(iterations):
        # |k|^2 is the same for every centroid and left out.
        apart = centroids.square().sum(-1)[:, :, None] - 2 * keys @ centroids.mT
        member = (apart.argmin(-1, keepdim=True) == index) & real[:, None, :, None]
        size = member.sum(2)[..., None]
        means = member.to(keys.dtype).mT @ keys.masked_fill(~real[:, None, :, None], 0) / size.clamp(min=1)
        centroids = torch.where(size > 0, means, centroids)
    return member


@register_control("landmarks")
class Landmarks(Control):
    """Slots at evenly spaced tokens: each token goes to those of like keys, and a slot counts for all that it holds.

    alpha_ti = softmax over slots of -sharpness |k_t - c_i|^2 / 2 s^2, where c_i is the key of slot i's own token and
    s^2 the mean square of keys' distances from their mean; a slot is the alpha-weighted mean, and the logarithm of its
    sum of alpha is added to its score. Sharpness, one a head, is learned. Not in the paper.
    """

    online = False  # where its tokens stand depends on how many there are
    mask_empty = True
    counts = True
    composable = False

    def __init__(self, slots: int, *, sharpness: float = 64.0, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        if not isinstance(sharpness, int | float) or not 0 < sharpness < float("inf"):
            raise ValueError(f"sharpness must be a number above 0, got {sharpness!r}")
        self.sharpness = float(sharpness)
        self.log_sharpness = nn.Parameter(torch.full((self.num_heads,), math.log(sharpness)))

    @property
    def appends(self) -> bool:
        return False

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        return (empty_total(batch, heads, self.slots, like),)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        check_log_total(inner[0])

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        assert state is not None
        position, count = count_positions(state[0].new_zeros(len(x), dtype=torch.int64), key_padding_mask, x)
        with full_precision(k):
            log_alpha = self._log_alpha(k.to(memory_dtype(k)), position, count[:, None], key_padding_mask)
            write, log_total = running_mean(Mean(log_alpha), state[0], key_padding_mask, causal=False)
        return write, (log_total,)

    def _log_alpha(self, k: Tensor, position: Tensor, count: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        slot, least = torch.arange(self.slots, device=k.device), count.where(count > 0, 1)
        real = torch.ones_like(position, dtype=torch.bool)
        if key_padding_mask is not None:
            real = ~key_padding_mask
            k = k.masked_fill(key_padding_mask[:, None, :, None], 0)
        taken = least.where(least < self.slots, self.slots)
        own = (position[:, None] == (slot * least // taken)[..., None]) & real[:, None]  # b n t
        # Distances are between keys alone, so their mean is taken out first: less is rounded.
        weight = (real.to(k.dtype) / least)[:, None, :, None]
        k = k - (k * weight).sum(2, keepdim=True)
        spread = (k.square() * weight).sum((2, 3))[..., None, None]  # s^2, b h 1 1
        center = k.take_along_dim(own.int().argmax(-1)[:, None, :, None], 2)
        nearness = 2 * k @ center.mT - center.square().sum(-1)[:, :, None]  # |k|^2 is the same for all slots
        scale = self.log_sharpness.to(k.dtype).exp()[:, None, None] / (2 * spread.where(spread > 0, 1))
        return (scale * nearness).masked_fill((slot >= taken)[:, None, None], -torch.inf).log_softmax(-1)


class Packed(Control):
    """What LUNA and the shared workspace have in common: P, the memory of the layer below, attends over the tokens.

    `packed_dim` is the width of P, that of the queries' side, where the tokens (a context) have another.
    """

    online = False
    composable = False
    packs = True

    def __init__(self, slots: int, *, packed_dim: int | None = None, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        width = self.embed_dim if packed_dim is None else at_least(1, packed_dim=packed_dim)
        self.packed_dim, self.packed_width = None if width == self.embed_dim else width, width
        self.packed = nn.Parameter(torch.randn(slots, width))  # P of the first layer
        self.query = nn.Linear(width, self.num_heads * self.head_dim)

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        return slots * (whole(options.get("packed_dim")) or sizes["embed_dim"])

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        return self.packed.expand(batch, -1, -1).clone(), empty_total(batch, heads, self.slots, like)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        check_log_total(inner[1])
        if inner[0].dtype != self.packed.dtype:
            raise ValueError(f"this state's P has dtype {inner[0].dtype}, this {self.title()} has {self.packed.dtype}")
        if not bool((inner[0].abs() <= 2.0**60).all()):
            raise ValueError("this state's P holds numbers beyond 2**60, whose products would overflow")

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        assert state is not None
        packed, log_total = state
        query = self.query(packed).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # b h n d
        logits = k @ query.mT.to(k.dtype) * self.head_dim**-0.5  # b h t n
        logits = self.compete(logits.to(memory_dtype(logits)), key_padding_mask)
        write, log_total = running_mean(Mean(logits), log_total, key_padding_mask, causal=False)
        return write, (packed, log_total)

    def compete(self, logits: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return logits


@register_control("luna")
class Luna(Packed):
    """LUNA: phi is the softmax over tokens of P x, with P carried up from the layer below (`below=`)."""

    paper = "A.5"


@register_control("workspace")
class Workspace(Packed):
    """Shared workspace: as luna, but for each slot only the `topk` best tokens may write."""

    paper = "A.5"

    def __init__(self, slots: int, *, topk: int = 16, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.topk = at_least(1, topk=topk)

    @property
    def appends(self) -> bool:
        return False  # who wins depends on all competitors

    def compete(self, logits: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        if key_padding_mask is not None:
            logits = logits.masked_fill(key_padding_mask[:, None, :, None], -torch.inf)
        weakest = logits.detach().topk(min(self.topk, logits.shape[2]), dim=2).values[:, :, -1:]
        return logits.masked_fill(logits < weakest, -torch.inf)
