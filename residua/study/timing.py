"""The speed of every variant's step, timed alone once its runs are complete: runs side by side slow each other down.

One process times all variants of a size in turn, exactly as `residua train` would run them. A record is
kept per model and device under `timings/`. Speeds of different devices are never compared. Whenever a variant is timed,
the baseline is timed again before it: if the machine is faster or slower than it was, all variants are timed again.
The baseline is also timed after the last variant: how far it moved enters the error of what was timed in between.
`python -m residua.study.timing SECONDS CONFIG.toml RECORD.json …`, the baseline first, is that process.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import Field
from rich.console import Console

from residua.config.run import RunConfig
from residua.config.settings import Frozen
from residua.files import write_atomically
from residua.machine import choose_device, python_command, python_environment
from residua.reading import read_json
from residua.report.failure import describe, ending
from residua.report.plain import outcome
from residua.study.config import StudyConfig
from residua.study.plan import CONFIGS, LOGS, TIMINGS, PlannedRun, StudyPlan, model_title
from residua.study.records import is_complete, read_measured
from residua.study.train_runs import StudyInterrupted, stop_as_exception, threads_per_run

SECONDS = 4.0
"""How long each step is timed, after compilation and warm-up."""
MIN_TIMED_STEPS, MAX_TIMED_STEPS = 10, 2000
BLOCKS = 10
"""Timed steps are divided into so many blocks, whose medians give the error."""
MAX_DRIFT = 0.03
"""If the baseline's step takes longer or shorter by more than this, it and earlier timings cannot be compared."""
MAX_IDLE_SPREAD = 0.5
"""If the times of a step spread by more than this share of their median, other programs used the machine meanwhile."""


class StepTiming(Frozen):
    """The seconds of one training step, timed alone: the median and the spread from the 10th to the 90th percentile.

    `error` is the standard error of the median's logarithm, from the medians of ten blocks of steps; a variant's also
    has how far the baseline moved in the session (`moved`). `memory_gib` is the peak on a GPU.
    """

    device: str
    tokens: int
    median: float
    p10: float
    p90: float
    count: int
    error: float
    memory_gib: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step over its seconds."""
        return self.tokens / self.median

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile, as a share of the median."""
        return (self.p90 - self.p10) / self.median

    @property
    def busy(self) -> bool:
        """Whether the steps took so unequal times that the machine was busy with something else."""
        return self.spread > MAX_IDLE_SPREAD

    def drift(self, earlier: StepTiming) -> float:
        """How much longer this step takes than it did, as a logarithm."""
        return math.log(self.median / earlier.median)

    def scaled(self, factor: float) -> StepTiming:
        """The timing with all seconds multiplied by a factor."""
        seconds = {"median": self.median, "p10": self.p10, "p90": self.p90}
        return self.model_copy(update={name: value * factor for name, value in seconds.items()})

    def moved(self, drift: float) -> StepTiming:
        """A variant's timing with the `drift` of the baseline from start to end of its session: error² + drift².

        What counts is the ratio to the baseline, so what is missing is the difference in load between the variant's
        timing and the baseline's. If load differs at random between timings, the square of that difference is on
        average the square of the difference between the baseline's two timings: drift². If load changes once, or
        steadily, the variant was timed somewhere in between, and the difference is at most the drift. It is one
        observation, so the interval is still too narrow where load changes at random between all timings: in
        simulations it then holds the truth in 74 % instead of 95 %, without the drift in a few percent.
        """
        return self.model_copy(update={"error": math.hypot(self.error, drift)})


class _Record(Frozen):
    """The content of a file under `timings/`: what was timed, and the timings by device."""

    config: str
    devices: dict[str, StepTiming] = Field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> _Record:
        """The record in a file that must be there."""
        return read_json(file, cls, "remove it to time the model again")

    def write(self, file: Path, devices: Mapping[str, StepTiming]) -> None:
        """The record with other timings."""
        content = self.model_copy(update={"devices": dict(devices)}).model_dump_json(indent=1) + "\n"
        write_atomically(file, content, parents=True)


@dataclass(frozen=True)
class TimingMeasurement:
    """Times the variants that have a complete run, here or `elsewhere`; skips sizes timed as a whole on one device."""

    study: StudyConfig
    out: Path
    elsewhere: Container[PlannedRun] = ()

    def measure(self, plan: StudyPlan, console: Console) -> None:
        """Time what is not timed yet."""
        if self.study.workers < 2 and not self.study.time_alone and self.study.target is None:
            return
        complete = {
            (run.size, run.variant)
            for run in plan.compared
            if run in self.elsewhere or is_complete(run.folder, run.config)
        }
        for size in dict.fromkeys(size for size, _ in plan.models):
            keys = [key for key in plan.models if key in complete and key[0] == size]
            keys.sort(key=lambda key: key[1] != self.study.baseline)  # the baseline first
            self._time_size({model_title(self.study, *key): plan.models[key].config for key in keys}, console)

    def _time_size(self, models: Mapping[str, RunConfig], console: Console) -> None:
        """Time the models of one size, by title, unless all were timed on one device before."""
        known = {title: _read(self.out, title, config) for title, config in models.items()}
        if not models or set.intersection(*(set(record.devices) for record in known.values())):
            return
        command = python_command("-m", "residua.study.timing", str(SECONDS))
        for title, config in models.items():
            path, file = self.out / CONFIGS / f"{title}.toml", _path(self.out, title)
            write_atomically(path, config.to_toml(), parents=True)
            if not file.exists() or not known[title].devices:
                known[title].write(file, {})
            command += [str(path), str(file)]
        _run(command, self.study, self.out, console)


