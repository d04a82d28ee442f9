"""Steps timed in isolation after parallel runs: recorded once, and compared only on one device."""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from residua.config.run import RunConfig
from residua.reading import ReadError
from residua.study import StudyConfig, timing
from residua.study.gains import timed_ratio
from residua.study.plan import make_plan
from residua.study.timing import (
    ROUNDS,
    Round,
    StepTiming,
    Timer,
    TimingMeasurement,
    keep_timings,
    read_timings,
    summarize,
)
from residua.study.train_runs import StudyInterrupted
from tests.study.conftest import SMALL, Choose, choose, compare
from tests.study.recorded import write_all
from tests.study.test_results import straight

ONE_SESSION = ["additive", "multi_gate"]


@pytest.fixture
def chosen(dataset: object) -> Choose:
    changes = {"workers": 2, "threads": 1, "set": (*SMALL, "model.layers=2")}
    return partial(choose, dataset, "mgr", **changes)


@dataclass
class Waiting:
    """A model with a made-up step time."""

    config: RunConfig
    step: Callable[[], float]
    too_large: bool = False
    memory_gib: float | None = None

    def wait(self) -> None:
        if self.too_large:
            raise MemoryError("out of memory")

    def warnings(self) -> list[str]:
        return [f"warned of {self.config.model.topology.kind}"]

    def __call__(self, seconds: float) -> list[float]:
        return [self.step()]


