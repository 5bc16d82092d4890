"""The recipes of the paper's tables, part of the package: a folder a table, `<table>/<scale>/<row>.yaml`.

Only the standard library is imported here, so that a command can list and find recipes at once.
"""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path

from abc_attn.files import whole_folder

ROOT = Path(__file__).parent
TABLE = "table.yaml"
SCALES = ("small", "full")


def tables(root: Path | None = None) -> list[str]:
    """The names of the tables: every folder with a table.yaml."""
    return sorted(path.parent.name for path in (root or ROOT).glob(f"*/{TABLE}"))


def names() -> list[str]:
    """Every recipe of the package, such as table1a/small/mlp-64. Shared settings (_*.yaml) are not recipes."""
    found = (path for scale in SCALES for path in ROOT.glob(f"*/{scale}/*.yaml") if not path.name.startswith("_"))
    return sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in found)


def find(name_or_path: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one of the package's recipes."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    wanted = path.as_posix().removesuffix(".yaml")
    if wanted in (known := names()):
        return ROOT / f"{wanted}.yaml"
    close = difflib.get_close_matches(wanted, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`abc-attn recipes` lists those that are installed"
    raise FileNotFoundError(f"no recipe at {name_or_path}, and no installed recipe has that name; {hint}")


def copy(to: str | Path) -> None:
    """Copy all recipes and tables into a new folder, to change them there (`abc-attn reproduce --recipes`)."""
    to = Path(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} exists: give a folder that does not, or an empty one")
    with whole_folder(to) as partial:
        for source in sorted(ROOT.rglob("*.yaml")):
            target = partial / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
