"""The statistics of a study against values worked out by hand, from tables, or of laws that are known."""

import math
import random

import pytest

from residua.study import statistics
from residua.study.statistics import PowerLaw, compute_advantage, fit_power_law


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.706204736),  # tan(0.475 π)
        (0.975, 2, 4.302652730),
        (0.975, 4, 2.776445105),
        (0.95, 10, 1.812461123),
        (0.995, 30, 2.749995654),
        (0.975, 1e6, 1.959966357),  # close to the normal distribution
        (0.025, 4, -2.776445105),
        (0.5, 7, 0.0),
    ],
)
def test_t_quantile_agrees_with_tables(probability: float, freedom: float, value: float) -> None:
    assert statistics.t_quantile(probability, freedom) == pytest.approx(value, rel=1e-8, abs=1e-9)


def test_t_quantile_of_a_certain_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="probability"):
        statistics.t_quantile(1.0, 3)


def test_estimate_of_three_values_matches_hand_calculation() -> None:
    result = statistics.estimate([3.0, 3.1, 3.5])
    error = math.sqrt((0.04 + 0.01 + 0.09) / 2 / 3)
    assert (result.value, result.error) == pytest.approx((3.2, error))
    assert (result.low, result.high) == pytest.approx((3.2 - 4.302652730 * error, 3.2 + 4.302652730 * error))
    alone = statistics.estimate([3.0])
    assert (alone.value, alone.count, alone.error, alone.low) == (3.0, 1, None, None)


def test_pairing_by_seed_removes_shared_seed_effects() -> None:
    result = statistics.paired_difference({0: 2.9, 1: 3.9, 2: 4.9, 7: 100.0}, {0: 3.0, 1: 4.0, 2: 5.0})
    assert (result.value, result.count) == (pytest.approx(-0.1), 3)
    assert result.error == pytest.approx(0.0, abs=1e-12)
    assert statistics.paired_difference({}, {0: 1.0}) is None


def test_unshared_seeds_use_welchs_test() -> None:
    result = statistics.paired_difference({0: 1.0, 1: 3.0}, {2: 5.0, 3: 5.5, 4: 7.5})
    a, b = 2.0 / 2, 1.75 / 3  # sample variance over count, each side
    freedom = (a + b) ** 2 / (a**2 / 1 + b**2 / 2)
    half = statistics.t_quantile(0.975, freedom) * math.sqrt(a + b)
    assert result.value == pytest.approx(-4.0)
    assert (result.low, result.high) == pytest.approx((-4.0 - half, -4.0 + half))


def test_ratios_average_geometrically() -> None:
    result = statistics.estimate_ratio([2.0, 0.5])
    assert (result.value, result.low * result.high) == pytest.approx((1.0, 1.0))


def test_tokens_to_reach_interpolates_between_validations() -> None:
    curve = [(0.0, 6.0), (100.0, 4.0), (200.0, 3.0)]
    reached = [statistics.tokens_to_reach(loss, curve) for loss in (5.0, 3.25, 4.0)]
    assert reached == pytest.approx([50.0, 175.0, 100.0]) and statistics.tokens_to_reach(2.9, curve) is None
    twice = [(0.0, 6.0), (100.0, 4.0), (200.0, 5.0), (300.0, 3.0)]
    assert statistics.tokens_to_reach(4.5, twice) == pytest.approx(75.0)  # the first passage


def curve_of(speed: float) -> list[tuple[float, float]]:
    return [(tokens, 2.0 + 4.0 * math.exp(-speed * tokens / 300)) for tokens in range(0, 1001, 10)]


def test_step_gain_of_a_curve_twice_as_fast_is_two() -> None:
    assert statistics.step_gain(curve_of(2.0), curve_of(1.0)) == pytest.approx(2.0, rel=1e-3)
    assert statistics.step_gain(curve_of(1.0), curve_of(2.0)) == pytest.approx(0.5, rel=1e-3)
    assert statistics.step_gain(curve_of(1.0), curve_of(1.0)) == pytest.approx(1.0)


def test_step_gain_from_a_single_validation_is_none() -> None:
    assert statistics.step_gain([(100.0, 5.0)], [(100.0, 4.0)]) is None
    assert statistics.step_gain([], curve_of(1.0)) is None


def test_smoothing_keeps_constants_and_the_first_value() -> None:
    assert statistics.smooth([2.0] * 5, 10) == pytest.approx([2.0] * 5)
    assert statistics.smooth([7.0, 1.0], 10)[0] == pytest.approx(7.0)
    assert statistics.smooth([5.0, 1.0, 3.0], 1) == pytest.approx([5.0, 1.0, 3.0])


COMPUTE = (1e15, 1e16, 1e17)


def law(scale: float, exponent: float) -> list[tuple[float, float]]:
    return [(compute, scale * compute**-exponent) for compute in COMPUTE]


def test_fit_recovers_a_power_law_exactly() -> None:
    fitted = fit_power_law(law(19.0, 0.057))
    assert (fitted.scale, fitted.exponent) == (pytest.approx(19.0), pytest.approx(0.057))
    assert fitted.residual == pytest.approx(0.0, abs=1e-20)
    assert fitted.loss(3e16) == pytest.approx(19.0 * 3e16**-0.057)


def test_advantage_at_equal_exponents_is_a_power_of_scales() -> None:
    ours, baseline = law(18.0, 0.06), law(19.0, 0.06)
    gain = compute_advantage(fit_power_law(ours), fit_power_law(baseline), 1e17)
    wanted = (19.0 / 18.0) ** (1 / 0.06)
    assert (gain.value, gain.low, gain.high) == pytest.approx((wanted, wanted, wanted))
    assert compute_advantage(fit_power_law(ours[:2]), fit_power_law(baseline[:2]), 1e16).low is None, "two points each"
    with pytest.raises(ValueError, match="two sizes"):
        fit_power_law([(1e15, 3.0), (1e15, 3.1)])


def test_sizes_too_close_together_give_an_infinite_scale() -> None:
    absurd = fit_power_law([(1e9, 6.0), (1.001e9, 4.0)])
    flat = fit_power_law([(1e9, 6.0), (1e10, 6.0 - 1e-6)])
    assert absurd.scale == math.inf
    gain = compute_advantage(fit_power_law([(1e9, 3.0), (1e10, 2.9)]), flat, 1e10)
    assert gain is not None and gain.value == math.inf


def test_the_interval_has_about_its_stated_coverage() -> None:
    noise, covered, trials = random.Random(0), 0, 400
    truth = (19.0 / 18.5) ** (1 / 0.06)

    def noisy(scale: float) -> PowerLaw:
        points = [(c, value * math.exp(noise.gauss(0, 0.002))) for c, value in law(scale, 0.06) for _ in range(2)]
        return fit_power_law(points)

    for _ in range(trials):
        gain = compute_advantage(noisy(18.5), noisy(19.0), 1e17)
        covered += gain.low <= truth <= gain.high
    assert 0.92 <= covered / trials <= 0.98


def test_a_baseline_that_does_not_improve_has_no_advantage() -> None:
    assert compute_advantage(fit_power_law(law(3.0, 0.1)), fit_power_law(law(3.0, -0.1)), 1e16) is None
