"""The families of transformers that can be converted: each is one file here and one line below.

docs/huggingface.md says how to add one.
"""

from importlib import import_module

from abc_attn.hf.families.base import Family

FAMILIES: list[Family] = [
    import_module(f"{__name__}.{module}").FAMILY
    for module in (
        "llama",
        "gpt2",
        "bert",
        "roberta",
        "marian",
        "bart",
    )
]
