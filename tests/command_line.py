"""What tests of commands share."""

from __future__ import annotations

import json
import subprocess
import sys

from abc_attn.cli import main


def refused_in_one_line(arguments, said, capsys):
    """A command that is refused, when torch is needed to know that."""
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.startswith("abc-attn: error: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err


SESSION = """
import contextlib, io, json, sys
from abc_attn.cli import main
large = set("torch transformers numpy huggingface_hub gguf datasets matplotlib".split())
results = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as exit:
            code = exit.code
    results.append([code, out.getvalue(), err.getvalue(), sorted(large & sys.modules.keys())])
print(json.dumps(results))
"""


def light_session(commands, folder):
    """Commands, one after the other in one fresh process: of each the exit code, output, errors, and what of torch,
    transformers and other large packages has been imported. Without them an answer takes a fraction of a second."""
    shown = subprocess.run(
        [sys.executable, "-c", SESSION],
        input=json.dumps(commands),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
    )
    return json.loads(shown.stdout)
