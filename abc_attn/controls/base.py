"""What a control is, how one is registered, made from its name, gated, and set beside others.

A control decides what each token writes (`Write`); it never touches the memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from abc_attn import control_names
from abc_attn.checks import check_inner_like
from abc_attn.controls.gates import Gate
from abc_attn.core import Band, Keep, Mean, Memory, Table, Write
from abc_attn.memory_limit import FLOAT, check_fits
from abc_attn.plugins import load_entry_points

InnerState = tuple[Tensor, ...] | None

CONTROLS: dict[str, type[Control]] = {}


class Control(nn.Module):
    """Decides how much of each token enters each slot. Subclass it, implement `forward`, and register it by name.

    embed_dim is the width of x (what the key projection reads), num_heads and head_dim are those of the keys. A
    keyword-only argument that a subclass adds is an option of the control, kept as an attribute of the same name:
    `def __init__(self, slots, *, half_life=16.0, **sizes)`, where `sizes` is passed on to this class.
    """

    paper: str = ""  # where the paper describes it
    online: bool = True  # decides from tokens <= t alone, so it can be causal
    linear: bool = False  # read by f(q) / (f(q) . mass) instead of softmax(K q)
    floor: float = 0.0  # ... whose denominator then counts as no less than this
    mask_empty: bool = False  # slots never written are not read
    grows: bool = False  # keeps every token: exact attention, whose memory is not bounded
    packs: bool = False  # starts from the memory of the layer below (`below=`), and offers its own as state.packed
    packed_width: int = 0  # ... which is so wide
    composable: bool = True
    learns_by_transfer: bool = False  # its weights have no gradient in ordinary training: abc-attn distill
    holds_tokens: bool = False  # keeps single tokens for good ...
    skips_held: bool = False  # ... which this control then leaves to the part that holds them
    sees_memory: bool = False  # `forward` takes the memory before the call as well
    sees_queries: bool = False  # ... and the queries of the tokens, which only causal self-attention has
    sees_values: bool = False  # ... and their values
    counts: bool = False  # a slot counts by what it holds, whose logarithm is the first tensor of its own state
    follows_window: bool = False  # takes over the rows of the window beside it, and decides about what leaves it

    name: str = ""  # as registered
    gating: str = ""  # what `describe` says of a gate inside

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = vars(cls).get("name", "")  # a subclass is not what its parent was registered as

    def __init__(self, slots: int, *, embed_dim: int, num_heads: int, head_dim: int, causal: bool = False) -> None:
        super().__init__()
        if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
            raise ValueError(f"{self.title()} needs at least 1 slot, got slots={slots!r}")
        if causal and not self.online:
            able = ", ".join(name for name, control in CONTROLS.items() if control.online)
            raise ValueError(
                f"{self.title()} cannot be causal: its phi depends on the whole sequence. "
                f"Use it with causal=False, or one of: {able}"
            )
        if self.sees_queries and not causal:
            raise ValueError(f"{self.title()} must be causal: it decides by the queries of the tokens that it writes")
        self.slots, self.causal = slots, causal
        self.embed_dim = at_least(1, embed_dim=embed_dim)
        self.num_heads = at_least(1, num_heads=num_heads)
        self.head_dim = at_least(1, head_dim=head_dim)

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        """The control's own state before any token: tensors with the batch first, or None; on `like`'s device."""
        return None

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        """What tokens x `b t D` with keys k `b h t d` write, after those that left `state`; and the new state.

        key_padding_mask `b t` is True at padding, which must not count in anything that is normalised or carried on.
        With `sees_memory` there is one more argument, `memory`: what the control's own rows hold before x; with
        `sees_queries` another, by name: the tokens' queries `q` `b h g t d`, scaled, g of them for each key head; with
        `sees_values` their values `v` `b h t e`, by name too.
        """
        raise NotImplementedError

    def log_weights(self, x: Tensor) -> Tensor | None:
        """log w, `b h t n`, of a control that is a running mean and no more: one kernel then does it all."""
        return None

    def mean(self, x: Tensor, key_padding_mask: Tensor | None) -> Mean | None:
        """The same of a control whose means may forget, or whose weights depend on how many tokens there are."""
        weights = self.log_weights(x)
        return None if weights is None else Mean(weights)

    def band(self) -> Band | None:
        """Which tokens a causal query reads, of a control that keeps tokens as they are and no more."""
        return None

    def keep(self) -> Keep | None:
        """The same of a control whose rows hold tokens that it chooses (keeping.py), and no more."""
        return None

    def sinks(self) -> int:
        """How many of the first tokens of a text it keeps as they are, in its first rows."""
        held = self.band() or self.keep()
        return 0 if held is None else held.sinks

    def choose(
        self, stored: Tensor, k: Tensor, before: Tensor, end: Tensor, state: tuple[Tensor, ...], q: Tensor | None = None
    ) -> tuple[Table, tuple[Tensor, ...]]:
        """... and its choices: see keeping.py."""
        raise NotImplementedError

    def look(self, q: Tensor, k: Tensor, place: Tensor, at: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """... and, with `sees_queries`, what it notes as queries read its rows: see keeping.py."""
        raise NotImplementedError

    def chosen(self, x: Tensor, query: Tensor) -> Tensor | None:
        """Which tokens of x `b t D` each query at positions `query` `q` reads, `b h q t`: 1 or 0, with a gradient that
        says what choosing would change. Of a control that learns which tokens to keep whole; None of any other."""
        return None

    def features(self, q: Tensor) -> Tensor:
        """f(q), `b h t d` -> `b h t n`, for a linear read."""
        return q

    @property
    def rows(self) -> int:
        """Rows of the memory; `slots` unless a control needs several to offer one."""
        return self.slots

    @property
    def state_bytes(self) -> int:
        """What the memory of one sequence in one layer takes; none, where it grows with the text."""
        return self.num_heads * self.rows * self.head_dim * (1 if self.linear else 2) * FLOAT

    def inner_shapes(self) -> list[tuple[int, ...]]:
        """The shapes, without the batch, of the tensors of its own state."""
        return [tuple(part.shape[1:]) for part in self.begin(1, self.num_heads, torch.zeros(())) or ()]

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        """Refuse (ValueError) a state of its own that no `length` `b` tokens can have left: a file may say anything.

        The shapes are right already. A control that counts, or indexes by what it keeps, adds its own conditions.
        """
        check_inner_like(inner, self.begin(len(length), self.num_heads, torch.zeros((), device=length.device)) or ())

    @property
    def appends(self) -> bool:
        """Whether a later call may add tokens to what this one wrote."""
        return True

    @property
    def causal_states_differ(self) -> bool:
        """Whether a state that was written causally means something else than one that was not."""
        return False

    @classmethod
    def default_slots(cls, head_dim: int) -> int:
        return 64

    @classmethod
    def count_weights(cls, slots: int, sizes: dict[str, int], options: dict[str, Any]) -> int:
        """How many numbers its weights and buffers hold, more or less: memory is checked before they are made."""
        return 0

    @classmethod
    def rows_of(cls, slots: int, options: dict[str, Any]) -> int:
        """`rows`, before there is a control."""
        return slots

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The options this control declares, with their defaults; any online control takes `gate` besides."""
        options = cls.declared()
        return {"gate": False} | options if cls.online and cls.composable else options

    @classmethod
    def declared(cls) -> dict[str, Any]:
        """The keyword-only arguments of its constructor, and of its parents' if it passes the rest on to them."""
        options: dict[str, Any] = {}
        for parent in cls.__mro__[: cls.__mro__.index(Control)]:
            if "__init__" in vars(parent):
                own = inspect.signature(vars(parent)["__init__"]).parameters.values()
                options = {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY} | options
                if not any(p.kind is p.VAR_KEYWORD for p in own):
                    break
        shared = inspect.signature(Control.__init__).parameters
        return {name: default for name, default in options.items() if name not in shared}

    def title(self) -> str:
        """What errors call it: the name it was asked for by."""
        return f"control {(self.name or type(self).__name__)!r}"

    def describe(self) -> str:
        """The name, slots and options that make two states interchangeable: "compressive:8(ratio=2)"."""
        set_here = {name: getattr(self, name, default) for name, default in self.options().items()}
        changed = [
            f"{name}={value}" for name, value in set_here.items() if value != self.options()[name] and name != "gate"
        ]
        changed += [self.gating] if self.gating else []
        changed += ["causal"] if self.causal and self.causal_states_differ else []
        return f"{self.name or type(self).__name__}:{self.slots}" + (f"({', '.join(changed)})" if changed else "")

    def extra_repr(self) -> str:
        return f"{self.describe()}, causal={self.causal}"


