"""Real runs of a few steps: side by side, reused, resumed, interrupted, and failing alone."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.errors import UserError
from residua.study import StudyConfig
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from residua.study.records import is_complete, read_run
from residua.study.run_study import run_study
from residua.study.timing import TimingMeasurement
from residua.study.train_runs import run_plan, threads_per_run
from tests.forked import Forked, fork_workers
from tests.study.conftest import printed

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the runs; `test_timing.py` is about timing them."""
    monkeypatch.setattr(TimingMeasurement, "measure", lambda *arguments: None)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without their imports. The test of Ctrl-C starts a real one."""
    fork_workers(monkeypatch)


class Quiet:
    """A watcher that only remembers which runs were started, and from which step."""

    def __init__(self) -> None:
        self.starts: dict[str, int] = {}

    def started(self, run: PlannedRun, step: int) -> None:
        self.starts[run.title] = step

    def advanced(self, run: PlannedRun, step: int, loss: float | None) -> None: ...
    def finished(self, run: PlannedRun, problem: str) -> None: ...


def two(study: StudyConfig, **changes: object) -> StudyConfig:
    """Pre-norm and MGR, one seed, side by side."""
    small = {"variants": {"prenorm": ("prenorm",), "mgr": ("mgr",)}, "seeds": (0,), "workers": 2, "threads": 1}
    return StudyConfig(**{**study.model_dump(), **small, **changes})


def losses(plan: StudyPlan) -> dict[str, list[tuple[float, float]]]:
    return {run.title: read_run(run.folder, run.config).loss_curve for run in plan.runs}


@pytest.mark.usefixtures("forked")
def test_a_study_writes_every_output_and_is_reused(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    small = two(study, data=str(dataset.path))
    outcome = run_study(small, out, Console(quiet=True))
    assert outcome.complete
    assert {run.status for run in outcome.result.runs} == {"complete"}
    assert all((out / name).stat().st_size for name in ("study.toml", "results.json", "results.md", "report.html"))
    assert not (out / "started.toml").exists()
    assert outcome.result.dataset is not None and outcome.result.dataset.unigram_entropy > 1.0
    difference = outcome.result.variants[1].difference
    assert difference is not None and (difference.count, difference.low) == (1, None)

    plan = make_plan(small, out, dataset)
    before = losses(plan)
    watcher = Quiet()
    assert run_plan(small, plan, out, watcher) == {}
    assert watcher.starts == {}
    assert losses(plan) == before

    # A complete run keeps the last checkpoint, and the best. A run that lost it trains again to the same bits.
    cut = plan.runs[1].folder
    assert [path.name for path in (cut / "checkpoints").iterdir()] == ["step-10"]
    shutil.rmtree(cut / "checkpoints" / "step-10")
    (cut / "inspection.json").unlink()
    assert not is_complete(cut, plan.runs[1].config)
    assert run_plan(small, plan, out, watcher) == {}
    assert list(watcher.starts) == [cut.name]
    assert losses(plan) == before

    # The same folder for a different study is refused, and nothing in it changes.
    other = two(study, data=str(dataset.path), set=(*study.set, "train.steps=12"))
    with pytest.raises(ConfigError, match=r"train\.steps = 10, but this study needs 12"):
        run_study(other, out, Console(quiet=True))
    assert losses(plan) == before


@pytest.mark.usefixtures("forked")
def test_only_budgets_added_to_a_study_are_trained(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    alone = {"data": str(dataset.path), "variants": {"prenorm": ("prenorm",)}}
    first = two(study, **alone, ladder=(1, 2))
    assert run_plan(first, make_plan(first, out, dataset), out, Quiet()) == {}
    longer = two(study, **alone, ladder=(0.5, 1, 2))
    plan, watcher = make_plan(longer, out, dataset), Quiet()
    assert run_plan(longer, plan, out, watcher) == {}
    assert watcher.starts == {"prenorm-0.5x-seed0": 0}

    # All budgets see the same batches: until the shortest lowers its learning rate, their losses have the same bits.
    records = {run.budget: read_run(run.folder, run.config) for run in plan.runs}
    losses = {budget: [row["loss"] for row in record.train[:4]] for budget, record in records.items()}
    assert losses[0.5] == losses[1.0] == losses[2.0]
    rates = {budget: [row["lr"] for row in record.train] for budget, record in records.items()}
    assert {budget: len(each) for budget, each in rates.items()} == {0.5: 5, 1.0: 10, 2.0: 20}
    assert len({each[-1] for each in rates.values()}) == 1 and rates[0.5][-1] < rates[1.0][4]  # each decays at its end


@pytest.mark.usefixtures("forked")
def test_shorter_budgets_branch_off_bit_identically(study: StudyConfig, dataset: Dataset, tmp_path: Path) -> None:
    alone = {"data": str(dataset.path), "variants": {"prenorm": ("prenorm",)}}
    together = two(study, **alone, ladder=(0.5, 1), workers=1)
    plan, watcher = make_plan(together, tmp_path / "branches", dataset), Quiet()
    assert run_plan(together, plan, tmp_path / "branches", watcher) == {}
    assert watcher.starts == {"prenorm-seed0": 0, "prenorm-0.5x-seed0": 4}
    session = json.loads((plan.runs[1].folder / "environment.json").read_text())["sessions"][0]
    assert (session["branch_of"], session["until_step"]) == ("prenorm-seed0", 4)

    whole = make_plan(together, tmp_path / "whole", dataset)
    for run in reversed(whole.runs):  # the shortest first: none has a longer run to branch off
        assert run_plan(together, replace(whole, runs=(run,)), tmp_path / "whole", watcher) == {}
    assert losses(plan) == losses(whole)


@pytest.mark.usefixtures("forked")
def test_budgets_without_decay_end_with_a_validation(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    """All steps of the shorter run are then those of the longer one, but it needs its own last loss."""
    alone = {"data": str(dataset.path), "variants": {"prenorm": ("prenorm",)}, "ladder": (0.5, 1), "workers": 1}
    constant = two(study, **alone, set=(*study.set, "train.schedule.decay_share=0"))
    plan, watcher = make_plan(constant, out, dataset), Quiet()
    assert run_plan(constant, plan, out, watcher) == {}
    assert watcher.starts == {"prenorm-seed0": 0, "prenorm-0.5x-seed0": 4}
    assert all(is_complete(run.folder, run.config) for run in plan.runs)


@pytest.mark.usefixtures("forked")
def test_one_failing_run_does_not_affect_the_others(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    small = two(study, data=str(dataset.path))
    plan = make_plan(small, out, dataset)
    blocked = plan.runs[0].folder
    blocked.mkdir(parents=True)
    (blocked / "stray.txt").write_text("not a run")
    outcome = run_study(small, out, Console(quiet=True))
    status = {run.folder: run.status for run in outcome.result.runs}
    assert status == {blocked.name: "failed", plan.runs[1].folder.name: "complete"}
    problem = next(run.problem for run in outcome.result.runs if run.problem)
    assert "is not empty" in problem and "log: " in problem
    assert (out / "report.html").exists()


WAITS = """
import signal, time
from residua.train.step import Step

