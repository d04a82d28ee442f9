"""A small study on a small text, planned but not trained, and a stand-in for training it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from residua.cli.compare import app
from residua.data import Dataset
from residua.errors import UserError
from residua.study import StudyConfig
from residua.study.page import Outcome
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from residua.study.records import is_complete
from residua.study.results import StudyResult
from residua.study.run_study import run_study
from residua.study.train_runs import StudyInterrupted
from tests.study.recorded import Curve, write_run
from tests.trained import prepare_sentences

SMALL = (
    "model.width=32", "model.attention.heads=2", "model.ffn.hidden=128", "model.context=32", "train.device=cpu",
    "train.steps=10", "train.micro_batch=2", "train.schedule.warmup=2", "train.log_every=1", "train.validate_every=5",
    "train.save_every=5", "data.validation_tokens=256",
)  # fmt: skip
SET_SMALL = [word for change in SMALL for word in ("--set", change)]
"""The same on a command line."""
ENVIRONMENT = {"residua": "0.2.0", "mathematics": 1, "commit": "abc", "torch": "2.11", "gpu": "H200", "platform": "x"}
Choose = Callable[..., StudyConfig]


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare_sentences(tmp_path_factory.mktemp("text"), documents=20, holdout=0.05)


@pytest.fixture(scope="session")
def study() -> StudyConfig:
    """Pre-norm against three others, two seeds, ten steps."""
    variants = ["prenorm", "block_attnres", "mgr", "exoformer"]
    return StudyConfig(name="small", base="tiny", variants=variants, seeds=2, set=SMALL)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "study"


@pytest.fixture
def plan(study: StudyConfig, dataset: Dataset, out: Path) -> StudyPlan:
    return make_plan(study, out, dataset)


def choose(dataset: Dataset, *variants: str, **changes: Any) -> StudyConfig:
    """A study of pre-norm and others on the small text."""
    defaults = {"name": "small", "base": "tiny", "set": SMALL, "seeds": 2, "data": str(dataset.path)}
    return StudyConfig(**{**defaults, "variants": ["prenorm", *variants], **changes})


@pytest.fixture
def chosen(dataset: Dataset) -> Choose:
    return partial(choose, dataset)


def changed(study: StudyConfig, **changes: Any) -> StudyConfig:
    """A study with other settings, which are checked."""
    return StudyConfig(**{**study.model_dump(exclude_none=True), **changes})


def falling(run: PlannedRun, step: int) -> float:
    """A loss that differs by size, seed and variant."""
    return 5.0 - 0.01 * step - 0.1 * run.seed - (0.2 if run.variant == "mgr" else 0.0) + 1e-3 * len(run.variant)


@dataclass
class Trainer:
    """Stands in for the processes that train: writes complete runs at once, and remembers which.

    Trials of the multiples `fails` diverge. After `stop_after` runs the study is stopped.
    """

    loss: Curve = falling
    trained: list[str] = field(default_factory=list)
    fails: tuple[float, ...] = ()
    stop_after: int | None = None

    def __call__(self, study: StudyConfig, plan: StudyPlan, out: Path, watcher: Any) -> dict[PlannedRun, str]:
        out.mkdir(parents=True, exist_ok=True)
        problems = {}
        for run in plan.runs:
            if is_complete(run.folder, run.config):
                continue
            watcher.started(run, 0)
            self.trained.append(run.title)
            if run.rate in self.fails:
                problems[run] = "the run diverged"
            else:
                self.train(run)
            watcher.finished(run, problems.get(run, ""))
            if len(self.trained) == self.stop_after:
                raise StudyInterrupted("Stopped")
        return problems

    def train(self, run: PlannedRun) -> None:
        write_run(run, self.loss)
        about = {**ENVIRONMENT, "sessions": [{"started": "now"}]}
        (run.folder / "environment.json").write_text(json.dumps(about))

    def replace_training(self, patch: pytest.MonkeyPatch, pages: bool = False) -> "Trainer":
        """Train with this instead of with processes; without `pages`, write none of the files of a report."""
        patch.setattr("residua.study.train_runs.run_plan", self)
        if not pages:
            patch.setattr("residua.study.run_study.write_report", without_pages)
        return self


def without_pages(study: StudyConfig, result: StudyResult, records: object, out: Path, *others: object) -> Outcome:
    """`write_report` without the files that it writes."""
    return Outcome(result, out / "report.html")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return Trainer().replace_training(monkeypatch)


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing it takes half a second, and these tests do not need it."""
    page = SimpleNamespace(write=lambda path: path)
    monkeypatch.setattr("residua.study.page.study_page", lambda *arguments: page)


def compare(study: StudyConfig, out: Path, results: Path | None = None) -> StudyResult:
    """The results of a study that prints nothing."""
    return run_study(study, out, Console(quiet=True), results, "residua compare study.toml").result


def printed(*arguments: object) -> str:
    """The output of `residua compare`."""
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments: object) -> str:
    """The sentence with which `residua compare` refuses a command line."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)