C = TypeVar("C", bound=type[Control])


def register_control(name: str) -> Callable[[C], C]:
    """Class decorator: make the control available as `name` (letters, digits, _ and -)."""

    def register(control: C) -> C:
        if not (isinstance(control, type) and issubclass(control, Control)):
            raise TypeError(f"register_control decorates a subclass of Control, got {control!r}")
        if not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"a control's name consists of letters, digits, _ and -, got {name!r}")
        known = CONTROLS.get(name, control)
        if (known.__module__, known.__qualname__) != (control.__module__, control.__qualname__):
            raise ValueError(f"control {name!r} is registered already, by {CONTROLS[name].__qualname__}")
        control.name = name
        CONTROLS[name] = control
        return control

    return register


def make_control(
    control: str,
    slots: int | None = None,
    *,
    embed_dim: int,
    num_heads: int,
    head_dim: int | None = None,
    causal: bool = False,
    **options: Any,
) -> Control:
    """Build a control from its name, "name:slots", or several joined by "+" ("window:32+mlp:32").

    An option goes to every part that declares it; one that no part declares is an error. Pass the result to several
    layers to tie them.
    """
    if not isinstance(control, str):
        raise TypeError(
            "control must be a string such as 'mlp' or 'window:32+mlp:32' "
            f"(BoundedAttention also takes a Control, as make_control returns it), got {type(control).__name__}"
        )
    parts = [_parse(part, control) for part in control_names.parts(control)]
    for option in options:
        declared = sorted({known for cls, _ in parts for known in cls.options()})
        if option not in declared:
            raise TypeError(f"control {control!r} has no option {option!r}; declared: {', '.join(declared) or 'none'}")
    if head_dim is None:
        if at_least(1, embed_dim=embed_dim) % at_least(1, num_heads=num_heads):
            raise ValueError(f"num_heads must divide embed_dim, got num_heads={num_heads} and embed_dim={embed_dim}")
        head_dim = embed_dim // num_heads
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": head_dim, "causal": causal}
    if len(parts) == 1:
        cls, given = parts[0]
        if None not in (given, slots) and given != slots:
            raise ValueError(f"slots={slots} contradicts control {control!r}; give one of them")
        return _build(cls, given or slots, sizes, options)
    made = [_build(cls, given, sizes, {o: x for o, x in options.items() if o in cls.options()}) for cls, given in parts]
    whole = Composition(made)
    if slots is not None and slots != whole.slots:
        raise ValueError(
            f"slots={slots} contradicts control {control!r}, whose parts have {whole.slots} in all; leave slots out"
        )
    return whole


