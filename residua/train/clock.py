"""Training time and random states of a run. Checkpoints keep both, so that a resumed run continues from them."""

from __future__ import annotations

import time
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
        if name == "cpu" or torch.cuda.is_available():
            setters[name](torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))
