"""A text that a model reads and writes token by token, in one state: plain text, or a conversation by chat template."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from abc_attn.attention import MemoryAttention
from abc_attn.hf.cache import BoundedCache, load_state, save_state
from abc_attn.hf.models import most_tokens
from abc_attn.hf.stateful import Stateful

CHUNK = 512  # tokens that are read at once: between chunks a caller may stop
_TAIL = 64  # tokens that are decoded together, at most
_ANSWER = "<an-answer>"  # stands for an answer in a template
NOT_NUMBERS = "the model's outputs are not numbers (NaN): its weights or its config.json are damaged"


def _never() -> bool:
    return False


class Stream:
    """One text. What was read is in the state (`cache`); what is not yet, in `pending`. Nothing is read twice, except
    where a model's rotary factors change (`short`)."""

    def __init__(self, model: PreTrainedModel, *, temperature: float = 0.0, seed: int = 0) -> None:
        self.model, self.temperature = model, temperature
        self.random = torch.Generator().manual_seed(seed)
        self.ends = _as_set(model.generation_config.eos_token_id)  # tokens that end what is written; they are not kept
        self.short = _short_length(model)
        self.read = self.written = 0
        self._timed, self._seconds = 0, 0.0
        self.reset()

    def reset(self) -> None:
        """Forget the text."""
        bounded = isinstance(self.model, Stateful)
        self.cache: Any = BoundedCache() if bounded else DynamicCache(config=self.model.config)
        self.pending: list[int] = []
        self._again: list[int] = []  # what was read, up to `short` tokens, if it may have to be read again

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return self.cache.get_seq_length() + len(self.pending)

    @property
    def speed(self) -> float | None:
        """Tokens written per second, without the first of each `write`: it includes reading what was pending."""
        return self._timed / self._seconds if self._timed else None

    def add(self, tokens: list[int], more: int = 0) -> None:
        """Append to the text. ValueError if the model has no positions for these tokens and `more` to be written, or no
        vector for one of them."""
        check_token(self.model, max(tokens, default=0))
        limit = most_tokens(self.model)
        if limit is not None and self.length + len(tokens) + more > limit + 1:  # the last is written and not read
            raise ValueError(
                f"the positions of this {type(self.model).__name__} end after {limit} tokens: prompt and --tokens may "
                f"be {limit + 1} together, and are {self.length + len(tokens)} and {more}; ask for fewer tokens or "
                "shorten the prompt"
            )
        self._check_factors(self.length + len(tokens) + more)
        self.pending += tokens

    def write(self, tokens: int, stop: Callable[[], bool] = _never) -> Iterator[int]:
        """The tokens that follow, one by one: at most so many, until an end of the text or until `stop` says so."""
        before = None
        for _ in range(tokens):
            logits = self._read(stop)
            if logits is None:
                return
            if bool(logits.isnan().any()):
                raise ValueError(NOT_NUMBERS)
            token = self._choose(logits)
            if token in self.ends:
                return
            self.pending.append(token)
            self.written += 1
            now = time.perf_counter()
            if before is not None:
                self._timed, self._seconds = self._timed + 1, self._seconds + now - before
            before = now
            yield token

    def save(self, file: str | os.PathLike[str], stop: Callable[[], bool] = _never) -> bool:
        """Write the state after the whole text into a file; False, and no file, if `stop` says so before."""
        if not isinstance(self.model, Stateful):
            raise ValueError(f"a {type(self.model).__name__} has no bounded state to save: convert the model first")
        self._read(stop)
        if stop():
            return False
        save_state(self.cache, file)
        return True

    def load(self, file: str | os.PathLike[str]) -> None:
        """Continue from a state that `save` wrote, in the place of the text so far."""
        if not isinstance(self.model, Stateful):
            raise ValueError(f"a {type(self.model).__name__} takes no bounded state: convert the model first")
        cache = load_state(file)
        if not isinstance(cache, BoundedCache):
            raise ValueError(f"{file} holds the state of an encoder-decoder model")
        attentions = [part for part in self.model.modules() if isinstance(part, MemoryAttention) and part.causal]
        if len(cache.layers) != len(attentions):
            raise ValueError(f"{file} holds the states of {len(cache.layers)} layers; this model has {len(attentions)}")
        for attention, layer in zip(attentions, cache.layers, strict=True):
            state: Any = layer
            try:
                attention.check_state(state.state, 1, False)
            except ValueError as error:
                raise ValueError(f"{file} does not fit this model: {error}") from None
        self.cache, self.pending, self._again = cache, [], []

    @torch.no_grad()
    def _read(self, stop: Callable[[], bool]) -> Tensor | None:
        """Read what is pending; the logits of what follows `1 v`, or None if there is nothing, or if stopped."""
        logits = None
        while self.pending:
            if stop():
                return None
            ids = torch.tensor([self._chunk()], device=self.model.device)
            given: Any = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
            logits = self.model(ids, **given).logits[:, -1].float()
            self.read += ids.shape[1]
            if self.short is not None and self.cache.get_seq_length() <= self.short:
                self._again += self.pending[: ids.shape[1]]
            del self.pending[: ids.shape[1]]
        return logits

    def _chunk(self) -> list[int]:
        """What is read next. A text that outgrows `short` is read from its beginning on and, up to there, in one call:
        a call has the factors of its last position, and keys of the short factors do not suit queries of the long."""
        if self.short is None or not (read := self.cache.get_seq_length()) <= self.short < self.length:
            return self.pending[:CHUNK]
        if read:
            self._check_factors(self.length)
            text = self._again + self.pending
            self.reset()
            self.pending = text
        return self.pending[: self.short + 1]

    def _check_factors(self, length: int) -> None:
        """Refuse a text of so many tokens if its beginning would have to be read again and is not known."""
        read = self.cache.get_seq_length()
        if self.short is not None and len(self._again) < read <= self.short < length:
            raise ValueError(
                f"beyond {self.short} tokens this {type(self.model).__name__} has other rotary factors (longrope) and "
                f"must read the text again, which a loaded state does not hold; it has read {read}, and would have to "
                f"go on to {length}: ask for fewer tokens, or begin anew"
            )

    def _choose(self, logits: Tensor) -> int:
        if not self.temperature:
            return int(logits.argmax(-1))
        # Below the largest, and in fp64: no temperature above 0 overflows.
        apart = (logits - logits.max(-1, keepdim=True).values).double() / self.temperature
        return int(torch.multinomial(apart.softmax(-1).cpu(), 1, generator=self.random))


