"""Fuzzers: what comes from outside must not crash, corrupt or mislead. `python -m fuzz --help` says how to run them."""
