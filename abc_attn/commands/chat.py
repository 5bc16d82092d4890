"""The command chat: a conversation with a model in a terminal, or line by line from standard input."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abc_attn import paths
from abc_attn.commands.errors import CommandError, explained
from abc_attn.commands.models import check_state_file, compile_steps, describe_cache, hugging_face, load_causal
from abc_attn.commands.user_controls import check_saved_controls, import_controls

if TYPE_CHECKING:
    from abc_attn.hf.streaming import Chat

HELP = """/save FILE   write the state: what the model remembers of this conversation
/load FILE   continue from a state, in the place of this conversation
/reset       begin anew
/stats       tokens, speed, size of the state
/quit        end (or Ctrl-D); Ctrl-C stops an answer"""


def chat(arguments: argparse.Namespace) -> None:
    """Talk with a model that has a chat template. The history is the model's state: a turn reads only what is new, and
    a bounded model remembers in constant memory. /save FILE and /load FILE keep a conversation; /help lists the rest.
    Ctrl-C stops an answer, Ctrl-D ends."""
    folder = arguments.model
    with explained():
        saved = paths.saved_model(folder)
        check_state_file(arguments.load_state)
    if arguments.system is not None and arguments.load_state is not None:
        raise CommandError("--system begins a conversation and --load-state continues one: give one of them")
    with explained():
        paths.check_chat_template(folder)
    import_controls(arguments)
    check_saved_controls(folder, saved)
    with hugging_face():
        from abc_attn.hf.streaming import Chat, Stream

        model, tokenizer = load_causal(folder)
        if arguments.compile:
            compile_steps(model, 1)
        stream = Stream(model, temperature=arguments.temperature, seed=arguments.seed)
        talk = Chat(stream, tokenizer, arguments.system)
        if arguments.load_state is not None:
            stream.load(arguments.load_state)
    Session(talk, arguments.tokens).run()


class Session:
    """Lines of a user, answered one by one. A line that begins with / is for the session itself."""

    def __init__(self, chat: Chat, tokens: int) -> None:
        self.chat, self.tokens = chat, tokens
        self.terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Until the end of the input, or /quit."""
        if self.terminal:
            print("/help lists commands; Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
        for line in self._lines():
            words = line.split(maxsplit=1)
            if not words:
                continue
            if words[0] == "/quit":
                return
            try:
                with explained():
                    if words[0].startswith("/"):
                        self._command(words[0], words[1].strip() if len(words) > 1 else "")
                    else:
                        self._answer(line)
            except (CommandError, OSError) as error:  # of this line; the next may be better
                print(f"abc-attn: error: {' '.join(str(error).split())}", file=sys.stderr)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield input("\n> " if self.terminal else "")
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise CommandError(f"standard input is not UTF-8 text: {error}") from None
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                print("\nCtrl-D or /quit ends", file=sys.stderr)

    def _answer(self, text: str) -> None:
        from abc_attn.hf.streaming import as_text

        self.chat.ask(text, self.tokens)
        with between_tokens() as stopped:
            for piece in as_text(self.chat.tokenizer, self.chat.stream.write(self.tokens, stopped)):
                print(piece, end="", flush=True)
        print(" [stopped]" if stopped() else "", flush=True)

    def _command(self, name: str, argument: str) -> None:
        stream = self.chat.stream
        if name in ("/save", "/load") and not argument:
            raise CommandError(f"{name} needs the name of a file")
        if name == "/save":
            if not stream.length:
                raise CommandError("nothing has been said yet: there is no state to save")
            file = paths.new_file(Path(argument))
            with between_tokens() as stopped:  # a question whose reading was stopped is read now
                saved = stream.save(file, stopped)
            if not saved:
                print("stopped: nothing is saved, and the conversation is as it was", file=sys.stderr)
                return
            size = Path(argument).stat().st_size
            print(f"saved {stream.length:,} tokens as {size:,} bytes: {argument}", file=sys.stderr)
        elif name == "/load":
            check_state_file(Path(argument))
            stream.load(argument)
            print(f"loaded a conversation of {stream.length:,} tokens", file=sys.stderr)
        elif name == "/reset":
            stream.reset()
            print("begun anew", file=sys.stderr)
        elif name == "/stats":
            speed = f", {stream.speed:.1f} tokens/s" if stream.speed else ""
            print(
                f"{stream.length:,} tokens in this conversation; in this session {stream.read:,} read and "
                f"{stream.written:,} written{speed}; {describe_cache(stream.model, stream.cache)}"
            )
        elif name == "/help":
            print(HELP)
        else:
            raise CommandError(f"no command {name!r}: /help lists them")


@contextmanager
def between_tokens() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is remembered here and not raised: inside a step it would leave some layers one token ahead of others."""
    seen: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