def unknown_controls(control: object) -> list[str]:
    """The names in "window:32+clock:8", or in several of such, that nobody has registered, nor an installed package."""
    given = control_names.names(control)
    if not CONTROLS.keys() >= {*given}:
        load_entry_points()
    return [name for name in given if name not in CONTROLS]


def _parse(part: str, control: str) -> tuple[type[Control], int | None]:
    name = part.partition(":")[0]
    if name not in CONTROLS:
        failed = load_entry_points()  # an installed package may bring it
        if name not in CONTROLS:
            why = "".join(f"; {line}" for line in failed)
            raise ValueError(f"unknown control {name!r} in {control!r}; accepted: {', '.join(CONTROLS)}{why}")
    return CONTROLS[name], control_names.name_and_slots(part)[1]


def _build(cls: type[Control], slots: int | None, sizes: dict[str, Any], options: dict[str, Any]) -> Control:
    gate = options.get("gate", False)
    wrap = gate and "gate" not in cls.declared()  # running means put the gate inside
    if wrap and gate not in (True, "head"):
        raise ValueError(f"gate must be 'head' (or True) for control {cls.name!r}, or left out, got {gate!r}")
    if "gate" in options and (wrap or not gate):
        options = {option: value for option, value in options.items() if option != "gate"}
    if slots is None:
        slots = cls.default_slots(sizes["head_dim"])
    _check_memory(cls, slots, sizes, options)
    control = cls(slots, **sizes, **options)
    return Gated(control) if wrap else control


