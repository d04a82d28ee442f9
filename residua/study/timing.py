"""Time every variant's step in isolation once its runs are complete, since concurrent runs slow each other down.

One process times all variants of a size in turn, exactly as `residua train` would run them. It stores a record per
model and device under `timings/`; speeds of different devices are never compared. On a GPU, some variants compile at
the same time, before any of them is timed. A variant alternates with the baseline, and its record is the mean ratio
over ten rounds: if the machine speeds up or slows down meanwhile, both change. If the baseline's speed differs from an
earlier session, all variants are timed again. `python -m residua.study.timing SECONDS CONFIG.toml RECORD.json …`, the
baseline first, starts that process; `python -m residua.study.timing CONFIG.toml` starts the process of one model.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field
from rich.console import Console

from residua.config.run import RunConfig
from residua.config.settings import Frozen
from residua.errors import UserError
from residua.files import write_atomically
from residua.machine import choose_device, python_command, python_environment
from residua.reading import read_json
from residua.report.failure import describe, ending
from residua.report.plain import outcome
from residua.study.config import StudyConfig
from residua.study.plan import CONFIGS, LOGS, TIMINGS, PlannedRun, StudyPlan, model_title
from residua.study.records import is_complete, read_measured
from residua.study.train_runs import StudyInterrupted, stop_as_exception, threads_per_run

if TYPE_CHECKING:
    from residua.train.turns import Turn

SECONDS = 4.0
"""How long each model's step is timed, after compilation and warm-up."""
MOST_STEPS = 200
"""The most steps in one turn."""
WARMUP = 5
AT_ONCE = 8
"""The most models that compile at the same time on a GPU, where they then wait in its memory."""
ROOM = 2.0
"""Memory set aside for each of them, as a multiple of the baseline's peak."""
ROUNDS = 10
"""Turns of a variant and the baseline; the error comes from their ratios."""
MAX_DRIFT = 0.03
"""If the baseline's step time changes by more than this, earlier timings are no longer comparable."""
MAX_ERROR = 0.05
"""A recorded timing with a larger standard error is taken again."""
MAX_IDLE_SPREAD = 0.5
"""If step times spread by more than this share of their median, other programs were using the machine."""


class StepTiming(Frozen):
    """The seconds of one training step timed in isolation: the median, and the 10th and 90th percentiles.

    `error` is a standard error of logarithms over rounds: for a variant `in_turns` with the baseline, of their ratio;
    for the baseline, and in older files for all, of its own medians. `memory_gib` is the peak on a GPU.
    """

    device: str
    tokens: int
    median: float
    p10: float
    p90: float
    count: int
    error: float
    in_turns: bool = False
    memory_gib: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.median

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile, as a share of the median."""
        return (self.p90 - self.p10) / self.median

    @property
    def busy(self) -> bool:
        """Whether step times vary so much that the machine must have been busy with something else."""
        return self.spread > MAX_IDLE_SPREAD

    def drift(self, earlier: StepTiming) -> float:
        """Log ratio of this step time to an earlier one."""
        return math.log(self.median / earlier.median)

    def errors(self, other: StepTiming) -> list[float]:
        """The standard errors that together make the error of the ratio to another model's speed."""
        return [self.error] if self.in_turns and not other.in_turns else [self.error, other.error]

    def scaled(self, factor: float) -> StepTiming:
        seconds = {"median": self.median, "p10": self.p10, "p90": self.p90}
        return self.model_copy(update={name: value * factor for name, value in seconds.items()})


class _Record(Frozen):
    """The content of a file under `timings/`: the timed model, and its timings by device."""

    config: str
    devices: dict[str, StepTiming] = Field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> _Record:
        """Read the record in a file that must exist."""
        return read_json(file, cls, "remove it to time the model again")

    def write(self, file: Path, devices: Mapping[str, StepTiming]) -> None:
        """Write the record with new timings."""
        content = self.model_copy(update={"devices": dict(devices)}).model_dump_json(indent=1) + "\n"
        write_atomically(file, content, parents=True)


@dataclass(frozen=True)
class TimingMeasurement:
    """Times the variants with a complete run, here or `elsewhere`; skips sizes already fully timed on one device."""

    study: StudyConfig
    out: Path
    elsewhere: Container[PlannedRun] = ()

    def measure(self, plan: StudyPlan, console: Console) -> None:
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
        """Time the models of one size, by title, unless all are already timed on one device."""
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
    """The timings of every model by (size, variant), then by device; empty if none are recorded."""
    return {key: dict(_read(out, model_title(study, *key), m.config).devices) for key, m in plan.models.items()}


