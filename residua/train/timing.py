"""Timing on a device, and a training step timed on random tokens: what benchmarks and studies measure speeds with."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from residua.config.run import RunConfig
from residua.data.loader import Batch
from residua.train.step import Step
from residua.train.throughput import peak_memory_gib

# Share of the peak learning rate: small, so that training on random tokens does not diverge. The work is the same.
RATE = 0.01


@dataclass(frozen=True)
class Sample:
    """Repeated timings in seconds: the median and the spread, from the 10th to the 90th percentile."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Sample:
        """Summarise timings."""
        values = torch.tensor(seconds, dtype=torch.float64)
        p10, median, p90 = torch.quantile(values, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return cls(median, p10, p90, len(seconds))

    @classmethod
    def measure(
        cls,
        work: Callable[[], object],
        repeats: int,
        device: torch.device,
        *,
        warmup: int = 3,
        before: Callable[[], object] | None = None,
    ) -> Sample:
        """Time `repeats` calls after `warmup` untimed ones; `before` runs before every call and is not counted."""
        time_each(work, warmup, device, before)
        return cls.of(time_each(work, repeats, device, before))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Drop graphs, compiled code and cached memory, so that the next case starts afresh."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def time_each(
    work: Callable[[], object], repeats: int, device: torch.device, before: Callable[[], object] | None = None
) -> list[float]:
    """Seconds of each of `repeats` calls; `before` runs before every call and is not counted.

    A GPU is timed by events on the stream, read after the last call: the host never waits, as in training.
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


@dataclass(frozen=True)
class TimedStep:
    """Seconds of the first step, which compiles, and of each timed one; peak memory (GPU only); the mean loss."""

    first: float
    seconds: list[float]
    memory_gib: float | None
    loss: float


def time_step(
    trained: Step, config: RunConfig, *, steps: int, warmup: int, started: Callable[[], object] = lambda: None
) -> TimedStep:
    """Train on random tokens: a first step, `warmup` more, then `steps` timed ones.

    `started` is called after the first.
    """
    device = trained.device
    step = partial(trained, random_batches(config), RATE)
    begin = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - begin

    started()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # before graph capture: replays allocate nothing
    for _ in range(warmup):
        step()
    seconds = time_each(step, steps, device)
    totals = trained.totals()
    memory = peak_memory_gib(device) if device.type == "cuda" else None
    return TimedStep(first, seconds, memory, totals.loss / totals.steps)


def random_batches(config: RunConfig) -> list[Batch]:
    """One step's micro-batches of random tokens, in host memory like the loader's."""
    shape = (config.train.accumulate, config.train.micro_batch, config.sequence + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(config.train.seed))
    segments = torch.zeros_like(tokens[0, :, 1:]) if config.data.masking == "documents" else None
    return [Batch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), segments) for t in tokens]
