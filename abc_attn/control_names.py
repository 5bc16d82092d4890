"""The text that names controls, such as "window:32+mlp:32". It is read without torch: a mistake is answered at once."""

from __future__ import annotations

# Those of this package, in the order of CONTROLS; tests/test_structure.py compares.
BUILT_IN = (
    "softmax", "window", "dilated", "global", "random", "compressive", "linformer", "mlp", "slots", "placed", "keydiff",
    "knorm", "leverage", "tova", "keep", "cluster", "landmarks", "luna", "workspace", "elu", "rfa", "t2r", "favor",
    "dpfp",
)  # fmt: skip


def parts(control: object) -> list[str]:
    """The parts of a control, or of several: a list (by layer) or a dict (by site).

    Anything else has none: whoever takes it will say what is wrong with it.
    """
    if isinstance(control, dict):
        control = list(control.values())
    controls = control if isinstance(control, list) else [control]
    return [part.strip() for each in controls if isinstance(each, str) for part in each.split("+")]


def name_and_slots(part: str) -> tuple[str, int | None]:
    """("window", 32) of "window:32", and ("mlp", None) of "mlp"."""
    name, colon, count = part.partition(":")
    if not colon:
        return name, None
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"the slots of a control are a whole number from 1, as in '{name}:32', got {part!r}")
    return name, int(count)


def names(control: object) -> list[str]:
    """The names in "window:32+clock:8", or in several of such."""
    return [part.partition(":")[0] for part in parts(control)]
