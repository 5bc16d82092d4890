"""Compiles the native kernels. Optional: without a C++ compiler the install succeeds and the torch backend is used.

Also prepares the README for package indexes, which do not resolve links to files of the repository.
"""

import re
import tomllib
from glob import glob
from pathlib import Path

from setuptools import Extension, setup


def index_readme(text: str, source: str | None) -> str:
    """The README with links to files made absolute, to where `source` keeps them; without a source, as plain text.

    A picture without a source becomes its description.
    """

    def link(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if re.match(r"https?://|#", target):
            return found[0]
        if source is None:
            return f"*{words}*" if picture else words
        return f"{picture}[{words}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, text)


if __name__ == "__main__":
    root = Path(__file__).parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=index_readme(
            (root / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Source")
        ),
        long_description_content_type="text/markdown",
        ext_modules=[
            Extension(
                "abc_attn.kernels._native",
                ["abc_attn/kernels/native.cpp"],
                depends=glob("abc_attn/kernels/native_*.h"),
                language="c++",
                extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", "-Wno-psabi", "-Wno-maybe-uninitialized"],
                optional=True,
            )
        ],
    )
