"""`residua compare FOLDER` resumes with the results file that the folder's study was extended by."""

import json
import shutil
from pathlib import Path

import pytest

from residua.data import Dataset
from residua.study.extend_study import link_results, linked_results
from residua.study.results_file import SavedStudy
from tests.study.conftest import SET_SMALL, Trainer, printed

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def extended(trainer: Trainer, dataset: Dataset, tmp_path: Path) -> Path:
    """The folder of a study that extended a file: it trained one of the file's three variants."""
    shared = ["--seeds", 1, "--data", dataset.path, *SET_SMALL, "--results", "kept/x.json"]
    printed("prenorm", "mgr", "--out", "runs/first", *shared)
    printed("prenorm", "exoformer", "--out", "runs/second", *shared)
    assert trainer.trained == ["prenorm-seed0", "mgr-seed0", "exoformer-seed0"]
    trainer.trained.clear()
    return Path("runs/second")


def test_folder_resumes_with_its_results_file_and_names_it(extended: Path, trainer: Trainer) -> None:
    shown = printed(extended)
    assert "runs/second resumes with its results file kept/x.json, as if you had given it with --results." in shown
    assert trainer.trained == []
    assert set(SavedStudy.read(Path("kept/x.json")).config.variants) == {"prenorm", "mgr", "exoformer"}
    assert "mgr" in shown


def test_folder_and_results_file_can_be_moved_together(extended: Path, trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    shutil.move("runs", "else/runs")
    shutil.move("kept", "else/kept")
    assert "results file else/kept/x.json" in printed("else/runs/second", "--plan")
    assert str(tmp_path) not in Path("else/runs/second/extended.json").read_text()


def test_runs_recorded_only_in_a_missing_file_are_retrained(extended: Path, trainer: Trainer) -> None:
    Path("kept/x.json").unlink()
    told = "kept/x.json, the results file of runs/second, is missing: runs recorded only there are trained again."
    assert told in printed(extended)
    assert trainer.trained == ["prenorm-seed0"]


def test_a_study_without_a_results_file_drops_the_link(tmp_path: Path) -> None:
    link_results(tmp_path / "out", tmp_path / "x.json")
    assert json.loads((tmp_path / "out/extended.json").read_text()) == {"results": "../x.json"}
    link_results(tmp_path / "out", None)
    assert linked_results(tmp_path / "out") is None and not (tmp_path / "out/extended.json").exists()
