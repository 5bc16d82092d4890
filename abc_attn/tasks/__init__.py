"""Tasks: what a model is trained on and scored by. One file a task, and one line here.

Only the standard library is imported here and at the top of a task's file, so that `abc-attn train --help` can show the
keys of every task at once.
"""

from __future__ import annotations

from importlib import import_module

from abc_attn.tasks.base import Settings, Task

DEFAULT = "language-modelling"
# `abc-attn evaluate` has measures of these names.
TRANSLATION = "translation"
MASKED_LM = "masked_lm"
CLASSIFICATION = "classification"
TASKS = {  # name in a recipe: module and class
    "language-modelling": "abc_attn.tasks.language_modelling:LanguageModelling",
    "recall": "abc_attn.tasks.synthetic:Recall",
    "copy": "abc_attn.tasks.synthetic:Copy",
    TRANSLATION: "abc_attn.tasks.translation:Translation",
    MASKED_LM: "abc_attn.tasks.masked_lm:MaskedLM",
    CLASSIFICATION: "abc_attn.tasks.classification:Classification",
}

__all__ = ["CLASSIFICATION", "DEFAULT", "MASKED_LM", "TASKS", "TRANSLATION", "Task", "get_task", "keys_help"]


def get_task(name: str) -> type[Task]:
    """The class of a task."""
    if not isinstance(name, str) or name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r:.100}")
    module, _, kind = TASKS[name].partition(":")
    return getattr(import_module(module), kind)


def keys_help() -> str:
    """The recipe keys that are a task's own, for the help of a command."""
    common = Settings.meanings()
    lines = ["every task:", *(f"  {key:20}  {meaning}" for key, meaning in common.items())]
    for name in TASKS:
        lines.append(f"task {name}{' (the default)' if name == DEFAULT else ''}:")
        meanings = get_task(name).settings_class.meanings()
        lines += [f"  {key:20}  {meaning}" for key, meaning in meanings.items() if key not in common]
    return "\n".join(lines)
