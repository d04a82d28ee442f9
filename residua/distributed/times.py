"""How fast each rank computes, and which ranks are slower than the others.

All ranks finish a step together, because they wait for each other in collectives. So a rank times what it computes
alone: forward passes, of a micro-batch (replicated), of a unit after it was gathered (sharded), of a stage (pipeline).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, median_low
from typing import Any

import torch

SLOW = 1.3
"""Times the median from which on a rank is called slow."""

MOST = 64
"""Passes that are timed between two log lines."""


class Stopwatch:
    """Times passes on a device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the block, if it trains and not enough have been timed yet."""
        if len(self._marks) >= MOST or not torch.is_grad_enabled():
            yield
            return
        start = self._mark()
        yield
        self._marks.append((start, self._mark()))

    def take(self) -> float:
        """Seconds of a pass, the mean since this was last called; 0 if none was timed. The device must be idle."""
        marks, self._marks = self._marks, []
        scale = 1e-3 if self._on_gpu else 1.0
        return mean(self._between(*pair) * scale for pair in marks) if marks else 0.0

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self._on_gpu else end - start


def slow_ranks(seconds: Sequence[float], stages: Sequence[float], hosts: Sequence[str]) -> dict[int, str]:
    """A sentence for each rank that takes `SLOW` times as long as the median of the ranks with the same `stages`.

    Ranks with other stages of a pipeline do other work, whose time no count of FLOPs predicts well enough.
    """
    usual = {
        own: median_low(second for second, stage in zip(seconds, stages, strict=True) if stage == own)
        for own in set(stages)
    }
    return {
        rank: f"rank {rank} on {hosts[rank]} computes slowly: {second / usual[stage]:.2f} × the median rank's time for "
        "the same work; look at the clock, temperature and other processes of its device"
        for rank, (second, stage) in enumerate(zip(seconds, stages, strict=True))
        if second > SLOW * usual[stage] > 0
    }
