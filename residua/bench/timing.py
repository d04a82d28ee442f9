"""Clocks: how long a piece of work takes on its device, many times over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """Repeated timings in seconds: the median and the spread, from the 10th to the 90th percentile."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Sample:
        values = torch.tensor(seconds, dtype=torch.float64)
        p10, median, p90 = torch.quantile(values, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return cls(median, p10, p90, len(seconds))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_each(
    work: Callable[[], object], repeats: int, device: torch.device, before: Callable[[], object] | None = None
) -> list[float]:
    """Seconds of each of `repeats` calls; `before` runs ahead of every call and is not counted.

    On a GPU the marks are events on the stream, read after the last call: nothing waits in between, so the host runs
    ahead of the device as it does in training.
    """
    synchronize(device)
    clock: Callable[[], Any] = _event if device.type == "cuda" else time.perf_counter
    marks = []
    for _ in range(repeats):
        if before is not None:
            before()
        start = clock()
        work()
        marks.append((start, clock()))
    synchronize(device)
    return [_seconds(start, end) for start, end in marks]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) / 1e3 if isinstance(start, torch.cuda.Event) else end - start
