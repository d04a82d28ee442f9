"""Steps timed alone after runs side by side: recorded once, and compared on one device only."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from residua.config.run import RunConfig
from residua.data import Dataset
from residua.study import StudyConfig, timing
from residua.study.conduct import conduct
from residua.study.gains import timed_ratio
from residua.study.plan import StudyPlan, make_plan
from residua.study.runner import StudyInterrupted
from residua.study.timing import StepTiming, keep_timings, read_timings, time_variants
from tests.study.recorded import write_all
from tests.study.test_results import straight


def two(study: StudyConfig, dataset: Dataset, **changes: object) -> StudyConfig:
    small = {"variants": ["prenorm", "mgr"], "data": str(dataset.path), "workers": 2, "threads": 1}
    small["set"] = (*study.set, "model.layers=2")
    return StudyConfig(**{**study.model_dump(exclude={"baseline"}), **small, **changes})


class Timed:
    """Stands in for the process that times: runs it here, with a made-up speed, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "H200") -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(timing, "SECONDS", 0.5)
        monkeypatch.setattr(timing, "measure", self._measure)
        monkeypatch.setattr(timing, "_run", lambda command, *others: timing.main(command[command.index("0.5") :]))
        monkeypatch.setattr("residua.train.environment.device_name", lambda device: self.device)
        self.device, self.seconds, self.slower = device, 1.0, 1.0  # `slower` by this factor with every timing

    def _measure(self, config: RunConfig, seconds: float) -> StepTiming:
        self.calls.append(config.model.topology.kind)
        self.seconds *= self.slower
        median = self.seconds * (2.0 if config.model.topology.kind == "multi_gate" else 1.0)
        values = {"median": median, "p10": 0.9 * median, "p90": 1.1 * median, "count": 10, "error": 0.01}
        return StepTiming(device=self.device, tokens=config.tokens_per_step, **values)


def medians(study: StudyConfig, plan: StudyPlan, out: Path) -> dict[str, float]:
    """The recorded seconds on the H200 by variant."""
    found = read_timings(study, plan, out)
    return {name: devices["H200"].median for (_, name), devices in found.items() if "H200" in devices}


@pytest.fixture
def plan(study: StudyConfig, dataset: Dataset, out: Path) -> StudyPlan:
    plan = make_plan(two(study, dataset), out, dataset)
    write_all(plan, straight)
    return plan


def quietly(study: StudyConfig, plan: StudyPlan, out: Path) -> None:
    time_variants(study, plan, out, Console(quiet=True))