def check_token(model: PreTrainedModel, token: int) -> None:
    """Refuse a token that the model has no vector for."""
    if token >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {token}, and the model has {model.config.vocab_size} (vocab_size in "
            "config.json): they do not belong together"
        )


def _short_length(model: PreTrainedModel) -> int | None:
    """The length of text beyond which a model's rotary factors are others (longrope, as in Phi-3); None: they stay."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


class Chat:
    """A conversation by the tokenizer's chat template. The state is its history: a turn reads what is new in it."""

    def __init__(self, stream: Stream, tokenizer: Any, system: str | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("this model's tokenizer has no chat template: it was not trained to chat")
        self.stream, self.tokenizer, self.system = stream, tokenizer, system
        closing = self._tokens(self._render(_question("x"), _answer(), prompted=False).partition(_ANSWER)[2])
        special = {*tokenizer.all_special_ids, *(i for i, x in tokenizer.added_tokens_decoder.items() if x.special)}
        if closing and closing[0] in special:  # ends an answer, whether or not the model's config says so
            stream.ends |= {closing[0]}
        stream.ends |= _as_set(tokenizer.eos_token_id)

    def ask(self, text: str, tokens: int) -> None:
        """Say something; `stream.write` then answers."""
        self.stream.add(self._tokens(self._turn(text)), tokens)

    def _turn(self, text: str) -> str:
        """A user's turn, up to where the answer begins. After an answer, first what closes that in the template."""
        if not self.stream.length:
            begin = [] if self.system is None else [{"role": "system", "content": self.system}]
            return self._render(*begin, _question(text))
        shown, _, turn = self._render(_question("x"), _answer(), _question(text)).partition(_ANSWER)
        if not shown or not turn:
            raise ValueError("the chat template does not show an answer as it is: its turns cannot be told apart")
        return turn

    def _render(self, *messages: dict[str, str], prompted: bool = True) -> str:
        try:
            return self.tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=prompted)
        except Exception as error:  # a template is a program of the model's, and may fail in any way
            said = " ".join(str(error).split())
            raise ValueError(f"the chat template cannot be used: {type(error).__name__}: {said}") from error

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def as_text(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """The text of tokens as they come, in pieces that are whole characters."""
    shown, made = "", []
    for token in tokens:
        made.append(token)
        text = tokenizer.decode(made, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # a character whose other bytes are still to come
            yield text[len(shown) :]
            if len(made) > _TAIL:  # what comes depends on the last tokens alone
                made = made[-_TAIL // 4 :]
                text = tokenizer.decode(made, skip_special_tokens=True)
            shown = text


def _question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer() -> dict[str, str]:
    return {"role": "assistant", "content": _ANSWER}


def _as_set(tokens: int | list[int] | None) -> set[int]:
    return {tokens} if isinstance(tokens, int) else {*(tokens or ())}
