"""Corrected, shrunk and combined intervals keep their guarantees in simulated studies."""

import math
from pathlib import Path

import numpy as np
import pytest

from residua.study.gains import Race, Tested, adjusted, compare, corrected, product, race, shrunk
from residua.study.records import RunRecord
from residua.study.statistics import Interval, estimate_ratio, t_quantile
from residua.study.timing import StepTiming


def record(gain: float, speed: float) -> RunRecord:
    """A run that reaches the baseline's last loss, 3, `gain` times as fast."""
    rows = [{"step": 100 / gain, "loss": 3.0}, {"step": 100.0, "loss": 3.0 - (gain > 1)}]
    rows = rows if gain > 1 else [{"step": 50, "loss": 4.0}, rows[-1]]
    return RunRecord(Path(), 1, validation=rows, tokens_per_second=speed)


def width(ratio: Interval | None) -> float:
    return math.log(ratio.high / ratio.low)


def test_anticorrelated_seeds_do_not_narrow_gain_per_second() -> None:
    """Two seeds once gave 1.43 per step [1.00, 2.07] and 1.29 per second [1.05, 1.59]."""
    spread = math.exp(0.0291)
    ours = {0: record(1.43 * spread, 900 / spread**0.5), 1: record(1.43 / spread, 900 * spread**0.5)}
    found = compare(ours, {seed: record(1.0, 1000.0) for seed in ours}, None, {}, {}, 0.95)
    step, seconds = found["step_gain"], found["wall_clock_gain"]
    assert (step.value, step.low, step.high) == pytest.approx((1.43, 0.99, 2.07), abs=0.01)
    assert seconds.value == pytest.approx(1.43 * 0.9)
    assert width(seconds) >= max(width(step), width(found["throughput_ratio"]))


@pytest.mark.parametrize("seeds", [2, 3])
def test_intervals_of_products_cover_the_truth(seeds: int) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(600):
        gains, speeds = np.exp(rng.normal(0.1, 0.03, seeds)), np.exp(rng.normal(-0.05, 0.02, seeds))
        found = product(estimate_ratio(list(gains)), estimate_ratio(list(speeds)))
        held += found.low <= math.exp(0.05) <= found.high
    assert held / 600 > 0.94


def racer(tokens: float) -> RunRecord:
    """A run that has a loss of 3 after so many tokens, on the line from 5 to its last loss."""
    rows = [{"step": 0.5 * tokens, "loss": 4.0}, {"step": 1.5 * tokens, "loss": 2.0}]
    return RunRecord(Path(), 1, validation=rows)


def alone(rate: float, error: float = 0.005) -> StepTiming:
    return StepTiming(device="H200", tokens=100, median=100 / rate, p10=1.0, p90=1.0, count=100, error=error)


def test_a_race_reports_tokens_seconds_and_a_p_value() -> None:
    baseline = {seed: racer(1000.0 * math.exp(0.01 * (seed - 2))) for seed in range(5)}
    ours = {seed: racer(800.0 * math.exp(0.01 * (seed - 2))) for seed in range(5)}
    found = race(ours, baseline, 3.0, alone(90.0), alone(100.0), 0.95)
    assert (found.runs, found.reached) == (5, 5) and found.tokens.value == pytest.approx(800)
    assert found.seconds.value == pytest.approx(800 / 90) and found.ratio.value == pytest.approx(0.8 / 0.9)
    assert found.ratio.error == pytest.approx(math.sqrt(2 * 0.01**2 * 2.5 / 5 + 2 * 0.005**2))
    assert found.p < 1e-4 and race(baseline, ours, 3.0, alone(100.0), alone(90.0), 0.95).p > 0.99
    slow = RunRecord(Path(), 1, validation=[{"step": 9, "loss": 3.5}])
    unreached = race({**ours, 5: slow}, baseline, 3.0, alone(90.0), alone(100.0), 0.95)
    assert (unreached.reached, unreached.runs, unreached.p) == (5, 6, None), "the slowest would be left out"
    failed = race({**ours, 5: None}, baseline, 3.0, alone(90.0), alone(100.0), 0.95)
    assert (failed.reached, failed.runs, failed.p) == (5, 6, None), "a run that diverged did not reach it either"
    first_two = ({seed: side[seed] for seed in (0, 1)} for side in (ours, baseline))
    assert race(*first_two, 3.0, alone(90.0), alone(100.0), 0.95).p is None
    easy = race(ours, baseline, 4.5, alone(90.0), alone(100.0), 0.95)
    assert (easy.reached, easy.tokens, easy.p) == (5, None, None), "the first validation has passed it"
    assert race(ours, baseline, 3.0, None, alone(100.0), 0.95).seconds is None
    assert race(baseline, baseline, 3.0, alone(100.0), alone(100.0), 0.95).p is None