def keep_timings(
    study: StudyConfig, plan: StudyPlan, out: Path, timings: Mapping[tuple[str, str], Mapping[str, StepTiming]]
) -> None:
    """Record timings from elsewhere, without replacing those of this folder.

    A device whose baseline was timed here in another session is skipped: the speeds would not be comparable. So are
    timings of a busy machine or with a large error, which support no conclusion: they are taken again.
    """
    here = read_timings(study, plan, out)
    for (size, name), devices in timings.items():
        title, config = model_title(study, size, name), plan.models[size, name].config
        recorded = _read(out, title, config)
        base, theirs = here.get((size, study.baseline), {}), timings.get((size, study.baseline), {})
        idle = {d: timing for d, timing in devices.items() if not timing.busy and timing.error <= MAX_ERROR}
        same = comparable_timings(idle, theirs, base)
        if same.keys() - recorded.devices.keys():
            recorded.write(_path(out, title), {**same, **recorded.devices})


def comparable_timings(
    devices: Mapping[str, StepTiming], theirs: Mapping[str, StepTiming], ours: Mapping[str, StepTiming]
) -> dict[str, StepTiming]:
    """The timings of a variant without devices where its baseline, `theirs`, was not timed in the session of `ours`."""
    return {device: timing for device, timing in devices.items() if ours.get(device) in (None, theirs.get(device))}


def comparable_with_any(
    timings: Mapping[tuple[str, str], Mapping[str, StepTiming]], baseline: str
) -> dict[tuple[str, str], dict[str, StepTiming]]:
    """Timings in which any variant can stand in for `baseline`, with which each alternated.

    Two variants compare by their ratios to the baseline, so with the errors of both. The baseline's ratio to itself is
    1 without error. Devices where the baseline was not timed are left out: nothing alternated there. Files from before
    steps alternated have the baseline's drift in each variant's error, but not the error of the baseline itself.
    """
    return {
        (size, name): {
            device: timing.model_copy(update={"error": 0.0}) if name == baseline else timing
            for device, timing in devices.items()
            if device in timings.get((size, baseline), {})
        }
        for (size, name), devices in timings.items()
    }


def _run(command: Sequence[str], study: StudyConfig, out: Path, console: Console) -> None:
    """Print a line per timed variant; report failures, and let the study continue."""
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
            raise StudyInterrupted("Stopped while steps were timed alone: run the same command to continue.") from None
    if ending:
        console.print(outcome(f"some steps could not be timed alone (log: {log})", good=False))


def _path(out: Path, title: str) -> Path:
    return out / TIMINGS / f"{title}.json"


def _read(out: Path, title: str, config: RunConfig) -> _Record:
    """The record of this model; an empty one if it is missing or belongs to another configuration."""
    empty = _Record(config=_signature(config))
    record = read_measured(_path(out, title), _Record)
    return record if record is not None and record.config == empty.config else empty


def _signature(config: RunConfig) -> str:
    """The configuration without the parts that differ between seeds and machines."""
    data = config.data.model_copy(update={"path": None, "seed": 0})
    train = config.train.model_copy(update={"seed": 0})
    return config.model_copy(update={"data": data, "train": train}).to_toml()


class Timer:
    """A model in its own process, where it compiles until `wait` returns."""

    def __init__(self, config: RunConfig, turn: Turn) -> None:
        self.config, self._turn = config, turn
        self.memory_gib: float | None = None
        self._step: float | None = None

    def wait(self) -> None:
        """Return once the model is compiled; raise MemoryError if it does not fit. A failed process shows its log."""
        try:
            first = self._turn.answer()
            if "problem" in first:
                raise MemoryError(first["problem"])
        except (UserError, MemoryError):
            print(self._turn.log.read_text(errors="replace"), end="", file=sys.stderr)
            raise
        self.memory_gib = first["memory_gib"]

    def warnings(self) -> list[str]:
        """The warnings of its process that it runs without a CUDA graph."""
        return self._turn.warnings()

    def __call__(self, seconds: float) -> list[float]:
        """Time steps for about this long; returns the seconds of each."""
        if self._step is None:
            self._step = statistics.median(self._turn.ask(WARMUP))
        return self._turn.ask(max(1, min(round(seconds / self._step), MOST_STEPS)))


