"""What converted models and AdaptiveLM share: what a bounded state rules out, and a model card beside the weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from abc_attn.controls import Control

BOUNDED = "reads a memory of fixed size instead of every key and value"


class Stateful(PreTrainedModel):
    """Mixed into a model whose memory is a bounded state."""

    _is_stateful = True  # generate() then refuses assisted decoding, which would have to take tokens back

    def card(self) -> str:
        """The text of README.md."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        """As ever, and a model card (README.md) beside the weights if there is none. The config says which modules to
        import first, where controls are not of this package."""
        config: Any = self.config
        if modules := control_modules(self):
            config.control_modules = modules
        saved = super().save_pretrained(save_directory, *arguments, **options)
        file = Path(save_directory) / "README.md"
        if Path(save_directory).is_dir() and not file.exists():
            file.write_text(self.card(), encoding="utf-8")
        return saved

    def generate_batch(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse_continuous_batching()

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse_continuous_batching()

    def continuous_batching_context_manager(self, *arguments: Any, **options: Any) -> NoReturn:
        self._refuse_continuous_batching()

    def _refuse_continuous_batching(self) -> NoReturn:
        raise ValueError(
            "continuous batching pages keys and values, which a bounded model does not keep: "
            "use generate() with a padded batch"
        )


def control_modules(model: nn.Module) -> list[str]:
    """The modules outside this package that define the controls of a model; a script by the name of its file."""
    found = {type(module).__module__ for module in model.modules() if isinstance(module, Control)}
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "__main__").stem
    return sorted(script if name == "__main__" else name for name in found if name.partition(".")[0] != "abc_attn")


def model_card(model: PreTrainedModel, kind: str, auto: str, *, bounded: str = BOUNDED, **facts: str) -> str:
    """A README.md that says what a model is, in the form that model hubs read. `auto` is the class that loads it."""
    config: Any = model.config
    reads = "is exact and keeps every key and value" if config.control == "softmax" else bounded
    facts = {
        "control": f"`{config.control}`",
        "slots": f"`{config.slots}`" if config.slots is not None else "as the control says (64 if it does not)",
        "options": f"`{config.control_options}`" if config.control_options else "none",
        "control tied across layers": "yes" if config.tie_control else "no",
    } | facts
    rows = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items())
    return f"""---
library_name: transformers
tags:
- abc-attn
- bounded-memory
---

# {type(model).__name__}

A {kind} whose attention {reads}
([ABC: Attention with Bounded-memory Control](https://aclanthology.org/2022.acl-long.515)).

| | |
|---|---|
{rows}

```python
import abc_attn.hf  # makes the Auto classes know this model
from transformers import {auto}

model = {auto}.from_pretrained("path/to/this/folder")
```
"""
