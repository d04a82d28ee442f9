"""Decode a generator's text as tokens arrive, and hold a plain-text conversation with a base model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from residua.errors import UserError

if TYPE_CHECKING:
    from residua.generate.generator import Completion, Generator, Request, Show, Speed

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
PERSON, MODEL = "User:", "Model:"


class TextStream:
    """Decodes a growing list of tokens piece by piece: only whole characters, and never part of a stop string.

    Text is final once shown. A character whose bytes span several tokens waits for the last of them, and text that may
    begin a stop string waits until that is decided. `text` ends before the earliest stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        assert "" not in stop
        self._decode, self._stop = decode, stop
        self._ids: list[int] = []
        self._context, self._read = 0, 0
        self._shown = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the text that can be shown now."""
        self._ids.append(token)
        # decode it after the previous tokens, since some tokenizers drop a leading space
        known, whole = (self._decode(self._ids[self._context : end]) for end in (self._read, len(self._ids)))
        if whole.endswith(UNFINISHED):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return self._add(whole[len(known) :])

    def finish(self) -> str:
        """The rest of the text, once no tokens follow; an incomplete character becomes a replacement character."""
        if self.stopped:
            return ""
        known, whole = (self._decode(self._ids[self._context : end]) for end in (self._read, len(self._ids)))
        shown = self._add(whole[len(known) :])
        rest = "" if self.stopped else self.text[self._shown :]
        self._shown = len(self.text)
        return shown + rest

    def _add(self, piece: str) -> str:
        self.text += piece
        stops = [at for stop in self._stop if (at := self.text.find(stop, max(0, self._shown))) >= 0]
        if stops:
            self.text, self.stopped = self.text[: min(stops)], True
        end = len(self.text) if self.stopped else len(self.text) - self._undecided()
        shown = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return shown

    def _undecided(self) -> int:
        """How many of the last characters may begin a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        tails = range(min(longest, len(self.text) - self._shown), 0, -1)
        return next((n for n in tails if any(stop.startswith(self.text[-n:]) for stop in self._stop)), 0)


class Conversation:
    """Alternating turns `User: …` and `Model: …`; the oldest are dropped when the context is full."""

    def __init__(self, generator: Generator, request: Request) -> None:
        self.generator = generator
        self.request = replace(request, stop=(*request.stop, f"\n{PERSON}"))
        self.turns: list[str] = []

    def say(self, line: str, show: Show | None = None) -> tuple[list[Completion], Speed]:
        """Add the user's next line and the model's answer to the conversation."""
        self.turns.append(f"{PERSON} {line}\n{MODEL}")
        try:
            done, speed = self.generator([self._prompt()], self.request, show)
        except UserError:
            self.turns.pop()  # refused: restore the conversation
            raise
        self.turns[-1] += f"{done[0].text}\n"
        return done, speed

    def _prompt(self) -> str:
        """The last turns, as many as leave room for an answer, always including the newest."""
        room = max(1, self.generator.model.config.context - self.request.tokens)
        for first in range(len(self.turns)):
            prompt = "".join(self.turns[first:])
            if len(self.generator.tokenizer.encode(prompt)) <= room:
                return prompt
        return self.turns[-1]
