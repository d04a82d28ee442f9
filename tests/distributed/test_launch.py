"""Ranks that die by a segmentation fault are started once more if the test allows it, and only once."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.distributed.launch import launch

pytestmark = pytest.mark.slow
CRASHING = "tests.distributed.crashing"


def test_a_crashed_rank_is_restarted_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="died by a segmentation fault"):
        launch(1, CRASHING, tmp_path, 1, again=True)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("times", "again"), [(1, False), (2, True)])
def test_an_unexpected_or_repeated_crash_fails_the_test(tmp_path: Path, times: int, again: bool) -> None:
    with pytest.warns(UserWarning) if again else nullcontext(), pytest.raises(AssertionError, match="failed"):
        launch(1, CRASHING, tmp_path, times, again=again)
