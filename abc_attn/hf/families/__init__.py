"""The families of transformers that can be converted: each is one file here and one line below.

docs/huggingface.md says how to add one.
"""

from importlib import import_module

from abc_attn.hf.families.base import Family

FAMILIES: list[Family] = [
    import_module(f"{__name__}.{module}").FAMILY
    for module in (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma3_text",
        "gpt_neox",
        "gpt2",
        "opt",
        "bert",
        "roberta",
        "marian",
        "bart",
    )
]
