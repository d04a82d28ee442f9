"""A conversation with a base model: plain text that it continues, turn by turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residua.generate.generator import Completion, Generator, Request, Show, Speed

PERSON, MODEL = "User:", "Model:"


class Conversation:
    """Turns `User: …` and `Model: …`, one after the other; the oldest go when the context is full."""

    def __init__(self, generator: Generator, request: Request) -> None:
        self.generator = generator
        self.request = replace(request, stop=(*request.stop, f"\n{PERSON}"))
        self.turns: list[str] = []

    def say(self, line: str, show: Show | None = None) -> tuple[list[Completion], Speed]:
        """A person's next line; the model's answer is added to the conversation."""
        self.turns.append(f"{PERSON} {line}\n{MODEL}")
        try:
            done, speed = self.generator([self._prompt()], self.request, show)
        except ValueError:
            self.turns.pop()  # refused: the conversation stays as it was
            raise
        self.turns[-1] += f"{done[0].text}\n"
        return done, speed

    def _prompt(self) -> str:
        """As many of the last turns as leave room for an answer; the newest in any case."""
        room = max(1, self.generator.model.config.context - self.request.tokens)
        for first in range(len(self.turns)):
            prompt = "".join(self.turns[first:])
            if len(self.generator.encode(prompt)) <= room:
                return prompt
        return self.turns[-1]
