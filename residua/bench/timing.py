"""Timing on a device, and its ceilings: the copy bandwidth and matrix product rate that results are compared with."""

from __future__ import annotations

import gc
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
class Ceilings:
    """Copy bandwidth (bytes read plus written, per second) and the rate of a large matrix product in `dtype`."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float
    dtype: str


def measure_ceilings(device: torch.device) -> Ceilings:
    """Time a copy much larger than any cache, and the product of two square matrices; random data, medians.

    The product is in the precision that training uses: bf16 on a GPU, fp32 on a CPU.
    """
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    elements, side, repeats = (2**30, 8192, 20) if on_gpu else (2**24, 512, 5)

    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy = Sample.measure(lambda: target.copy_(source), repeats, device).median
    bytes_moved = 2 * source.numel() * source.element_size()

    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul = Sample.measure(lambda: torch.mm(a, b, out=product), repeats, device).median
    return Ceilings(bytes_moved / copy, 2 * side**3 / matmul, str(dtype).removeprefix("torch."))
