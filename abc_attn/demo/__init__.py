"""`abc-attn demo`: five small language models, trained and compared (run.py), as a table and a page (report.py)."""

from abc_attn.demo.run import SPECS, LanguageModel, Settings, run_demo

__all__ = ["SPECS", "LanguageModel", "Settings", "run_demo"]
