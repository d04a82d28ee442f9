"""How well a part that starts as another keeps what the model computes."""

from __future__ import annotations

from enum import IntEnum


class Kept(IntEnum):
    """From best to worst, so that the worst of several parts is their maximum.

    UP_TO_EPS: what differs is a positive factor on the input of a norm that takes it out but for its eps. NEARLY: the
    part says in its docstring what differs. NOT: it starts as in a new model.
    """

    EXACTLY = 0
    UP_TO_EPS = 1
    NEARLY = 2
    NOT = 3

    @property
    def words(self) -> str:
        return {"EXACTLY": "exactly", "UP_TO_EPS": "up to the norms' eps", "NEARLY": "nearly", "NOT": "not"}[self.name]
