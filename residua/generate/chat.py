"""A conversation with a base model: plain text that the model continues, turn by turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residua.errors import UserError

if TYPE_CHECKING:
    from residua.generate.generator import Completion, Generator, Request, Show, Speed

PERSON, MODEL = "User:", "Model:"


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
            self.turns.pop()  # refused: the conversation stays as it was
            raise
        self.turns[-1] += f"{done[0].text}\n"
        return done, speed

    def _prompt(self) -> str:
        """The last turns, as many as leave room for an answer, and always the newest."""
        room = max(1, self.generator.model.config.context - self.request.tokens)
        for first in range(len(self.turns)):
            prompt = "".join(self.turns[first:])
            if len(self.generator.encode(prompt)) <= room:
                return prompt
        return self.turns[-1]
