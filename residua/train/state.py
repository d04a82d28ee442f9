"""What state.json of a checkpoint must hold for a run to go on from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field

from residua.reading import Count, Shape, reason, refuse
from residua.storage.checkpoint import STATE, Checkpoint, elsewhere


class _Loader(Shape):
    seed: Count
    sequence: Count
    tokens: Count
    tokenizer_hash: str
    epoch: Count
    position: Count


class _Balance(Shape):
    load: list[list[float]] | None
    sums: Annotated[list[Any], Field(min_length=3, max_length=3)]
    steps: Count


class _Clock(Shape):
    total: float
    interval: float


class _Watch(Shape):
    first_loss: float | None
    strikes: Count
    lowest: float | None = None
    lowest_step: Count = 0
    stale: Count = 0


class _Random(Shape):
    cpu: str
    cuda: str | None = None


class RunState(Shape):
    """Step, data position, counters and random states; `Trainer._state` writes it."""

    step: Count
    validation_loss: float | None
    tokenizer_hash: str
    loader: _Loader
    totals: Annotated[list[Annotated[float, Field(allow_inf_nan=True)]], Field(min_length=4, max_length=4)]
    balance: _Balance | None
    clock: _Clock
    watch: _Watch
    smoothed: float
    lines: Count
    kept: list[Count] = Field(default_factory=list)
    rng: _Random


def read_state(checkpoint: Checkpoint) -> RunState:
    """The state in a checkpoint."""
    state = checkpoint.read(RunState)
    if state.step != checkpoint.step:
        with fitting_state(checkpoint):
            raise ValueError(f"it is of step {state.step}")
    return state


@contextmanager
def fitting_state(checkpoint: Checkpoint) -> Iterator[None]:
    """Name the checkpoint in errors of what is restored from its state."""
    try:
        yield
    except (ValueError, RuntimeError, TypeError) as error:
        problem = f"{checkpoint.path / STATE} does not fit this run ({reason(error)})"
        refuse(problem, lambda: elsewhere(checkpoint.path))
