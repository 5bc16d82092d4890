"""What tests of commands share."""

from __future__ import annotations

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
