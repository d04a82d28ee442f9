"""What is read of a run under way, and the time that is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from residua.report import terminal
from residua.study.runs import latest, steps_done


def test_the_latest_row_is_found_before_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    assert latest(tmp_path) == (0, None)
    rows = [f'{{"kind": "train", "step": {step}, "loss": {5 - step / 1000}}}\n' for step in range(1, 401)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows) + '{"kind": "tra')
    assert latest(tmp_path) == (400, 4.6)
    assert steps_done(tmp_path) == 400


def test_the_time_left_counts_only_steps_of_this_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.time, "monotonic", lambda: 110.0)
    assert terminal.remaining(start=100.0, before=50, done=70, total=100) == pytest.approx(15.0)
    assert terminal.remaining(start=100.0, before=50, done=50, total=100) is None


@pytest.mark.parametrize(("seconds", "shown"), [(None, "?"), (5.4, "0:05"), (125.0, "2:05"), (3723.0, "1:02:03")])
def test_clock(seconds: float | None, shown: str) -> None:
    assert terminal.clock(seconds) == shown
