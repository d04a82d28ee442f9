"""Which ranks are called slow, and what a stopwatch times."""

from __future__ import annotations

import time

import pytest
import torch
from residua.distributed.times import MOST, Stopwatch, slow_ranks

HOSTS = ["node-a", "node-a", "node-b", "node-b"]


def test_a_rank_is_slow_compared_with_the_median_for_its_work() -> None:
    assert slow_ranks([1.0, 1.1, 1.0, 1.2], [0] * 4, HOSTS) == {}
    found = slow_ranks([1.0, 1.0, 1.0, 2.0], [0] * 4, HOSTS)
    assert list(found) == [3] and found[3].startswith("rank 3 on node-b computes slowly: 2.00 × the median rank's time")
    assert list(slow_ranks([1.0, 2.0], [0, 0], HOSTS)) == [1]
    assert slow_ranks([0.0, 0.0], [0, 0], HOSTS) == {}


def test_ranks_with_other_stages_of_a_pipeline_are_not_compared() -> None:
    assert slow_ranks([1.0, 9.0], [0, 1], HOSTS) == {}
    assert slow_ranks([1.0, 1.0, 9.0, 9.5], [0, 0, 1, 1], HOSTS) == {}
    found = slow_ranks([1.0, 2.0, 9.0, 9.0], [0, 0, 1, 1], HOSTS)
    assert list(found) == [1] and "2.00 × the median" in found[1]


def test_a_stopwatch_takes_the_mean_of_the_first_passes_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(float(number**2) for number in range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch(torch.device("cpu"))
    assert watch.take() == 0.0
    for _ in range(2):
        with watch.measure():
            pass
    assert watch.take() == (1 + 5) / 2
    with torch.no_grad(), watch.measure():
        pass
    assert watch.take() == 0.0
    for _ in range(2 * MOST):
        with watch.measure():
            pass
    assert next(ticks) == (4 + 2 * MOST) ** 2
