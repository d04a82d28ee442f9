"""The folder of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.storage.run import Run, failed_early


def test_files_that_a_killed_session_left_are_removed(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / ".unfinished-7-abcdef-config.toml").write_text("half")
    (tmp_path / ".unfinished-fp8").mkdir()
    run = Run.create(tmp_path, config)
    run.begin({}, 0)
    run.close()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", ".unfinished-fp8", "config.toml", "environment.json"}


@pytest.mark.parametrize(
    "valuable", ["checkpoints/step-3/state.json", "checkpoints/step-3-not-finite-1/state.json", "result.json", "thesis"]
)
def test_folder_with_anything_of_value_is_not_started_again(config: RunConfig, tmp_path: Path, valuable: str) -> None:
    run = Run.create(tmp_path / "run", config)
    run.begin({}, 0)
    assert failed_early(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by another process"):
        Run.start_again(tmp_path / "run", config)
    run.close()
    Run.start_again(tmp_path / "run", config.override(["model.layers=3"])).close()
    path = tmp_path / "run" / valuable
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    assert not failed_early(tmp_path / "run")
    with pytest.raises(ConfigError, match="is not empty"):
        Run.start_again(tmp_path / "run", config)


def test_run_that_starts_again_drops_what_the_failed_one_took(config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Run.create(folder, config)
    run.begin({}, 0)
    run.close()
    (folder / "source").mkdir()
    (folder / "source" / "generation_config.json").write_text("{}")
    (folder / "wandb-id").write_text("old")
    again = Run.start_again(folder, config)
    assert (folder / "source").exists()  # until the run begins, nothing is changed
    again.begin({}, 0)
    again.close()
    assert not (folder / "source").exists() and not (folder / "wandb-id").exists()


def test_branch_waits_until_somebody_trains_it(config: RunConfig, tmp_path: Path) -> None:
    trunk = Run.create(tmp_path / "long", config)
    trunk.begin({}, 0)
    (tmp_path / "long" / "metrics.jsonl").write_text("")
    trunk.branch(tmp_path / "short", config, 4, lambda folder: (folder / "checkpoints").mkdir())
    trunk.close()
    session = json.loads((tmp_path / "short" / "environment.json").read_text())["sessions"][-1]
    assert (session["branch_of"], session["until_step"]) == ("long", 4) and "process" not in session


def test_configuration_without_record_of_training_is_kept(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert not failed_early(tmp_path)
