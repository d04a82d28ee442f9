"""The choices of order: which layers run, and when; a layer may run several times (docs/reference/extending.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from residua.config.settings import Count, Frozen, Positive
from residua.errors import UserError

MAX_EXECUTIONS = 10_000


class OrderChoice(Frozen):
    """An order of execution. Parameters belong to layers; caches and the state along depth to executions."""

    def executed(self, layers: int) -> tuple[int, ...]:
        """The number of each layer that runs, in order, of a model with so many."""
        return tuple(range(layers))


class Sequential(OrderChoice):
    """Every layer once."""

    kind: Literal["sequential"] = "sequential"


class Loop(OrderChoice):
    """`prelude` layers once, the layers between `turns` times, `coda` layers once."""

    kind: Literal["loop"] = "loop"
    prelude: Count = 0
    coda: Count = 0
    turns: Positive

    def executed(self, layers: int) -> tuple[int, ...]:
        looped = range(self.prelude, layers - self.coda)
        if not looped:
            raise UserError(
                f"order.prelude = {self.prelude} and order.coda = {self.coda} leave no layer to loop of layers = "
                f"{layers}: lower one of them."
            )
        if len(looped) * self.turns > MAX_EXECUTIONS:
            raise UserError(
                f"order.turns = {self.turns} runs {len(looped) * self.turns:,} layers: use fewer, for at most "
                f"{MAX_EXECUTIONS:,}."
            )
        return (*range(self.prelude), *(tuple(looped) * self.turns), *range(layers - self.coda, layers))


class Listed(OrderChoice):
    """The layers by number, counted from 0; each at least once."""

    kind: Literal["listed"] = "listed"
    layers: tuple[Count, ...] = Field(max_length=MAX_EXECUTIONS)
    """The numbers of the layers that run, in order."""

    def executed(self, layers: int) -> tuple[int, ...]:
        if {*self.layers} != {*range(layers)}:
            wrong = sorted({*range(layers)} ^ {*self.layers})[0]
            raise UserError(
                f"order.layers {'leaves out' if wrong < layers else 'names'} layer {wrong} and layers = {layers}: name "
                f"each of 0 to {layers - 1} at least once."
            )
        return self.layers


Order = Annotated[Sequential | Loop | Listed, Field(discriminator="kind")]
