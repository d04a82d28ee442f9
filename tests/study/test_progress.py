"""Progress of an unfinished run, and the time left."""

from pathlib import Path

import pytest
from rich.console import Console

from residua.data import Dataset
from residua.report import terminal
from residua.study import StudyConfig
from residua.study.plan import PlannedRun, make_plan
from residua.study.records import latest, steps_done
from residua.study.train_runs import LiveProgress
from tests.study.recorded import write_run


def test_the_latest_row_is_found_before_an_unfinished_line(tmp_path: Path) -> None:
    assert latest(tmp_path) == (0, None)
    rows = [f'{{"kind": "train", "step": {step}, "loss": {5 - step / 1000}}}\n' for step in range(1, 401)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows) + '{"kind": "tra')
    assert latest(tmp_path) == (400, 4.6)
    assert steps_done(tmp_path) == 400


def test_the_time_left_counts_only_steps_of_this_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.time, "monotonic", lambda: 110.0)
    assert terminal.remaining(start=100.0, before=50, done=70, total=100) == pytest.approx(15.0)
    assert terminal.remaining(start=100.0, before=50, done=50, total=100) is None
    clocks = {None: "?", 5.4: "0:05", 125.0: "2:05", 3723.0: "1:02:03"}
    assert {seconds: terminal.clock(seconds) for seconds in clocks} == clocks


class Shown:
    """The bars of a study of one run of 100 steps, with a clock that the test sets."""

    def __init__(self, study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        small = {"variants": ["prenorm", "mgr"], "seeds": 1, "set": (*study.set, "train.steps=100")}
        config = StudyConfig(**{**study.model_dump(exclude={"baseline"}), **small, "data": str(dataset.path)})
        self.plan = make_plan(config, out, dataset)
        self.now = 0.0
        monkeypatch.setattr(terminal.time, "monotonic", lambda: self.now)

    def at(self, seconds: float, run: PlannedRun, step: int) -> str:
        """The status of all runs after a step was reported."""
        self.now = seconds
        self.live.advanced(run, step, 4.0)
        return str(self.live._bars.tasks[0].fields["note"])

    def begin(self) -> None:
        self.live = LiveProgress(Console(quiet=True), self.plan)


@pytest.fixture
def shown(study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(study, dataset, out, monkeypatch)


def test_time_left_ignores_start_up_and_complete_runs(shown: Shown) -> None:
    shown.begin()
    first, second = shown.plan.runs
    shown.live.started(first, 0)
    assert shown.at(60.0, first, 0) == ""
    assert shown.at(61.0, first, 1) == "0/2 runs"  # nothing to tell the rate from
    assert shown.at(71.0, first, 11) == "0/2 runs, 3:09 left"  # 189 steps of a second
    write_run(first, lambda run, step: 4.0)
    shown.begin()
    shown.live.started(second, 0)
    assert shown.at(60.0, second, 1) == "0/1 run"


@pytest.mark.parametrize(("logged", "saved"), [(20, 26), (30, 26), (20, 0)])
def test_a_resumed_run_is_shown_from_its_checkpoint(shown: Shown, logged: int, saved: int) -> None:
    run = shown.plan.runs[0]
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text(f'{{"kind": "train", "step": {logged}, "loss": 4.0}}\n')
    if saved:
        (run.folder / "checkpoints" / f"step-{saved}").mkdir(parents=True)
    shown.begin()
    shown.live.started(run, logged)
    bar = shown.live._bars.tasks[1]
    assert (bar.completed, bar.fields["note"]) == (saved, f"from step {saved}" if saved else "")
    for step in (logged, min(logged, saved)):  # before and after the trainer cuts the log back
        shown.at(60.0, run, step)
        assert bar.completed == saved
    assert shown.at(70.0, run, saved + 10) == "0/2 runs"
    assert bar.completed == saved + 10
