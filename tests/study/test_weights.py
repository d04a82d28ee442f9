"""A study whose variants begin with given weights identifies them by their content, not by their path."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from residua.cli.compare_study import start_study
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.storage.load import weights_fingerprint
from residua.storage.tensors import save_tensors
from residua.study import StudyConfig
from residua.study.plan import PlannedRun
from residua.study.results_file import SavedStudy
from residua.study.run_study import preview
from residua.train.environment import START, TEXT
from tests.study.conftest import SMALL, Choose, Trainer, compare

pytestmark = pytest.mark.slow


def save_weights(run: Path, step: int, value: float) -> None:
    """A checkpoint, as far as a study reads it."""
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    save_tensors({"weight": torch.full((4,), value)}, folder / "model.safetensors")


@pytest.fixture
def old(tmp_path: Path, dataset: Dataset) -> Path:
    """The run to start from."""
    folder = tmp_path / "old"
    folder.mkdir()
    config = RunConfig.find("tiny").override([*SMALL, f"data.path='{dataset.path}'", "model.vocab_size=384"])
    (folder / "config.toml").write_text(config.to_toml())
    save_weights(folder, 10, 1.0)
    return folder


class Recorder(Trainer):
    """A stand-in that also records the weights that a run begins with, as the trainer does."""

    def train(self, run: PlannedRun) -> None:
        super().train(run)
        path, start, text = run.folder / "environment.json", run.config.train.start, run.config.data.path
        made_of = {START: weights_fingerprint(start), TEXT: Dataset.open(text).fingerprint}
        path.write_text(json.dumps({**json.loads(path.read_text()), **made_of}))


@pytest.fixture(autouse=True)
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return Recorder().replace_training(monkeypatch)


@pytest.fixture
def begin(dataset: Dataset) -> Choose:
    def begun(run: Path, *variants: str, **keys: Any) -> StudyConfig:
        study = {"variants": ["base", *variants], "data": str(dataset.path), "seeds": 1, **keys}
        return StudyConfig(**start_study(study, run))

    return begun


def test_fingerprint_follows_the_last_checkpoint_not_the_path(old: Path, tmp_path: Path) -> None:
    first = weights_fingerprint(old)
    assert first is not None and weights_fingerprint(old.rename(tmp_path / "moved")) == first
    save_weights(tmp_path / "moved", 20, 2.0)
    assert weights_fingerprint(tmp_path / "moved") not in (None, first)
    assert weights_fingerprint(old) is None


def test_changed_weights_are_refused_in_a_folder(old: Path, tmp_path: Path, begin: Choose, trainer: Trainer) -> None:
    compare(begin(old), tmp_path / "study")
    save_weights(old, 20, 2.0)
    assert compare(begin(old), tmp_path / "study").runs[0].status == "complete", "it is shown"
    with pytest.raises(ConfigError, match=f"base-seed0 started from weights that {old} no longer has .* --out"):
        compare(begin(old, "mgr"), tmp_path / "study")
    assert trainer.trained == ["base-seed0"]


def test_changed_weights_are_refused_in_a_results_file(old: Path, tmp_path: Path, begin: Choose) -> None:
    kept = tmp_path / "x.json"
    result = compare(begin(old), tmp_path / "study", kept)
    assert str(tmp_path) not in kept.read_text() and [row.size for row in result.variants] == ["old.toml"]
    assert SavedStudy.read(kept).environments[0][START] == weights_fingerprint(old)
    save_weights(old, 20, 2.0)
    with pytest.raises(ConfigError, match=r"base-seed0 of .*x\.json started from weights .* for --results"):
        compare(begin(old, "mgr"), tmp_path / "other", kept)


def test_folder_without_recorded_weights_resumes(old: Path, tmp_path: Path, begin: Choose, trainer: Trainer) -> None:
    compare(begin(old), tmp_path / "study")
    path = tmp_path / "study/runs/base-seed0/environment.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != START}))
    save_weights(old, 20, 2.0)
    compare(begin(old, "mgr"), tmp_path / "study")
    assert trainer.trained == ["base-seed0", "mgr-seed0"]


def test_study_resumes_with_moved_weights(
    old: Path, tmp_path: Path, dataset: Dataset, begin: Choose, trainer: Trainer
) -> None:
    kept = tmp_path / "x.json"
    (old / "source").mkdir()
    shutil.copy(dataset.path / "tokenizer.json", old)
    compare(begin(old), tmp_path / "study", kept)
    moved = old.rename(tmp_path / "elsewhere")
    compare(begin(moved, "mgr"), tmp_path / "study")
    compare(begin(moved, "exoformer"), tmp_path / "fresh", kept)
    assert trainer.trained == ["base-seed0", "mgr-seed0", "exoformer-seed0"]


def test_changed_weights_at_the_old_path_are_ignored(
    old: Path, tmp_path: Path, begin: Choose, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "x.json"
    compare(begin(old, "mgr"), tmp_path / "study", kept)
    moved = shutil.copytree(old, tmp_path / "elsewhere")
    save_weights(old, 20, 2.0)
    compare(begin(moved, "exoformer"), tmp_path / "fresh", kept)
    assert trainer.trained == ["base-seed0", "mgr-seed0", "exoformer-seed0"]


def test_results_file_resumes_from_its_weights_folder(
    old: Path, tmp_path: Path, dataset: Dataset, begin: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "x.json"
    compare(begin(old), tmp_path / "study", kept)
    study = StudyConfig(**{**SavedStudy.read(kept).study, "data": str(dataset.path), "seeds": 2})
    result = compare(study, tmp_path / "fresh", kept)
    assert len(result.runs) == 2
    assert RunConfig.from_toml(tmp_path / "fresh/runs/base-seed1/config.toml").train.start == str(old)


def test_plan_and_study_report_missing_initial_weights(
    old: Path, tmp_path: Path, begin: Choose, trainer: Trainer
) -> None:
    study = begin(old, "mgr")
    shutil.rmtree(old / "checkpoints")
    told = f"{old} has no initial weights, but 2 runs are left to train: name the run that has them with --from"
    console = Console(record=True, width=400)
    preview(study, tmp_path / "study", console)
    assert told in console.export_text()
    with pytest.raises(ConfigError, match=told):
        compare(study, tmp_path / "study")
    assert trainer.trained == []