def test_a_race_between_equals_is_rarely_significant() -> None:
    rng = np.random.default_rng(5)
    won = []
    for _ in range(800):
        a, b = ({i: racer(1000 * math.exp(rng.normal(0, 0.02))) for i in range(4)} for _ in range(2))
        errors = rng.normal(0, 0.005, 2)
        won.append(race(a, b, 3.0, *(alone(100 * math.exp(error)) for error in errors), 0.95).p < 0.05)
    assert 0.025 < np.mean(won) < 0.065


def test_p_values_of_races_are_corrected_by_holm() -> None:
    races = {name: Race(3, 3, p=p) for name, p in (("a", 0.004), ("b", 0.001), ("c", 0.9), ("d", None))}
    found = {name: each.adjusted for name, each in adjusted(races).items()}
    assert found == {"a": pytest.approx(0.008), "b": pytest.approx(0.003), "c": pytest.approx(0.9), "d": None}


def study(rng: np.random.Generator, truths: np.ndarray, error: float = 0.02, runs: int = 4) -> dict[int, Interval]:
    """Gains of variants with these true logarithms, each from a few runs."""
    each = (np.exp(rng.normal(truth, error * runs**0.5, runs)) for truth in truths)
    return {i: estimate_ratio(list(gains)) for i, gains in enumerate(each)}


def as_tested(gain: Interval) -> Tested:
    value, half = math.log(gain.value), math.log(gain.high / gain.value)
    parts = ((half / t_quantile(0.975, gain.freedom), gain.freedom),)
    return Tested(gain, value, half, half, parts, 0.05, is_ratio=True)


def clear(gain: Interval) -> bool:
    return gain.low > 1.0 or gain.high < 1.0


def test_holms_correction_bounds_the_chance_of_any_false_claim() -> None:
    rng = np.random.default_rng(1)
    plain = after = 0
    for _ in range(250):
        gains = study(rng, np.zeros(6))
        plain += any(map(clear, gains.values()))
        after += any(map(clear, corrected({i: as_tested(gain) for i, gain in gains.items()}, 0.05).values()))
    assert plain / 250 > 0.2 and after / 250 < 0.07


def test_corrected_intervals_agree_with_holms_procedure() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        gains = study(rng, np.linspace(0.0, 0.12, 5))
        family = {i: as_tested(gain) for i, gain in gains.items()}
        rejected, going_on = set(), True
        for place, i in enumerate(sorted(family, key=lambda i: family[i].p)):
            going_on = going_on and family[i].p <= 0.05 / (5 - place)
            rejected |= {i} if going_on else set()
        assert {i for i, gain in corrected(family, 0.05).items() if clear(gain)} == rejected


def test_an_interval_at_its_p_value_touches_one() -> None:
    found = as_tested(Interval(value=1.1, count=3, error=0.03, low=1.1 / 1.05, high=1.1 * 1.05, freedom=6.0))
    assert 0.0 < found.p < 0.05
    assert found.at(found.p).low == pytest.approx(1.0) and found.at(0.05) == found.interval


def test_shrinkage_fixes_the_overestimated_best_of_six() -> None:
    rng = np.random.default_rng(3)
    plain, pooled, held, held_before = [], [], 0, 0
    for _ in range(300):
        truths = rng.normal(0.1, 0.015, 6)
        gains = study(rng, truths)
        best = max(gains, key=lambda i: gains[i].value)
        after = shrunk(gains)[best]
        plain.append(math.log(gains[best].value) - truths[best])
        pooled.append(math.log(after.value) - truths[best])
        held += after.low <= math.exp(truths[best]) <= after.high
        held_before += gains[best].low <= math.exp(truths[best]) <= gains[best].high
    assert np.mean(plain) > 0.012 and abs(np.mean(pooled)) < 0.5 * np.mean(plain)
    assert held / 300 > 0.92 and held > held_before
    assert shrunk({0: gains[0], 1: gains[1]}) == {}