class Timed:
    """A study of complete runs, whose steps are timed in this process, with made-up speeds, and counted."""

    def __init__(self, chosen: Choose, dataset: object, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._chosen, self._dataset, self.out, self._patch = chosen, dataset, out, monkeypatch
        self.calls: list[str] = []
        self.device, self.seconds, self.slower = "H200", 1.0, 1.0  # `slower` by this factor with every timing
        self.study(chosen())
        monkeypatch.setattr(timing, "SECONDS", 0.5)
        monkeypatch.setattr(timing, "_run", lambda command, *others: timing.main(command[command.index("0.5") :]))
        monkeypatch.setattr("residua.train.environment.device_name", lambda device: self.device)
        monkeypatch.setattr(timing, "open_model", self.open)
        self.too_large: set[str] = set()

    def study(self, config: StudyConfig) -> None:
        """Time this study from now on."""
        self.config, self.plan = config, make_plan(config, self.out, self._dataset)
        write_all(replace(self.plan, runs=tuple(run for run in self.plan.runs if not run.folder.exists())), straight)

    @contextmanager
    def open(self, path: Path) -> Iterator[Timer]:
        config = RunConfig.from_toml(path)
        kind = config.model.topology.kind
        if kind not in self.too_large:
            self.calls.append(kind)
        yield cast(Timer, Waiting(config, partial(self.step, kind), kind in self.too_large))

    def step(self, kind: str) -> float:
        self.seconds *= self.slower
        return self.seconds * (2.0 if kind == "multi_gate" else 1.0)

    def time(self, **changes: object) -> list[str]:
        """Run missing timings; returns the kinds of models that were timed."""
        before = len(self.calls)
        config = self.config.model_copy(update=changes)
        TimingMeasurement(config, self.out).measure(self.plan, Console(quiet=True))
        return self.calls[before:]

    def forget(self, *names: str) -> None:
        for path in (self.out / "timings").iterdir():
            if not names or path.stem in names:
                path.unlink()

    @property
    def recorded(self) -> dict[tuple[str, str], dict[str, StepTiming]]:
        return read_timings(self.config, self.plan, self.out)

    @property
    def medians(self) -> dict[str, float]:
        """The recorded seconds on the H200 by variant, and size if there are two."""
        names = {key: key[1] if len(self.config.sizes) == 1 else "-".join(key) for key in self.recorded}
        return {names[key]: found["H200"].median for key, found in self.recorded.items() if "H200" in found}


@pytest.fixture
def timed(chosen: Choose, dataset: object, out: Path, monkeypatch: pytest.MonkeyPatch) -> Timed:
    return Timed(chosen, dataset, out, monkeypatch)


@pytest.mark.slow
def test_parallel_study_times_every_step_in_isolation(
    chosen: Choose, dataset: object, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    plan = make_plan(chosen(), out, dataset)
    write_all(plan, straight)
    baseline, ours = compare(chosen(), out).variants  # the runs are complete
    assert ours.timing.count == 10 and ours.timing.p10 <= ours.timing.median <= ours.timing.p90
    assert ours.timing.device == baseline.timing.device and ours.timing.device.endswith(", 1 threads")
    assert ours.throughput_ratio.value == pytest.approx(baseline.timing.median / ours.timing.median)
    assert ours.throughput_ratio.value != 1.0  # which the training runs have
    monkeypatch.setattr(timing, "_run", lambda *arguments: pytest.fail("timed again"))
    TimingMeasurement(chosen(), out).measure(plan, Console(quiet=True))


def test_sequential_study_is_timed_only_on_request(timed: Timed) -> None:
    assert timed.time(workers=1) == []
    assert timed.time(workers=1, time_alone=True) == ONE_SESSION


def test_only_missing_damaged_or_changed_timings_are_repeated(timed: Timed) -> None:
    assert timed.time() == ONE_SESSION and timed.time() == []
    timed.forget("mgr")  # as if the study had been stopped between the two
    assert timed.time() == ONE_SESSION  # in turn with the baseline
    (timed.out / "timings" / "prenorm.json").write_text("{")
    assert timed.time() == ONE_SESSION
    models = timed.plan.models.items()
    wider = {key: replace(one, config=one.config.override(["train.micro_batch=4"])) for key, one in models}
    timed.plan = replace(timed.plan, models=wider)
    assert timed.recorded == {("tiny", "prenorm"): {}, ("tiny", "mgr"): {}}


def test_a_damaged_record_is_named_by_its_path(timed: Timed) -> None:
    timed.time()
    file = timed.out / "timings" / "prenorm.json"
    file.write_text("{")
    with pytest.raises(ReadError, match=rf"^{re.escape(str(file))} .*: remove it to time the model again\.$"):
        timing.Session(1.0, (timed.out / "configs" / "prenorm.toml", file), ExitStack()).time_baseline([])


def test_a_slower_machine_retimes_all_variants(
    timed: Timed, chosen: Choose, capsys: pytest.CaptureFixture[str]
) -> None:
    """Idle when two variants were timed, busy when the third one is."""
    timed.study(chosen(variants=["prenorm", "mgr", "exoformer"]))
    timed.time()
    timed.forget("exoformer")
    timed.seconds = 2.0
    capsys.readouterr()
    timed.time()
    assert timed.medians == {"prenorm": 2.0, "mgr": 4.0, "exoformer": 2.0}
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 5 and "when timed before: all variants are timed again" in told[0]
    assert told[1] == "mgr: warned of multi_gate", "a model without its CUDA graph is not timed silently"


def test_a_new_variants_timing_is_scaled_to_the_recorded_speed(timed: Timed) -> None:
    timed.time()
    timed.forget("mgr")
    timed.seconds = 1.02
    timed.time()
    assert timed.medians == {"prenorm": 1.0, "mgr": pytest.approx(2.0)}  # 2.04 × 1.0 / 1.02


def test_no_variant_is_timed_if_the_baseline_cannot_be(timed: Timed) -> None:
    timed.time()
    timed.forget("mgr")
    timed.too_large = {"additive"}
    assert timed.time() == [] and timed.medians == {"prenorm": 1.0}
    timed.too_large = set()
    timed.time()
    assert timed.medians == {"prenorm": 1.0, "mgr": 2.0}
    timed.forget()
    timed.too_large = {"additive"}
    assert timed.time() == ["multi_gate"], "the others are"
    assert json.loads((timed.out / "timings" / "prenorm.json").read_text())["devices"] == {}


def test_saved_timings_are_not_mixed_with_a_new_baseline(timed: Timed) -> None:
    """As after a stop between the baseline and the variant: their old timings must not be mixed with the new."""
    timed.time()
    saved = timed.recorded
    timed.forget("mgr")
    keep_timings(timed.config, timed.plan, timed.out, saved)
    assert timed.recorded == saved  # from one session
    timed.forget()
    for poor in ({"p90": 9.0}, {"error": 0.06}):
        taken = {device: timing.model_copy(update=poor) for device, timing in saved["tiny", "mgr"].items()}
        keep_timings(timed.config, timed.plan, timed.out, {**saved, ("tiny", "mgr"): taken})
        assert timed.recorded == {**saved, ("tiny", "mgr"): {}}
    timed.seconds = 2.0
    timed.forget()
    timed.time()
    timed.forget("mgr")
    keep_timings(timed.config, timed.plan, timed.out, saved)
    assert timed.medians == {"prenorm": 2.0}


def test_each_size_is_timed_against_its_own_baseline(timed: Timed, chosen: Choose) -> None:
    changes = {"scaling": {"sizes": ["tiny", "mini"]}, "set": ["train.steps=100", "train.schedule.warmup=1"]}
    timed.study(chosen(seeds=1, **changes))
    timed.time()
    timed.forget("mini-mgr")
    timed.seconds = 2.0
    timed.time()
    complete, again = {"tiny-prenorm": 1.0, "tiny-mgr": 2.0}, {"mini-prenorm": 2.0, "mini-mgr": 4.0}
    assert timed.medians == complete | again


def test_a_new_variant_on_another_device_retimes_all(timed: Timed) -> None:
    timed.time()
    timed.device = "B200"
    assert timed.time() == []  # all have one device in common: nothing to do
    timed.forget("mgr")
    assert timed.time() == ONE_SESSION
    devices = {name: list(found) for (_, name), found in timed.recorded.items()}
    assert devices == {"prenorm": ["H200", "B200"], "mgr": ["B200"]}


def test_steadily_changing_load_does_not_change_the_ratio(timed: Timed) -> None:
    timed.slower = 1.05  # with every turn: 2.65 times slower at the end
    timed.time()
    prenorm, mgr = (devices["H200"] for devices in timed.recorded.values())
    assert mgr.median / prenorm.median == pytest.approx(2.0)  # the first one alternates
    assert mgr.error == pytest.approx(math.log(1.05) / 3) and prenorm.error > 0.04


def test_model_too_large_to_share_memory_is_timed_in_between(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once both processes do not fit, the baseline makes room and is timed again after it."""
    running: list[str] = []

    @contextmanager
    def open(path: Path) -> Iterator[Timer]:
        calls = [*timed.calls]
        with timed.open(path) as model:
            cast(Waiting, model).too_large = bool(running)
            if running:
                timed.calls[:] = calls
            running.append(path.stem)
            yield model
            running.remove(path.stem)

    monkeypatch.setattr(timing, "open_model", open)
    assert timed.time() == ["additive", "multi_gate", "additive"]
    assert timed.medians == {"prenorm": 1.0, "mgr": pytest.approx(2.0)}
    timed.forget()
    timed.slower = 1.01
    timed.time()
    assert timed.recorded["tiny", "mgr"]["H200"].error == pytest.approx(math.log(1.01) * 2 * ROUNDS, rel=0.1)


def test_variants_compile_at_once_then_alone_if_one_does_not_fit(
    timed: Timed, chosen: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed.study(chosen(variants=["prenorm", "mgr", "exoformer"]))
    monkeypatch.setattr(timing, "_compile_at_once", lambda path: 2)
    running: list[str] = []
    events: list[str] = []

    @dataclass
    class Crowded(Waiting):
        def wait(self) -> None:
            events.append(f"wait, {len(running)} running")
            if len(running) > 2 and len(events) > 3:
                raise MemoryError("out of memory")

        def __call__(self, seconds: float) -> list[float]:
            if events[-1] != self.config.model.topology.kind:
                events.append(self.config.model.topology.kind)
            return super().__call__(seconds)

    @contextmanager
    def open(path: Path) -> Iterator[Timer]:
        config = RunConfig.from_toml(path)
        running.append(path.stem)
        yield cast(Timer, Crowded(config, partial(timed.step, "multi_gate" if path.stem == "mgr" else "additive")))
        running.remove(path.stem)

    monkeypatch.setattr(timing, "open_model", open)
    timed.time()
    assert timed.medians == {"prenorm": 1.0, "mgr": 2.0, "exoformer": 1.0}
    waits = [event for event in events if event.startswith("wait")]
    assert waits == ["wait, 1 running", "wait, 3 running", "wait, 3 running", "wait, 2 running"]
    assert events[2] == waits[1] and events[3] == waits[2], "no model is timed while another one compiles"


@pytest.mark.parametrize(("peak", "at_once"), [(None, 1), (1.0, 8), (10.0, 6), (31.0, 1), (100.0, 1)])
def test_as_many_models_compile_as_memory_holds(
    peak: float | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=140 * 2**30))
    baseline = Waiting(RunConfig.find("tiny"), lambda: 1.0, memory_gib=peak)
    assert timing._compile_at_once(cast(Timer, baseline)) == at_once
    assert timing._compile_at_once(None) == 1


def test_a_session_stopped_early_keeps_its_timings(timed: Timed, chosen: Choose) -> None:
    timed.study(chosen(variants=["prenorm", "mgr", "exoformer"]))
    ours = timed.step

    def stopped(kind: str) -> float:
        if len(timed.calls) == 3:
            raise KeyboardInterrupt
        return ours(kind)

    timed.step = stopped  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        timed.time()
    assert timed.medians == {"prenorm": 1.0, "mgr": 2.0}


def covered(config: RunConfig, load: Callable[[random.Random, int], float]) -> float:
    """How often the interval of a ratio of 1 holds it; `load` at each turn, two in a round."""
    made, held, times = random.Random(0), 0, 400
    recorded = StepTiming(
        device="cpu", tokens=config.tokens_per_step, median=1.0, p10=1.0, p90=1.0, count=10, error=0.05
    )
    for _ in range(times):
        turns = [math.exp(load(made, turn) + made.gauss(0, 0.002)) for turn in range(2 * ROUNDS)]
        rounds = [Round([turns[i]], [turns[i + 1]]) for i in range(0, 2 * ROUNDS, 2)]
        interval = timed_ratio(summarize(config, rounds, recorded, None), recorded, 0.95)
        held += interval.low <= 1.0 <= interval.high
    return held / times


def test_intervals_cover_the_truth_under_changing_load() -> None:
    config = RunConfig.find("tiny")
    assert covered(config, lambda made, turn: 0.0) == pytest.approx(0.95, abs=0.03)
    assert covered(config, lambda made, turn: 0.2 * (turn >= 7)) > 0.95  # within a round
    assert covered(config, lambda made, turn: made.gauss(0, 0.1)) == pytest.approx(0.95, abs=0.03)


def test_ctrl_c_while_timing_prints_how_to_resume(
    chosen: Choose, dataset: object, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __init__(self, *arguments: object, **options: object) -> None:
            self.stdout, self.ended = self, False

        def __iter__(self) -> "Interrupted":
            raise KeyboardInterrupt

        def terminate(self) -> None:
            self.ended = True

        def wait(self) -> int:
            assert self.ended
            return -15

    plan = make_plan(chosen(), out, dataset)
    write_all(plan, straight)
    monkeypatch.setattr(timing.subprocess, "Popen", Interrupted)
    with pytest.raises(StudyInterrupted, match="run the same command to continue"):
        TimingMeasurement(chosen(), out).measure(plan, Console(quiet=True))
