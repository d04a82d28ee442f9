"""Power-law fits on laws that are known."""

from __future__ import annotations

import math
import random

import pytest

from residua.study import scaling

COMPUTE = (1e15, 1e16, 1e17)


def law(scale: float, exponent: float) -> list[tuple[float, float]]:
    return [(compute, scale * compute**-exponent) for compute in COMPUTE]


def test_fit_recovers_a_power_law_exactly() -> None:
    fitted = scaling.fit(law(19.0, 0.057))
    assert (fitted.scale, fitted.exponent) == (pytest.approx(19.0), pytest.approx(0.057))
    assert fitted.residual == pytest.approx(0.0, abs=1e-20)
    assert fitted.loss(3e16) == pytest.approx(19.0 * 3e16**-0.057)


def test_advantage_of_equal_exponents_is_the_scale_ratio_to_the_power() -> None:
    ours, baseline = scaling.fit(law(18.0, 0.06)), scaling.fit(law(19.0, 0.06))
    gain = scaling.advantage(ours, baseline, 1e17)
    assert gain is not None
    assert gain.value == pytest.approx((19.0 / 18.0) ** (1 / 0.06))
    assert gain.low == pytest.approx(gain.value) and gain.high == pytest.approx(gain.value)


def test_sizes_too_near_each_other_give_an_infinite_scale_and_no_crash() -> None:
    absurd = scaling.fit([(1e9, 6.0), (1.001e9, 4.0)])
    flat = scaling.fit([(1e9, 6.0), (1e10, 6.0 - 1e-6)])
    assert absurd.scale == math.inf
    gain = scaling.advantage(scaling.fit([(1e9, 3.0), (1e10, 2.9)]), flat, 1e10)
    assert gain is not None and gain.value == math.inf


def test_two_points_each_give_no_interval() -> None:
    gain = scaling.advantage(scaling.fit(law(18.0, 0.06)[:2]), scaling.fit(law(19.0, 0.06)[:2]), 1e16)
    assert gain is not None and gain.low is None


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    noise, covered, trials = random.Random(0), 0, 400
    truth = (19.0 / 18.5) ** (1 / 0.06)

    def noisy(scale: float) -> scaling.PowerLaw:
        points = [(c, value * math.exp(noise.gauss(0, 0.002))) for c, value in law(scale, 0.06) for _ in range(2)]
        return scaling.fit(points)

    for _ in range(trials):
        gain = scaling.advantage(noisy(18.5), noisy(19.0), 1e17)
        assert gain is not None and gain.low is not None and gain.high is not None
        covered += gain.low <= truth <= gain.high
    assert 0.92 <= covered / trials <= 0.98


def test_one_size_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        scaling.fit([(1e15, 3.0), (1e15, 3.1)])


def test_a_baseline_that_does_not_improve_has_no_advantage() -> None:
    assert scaling.advantage(scaling.fit(law(3.0, 0.1)), scaling.fit(law(3.0, -0.1)), 1e16) is None