@pytest.mark.slow
def test_a_study_side_by_side_times_every_step_alone_and_uses_that(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    result = conduct(two(study, dataset), out, Console(quiet=True)).result  # the runs are complete
    baseline, ours = result.variants
    assert baseline.timing is not None and ours.timing is not None and ours.throughput_ratio is not None
    assert ours.timing.count == 10 and ours.timing.p10 <= ours.timing.median <= ours.timing.p90
    assert ours.timing.device == baseline.timing.device and ours.timing.device.endswith(", 1 threads")
    assert ours.throughput_ratio.value == pytest.approx(baseline.timing.median / ours.timing.median)
    assert ours.throughput_ratio.value != 1.0  # which the training runs have
    monkeypatch.setattr(timing, "_run", lambda *arguments: pytest.fail("timed again"))
    quietly(two(study, dataset), plan, out)


def test_one_run_at_a_time_is_timed_on_request_only(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(monkeypatch)
    quietly(two(study, dataset, workers=1), plan, out)
    assert timed.calls == []
    quietly(two(study, dataset, workers=1, time_alone=True), plan, out)
    assert timed.calls == ["additive", "multi_gate", "additive"]


def test_what_was_timed_is_not_timed_again_and_what_changed_is(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, chosen = Timed(monkeypatch), two(study, dataset)
    for _ in range(2):
        quietly(chosen, plan, out)
    assert timed.calls == ["additive", "multi_gate", "additive"]
    (out / "timings" / "mgr.json").unlink()  # as if the study had been stopped between the two
    quietly(chosen, plan, out)
    assert timed.calls == ["additive", "multi_gate", "additive"] * 2  # the baseline beside it
    (out / "timings" / "prenorm.json").write_text("{")
    quietly(chosen, plan, out)
    assert timed.calls[6:] == ["additive", "multi_gate", "additive"]

    wider = {key: model.config.override(["train.micro_batch=4"]) for key, model in plan.models.items()}
    changed = StudyPlan({k: m.__class__(**{**vars(m), "config": wider[k]}) for k, m in plan.models.items()}, plan.runs)
    assert read_timings(chosen, changed, out) == {("tiny", "prenorm"): {}, ("tiny", "mgr"): {}}


def test_on_a_machine_that_has_become_slower_all_variants_are_timed_again(
    study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Idle when two variants were timed, busy when the third one is."""
    chosen = two(study, dataset, variants=["prenorm", "mgr", "exoformer"])
    plan = make_plan(chosen, out, dataset)
    write_all(plan, straight)
    timed = Timed(monkeypatch)
    quietly(chosen, plan, out)
    (out / "timings" / "exoformer.json").unlink()
    timed.seconds = 2.0
    capsys.readouterr()
    quietly(chosen, plan, out)
    assert medians(chosen, plan, out) == {"prenorm": 2.0, "mgr": 4.0, "exoformer": 2.0}
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 3 and "when timed before: all variants are timed again" in told[0]


def test_on_a_machine_as_fast_as_before_a_new_variant_is_set_against_the_baseline_of_its_own_session(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    timed, chosen = Timed(monkeypatch), two(study, dataset)
    quietly(chosen, plan, out)
    assert "scaled" not in capsys.readouterr().out
    (out / "timings" / "mgr.json").unlink()
    timed.seconds = 1.02
    quietly(chosen, plan, out)
    tokens = plan.models["tiny", "mgr"].config.tokens_per_step
    measured, recorded = (f"{tokens / seconds:,.0f} tokens/s" for seconds in (2.04, 2.0))
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith(f"mgr: {measured} alone") and told.endswith(
        f"; recorded as {recorded}, scaled to the baseline's recorded speed"
    )
    assert medians(chosen, plan, out) == {"prenorm": 1.0, "mgr": pytest.approx(2.0)}  # 2.04 × 1.0 / 1.02


def test_a_new_variant_is_not_timed_if_the_baseline_cannot_be_timed_beside_it(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, chosen = Timed(monkeypatch), two(study, dataset)
    quietly(chosen, plan, out)
    (out / "timings" / "mgr.json").unlink()

    def fails(config: RunConfig, seconds: float) -> StepTiming:
        assert config.model.topology.kind == "additive"
        raise RuntimeError("out of memory")

    monkeypatch.setattr(timing, "measure", fails)
    quietly(chosen, plan, out)
    assert medians(chosen, plan, out) == {"prenorm": 1.0}
    monkeypatch.setattr(timing, "measure", timed._measure)
    quietly(chosen, plan, out)
    assert medians(chosen, plan, out) == {"prenorm": 1.0, "mgr": 2.0}


def test_timings_of_a_results_file_stay_out_where_the_baseline_was_timed_again_since(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a stop between the baseline and the variant: their old timings must not be mixed with the new."""
    timed, chosen = Timed(monkeypatch), two(study, dataset)
    quietly(chosen, plan, out)
    saved = read_timings(chosen, plan, out)
    (out / "timings" / "mgr.json").unlink()
    keep_timings(chosen, plan, out, saved)
    assert read_timings(chosen, plan, out) == saved  # from one session
    timed.seconds = 2.0
    for record in (out / "timings").iterdir():
        record.unlink()
    quietly(chosen, plan, out)
    (out / "timings" / "mgr.json").unlink()
    keep_timings(chosen, plan, out, saved)
    assert medians(chosen, plan, out) == {"prenorm": 2.0}


def test_each_size_is_timed_against_its_own_baseline(
    study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"scaling": {"sizes": ["tiny", "mini"]}, "set": ["train.steps=100", "train.schedule.warmup=1"]}
    chosen = two(study, dataset, seeds=1, **changes)
    plan = make_plan(chosen, out, dataset)
    write_all(plan, straight)
    timed = Timed(monkeypatch)
    quietly(chosen, plan, out)
    (out / "timings" / "mini-mgr.json").unlink()
    timed.seconds = 2.0
    quietly(chosen, plan, out)
    found = {key: devices["H200"].median for key, devices in read_timings(chosen, plan, out).items()}
    assert [found["tiny", "prenorm"], found["tiny", "mgr"]] == [1.0, 2.0]  # complete: left as it is
    assert [found["mini", "prenorm"], found["mini", "mgr"]] == [2.0, 4.0]


def test_on_another_device_all_are_timed_again_if_one_is_new(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, chosen = Timed(monkeypatch), two(study, dataset)
    quietly(chosen, plan, out)
    timed.device = "B200"
    quietly(chosen, plan, out)  # all have one device in common: nothing to do
    (out / "timings" / "mgr.json").unlink()
    quietly(chosen, plan, out)
    assert timed.calls == ["additive", "multi_gate", "additive"] * 2
    found = read_timings(chosen, plan, out)
    assert list(found["tiny", "prenorm"]) == ["H200", "B200"] and list(found["tiny", "mgr"]) == ["B200"]


def test_load_that_changes_within_a_session_enters_the_error_of_its_variants(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    timed, chosen = Timed(monkeypatch), two(study, dataset)
    timed.slower = 1.25
    quietly(chosen, plan, out)
    errors = {name: devices["H200"].error for (_, name), devices in read_timings(chosen, plan, out).items()}
    assert errors == {"prenorm": 0.01, "mgr": pytest.approx(math.hypot(0.01, math.log(1.25**2)))}
    assert "at the end (-36%): the load of the machine changed" in capsys.readouterr().out.splitlines()[-1]
    for record in (out / "timings").iterdir():
        record.unlink()
    timed.slower = 1.01
    quietly(chosen, plan, out)
    assert len(capsys.readouterr().out.splitlines()) == 2  # nothing is said of 2 %


def test_a_session_that_is_stopped_before_its_end_keeps_what_it_timed(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, chosen = Timed(monkeypatch), two(study, dataset)

    def stopped(config: RunConfig, seconds: float) -> StepTiming:
        if len(timed.calls) == 2:
            raise KeyboardInterrupt
        return timed._measure(config, seconds)

    monkeypatch.setattr(timing, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        quietly(chosen, plan, out)
    assert medians(chosen, plan, out) == {"prenorm": 1.0, "mgr": 2.0}


def covered(load: Callable[[random.Random], tuple[float, float, float]], widened: bool) -> float:
    """How often the interval of a ratio of 1 holds it; `load` at the timings of baseline, variant, and baseline."""
    made, held, times = random.Random(0), 0, 1000
    for _ in range(times):
        first, ours, last = (timed_at(slower + made.gauss(0, 0.002)) for slower in load(made))
        ours = ours.moved(last.drift(first)) if widened else ours
        interval = timed_ratio(ours, first, 0.95)
        assert interval.low is not None and interval.high is not None
        held += interval.low <= 1.0 <= interval.high
    return held / times


def timed_at(slower: float) -> StepTiming:
    median = math.exp(slower)
    return StepTiming(device="cpu", tokens=64, median=median, p10=median, p90=median, count=10, error=0.002)


def test_intervals_hold_the_truth_where_load_changes_between_models() -> None:
    def once(made: random.Random) -> tuple[float, float, float]:
        return (0.0, made.choice([0.0, 0.2]), 0.2)

    def steadily(made: random.Random) -> tuple[float, float, float]:
        slope = made.gauss(0, 0.1)
        return (0.0, slope, 2 * slope)

    def at_random(made: random.Random) -> tuple[float, float, float]:
        return (made.gauss(0, 0.1), made.gauss(0, 0.1), made.gauss(0, 0.1))

    assert covered(lambda made: (0.0, 0.0, 0.0), widened=True) > 0.95
    assert covered(once, widened=True) > 0.95 and covered(once, widened=False) < 0.6
    assert covered(steadily, widened=True) > 0.95 and covered(steadily, widened=False) < 0.1
    assert covered(at_random, widened=True) == pytest.approx(0.74, abs=0.04) and covered(at_random, False) < 0.1


@pytest.mark.slow
def test_a_variant_that_cannot_be_timed_does_not_stop_the_others(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(monkeypatch)

    def fails(config: RunConfig, seconds: float) -> StepTiming:
        if config.model.topology.kind == "additive":
            raise RuntimeError("out of memory")
        return timed._measure(config, seconds)

    monkeypatch.setattr(timing, "measure", fails)
    quietly(two(study, dataset), plan, out)
    assert json.loads((out / "timings" / "prenorm.json").read_text())["devices"] == {}
    assert timed.calls == ["multi_gate"]


def test_ctrl_c_while_timing_says_how_to_go_on(
    study: StudyConfig, dataset: Dataset, plan: StudyPlan, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __init__(self, *arguments: object, **options: object) -> None:
            self.stdout, self.ended = self, False

        def __iter__(self) -> Interrupted:
            raise KeyboardInterrupt

        def terminate(self) -> None:
            self.ended = True

        def wait(self) -> int:
            assert self.ended
            return -15

    monkeypatch.setattr(timing.subprocess, "Popen", Interrupted)
    with pytest.raises(StudyInterrupted, match="the same command continues"):
        quietly(two(study, dataset), plan, out)
