"""Equivalent tokens from a ladder of budgets: against laws that are known, and intervals against simulated truth."""

from __future__ import annotations

import numpy as np
import pytest

from residua.study.ladder import FittedLaw, _gains, _Rows, equivalent_tokens, fit_law

D = 1e8
BUDGETS = (0.5, 1.0, 1.5, 2.0)


def law(tokens: float) -> float:
    return 2.5 + 1.4 * (tokens / D) ** -0.35


def rungs(budgets: tuple[float, ...] = BUDGETS, seeds: int = 3, effect: float = 0.0) -> dict[float, dict[int, float]]:
    return {f * D: {seed: law(f * D) + effect * seed for seed in range(seeds)} for f in budgets}


@pytest.mark.parametrize("budgets", [BUDGETS, (0.5, 1.0, 2.0), (0.25, 0.5, 1.0, 2.0, 4.0)])
def test_the_fit_returns_the_law_that_the_losses_were_made_with(budgets: tuple[float, ...]) -> None:
    found = fit_law(rungs(budgets))
    assert found is not None
    assert (found.floor, found.exponent) == pytest.approx((2.5, 0.35), rel=1e-6)
    assert found.scale == pytest.approx(1.4 * D**0.35, rel=1e-5)
    assert found.loss(3 * D) == pytest.approx(law(3 * D), rel=1e-8)


def test_the_example_of_the_docs() -> None:
    losses = {19.7: (4.142, 4.136, 4.139), 39.3: (3.975, 3.969, 3.978), 59.0: (3.888, 3.893, 3.897)}
    losses[78.6] = (3.846, 3.839, 3.841)
    ladder = {tokens * 1e6: dict(enumerate(seeds)) for tokens, seeds in losses.items()}
    found, fitted = equivalent_tokens(ladder, {0: 3.908, 1: 3.900, 2: 3.907}, 39.3e6), fit_law(ladder)
    assert found is not None and found.low is not None and found.high is not None and fitted is not None
    assert (found.value, found.low, found.high) == pytest.approx((1.41, 1.37, 1.44), abs=0.005)
    assert (fitted.floor, fitted.scale, fitted.exponent) == pytest.approx((3.327, 205.2, 0.3294), rel=1e-3)


@pytest.mark.parametrize("gain", [0.7, 1.0, 1.23, 1.9])
def test_a_loss_becomes_the_tokens_at_which_the_law_has_it(gain: float) -> None:
    found = equivalent_tokens(rungs(), {seed: law(gain * D) for seed in range(3)}, D)
    assert found is not None and not found.extrapolated
    assert found.value == pytest.approx(gain, rel=1e-4)
    assert found.low == pytest.approx(gain, rel=1e-3) and found.high == pytest.approx(gain, rel=1e-3)


def test_a_gain_ignores_what_runs_of_a_seed_share() -> None:
    found = equivalent_tokens(rungs(effect=0.2), {seed: law(1.3 * D) + 0.2 * seed for seed in range(3)}, D)
    assert found is not None and found.value == pytest.approx(1.3, rel=1e-4)
    assert found.high is not None and found.high < 1.301


def test_beyond_the_largest_budget_a_gain_is_called_extrapolated() -> None:
    found = equivalent_tokens(rungs(), {seed: law(2.5 * D) for seed in range(3)}, D)
    assert found is not None and found.extrapolated
    assert found.value == pytest.approx(2.5, rel=1e-3)
    below = equivalent_tokens(rungs(), {0: law(0.4 * D)}, D)
    assert below is not None and below.extrapolated


def test_out_of_reach_there_is_no_gain() -> None:
    assert equivalent_tokens(rungs(), {0: 2.4, 1: 2.4}, D) is None  # below the floor of the law
    assert equivalent_tokens(rungs(), {0: 9.0, 1: 9.0}, D) is None
    assert equivalent_tokens(rungs(), {}, D) is None
    assert equivalent_tokens({D: {0: 3.0}}, {0: 2.9}, D) is None


def test_a_baseline_that_does_not_learn_gives_no_gain() -> None:
    rising = {f * D: {0: 3.0 + 0.1 * f, 1: 3.0 + 0.1 * f} for f in BUDGETS}
    assert fit_law(rising) is None
    assert equivalent_tokens(rising, {0: 3.1, 1: 3.1}, D) is None
    assert equivalent_tokens({D: {0: 3.0}, 2 * D: {0: 3.1}}, {0: 3.0}, D) is None


