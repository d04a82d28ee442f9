"""Bases described by files are identified by their content, and have short names."""

from pathlib import Path

import pytest

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.study import StudyConfig
from residua.study.extend_study import join, settle
from residua.study.plan import make_plan
from residua.study.records import read_run
from residua.study.results_file import portable, same_place, save_study
from tests.study.conftest import SMALL
from tests.study.recorded import write_all


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    path = tmp_path / "nano.toml"
    path.write_text(RunConfig.find("tiny").override(list(SMALL)).to_toml())
    return path


def study_of(base: Path, **keys: object) -> StudyConfig:
    return StudyConfig(**{"variants": ["prenorm", "mgr"], "base": str(base), "seeds": 1, **keys})


def test_bases_are_named_after_their_file_or_run_folder(nano: Path, tmp_path: Path, out: Path) -> None:
    study = settle(study_of(nano), out)
    assert study.base == "nano.toml" and set(study.bases or {}) == {"nano.toml"}
    several = settle(study_of(nano, scaling={"sizes": [str(nano), "tiny"]}), out)
    assert several.sizes == ("nano.toml", "tiny")
    (tmp_path / "old").mkdir()
    assert settle(study_of(nano.rename(tmp_path / "old/config.toml")), out).base == "old.toml"


def test_an_equal_base_keeps_its_recorded_name(nano: Path, tmp_path: Path, out: Path) -> None:
    out.mkdir()
    content = RunConfig.from_toml(nano).model_dump(mode="json", exclude_none=True)
    (out / "study.toml").write_text(study_of(nano, bases={str(nano): content}).to_toml())
    copy = nano.rename(tmp_path / "copy.toml")
    assert settle(study_of(copy), out).base == str(nano)
    copy.write_text(RunConfig.find("tiny").to_toml())
    assert settle(study_of(copy), out).base == "copy.toml"


def test_a_renamed_base_extends_results_a_changed_is_refused(
    nano: Path, tmp_path: Path, dataset: Dataset, out: Path
) -> None:
    kept = tmp_path / "x.json"
    _save(study_of(nano), out, dataset, kept)
    copy = nano.rename(tmp_path / "copy.toml")
    again = settle(study_of(copy), tmp_path / "fresh", kept)
    assert again.base == "nano.toml"
    assert join(again, make_plan(again, out, dataset), out, dataset, kept).study.base == "nano.toml"
    copy.write_text(RunConfig.find("tiny").to_toml())
    other = settle(study_of(copy), tmp_path / "fresh", kept)
    plan = make_plan(other, out, dataset)
    with pytest.raises(ConfigError, match=r"variants of nano\.toml, but this study starts from copy\.toml, a diffe"):
        join(other, plan, out, dataset, kept)


def _save(study: StudyConfig, out: Path, dataset: Dataset, kept: Path) -> None:
    begun = settle(study, out)
    plan = make_plan(begun, out, dataset)
    write_all(plan, lambda run, step: 5.0 - 0.01 * step)
    records = {run: read_run(run.folder, run.config) for run in plan.runs}
    save_study(begun, plan, records, dataset.fingerprint, None).write(kept)


def test_paths_are_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert portable(str(tmp_path / "runs/old")) == "runs/old"
    assert portable("/somewhere/else/old") == "old"
    assert same_place("runs/old", str(tmp_path / "runs/old")) and not same_place("runs/old", "/somewhere/else/old")
    assert same_place("/a/old", "/a/old") and not same_place("/a/old", "/b/old")