@contextmanager
def open_model(path: Path) -> Iterator[Timer]:
    """Start the process of a configuration file's model; it ends with the block."""
    from residua.train.turns import open_turn

    with TemporaryDirectory() as folder:
        command = python_command("-m", "residua.study.timing", str(path))
        with open_turn(path.stem, command, Path(folder) / "log") as turn:
            yield Timer(RunConfig.from_toml(path), turn)


def time_rounds(ours: Timer, baseline: Timer | None, seconds: float) -> list[Round]:
    """Alternate a model and the baseline, each for `seconds` in total; which one starts alternates too."""
    share, rounds = seconds / ROUNDS, []
    for number in range(ROUNDS):
        last = ours(share) if number % 2 else None
        base = baseline(share) if baseline else []
        rounds.append(Round(base, last or ours(share)))
    return rounds


class Round(NamedTuple):
    """Seconds of the baseline's steps and of the model's."""

    baseline: list[float]
    ours: list[float]


def summarize(
    config: RunConfig, rounds: Sequence[Round], recorded: StepTiming | None, memory: float | None
) -> StepTiming:
    """The timing of a model from its rounds, relative to the baseline's recorded speed if they include the baseline."""
    from residua.train.environment import device_name
    from residua.train.timing import Sample

    sample = Sample.of([second for each in rounds for second in each.ours])
    medians = [math.log(statistics.median(each.ours)) for each in rounds]
    scale = 1.0
    if recorded is not None:
        medians = [m - math.log(statistics.median(r.baseline)) for m, r in zip(medians, rounds, strict=True)]
        scale = recorded.median * math.exp(statistics.mean(medians)) / sample.median
    return StepTiming(
        device=device_name(choose_device(config.train.device, "train.device")), tokens=config.tokens_per_step,
        median=sample.median * scale, p10=sample.p10 * scale, p90=sample.p90 * scale, count=sample.count,
        error=statistics.stdev(medians) / math.sqrt(len(rounds)), in_turns=recorded is not None, memory_gib=memory,
    )  # fmt: skip


