"""Options given with a study file change only the settings that they name."""

from pathlib import Path
from typing import Any

import pytest

from residua.config.run import RunConfig
from residua.data import Dataset
from residua.study import StudyConfig
from residua.study import run_study as previewing
from residua.study.config import DEMO, MatchDepth, NoMatch, Tasks, Tune
from residua.study.plan import base_run, make_plan
from residua.study.results_file import save_study
from tests.study.conftest import SMALL, printed, refusal

SHORT = SMALL[5]
assert SHORT == "train.steps=10"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The study of a command line."""

    def ask(*arguments: object) -> StudyConfig:
        asked: list[StudyConfig] = []
        monkeypatch.setattr(previewing, "preview", lambda study, *rest: asked.append(study))
        printed(*arguments, "--plan")
        return asked[0]

    return ask


@pytest.fixture
def file(tmp_path: Path, dataset: Dataset) -> Path:
    written = StudyConfig(
        variants=["base", "mgr"], set=SMALL, data=str(dataset.path), match={"kind": "ffn", "tolerance": 0.02},
        tune={"lr": [1, 2], "share": 0.5, "seed": 77},
    )  # fmt: skip
    path = tmp_path / "mine.toml"
    path.write_text(written.to_toml())
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, as far as a plan reads it."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.toml").write_text(RunConfig.find("tiny").override(["model.width=64"]).to_toml())
    return folder


def test_set_adds_to_a_file_and_the_last_of_a_key_wins(file: Path, tmp_path: Path, asked: Any) -> None:
    study = asked(file, "--set", "train.log_every=5", "--set", "train.steps=20")
    kept = tuple(change for change in SMALL if change not in (SHORT, "train.log_every=1"))
    assert study.set == (*kept, "train.log_every=5", "train.steps=20")
    assert base_run(study, "tiny").train.steps == 20
    (tmp_path / "study").mkdir()
    file.rename(tmp_path / "study/study.toml")
    assert asked(tmp_path / "study", "--set", "train.keep=1").set == (*SMALL, "train.keep=1")


def test_set_adds_to_the_changes_of_the_demo(asked: Any) -> None:
    study = asked("--demo", "--set", "train.steps=90")
    run = base_run(study, "tiny")
    assert (run.train.steps, run.model.width, run.train.micro_batch) == (90, 64, 24)


def test_demo_with_names_compares_those_at_its_size(asked: Any) -> None:
    study = asked("--demo", "lns", "mudd")
    assert (list(study.variants), study.baseline) == (["lns", "mudd"], "lns")
    assert base_run(study, "tiny").model.width == 64


def test_from_keeps_changes_not_determined_by_the_weights(file: Path, run: Path, tmp_path: Path, asked: Any) -> None:
    study = asked(file, "--from", run, "--set", "train.keep=1")
    chosen = base_run(study, study.base).train
    assert (chosen.start, chosen.steps, chosen.keep) == (str(run.resolve()), 10, 1)
    assert study.match == NoMatch()
    file.write_text(study.to_toml())
    kept = asked(file, "--set", "train.log_every=5")
    assert base_run(kept, kept.base).train.start == str(run.resolve())
    other = run.rename(tmp_path / "other")
    again = asked(file, "--from", other)
    assert base_run(again, again.base).train.start == str(other.resolve())
    assert sum(change.startswith("train.start") for change in again.set) == 1


def test_a_demo_from_given_weights_has_their_shapes(run: Path, asked: Any) -> None:
    study = asked("--demo", "--from", run)
    started = base_run(study, study.base)
    assert (started.train.steps, started.model.context) == (160, RunConfig.find("tiny").model.context)
    assert "model.context=64" in DEMO.read_text()


def test_changed_matching_or_tuning_keeps_other_file_settings(file: Path, asked: Any) -> None:
    assert asked(file, "--tune", "lr=1x,4x").tune == Tune(lr=(1, 4), share=0.5, seed=77)
    assert asked(file, "--match", "depth").match == MatchDepth(tolerance=0.02)
    file.write_text(file.read_text().replace('tables = "free"', 'tables = "counted"'))
    same = asked(file, "--match", "ffn").match
    assert (same.tables, same.tolerance) == ("counted", 0.02)
    assert asked(file, "--match", "flops").match.tolerance == 0.02
    assert asked(file, "--match", "none").match == NoMatch()


def test_the_task_folder_applies_to_named_tasks(file: Path, tmp_path: Path, dataset: Dataset, asked: Any) -> None:
    tasks = {"names": ("colours",), "limit": 5}
    study = StudyConfig(variants=["prenorm", "mgr"], set=SMALL, data=str(dataset.path), tasks=tasks)
    file.write_text(study.to_toml())
    assert asked(file, "--task-dir", "here").tasks == Tasks(**tasks, folder="here")
    assert asked(file, "--tasks", "arc").tasks == Tasks(names=("arc",))
    plan = make_plan(study, tmp_path, dataset)
    save_study(study, plan, {}, dataset.fingerprint, None).write(tmp_path / "x.json")
    assert asked("--results", tmp_path / "x.json", "--task-dir", "here").tasks == Tasks(**tasks, folder="here")
    assert asked("--results", tmp_path / "x.json").tasks is None


def test_set_that_is_not_a_list_is_refused(file: Path) -> None:
    file.write_text('variants = ["prenorm", "mgr"]\nset = "train.steps=3"\n')
    assert "set = 'train.steps=3' should be a list" in refusal(file, "--set", "train.keep=1", "--plan")
