import itertools
import math

import pytest

from residua.config.run import TrainConfig
from residua.config.schedule import Cosine, LinearDecay, WarmUp


def test_warm_up_rises_linearly_to_the_peak() -> None:
    for schedule in (LinearDecay(warmup=4), Cosine(warmup=4)):
        assert [schedule.factor(step, 100) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_linear_decay_falls_to_a_tenth_over_the_last_fifth() -> None:
    schedule = LinearDecay(warmup=10)
    factors = [schedule.factor(step, 100) for step in range(100)]
    assert set(factors[9:80]) == {1.0}
    assert factors[80:] == pytest.approx([1 - 0.9 * (i + 1) / 20 for i in range(20)])
    assert factors[-1] == pytest.approx(0.1)


def test_decay_waits_for_the_end_of_warm_up() -> None:
    factors = [LinearDecay(warmup=20).factor(step, 22) for step in range(22)]
    assert factors[18:] == pytest.approx([0.95, 1.0, 0.55, 0.1])
    for steps in range(101, 126):
        for schedule in (LinearDecay(), LinearDecay(decay_share=1)):
            factors = [schedule.factor(step, steps) for step in range(99, steps)]
            falls = [high - low for high, low in itertools.pairwise(factors)]
            assert (factors[0], factors[-1]) == pytest.approx((1.0, 0.1))
            assert falls == pytest.approx([0.9 / (steps - 100)] * (steps - 100))


def test_short_warm_up_does_not_change_the_decay() -> None:
    for steps, warmup in ((100, 80), (125, 100), (1000, 100), (3, 1)):
        decay = int(0.2 * steps)
        expected = [0.1 + 0.9 * (min(1.0, (steps - 1 - s) / decay) if decay else 1.0) for s in range(warmup, steps)]
        assert [LinearDecay(warmup=warmup).factor(s, steps) for s in range(warmup, steps)] == expected


def test_cosine_is_halfway_in_the_middle_and_ends_at_a_tenth() -> None:
    schedule = Cosine(warmup=20)
    assert schedule.factor(59, 100) == pytest.approx(0.55)
    assert schedule.factor(99, 100) == pytest.approx(0.1)
    assert schedule.factor(39, 100) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert LinearDecay(warmup=0).factor(0, 10) == 1.0


def test_a_run_of_one_step_has_a_rate() -> None:
    assert LinearDecay(warmup=0).factor(0, 1) == 1.0
    assert Cosine(warmup=0).factor(0, 1) == pytest.approx(0.1)


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.schedule\.warmup = 10 must be less than train\.steps = 10"):
        TrainConfig(steps=10, schedule=LinearDecay(warmup=10))


@pytest.mark.parametrize("schedule", [LinearDecay(warmup=3), LinearDecay(warmup=0, decay_share=0.5), Cosine(warmup=4)])
def test_shared_steps_have_equal_rates_in_longer_runs(schedule: WarmUp) -> None:
    shared = schedule.shared_steps(20)
    for steps in (21, 40, 1000):
        assert all(schedule.factor(step, 20) == schedule.factor(step, steps) for step in range(shared))
        assert schedule.factor(shared, 20) != schedule.factor(shared, steps)