def read_timings(study: StudyConfig, plan: StudyPlan, out: Path) -> dict[tuple[str, str], dict[str, StepTiming]]:
    """The timings of every model by (size, variant), then by device; empty where none is recorded."""
    return {key: dict(_read(out, model_title(study, *key), m.config).devices) for key, m in plan.models.items()}


def keep_timings(
    study: StudyConfig, plan: StudyPlan, out: Path, timings: Mapping[tuple[str, str], Mapping[str, StepTiming]]
) -> None:
    """Record timings that were made elsewhere; those of this folder stay.

    A device whose baseline was timed here at another time is left out: the speeds would not be comparable.
    """
    here = read_timings(study, plan, out)
    for (size, name), devices in timings.items():
        title, config = model_title(study, size, name), plan.models[size, name].config
        recorded = _read(out, title, config)
        base, theirs = here.get((size, study.baseline), {}), timings.get((size, study.baseline), {})
        same = {d: timing for d, timing in devices.items() if d not in base or base[d] == theirs.get(d)}
        if same.keys() - recorded.devices.keys():
            recorded.write(_path(out, title), {**same, **recorded.devices})


def _run(command: Sequence[str], study: StudyConfig, out: Path, console: Console) -> None:
    """Print a line for every variant that is timed; report failures, and let the study continue."""
    threads = threads_per_run(study.model_copy(update={"workers": 1}))
    log = out / LOGS / "timing.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file, stop_as_exception():
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True,
            env=python_environment(OMP_NUM_THREADS=str(threads)),
        )  # fmt: skip
        try:
            for line in child.stdout or ():
                console.print(outcome(line.rstrip()))
            ending = child.wait()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise StudyInterrupted("Stopped while steps were timed alone: the same command continues.") from None
    if ending:
        console.print(outcome(f"not every step could be timed alone (log: {log})", good=False))


def _path(out: Path, title: str) -> Path:
    return out / TIMINGS / f"{title}.json"


def _read(out: Path, title: str, config: RunConfig) -> _Record:
    """What is recorded of this model; an empty record if there is none, or one of another configuration."""
    empty = _Record(config=_signature(config))
    record = read_measured(_path(out, title), _Record)
    return record if record is not None and record.config == empty.config else empty


def _signature(config: RunConfig) -> str:
    """The configuration without what differs between seeds and machines."""
    data = config.data.model_copy(update={"path": None, "seed": 0})
    train = config.train.model_copy(update={"seed": 0})
    return config.model_copy(update={"data": data, "train": train}).to_toml()


def measure(config: RunConfig, seconds: float) -> StepTiming:
    """Time the step of a run on this machine, for about this long."""
    import torch

    from residua.train.environment import device_name
    from residua.train.step import arithmetic
    from residua.train.timing import Sample, release_memory, time_step
    from residua.train.world import World

    with World.alone(config) as world, arithmetic(config.train):
        torch.manual_seed(config.train.seed)
        step = world.build_step(config)
        probe = time_step(step, config, steps=5, warmup=5)
        steps = round(seconds / Sample.of(probe.seconds).median)
        # Peak memory is the probe's: later steps replay CUDA graphs, which allocate nothing.
        timed = time_step(step, config, steps=min(max(steps, MIN_TIMED_STEPS), MAX_TIMED_STEPS), warmup=0)
        del step
        release_memory(world.device)
        device = device_name(world.device)
    sample = Sample.of(timed.seconds)
    return StepTiming(
        device=device, tokens=config.tokens_per_step, median=sample.median, p10=sample.p10, p90=sample.p90,
        count=sample.count, error=_error(timed.seconds), memory_gib=probe.memory_gib,
    )  # fmt: skip


def _error(seconds: Sequence[float]) -> float:
    """The standard error of the logarithm of the median, from the medians of successive blocks."""
    edges = [round(i * len(seconds) / BLOCKS) for i in range(BLOCKS + 1)]
    medians = [statistics.median(seconds[a:b]) for a, b in pairwise(edges)]
    return statistics.stdev([math.log(value) for value in medians]) / math.sqrt(BLOCKS)


