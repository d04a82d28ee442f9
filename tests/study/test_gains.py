"""Corrected, shrunk and combined intervals: what they promise, in simulated studies."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from residua.study.gains import Tested, compare, corrected, product, shrunk
from residua.study.records import RunRecord
from residua.study.statistics import Interval, estimate_ratio, t_quantile


def record(gain: float, speed: float) -> RunRecord:
    """A run that reaches the baseline's last loss, 3, `gain` times as fast."""
    rows = [{"step": 100 / gain, "loss": 3.0}, {"step": 100.0, "loss": 3.0 - (gain > 1)}]
    return RunRecord(Path(), 1, validation=rows if gain > 1 else [{"step": 50, "loss": 4.0}, rows[-1]], speed=speed)


def width(ratio: Interval | None) -> float:
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    return math.log(ratio.high / ratio.low)


def test_seeds_that_cancel_do_not_narrow_a_gain_per_second() -> None:
    """Two seeds once gave 1.43 per step [1.00, 2.07] and 1.29 per second [1.05, 1.59]."""
    spread = math.exp(0.0291)
    ours = {0: record(1.43 * spread, 900 / spread**0.5), 1: record(1.43 / spread, 900 * spread**0.5)}
    found = compare(ours, {seed: record(1.0, 1000.0) for seed in ours}, None, {}, {}, 0.95)
    assert found.step is not None and found.wall_clock is not None
    assert (found.step.value, found.step.low, found.step.high) == pytest.approx((1.43, 0.99, 2.07), abs=0.01)
    assert found.wall_clock.value == pytest.approx(1.43 * 0.9)
    assert width(found.wall_clock) >= max(width(found.step), width(found.throughput))


@pytest.mark.parametrize("seeds", [2, 3])
def test_intervals_of_products_hold_the_truth(seeds: int) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(600):
        gains, speeds = np.exp(rng.normal(0.1, 0.03, seeds)), np.exp(rng.normal(-0.05, 0.02, seeds))
        found = product(estimate_ratio(list(gains)), estimate_ratio(list(speeds)))
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= math.exp(0.05) <= found.high
    assert held / 600 > 0.94


def study(rng: np.random.Generator, truths: np.ndarray, error: float = 0.02, runs: int = 4) -> dict[int, Interval]:
    """Gains of variants with these true logarithms, each from a few runs."""
    return {
        i: estimate_ratio(list(np.exp(rng.normal(truth, error * runs**0.5, runs)))) for i, truth in enumerate(truths)
    }


def as_tested(gain: Interval) -> Tested:
    assert gain.low is not None and gain.high is not None and gain.freedom is not None
    value, half = math.log(gain.value), math.log(gain.high / gain.value)
    return Tested(
        gain, value, half, half, ((half / t_quantile(0.975, gain.freedom), gain.freedom),), 0.05, is_ratio=True
    )


def clear(gain: Interval) -> bool:
    assert gain.low is not None and gain.high is not None
    return gain.low > 1.0 or gain.high < 1.0


def test_holms_correction_bounds_the_chance_of_any_false_claim() -> None:
    rng = np.random.default_rng(1)
    plain = after = 0
    for _ in range(250):
        gains = study(rng, np.zeros(6))
        plain += any(map(clear, gains.values()))
        after += any(map(clear, corrected({i: as_tested(gain) for i, gain in gains.items()}, 0.05).values()))
    assert plain / 250 > 0.2 and after / 250 < 0.07


def test_corrected_intervals_decide_as_holms_procedure() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        gains = study(rng, np.linspace(0.0, 0.12, 5))
        family = {i: as_tested(gain) for i, gain in gains.items()}
        rejected, going_on = set(), True
        for place, i in enumerate(sorted(family, key=lambda i: family[i].p)):
            going_on = going_on and family[i].p <= 0.05 / (5 - place)
            rejected |= {i} if going_on else set()
        assert {i for i, gain in corrected(family, 0.05).items() if clear(gain)} == rejected


def test_at_its_p_value_an_interval_touches_one() -> None:
    found = as_tested(Interval(value=1.1, count=3, error=0.03, low=1.1 / 1.05, high=1.1 * 1.05, freedom=6.0))
    assert 0.0 < found.p < 0.05
    assert found.at(found.p).low == pytest.approx(1.0) and found.at(0.05) == found.interval


def test_the_best_of_six_is_overestimated_and_shrinking_mends_it() -> None:
    rng = np.random.default_rng(3)
    plain, pooled, held, held_before = [], [], 0, 0
    for _ in range(300):
        truths = rng.normal(0.1, 0.015, 6)
        gains = study(rng, truths)
        best = max(gains, key=lambda i: gains[i].value)
        after = shrunk(gains)[best]
        assert after.low is not None and after.high is not None
        plain.append(math.log(gains[best].value) - truths[best])
        pooled.append(math.log(after.value) - truths[best])
        held += after.low <= math.exp(truths[best]) <= after.high
        held_before += gains[best].low <= math.exp(truths[best]) <= gains[best].high
    assert np.mean(plain) > 0.012 and abs(np.mean(pooled)) < 0.5 * np.mean(plain)
    assert held / 300 > 0.92 and held > held_before
    assert shrunk({0: gains[0], 1: gains[1]}) == {}
