"""Controls that keep the tokens that matter, without training: those that leave a window compete for m slots.

Decisions fall as tokens B, 2B, 3B, ... of the text arrive, whatever the calls are. At token c B those before c B - w
have left the window; the m best of them stay, the others free their rows. A token never moves: it stays in the row that
it was written into, and the tokens of the next block enter the rows that were freed. So the memory is w + m + B rows,
full just before a decision. What a token is worth is said by its key, its value, or the queries since the last
decision. With `longest`, tokens that are further back lose to all others: none stays for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from abc_attn.checks import check_count
from abc_attn.controls.base import Control, InnerState, at_least, register_control, whole
from abc_attn.core import Keep, Memory, Table, Write, full_precision, has_values, softmax_weights

PIECE = 512  # tokens that are decided about at once: scores of all against all decisions would grow with the square
_RIDGE = 1e-3  # of the mean square of a value's channels
_NEVER = torch.iinfo(torch.int64).min
_MOST = 2**18  # of a score, either way
_PLACES = 2**44  # more than a text has tokens; what is left of 64 bits is for scores


class Keeping(Control):
    """A control whose rows hold single tokens: the last ones, and m of the others, chosen by what they are worth.

    That is said by `judge`, from the keys, or with `sees_values` from the values; with `sees_queries` by `look` and
    `judge_rows`.
    """

    mask_empty = True
    skips_held = True
    sees_memory = True
    follows_window = True
    window = 0  # tokens that do not compete yet; the window beside it, which `+` joins to it

    def __init__(self, slots: int, *, block: int = 64, longest: int | None = None, **sizes: Any) -> None:
        super().__init__(slots, **sizes)
        self.block = at_least(1, block=block)
        self.longest = None if longest is None else at_least(1, longest=longest)

    @classmethod
    def options(cls) -> dict[str, Any]:
        return cls.declared()  # no gate: what is kept is kept as it is

    @classmethod
    def rows_of(cls, slots: int, options: dict[str, Any]) -> int:
        return slots + whole(options.get("block", 64))

    @property
    def rows(self) -> int:
        return self.window + self.slots + self.block

    def describe(self) -> str:
        return (f"window:{self.window}+" if self.window else "") + super().describe()

    def keep(self) -> Keep | None:
        return Keep(0, self.window, self.slots, self.block)

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        count = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return count, torch.full((batch, heads, self.rows), -1, dtype=torch.int64, device=like.device)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None,
        state: InnerState,
        memory: Memory,
        q: Tensor | None = None,
        v: Tensor | None = None,
    ) -> tuple[Write, InnerState]:
        assert state is not None
        judged, stored = (k, memory.k) if v is None else (v, memory.v)
        t, real, keys, stored = k.shape[2], None, judged.detach().to(memory.k.dtype), stored.detach()
        q = None if q is None else q.to(memory.k.dtype)
        count, tokens = state[0], torch.full_like(state[0], t)
        if key_padding_mask is not None:  # the real tokens to the front, in order
            real = (~key_padding_mask).cumsum(1)
            tokens = real[:, -1]
            order = key_padding_mask.sort(dim=1, stable=True).indices
            keys = keys.take_along_dim(order[:, None, :, None], 2)
            q = None if q is None else q.take_along_dim(order[:, None, None, :, None], 3)
        phi, freed = [], []
        for start in range(0, t, PIECE):
            new = keys[:, :, start : start + PIECE]
            before = count + tokens.clamp(max=start)
            end = count + tokens.clamp(max=start + new.shape[2])
            asks = None if q is None else q[:, :, :, start : start + PIECE]
            table, state = self.choose(stored, new, before, end, state, asks)
            both = torch.cat([stored, new], dim=2)
            stored = both.take_along_dim(table.source[:, :, -1, :, None], 2)
            # Token j enters the row that holds it at the end of its block; with the first of a block, rows become free.
            index = torch.arange(new.shape[2], device=k.device)
            place = before[:, None] + index  # b t
            of_block = (place // self.block - (before // self.block)[:, None]).clamp(max=table.source.shape[2] - 1)
            of_block = of_block[:, None, :, None]
            phi.append(table.source.take_along_dim(of_block, 2) == self.rows + index[:, None])
            first = (place % self.block == 0) & (place < end[:, None])
            freed.append(table.freed.take_along_dim(of_block, 2) & first[:, None, :, None])
        entered, emptied = torch.cat(phi, dim=2), torch.cat(freed, dim=2)
        if real is not None:  # back to where the tokens were
            at = (real - 1).clamp(min=0)[:, None, :, None]
            hidden = key_padding_mask[:, None, :, None]  # type: ignore[index]
            entered, emptied = (part.take_along_dim(at, 2) & ~hidden for part in (entered, emptied))
        log_decay = torch.zeros_like(entered, dtype=memory.k.dtype).masked_fill(emptied, -torch.inf)
        return Write(entered.to(memory.k.dtype), log_decay), state

    @torch.no_grad()
    def choose(
        self, stored: Tensor, k: Tensor, before: Tensor, end: Tensor, state: tuple[Tensor, ...], q: Tensor | None = None
    ) -> tuple[Table, tuple[Tensor, ...]]:
        """Which token each row holds, block by block, as new keys k `b h t d` come to those `stored` `b h n d`; with
        `sees_values` these are values.

        Places count the control's own tokens: the first new one has the place `before` `b` (negative: not yet one of
        them), those up to `end` are real. With `sees_queries` the new tokens have queries q `b h g t d`.
        """
        _, place, *rest = state
        others: Sequence[Tensor] = rest
        rows, size, new = self.rows, self.block, k.shape[2]
        first_block = before // size  # b
        blocks = (new + size - 2) // size + 1
        if has_values(k):
            blocks = max(1, int(((end - 1) // size - first_block).max()) + 1)
        keys = torch.cat([stored, k], dim=2)
        source = torch.arange(rows, device=k.device).expand(place.shape)
        starts = (first_block[:, None] + torch.arange(blocks, device=k.device)) * size  # b c
        decides = (starts >= before[:, None]) & (starts < end[:, None]) & (starts > 0)
        any_decides = decides.any(0).tolist() if has_values(k) else [True] * blocks
        left = starts[:, :1] - self.window - size  # b 1   the first place that may leave the window
        line = self._line(place, source, before, left[:, 0], self.window + (blocks + 1) * size, new - 1)
        worth: Tensor | None = None
        if any(any_decides) and q is None:
            with full_precision(k):
                worth, others = self.judge(keys, line[..., : blocks * size], decides, left, others)
        sources, places, freed = [], [], []
        for i in range(blocks):
            start = starts[:, i, None, None]
            gone = torch.zeros_like(place, dtype=torch.bool)
            if any_decides[i]:
                if worth is None:
                    of_row, others = self.judge_rows(place, start, decides[:, i, None, None], others)
                else:
                    of_row = worth[..., min(i, worth.shape[-1] - 1)].take_along_dim(source, 2)
                if self.longest is not None:  # rotary positions end: what is further back is the first to go
                    of_row = of_row.masked_fill(place < start - self.longest, -_MOST - 1)
                competes = (place >= 0) & (place < start - self.window) & decides[:, i, None, None]
                # On a tie the later token stays: then no two are equal.
                score = (of_row * _PLACES + place).masked_fill(~competes, _NEVER)
                gone = competes & (score < score.topk(self.slots, dim=-1).values[..., -1:])
                place = place.masked_fill(gone, -1)
            begin = torch.maximum(start, before[:, None, None]).clamp(min=0)
            free = place < 0
            rank = free.cumsum(-1) - 1
            enters = free & (rank < torch.minimum(end[:, None, None], start + size) - begin)
            place = torch.where(enters, begin + rank, place)
            source = torch.where(enters, rows + begin - before[:, None, None] + rank, source)
            sources.append(source)
            places.append(place)
            freed.append(gone)
            if q is not None:
                at = starts[:, i, None] + torch.arange(size, device=k.device)  # b B   the block's own queries
                nth = (at - before[:, None]).clamp(0, new - 1)
                at = torch.where((at >= before[:, None]) & (at < end[:, None]), at, -1)
                with full_precision(k):
                    asks = q.take_along_dim(nth[:, None, None, :, None], 3)
                    others = self.look(asks, keys.take_along_dim(source[..., None], 2), place, at, others)
        stacked = [torch.stack(part, dim=2) for part in (sources, places, freed)]
        return Table(stacked[0], stacked[1], stacked[2], line), (end.clamp(min=0), place, *others)

    def _line(self, place: Tensor, source: Tensor, before: Tensor, first: Tensor, length: int, last: int) -> Tensor:
        """Where the tokens at the places from `first` `b` on are, in order: `b h length`, as in `Table.source`.

        Of places that are no longer there, or not yet, some row; token `last` is the last one of the call.
        """
        behind = place - first[:, None, None]
        behind = torch.where((behind >= 0) & (behind < length), behind, length)
        line = torch.zeros(*place.shape[:2], length + 1, dtype=torch.int64, device=place.device)
        line = line.scatter(2, behind, source)[..., :length]
        new = first[:, None, None] + torch.arange(length, device=place.device) - before[:, None, None]
        return torch.where(new >= 0, self.rows + new.clamp(max=last), line)

    def judge(
        self, keys: Tensor, line: Tensor, decides: Tensor, left: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """How much each of `keys` `b h s d` is worth, as whole numbers `b h s c`, at each decision (or `b h s 1`); and
        what the control keeps beside the places.

        Decision i is about those that stayed and, new among them, tokens i B to (i + 1) B of `line`; `left` is the
        place of the first of these.
        """
        raise NotImplementedError

    def _leaving(self, keys: Tensor, line: Tensor, decides: Tensor, left: Tensor) -> Tensor:
        """Of what `judge` is given, the tokens that leave the window at each decision: `b h c B d`, zeros for none."""
        found = keys.take_along_dim(line[..., None], 2).unflatten(2, (-1, self.block))
        place = (left + torch.arange(line.shape[2], device=line.device)).unflatten(1, (-1, self.block))  # b c B
        counts = (place >= 0) & decides[..., None]
        return found.where(counts[:, None, ..., None], 0)

    def judge_rows(
        self, place: Tensor, start: Tensor, decides: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """How much each row is worth, as whole numbers `b h n`, at the decision that falls at the place `start`
        `b 1 1`, by what `look` has noted; and what it has noted afterwards, in the rows of the batch that decide.

        The rows hold the tokens at `place` `b h n`.
        """
        raise NotImplementedError

    def _left(self, count: Tensor) -> Tensor:
        """How many of `count` tokens have left the window at the last decision."""
        return (((count - 1).clamp(min=0) // self.block) * self.block - self.window).clamp(min=0)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        count, place, *_ = inner
        check_count(count, length, exact=False)
        local = self._left(count)  # the first place that has not competed
        kept, local = local.clamp(max=self.slots)[:, None], local[:, None, None]
        held, recent = (place >= 0) & (place < local), place >= local
        distinct = place.sort(-1).values
        distinct = (distinct[..., 1:] > distinct[..., :-1]) | (distinct[..., 1:] < 0)
        fits = (held.sum(-1) == kept) & (recent.sum(-1) == count[:, None] - local[..., 0])
        if not bool(((place >= -1) & (place < count[:, None, None])).all() and fits.all() and distinct.all()):
            raise ValueError(
                f"this state's places in the text are not those that {self.title()} has after "
                f"{count.tolist()[:8]} tokens"
            )


@register_control("keydiff")
class KeyDiff(Keeping):
    """Keeps, of what leaves the window, the keys least similar to their running mean (KeyDiff, Park et al. 2025)."""

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        total = torch.zeros(batch, heads, self.head_dim, dtype=torch.float64, device=like.device)
        return *super().begin(batch, heads, like), total  # type: ignore[misc]

    def judge(
        self, keys: Tensor, line: Tensor, decides: Tensor, left: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        unit = torch.nn.functional.normalize(keys.double(), dim=-1)
        totals = others[0][:, :, None] + self._leaving(unit, line, decides, left).sum(3).cumsum(2)  # b h c d
        cosine = unit @ torch.nn.functional.normalize(totals, dim=-1).mT
        return _grid(-cosine * 4096), [totals[:, :, -1].clone()]


@register_control("knorm")
class KNorm(Keeping):
    """Keeps, of what leaves the window, the keys of least norm (Devoto et al. 2024)."""

    def judge(
        self, keys: Tensor, line: Tensor, decides: Tensor, left: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        return _grid(-keys.double().norm(dim=-1, keepdim=True).log2() * 1024), others


@register_control("leverage")
class Leverage(Keeping):
    """Keeps, of what leaves the window, the tokens whose values are the least like all others: of most leverage.

    worth_j = log2 of [v_j, 1]^T (sum of [v, 1] [v, 1]^T)^-1 [v_j, 1], the sum over all tokens that have left: what a
    least-squares fit to them would follow token j by.
    """

    sees_values = True

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        size = self.head_dim + 1
        moment = torch.zeros(batch, heads, size, size, dtype=torch.float64, device=like.device)
        return *super().begin(batch, heads, like), moment  # type: ignore[misc]

    def judge(
        self, keys: Tensor, line: Tensor, decides: Tensor, left: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        values = torch.nn.functional.pad(keys.double(), (0, 1), value=1.0)
        leaving = self._leaving(values, line, decides, left)
        moments = others[0][:, :, None] + (leaving.mT @ leaving).cumsum(2)  # b h c d+1 d+1
        spread = moments.diagonal(dim1=-2, dim2=-1)[..., :-1]
        # Directions in which next to nothing varies, or of which few tokens are known, must not decide alone.
        ridge = torch.nn.functional.pad((_RIDGE * spread.mean(-1, keepdim=True)).expand_as(spread), (0, 1))
        inverse = torch.linalg.inv_ex(moments + torch.diag_embed(ridge)).inverse
        each = values[:, :, None]  # b h 1 s d+1
        worth = (each @ inverse * each).sum(-1).transpose(2, 3)
        return _grid(worth.log2() * 1024), [moments[:, :, -1].clone()]

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        count, _, moment = inner
        left = self._left(count)[:, None]
        if not bool((moment[..., -1, -1] == left).all() and (moment.diagonal(dim1=-2, dim2=-1) >= 0).all()):
            raise ValueError(
                f"this state's moments are not those that {self.title()} has after {count.tolist()[:8]} tokens"
            )


@register_control("tova")
class Tova(Keeping):
    """Keeps, of what leaves the window, the tokens that the last queries attend to (after TOVA, Oren et al. 2024).

    Causal only. The queries are those of the block before a decision; docs/maths.md says how it differs from TOVA.
    """

    sees_queries = True

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        attention = torch.zeros(batch, heads, self.rows, dtype=torch.float64, device=like.device)
        return *super().begin(batch, heads, like), attention  # type: ignore[misc]

    def look(self, q: Tensor, k: Tensor, place: Tensor, at: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The attention of this block's queries so far to each row `b h n`, and that of queries q `b h g t d` at the
        places `at` `b t` (-1: none) to rows with keys k `b h n d`: a softmax over these rows, the mean over g heads."""
        seen = (place[:, :, None] >= 0) & (place[:, :, None] <= at[:, None, :, None])  # b h t n
        scores = (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])  # b h g t n
        weights = softmax_weights(scores, seen[:, :, None], 0.0)
        return (others[0] + weights.sum((2, 3), dtype=torch.float64) / q.shape[2],)

    def judge_rows(
        self, place: Tensor, start: Tensor, decides: Tensor, others: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        (attention,) = others
        readers = start - place.clamp(min=0).maximum(start - self.block)  # those of the block that came after it
        return _grid((attention / readers).log2() * 4096), (attention.masked_fill(decides, 0),)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        super().check_inner(inner, length)
        count, place, attention = inner
        queries = count - (count - 1).clamp(min=0) // self.block * self.block  # each gives 1 in all
        fits = (attention.sum(-1) - queries[:, None]).abs() <= self.block / 1000  # rounding
        if not bool((attention >= 0).all() and (attention.masked_select(place < 0) == 0).all() and fits.all()):
            raise ValueError(f"this state's attention to rows is not that of the last queries of {self.title()}")


def _grid(score: Tensor) -> Tensor:
    """Scores as whole numbers. The same token twice has equal scores, and must have them whatever the rounding of a
    product is, which differs from one way to split a text to another."""
    return score.nan_to_num(0, _MOST, -_MOST).clamp(-_MOST, _MOST).round().long()