class Session:
    """Times the models of one size on this machine, the baseline first, into their records."""

    def __init__(self, seconds: float) -> None:
        self.failed = False
        self._seconds = seconds
        self._factor: float | None = 1.0  # from seconds of this session to recorded ones; None if not comparable
        self._baseline: StepTiming | None = None  # as timed at the start of this session
        self._timed: list[tuple[Path, StepTiming]] = []  # the variants of this session, by record

    def time_baseline(self, path: Path, file: Path, others: Sequence[Path]) -> None:
        """Time the first model. If its recorded timing no longer holds, remove those of the others on this device."""
        earlier = _timed_here(path, file)
        timing = self._baseline = self._measured(path)
        if timing is None:
            self._factor = 1.0 if earlier is None else None
        elif earlier is not None and abs(timing.drift(earlier)) <= MAX_DRIFT:
            self._factor = math.exp(-timing.drift(earlier))
            print(f"{path.stem}: {_rate(timing)} alone, and {_rate(earlier)} when timed before", flush=True)
        else:
            stale = [other for other in others if _forget(other, timing.device)]
            _add(file, timing)
            what = f"{path.stem}: {_in_words(timing)}"
            if earlier is not None:
                what = f"{path.stem}: {_rate(timing)} alone, but {_rate(earlier)} when timed before"
            print(what + ": all variants are timed again" * bool(earlier or stale), flush=True)

    def time_variant(self, path: Path, file: Path) -> None:
        """Time a model that has no timing on this device, relative to the recorded one of the baseline."""
        if _timed_here(path, file) is not None:
            return
        if self._factor is None:
            print(f"{path.stem}: not timed, since the baseline could not be timed", file=sys.stderr)
            return
        if (measured := self._measured(path)) is not None:
            timing = measured.scaled(self._factor)
            _add(file, timing)
            self._timed.append((file, timing))
            scaled = f"; recorded as {_rate(timing)}, scaled to the baseline's recorded speed" * (self._factor != 1.0)
            print(f"{path.stem}: {_in_words(measured)}{scaled}", flush=True)

    def time_baseline_again(self, path: Path) -> None:
        """Time the first model once more: how far it moved enters the records of the variants of this session.

        If the session was stopped before, or this fails, they keep the error of their own steps.
        """
        if self._baseline is None or not self._timed or (again := self._measured(path)) is None:
            return
        drift = again.drift(self._baseline)
        for file, timing in self._timed:
            _add(file, timing.moved(drift))
        if abs(drift) > MAX_DRIFT:
            change = again.tokens_per_second / self._baseline.tokens_per_second - 1
            what = "the load of the machine changed, and intervals of speeds are wider for it"
            print(f"{path.stem}: {_rate(again)} at the end ({change:+.0%}): {what}", flush=True)

    def _measured(self, path: Path) -> StepTiming | None:
        from residua.train.timing import release_memory

        config = RunConfig.from_toml(path)
        try:
            return measure(config, self._seconds)
        except (RuntimeError, ValueError) as problem:  # also out of memory
            failure = describe(problem)
            print(f"{path.stem}: {failure.sentence}\n{failure.trace}", end="", file=sys.stderr)
            self.failed = True
            release_memory(choose_device(config.train.device, "train.device"))
            return None


def _timed_here(path: Path, file: Path) -> StepTiming | None:
    """The recorded timing of a model on this device."""
    from residua.train.environment import device_name

    device = choose_device(RunConfig.from_toml(path).train.device, "train.device")
    return _Record.read(file).devices.get(device_name(device))


def _add(file: Path, timing: StepTiming) -> None:
    record = _Record.read(file)
    record.write(file, {**record.devices, timing.device: timing})


def _forget(file: Path, device: str) -> bool:
    """Remove the timing on a device; returns whether there was one."""
    record = _Record.read(file)
    others = {name: timing for name, timing in record.devices.items() if name != device}
    if others != record.devices:
        record.write(file, others)
    return others != record.devices


def _rate(timing: StepTiming) -> str:
    return f"{timing.tokens_per_second:,.0f} tokens/s"


def _in_words(timing: StepTiming) -> str:
    return f"{_rate(timing)} alone, spread {timing.spread:.1%}{', the machine is busy' * timing.busy}"


def main(arguments: Sequence[str]) -> int:
    """Time the baseline, every other model without a timing on this device, and the baseline again; 1 if one failed."""
    from residua.config.plugins import load_plugins

    load_plugins()
    seconds, *paths = arguments
    pairs = list(zip(map(Path, paths[::2]), map(Path, paths[1::2]), strict=True))
    session = Session(float(seconds))
    session.time_baseline(*pairs[0], others=[file for _, file in pairs[1:]])
    for path, file in pairs[1:]:
        session.time_variant(path, file)
    session.time_baseline_again(pairs[0][0])
    return int(session.failed)


if __name__ == "__main__":
    with ending():
        sys.exit(main(sys.argv[1:]))