def _check_memory(cls: type[Control], slots: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    """Refuse what this machine cannot hold: the memory of one sequence, or the control's weights."""
    given = (slots, *(sizes[name] for name in ("embed_dim", "num_heads", "head_dim")))
    if not all(isinstance(number, int) and number > 0 for number in given):
        return  # the constructor says what is wrong
    row = sizes["num_heads"] * sizes["head_dim"] * (1 if cls.linear else 2)
    what = f"control '{cls.name}:{slots}'"
    check_fits(f"the state of {what}, for one sequence in one layer,", cls.rows_of(slots, options) * row * FLOAT)
    check_fits(f"the weights of {what}", cls.count_weights(slots, sizes, options) * FLOAT)


def whole(value: Any) -> int:
    """An option's value in an estimate of memory; one that is no number is for the constructor to refuse."""
    return value if isinstance(value, int) else 0


def at_least(least: int, **option: int) -> int:
    """The option's value, if it is a whole number from `least`."""
    ((name, value),) = option.items()
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number from {least}, got {value!r}")
    return value


def check_seed(seed: int) -> int:
    """The seed, if it is one that torch's generators take."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise TypeError(f"seed must be a whole number of 64 bits, got {seed!r}")
    return seed


class Gated(Control):
    """A control with `gate=True`: the memory also forgets, at a rate each token decides (section 4)."""

    def __init__(self, control: Control) -> None:
        super().__init__(
            control.slots,
            embed_dim=control.embed_dim,
            num_heads=control.num_heads,
            head_dim=control.head_dim,
            causal=control.causal,
        )
        self.control, self.gate = control, Gate(control)
        for flag in ("online", "linear", "floor", "mask_empty", "holds_tokens", "skips_held"):
            setattr(self, flag, getattr(control, flag))

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        return self.control.begin(batch, heads, like)

    def forward(
        self, x: Tensor, k: Tensor, key_padding_mask: Tensor | None, state: InnerState
    ) -> tuple[Write, InnerState]:
        write, state = self.control(x, k, key_padding_mask, state)
        return self.gate.apply_to(write, x, self.causal), state

    def features(self, q: Tensor) -> Tensor:
        return self.control.features(q)

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        self.control.check_inner(inner, length)

    @property
    def rows(self) -> int:
        return self.control.rows

    @property
    def appends(self) -> bool:
        return self.control.appends

    def title(self) -> str:
        return self.control.title()

    def describe(self) -> str:
        return f"gated {self.control.describe()}"


class Composition(Control):
    """The slots of several controls side by side, under one read. A token that a `global` part holds stays out of the
    window, random and compressive parts, so that it is not counted twice."""

    def __init__(self, parts: Sequence[Control]) -> None:
        for part in parts:
            if not part.composable:
                raise ValueError(f"{part.title()} cannot be combined with others by '+'; use it alone")
        if len({part.linear for part in parts}) > 1:
            kinds = ", ".join(
                f"{part.name or part.describe()} is {'linear' if part.linear else 'softmax'}" for part in parts
            )
            raise ValueError(f"the parts of a '+' must share one kind of read: {kinds}")
        self.online = all(part.online for part in parts)
        slots = sum(part.slots for part in parts)
        # A read ignores the order of slots, so it is free: those that hold tokens are asked first.
        parts = sorted(_join_windows(parts), key=lambda part: not part.holds_tokens)
        first = parts[0]
        super().__init__(
            slots,
            embed_dim=first.embed_dim,
            num_heads=first.num_heads,
            head_dim=first.head_dim,
            causal=first.causal,
        )
        self.parts: Iterable[Control] = nn.ModuleList(parts)  # type: ignore[assignment]
        self.linear, self.floor = first.linear, max(part.floor for part in parts)
        self.mask_empty = any(part.mask_empty for part in parts)
        self.sees_memory = any(part.sees_memory for part in parts)
        self.sees_queries = any(part.sees_queries for part in parts)
        self.sees_values = any(part.sees_values for part in parts)
        self._sizes = [len(part.inner_shapes()) for part in parts]

    def begin(self, batch: int, heads: int, like: Tensor) -> InnerState:
        return tuple(tensor for part in self.parts for tensor in part.begin(batch, heads, like) or ())

    def forward(
        self,
        x: Tensor,
        k: Tensor,
        key_padding_mask: Tensor | None,
        state: InnerState,
        memory: Memory | None = None,
        q: Tensor | None = None,
        v: Tensor | None = None,
    ) -> tuple[Write, InnerState]:
        states = self._of_parts(state or ())
        decided: list[tuple[Write, InnerState]] = []
        held = None  # b t   tokens that some part keeps for good
        row = 0
        for part, own in zip(self.parts, states, strict=True):
            rows = slice(row, row := row + part.rows)
            seen = (Memory(*(x[:, :, rows] for x in memory)),) if part.sees_memory and memory is not None else ()
            asks = ({"q": q} if part.sees_queries else {}) | ({"v": v} if part.sees_values else {})
            if held is None or not part.skips_held:
                write, own = part(x, k, key_padding_mask, own, *seen, **asks)
            else:  # to this part a held token is as good as padding
                left_out = held if key_padding_mask is None else held | key_padding_mask
                write, own = part(x, k, left_out, own, *seen, **asks)
                write = _silence(write, left_out)
            decided.append((write, own))
            if part.holds_tokens:
                holds = (write.phi != 0).any(-1).any(1).expand(x.shape[:2])
                held = holds if held is None else held | holds
        return _side_by_side([write for write, _ in decided]), tuple(t for _, own in decided for t in own or ())

    def _of_parts(self, state: tuple[Tensor, ...]) -> list[InnerState]:
        rest = iter(state)
        return [tuple(next(rest) for _ in range(size)) or None for size in self._sizes]

    def check_inner(self, inner: tuple[Tensor, ...], length: Tensor) -> None:
        for part, own in zip(self.parts, self._of_parts(inner), strict=True):
            part.check_inner(own or (), length)

    def band(self) -> Band | None:
        match [part.band() for part in self.parts]:
            case [Band(sinks, 0), Band(0, window, 1)]:
                return Band(sinks, window)
        return None

    def keep(self) -> Keep | None:
        match [*self.parts]:
            case [part]:
                return part.keep()
            case [first, part] if first.band() == Band(sinks=first.slots) and (keep := part.keep()):
                return keep._replace(sinks=first.slots)
        return None

    def sinks(self) -> int:
        return next(iter(self.parts)).sinks()  # parts that hold tokens come first

    def choose(self, *given: Any) -> tuple[Table, tuple[Tensor, ...]]:
        return [*self.parts][-1].choose(*given)

    def look(self, *given: Any) -> tuple[Tensor, ...]:
        return [*self.parts][-1].look(*given)

    def chosen(self, x: Tensor, query: Tensor) -> Tensor | None:
        match [*self.parts], [part.band() for part in self.parts]:
            case [_, other], [Band(sinks, 0), None] if other.skips_held:  # the first tokens, then those that it chooses
                among_others = other.chosen(x[:, sinks:], query - sinks)
                if among_others is not None:
                    first = (torch.arange(sinks, device=x.device) <= query[:, None]).expand(*among_others.shape[:3], -1)
                    return torch.cat([first.to(among_others.dtype), among_others], dim=-1)
        return None

    def features(self, q: Tensor) -> Tensor:
        return torch.cat([part.features(q) for part in self.parts], dim=-1)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def appends(self) -> bool:
        return all(part.appends for part in self.parts)

    def title(self) -> str:
        return f"control {self.describe()!r}"

    def describe(self) -> str:
        return "+".join(part.describe() for part in self.parts)


def _join_windows(parts: Sequence[Control]) -> list[Control]:
    """The parts, without a window whose rows another part takes over."""
    following = [part for part in parts if part.follows_window]
    if not following:
        return [*parts]
    windows = [part for part in parts if part.title() == "control 'window'"]  # gated ones too
    names = " + ".join(part.describe() for part in parts)
    if len(following) > 1 or len(windows) > 1:
        raise ValueError(f"one control that keeps tokens goes beside one window, got {names}")
    for window in windows:
        if window.band() is None:
            raise ValueError(f"{following[0].title()} keeps tokens as they are: the window beside it takes no gate")
        following[0].window = window.slots  # type: ignore[assignment]
    return [part for part in parts if part not in windows]


def _silence(write: Write, padding: Tensor) -> Write:
    padding = padding[:, None, :, None]
    log_decay = None if write.log_decay is None else write.log_decay.masked_fill(padding, 0)
    return Write(write.phi.masked_fill(padding, 0), log_decay, write.readable)


def _side_by_side(writes: Sequence[Write]) -> Write:
    """One write whose slots are those of all, in order."""
    b, h = (max(write.phi.shape[axis] for write in writes) for axis in (0, 1))

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.expand(b, h, -1, -1) for part in parts], dim=-1)

    phi, log_decay, readable = joined([w.phi for w in writes]), None, None
    if any(w.log_decay is not None for w in writes):
        log_decay = joined([torch.zeros_like(w.phi) if w.log_decay is None else w.log_decay for w in writes])
    if any(w.readable is not None for w in writes):
        readable = joined(
            [torch.ones_like(w.phi, dtype=torch.bool) if w.readable is None else w.readable for w in writes]
        )
    return Write(phi, log_decay, readable)
