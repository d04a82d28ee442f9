"""Training time, time to start and random states of a run.

Checkpoints keep the training time and the random states, so that a resumed run continues from them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Clock:
    """Seconds of training without validation and saving: `total` for the run, `interval` since the last log line."""

    total: float = 0.0
    interval: float = 0.0
    _started: float = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Add the time since `start`, and start again."""
        now = time.perf_counter()
        self.total += now - self._started
        self.interval += now - self._started
        self._started = now


class Stages:
    """Seconds that each stage before a run's first step took, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time inside the block to the stage's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The stages so far, rounded to milliseconds; the next ones belong to another run."""
        taken, self._seconds = self._seconds, {}
        return {name: round(seconds, 3) for name, seconds in taken.items()}


def random_states(device: torch.device) -> dict[str, str]:
    """PyTorch's random states as text."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: state.numpy().tobytes().hex() for name, state in states.items()}


def set_random_states(states: dict[str, str]) -> None:
    """Restore states that `random_states` returned; skips that of a GPU if this machine has none."""
    setters = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
    for name, text in states.items():
        if name == "cpu" or (name == "cuda" and torch.cuda.is_available()):
            setters[name](torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))