class Session:
    """Times the models of one size on this machine, baseline first, and stores their records."""

    def __init__(self, seconds: float, baseline: tuple[Path, Path], running: ExitStack) -> None:
        self.failed = False
        self._seconds, self._running = seconds, running
        self._path, self._file = baseline
        self._model: Timer | None = None  # the baseline, waiting in its process
        self._comparable = True

    def time_baseline(self, others: Sequence[Path]) -> None:
        """Time the baseline. If its recorded timing no longer holds, remove the others' timings on this device."""
        earlier = _timed_here(self._path, self._file)
        timing = self._tried(self._path, self._alone)
        if timing is None:
            self._comparable = earlier is None
            return
        name = self._path.stem
        if earlier is not None and abs(timing.drift(earlier)) <= MAX_DRIFT:
            print(f"{name}: {_rate(timing)} alone, and {_rate(earlier)} when timed before", flush=True)
            return
        stale = [other for other in others if _forget(other, timing.device)]
        _add(self._file, timing)
        what = f"{name}: {_in_words(timing)}"
        if earlier is not None:
            what = f"{name}: {_rate(timing)} alone, but {_rate(earlier)} when timed before"
        print(what + ": all variants are timed again" * bool(earlier or stale), flush=True)

    def time_variants(self, models: Sequence[tuple[Path, Path]]) -> None:
        """Time the models that have no timing on this device, each alternating with the baseline."""
        models = [(path, file) for path, file in models if _timed_here(path, file) is None]
        if not self._comparable:
            for path, _ in models:
                print(f"{path.stem}: not timed, since the baseline could not be timed", file=sys.stderr)
            return
        at_once = _compile_at_once(self._model)
        for first in range(0, len(models), at_once):
            self._time_group(models[first : first + at_once])

    def _time_group(self, group: Sequence[tuple[Path, Path]]) -> None:
        """Compile models at the same time, then time each in turn; afterwards those that did not fit."""
        crowded = []
        with ExitStack() as opened:
            models = {path: opened.enter_context(open_model(path)) for path, _ in group}
            problems = {path: _problem(model) for path, model in models.items()}
            for path, file in group:
                if isinstance(problems[path], MemoryError) and (len(group) > 1 or self._model is not None):
                    crowded.append((path, file))
                else:
                    self._record(path, file, partial(self._in_turns, path, models[path], problems[path]))
        for path, file in crowded:
            if len(group) > 1:
                self._time_group([(path, file)])
            else:
                self._record(path, file, partial(self._one_by_one, path))

    def _record(self, path: Path, file: Path, measure: Callable[[], StepTiming]) -> None:
        if (timing := self._tried(path, measure)) is not None:
            _add(file, timing)
            print(f"{path.stem}: {_in_words(timing)}", flush=True)

    def _alone(self) -> StepTiming:
        """Time the baseline, and keep its process open."""
        with ExitStack() as opened:
            model = opened.enter_context(open_model(self._path))
            model.wait()
            self._running.push(opened.pop_all())
        self._model = model
        return summarize(model.config, time_rounds(model, None, self._seconds), None, model.memory_gib)

    def _in_turns(self, path: Path, ours: Timer, problem: Exception | None) -> StepTiming:
        if problem is not None:
            raise problem
        recorded = _timed_here(self._path, self._file) if self._model else None
        rounds = time_rounds(ours, self._model, self._seconds)
        for warning in ours.warnings():
            print(f"{path.stem}: {warning}", flush=True)
        return summarize(ours.config, rounds, recorded, ours.memory_gib)

    def _one_by_one(self, path: Path) -> StepTiming:
        """Time the baseline, this model, the baseline again: both at once do not fit. The drift enters the error."""
        assert self._model is not None
        recorded = _timed_here(self._path, self._file)
        before = [each.ours for each in time_rounds(self._model, None, self._seconds)]
        self._running.close()
        self._model = None
        with open_model(path) as ours:
            ours.wait()
            rounds = time_rounds(ours, None, self._seconds)
        self._model = self._running.enter_context(open_model(self._path))
        self._model.wait()
        after = [each.ours for each in time_rounds(self._model, None, self._seconds)]
        pairs = [Round(b + a, o.ours) for b, o, a in zip(before, rounds, after, strict=True)]
        timing = summarize(ours.config, pairs, recorded, ours.memory_gib)
        drift = math.log(statistics.median(chain.from_iterable(after)) / statistics.median(chain.from_iterable(before)))
        return timing.model_copy(update={"error": math.hypot(timing.error, drift)})

    def _tried(self, path: Path, measure: Callable[[], StepTiming]) -> StepTiming | None:
        try:
            return measure()
        except (RuntimeError, MemoryError, ValueError) as problem:  # includes a process that died
            failure = describe(problem)
            print(f"{path.stem}: {failure.sentence}\n{failure.trace}", end="", file=sys.stderr)
            self.failed = True
            return None


def _problem(model: Timer) -> Exception | None:
    """Wait until a model is compiled; returns its problem, to report in its turn."""
    try:
        model.wait()
    except (RuntimeError, MemoryError, ValueError) as problem:
        return problem
    return None


def _compile_at_once(baseline: Timer | None) -> int:
    """How many models may compile at the same time; on a CPU each would slow the others down."""
    if baseline is None or baseline.memory_gib is None:
        return 1
    import torch

    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
    return max(1, min(AT_ONCE, int(memory / (ROOM * baseline.memory_gib)) - 1))


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
    """Time the baseline and every other model without a timing on this device; 1 if one failed."""
    from residua.config.plugins import load_plugins

    load_plugins()
    if len(arguments) == 1:
        return _wait(RunConfig.from_toml(arguments[0]))
    seconds, *paths = arguments
    pairs = list(zip(map(Path, paths[::2]), map(Path, paths[1::2]), strict=True))
    with stop_as_exception(), ExitStack() as running:
        session = Session(float(seconds), pairs[0], running)
        session.time_baseline(others=[file for _, file in pairs[1:]])
        session.time_variants(pairs[1:])
    return int(session.failed)


def _wait(config: RunConfig) -> int:
    """Run a model's process: build its step like a training run, and time it on request."""
    import torch

    from residua.train.step import arithmetic
    from residua.train.turns import take_turns
    from residua.train.world import World

    with World.alone(config) as world, arithmetic(config.train):
        torch.manual_seed(config.train.seed)
        take_turns(lambda: world.build_step(config), config, WARMUP)
    return 0


if __name__ == "__main__":
    with ending():
        sys.exit(main(sys.argv[1:]))