step, steps = Step.__call__, []

def wait_for_the_signal(self, *given):
    steps.append(self)
    while len(steps) == 4 and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        time.sleep(0.01)
    return step(self, *given)

Step.__call__ = wait_for_the_signal
"""
"""A plugin: the fourth step of a run lasts until the run is stopped."""


def test_ctrl_c_saves_every_run_and_the_same_command_resumes(
    study: StudyConfig, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("train.save_every=5000", "train.validate_every=5000", "model.layers=2")
    small = two(study, data=str(dataset.path), set=(*study.set, *steps), variants={"mgr": ("mgr",)}, baseline="mgr")
    (out.parent / "waits.py").write_text(WAITS)
    monkeypatch.setenv("RESIDUA_PLUGINS", str(out.parent / "waits.py"))
    out.mkdir()
    (out / "wanted.toml").write_text(small.to_toml())
    call = "from residua.cli.main import main; main()"
    command = [sys.executable, "-c", call, "compare", str(out / "wanted.toml"), "--out", str(out)]
    with (out.parent / "errors").open("w+b") as errors:
        first = (subprocess.Popen if torch.cuda.is_available() else Forked)(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
        )
        plan = make_plan(small, out, dataset)
        wait_for(lambda: all(read_run(run.folder, run.config).train for run in plan.runs), first)
        first.send_signal(signal.SIGINT)
        assert first.wait() == 130
        errors.seek(0)
        assert b"run the same command to continue" in errors.read()
    (out / "wanted.toml").unlink()
    assert "1 variant × 1 seed" in printed(out, "--plan"), "the folder is enough to resume"
    monkeypatch.delenv("RESIDUA_PLUGINS")
    fork_workers(monkeypatch)
    saved = {run.title: next((run.folder / "checkpoints").glob("step-*")) for run in plan.runs}
    watcher = Quiet()
    assert all(0 < int(path.name.removeprefix("step-")) < 10 for path in saved.values())
    assert run_plan(small, plan, out, watcher) == {}
    assert watcher.starts.keys() == saved.keys()
    assert all(is_complete(run.folder, run.config) for run in plan.runs)
    sessions = json.loads((plan.runs[0].folder / "environment.json").read_text())["sessions"]
    assert [session["from_step"] > 0 for session in sessions] == [False, True]


def test_a_second_study_in_the_same_folder_is_refused(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    from residua.study.train_runs import _own

    with _own(out), pytest.raises(UserError, match="in use by another study"):
        run_plan(study, make_plan(study, out, dataset), out, Quiet())


@pytest.mark.parametrize(("limit", "threads"), [("", 8), ("3", 3), ("16", 8), ("0", 1), ("3,2", 8)])
def test_runs_take_no_more_threads_than_the_environment_allows(
    study: StudyConfig, monkeypatch: pytest.MonkeyPatch, limit: str, threads: int
) -> None:
    monkeypatch.setattr("residua.study.train_runs.available_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    alone = study.model_copy(update={"workers": 1, "threads": None})
    assert threads_per_run(alone) == threads
    assert threads_per_run(alone.model_copy(update={"threads": 5})) == 5
    assert threads_per_run(alone.model_copy(update={"workers": 10_000})) == 1


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes] | Forked) -> None:
    while not ready():
        assert process.poll() is None
        time.sleep(0.1)