def test_two_budgets_are_joined_by_a_line_without_an_interval() -> None:
    two = {D: {0: 3.4, 1: 3.4}, 2 * D: {0: 3.2, 1: 3.2}}
    found = equivalent_tokens(two, {0: 3.3, 1: 3.3}, D)
    assert found is not None and found.value == pytest.approx(2**0.5, rel=1e-3)
    assert (found.low, found.high) == (None, None)
    assert fit_law(two) is None


def test_one_seed_has_no_interval() -> None:
    found = equivalent_tokens(rungs(seeds=1), {0: law(1.2 * D)}, D)
    assert found is not None and found.value == pytest.approx(1.2, rel=1e-4)
    assert (found.count, found.low, found.high) == (1, None, None)


def test_seeds_that_only_one_side_has_count_too() -> None:
    ladder = rungs()
    ladder[2.0 * D] = {0: law(2 * D)}  # two runs of the ladder are missing
    found = equivalent_tokens(ladder, {seed: law(1.2 * D) for seed in (1, 2, 5)}, D)
    assert found is not None and found.value == pytest.approx(1.2, rel=1e-4)
    apart = equivalent_tokens(rungs(), {7: law(1.2 * D), 8: law(1.2 * D)}, D)
    assert apart is not None and apart.value == pytest.approx(1.2, rel=1e-4)


def test_an_interval_without_an_end_in_reach_is_open() -> None:
    noise = np.random.default_rng(0).normal(0, 0.25, (5, 3))
    ladder = {f * D: {k: law(f * D) + noise[i, k] for k in range(3)} for i, f in enumerate(BUDGETS)}
    found = equivalent_tokens(ladder, {k: law(1.9 * D) + noise[4, k] for k in range(3)}, D)
    assert found is not None and found.high is None


def coverage(studies: int, budgets: tuple[float, ...], seeds: int, *, confidence: float, shared: float = 0.0) -> float:
    """The share of simulated studies whose interval holds the true gain.

    Each study has its own law (slope 0.1 to 0.25 nats per e-fold of tokens, exponent 0.2 to 0.7), gain (1 to 1.5), seed
    noise (0.004 to 0.008 nats), and effects of that size `shared` by all runs of a seed.
    """
    draw = np.random.default_rng(0)
    ladder = {f * D: dict.fromkeys(range(seeds), 0.0) for f in budgets}
    rows = _Rows.of(ladder, dict.fromkeys(range(seeds), 0.0))
    slope, exponent, gain, noise = (
        draw.uniform(low, high, (studies, 1)) for low, high in ((0.1, 0.25), (0.2, 0.7), (1.0, 1.5), (0.004, 0.008))
    )
    tokens = np.where(np.isnan(rows.tokens), gain * D, rows.tokens) / D  # [studies, runs]
    losses = 3.0 + slope / exponent * tokens**-exponent + noise * draw.normal(size=tokens.shape)
    losses += shared * draw.normal(size=(studies, seeds))[:, list(rows.seeds)]
    found = _gains(rows, sorted(ladder), losses, D, confidence)
    above = np.isnan(found.low) | (found.low <= gain[:, 0])
    below = np.isnan(found.high) | (found.high >= gain[:, 0])
    return float((above & below).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budgets", "seeds", "shared"),
    [
        (BUDGETS, 3, 0.0),
        ((0.5, 1.0, 2.0), 3, 0.0),  # docs/results/mini-39m; an exponent taken as known is noticed here only
        pytest.param((0.5, 1.0, 2.0), 2, 0.01, marks=pytest.mark.nightly),
        pytest.param((0.25, 0.5, 1.0, 2.0, 4.0), 3, 0.01, marks=pytest.mark.nightly),
    ],
)
def test_95_percent_of_simulated_intervals_hold_the_truth(
    budgets: tuple[float, ...], seeds: int, shared: float
) -> None:
    assert coverage(2000, budgets, seeds, confidence=0.95, shared=shared) == pytest.approx(0.95, abs=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_asked_share_of_intervals_holds_the_truth(seeds: int, confidence: float) -> None:
    shares = [coverage(4000, BUDGETS, seeds, confidence=confidence, shared=0.002 * part) for part in range(5)]
    assert np.mean(shares) == pytest.approx(confidence, abs=0.01)


def test_a_law_knows_its_loss_and_when_it_has_it() -> None:
    law = FittedLaw(2.0, 8.0, 0.5)
    assert law.loss(4.0) == 6.0 and law.tokens(6.0) == 4.0 and law.tokens(2.0) == float("inf")
