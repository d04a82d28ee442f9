"""The folder of a run."""

from __future__ import annotations

from pathlib import Path

from residua.config.run import RunConfig
from residua.storage.run import Run


def test_files_that_a_killed_session_left_are_removed(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / ".unfinished-7-abcdef-config.toml").write_text("half")
    (tmp_path / ".unfinished-fp8").mkdir()
    run = Run.create(tmp_path, config)
    run.begin({}, 0)
    run.close()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", ".unfinished-fp8", "config.toml", "environment.json"}
