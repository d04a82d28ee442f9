"""Measures time, speed and memory of a device, of a step on random tokens (benchmarks, studies), and of a run.

`Clock` measures a run's training time without validation and saving, `Stages` the time to its first step; `Profiler`
traces selected steps.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from residua.config.run import RunConfig
from residua.data.loader import Batch
from residua.files import unfinished, writing
from residua.train.step import Step

# Share of the peak learning rate: small, so that training on random tokens does not diverge; the speed is the same.
RATE = 0.01


@dataclass(frozen=True)
class Sample:
    """Repeated timings in seconds: the median and the 10th and 90th percentiles."""

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
    """Free graphs, compiled code and cached memory before the next case."""
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

    A GPU is timed with events on the stream, read after the last call, so that the host never waits, as in training.
    """
    synchronize(device)
    marks = []
    for _ in range(repeats):
        if before is not None:
            before()
        start = _mark(device)
        work()
        marks.append((start, _mark(device)))
    synchronize(device)
    return [_seconds(start, end) for start, end in marks]


def _mark(device: torch.device) -> Any:
    """The current time; on a GPU an event on the stream, for which the host does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end)) / 1e3 if isinstance(start, torch.cuda.Event) else end - start


class Stopwatch:
    """Times training passes on a device without waiting for it.

    All ranks finish a step together, because they wait for each other in collectives. So a rank times forward passes,
    which it computes alone: of a micro-batch (replicated), of a gathered unit (sharded), or of a pipeline stage.
    """

    MOST = 64
    """Maximum passes timed between two log lines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the block if it is part of training and fewer than `MOST` have been timed."""
        if len(self._marks) >= self.MOST or not torch.is_grad_enabled():
            yield
            return
        start = _mark(self._device)
        yield
        self._marks.append((start, _mark(self._device)))

    def take(self) -> float:
        """Mean seconds of a pass since the last call; 0 if none was timed. The device must be idle."""
        marks, self._marks = self._marks, []
        return mean(_seconds(*pair) for pair in marks) if marks else 0.0


@dataclass(frozen=True)
class TimedStep:
    """Seconds of the first step, which compiles, and of each timed step; peak memory (GPU only); mean loss."""

    first: float
    seconds: list[float]
    memory_gib: float | None
    loss: float


def time_step(
    trained: Step, config: RunConfig, *, steps: int, warmup: int, started: Callable[[], object] = lambda: None
) -> TimedStep:
    """Train on random tokens: a first step, `warmup` more, then `steps` timed ones.

    `started` is called after the first step.
    """
    device = trained.device
    step, first = first_step(trained, config)
    started()
    for _ in range(warmup):
        step()
    seconds = time_each(step, steps, device)
    totals = trained.totals()
    memory = peak_memory_gib(device) if device.type == "cuda" else None
    return TimedStep(first, seconds, memory, totals.loss / totals.steps)


def first_step(trained: Step, config: RunConfig) -> tuple[Callable[[], None], float]:
    """A step on random tokens that has run once, and the seconds that took."""
    step = partial(trained, random_batches(config), RATE)
    begin = time.perf_counter()
    step()
    synchronize(trained.device)
    first = time.perf_counter() - begin
    reset_peak_memory(trained.device)  # before graph capture: replays allocate nothing
    return step, first


def random_batches(config: RunConfig) -> list[Batch]:
    """One step's micro-batches of random tokens, in host memory like the loader's."""
    shape = (config.train.accumulate, config.train.micro_batch, config.sequence + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(config.train.seed))
    segments = torch.zeros_like(tokens[0, :, 1:]) if config.data.masking == "documents" else None
    return [Batch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), segments) for t in tokens]


# Dense bf16 peaks in TFLOP/s, from the vendors' datasheets. The first entry that the device's name contains is used.
PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None for a CPU or a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for known, peak in PEAKS.items() if known in name), None)


def mfu(tokens_per_second: float, flops_per_token: float, device: torch.device) -> float | None:
    """Model FLOP utilisation: FLOP/s of the model as a share of the device's peak."""
    peak = peak_flops(device)
    return None if peak is None else tokens_per_second * flops_per_token / peak


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory (GPU only), because a process may train more than one model."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: PyTorch's allocations on a GPU, or the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**30 if sys.platform == "darwin" else 2**20)


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
    """Seconds of each stage before a run's first step, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time inside the block to the stage `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The stages so far, rounded to milliseconds; resets them for the next run."""
        times, self._seconds = self._seconds, {}
        return {name: round(seconds, 3) for name, seconds in times.items()}


FOLDER = "profile"


class Profiler:
    """Traces the given steps of this process into the run's folder: `profile/step-N-rank-R.json.gz`."""

    def __init__(
        self, run: Path, steps: Collection[int], rank: int, device: torch.device, tell: Callable[[str], None]
    ) -> None:
        self.run, self.steps, self.rank, self.device, self.tell = run, steps, rank, device, tell

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace the block if it is one of the chosen steps."""
        if step not in self.steps:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        synchronize(self.device)
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as trace:
            yield
            synchronize(self.device)
        path = self.run / FOLDER / f"step-{step}-rank-{self.rank}.json.gz"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            temporary = unfinished(path)
            trace.export_chrome_trace(str(temporary))
            temporary.replace(path)
        self.tell(f"step {step} was traced: open {path} in ui.perfetto.dev")
