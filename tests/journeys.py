"""The journeys of docs/journeys.md: their commands, what is typed into them, and what they print."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "journeys.md"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ANYTHING = "..."  # on the page, any text; here it takes the place of answers, and of lines that `generate` writes


@dataclass
class Step:
    """A command of the page. `typed` goes to its standard input, line by line."""

    command: str
    typed: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    def check(self, output: str) -> None:
        """The lines of the page are printed, in their order; progress bars may stand between them."""
        lines = iter(re.split(r"[\r\n]+", output))
        for expected in self.printed:
            assert any(_pattern(expected).fullmatch(line) for line in lines), f"{expected!r} is not in:\n{output}"


def _pattern(line: str) -> re.Pattern[str]:
    """A line of the page, in which any number stands for any other."""
    texts = [re.split(r"\d[\d,]*(?:\.\d+)?", text) for text in line.split(ANYTHING)]
    return re.compile(".*".join(r"\d[\d,]*(?:\.\d+)?".join(map(re.escape, parts)) for parts in texts))


def journey(heading: str) -> tuple[dict[str, str], list[Step]]:
    """The files and the steps under a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    files = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", section, re.M | re.S))
    steps: list[Step] = []
    asked = False  # whether a question was typed last, so that the model answers next
    for block in re.findall(r"^```console\n(.*?)^```$", section, re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:]))
            elif line.startswith("> "):
                steps[-1].typed.append(line[2:])
            else:
                written = steps[-1].command.startswith("abc-attn generate") and line.endswith(ANYTHING)
                steps[-1].printed.append(ANYTHING if asked or written else line)
            asked = line.startswith("> ") and not line.startswith("> /")
    return files, steps
