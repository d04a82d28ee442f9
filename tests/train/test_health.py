"""Runs that learn nothing are distinguished from runs that have not learned yet."""

import math
from pathlib import Path

import pytest

from residua.config.run import RunConfig
from residua.data import Dataset, unigram_entropy
from residua.train.health import MAX_STILL_STEPS, Frequencies, TrainingStopped, Watch, had_fair_steps, token_frequencies
from tests.train.conftest import Lab

TEXT = Frequencies(guessing=6.9, unigram=5.9, warmup=20)


@pytest.mark.slow
def test_run_with_a_huge_learning_rate_is_not_called_finished(lab: Lab) -> None:
    changes = ["train.steps=24", "train.optimizer.lr=1e6", "train.save_every=100"]
    expected = r"has learned nothing: after 24 steps .* train\.optimizer\.lr = 1e\+06"
    assert "token frequencies alone" in lab.refuse(expected, *changes, error=TrainingStopped)
    assert TrainingStopped.exit_code == 1 and lab.saved() == [] and not (lab / "run" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [(["train.steps=3"], True), (["train.steps=24"], True), (["train.optimizer={kind='adamw', lr=1e-3}"], False)],
    ids=["short", "longer", "slow, but still falling"],
)
def test_a_healthy_run_finishes_at_any_length(lab: Lab, changes: list[str], said: bool) -> None:
    lab.train("train.steps=24", *changes)
    assert "Finished" in lab.printed
    assert not said or "It is not below the loss of token frequencies alone" in lab.printed


def test_short_runs_and_warm_up_are_not_checked(config: RunConfig) -> None:
    def fair(*changes: str) -> bool:
        return had_fair_steps(config.override(list(changes)).train)

    assert not fair("train.steps=5")
    assert not fair("train.steps=16", "train.schedule.warmup=15")
    assert fair("train.steps=30")


def test_token_frequencies_are_those_of_the_text(config: RunConfig, data: Path) -> None:
    known = token_frequencies(config, Dataset.open(data))
    assert known.guessing == math.log(320) and 2.0 < known.unigram < 3.5 and known.telling
    exact = unigram_entropy(Dataset.open(data), limit_tokens=128)
    assert known.unigram == exact  # a text smaller than the sample is counted whole
    assert unigram_entropy(Dataset.open(data), limit_tokens=128, sample=2000) == pytest.approx(exact, rel=0.1)


def checked(losses: list[float], every: int = 100) -> Watch:
    watch = Watch(margin=1.0, patience=3)
    for line, loss in enumerate(losses, 1):
        assert watch.check(line * every, loss, 1.0) is None
    return watch


def test_a_run_whose_loss_stops_falling_for_long_is_stopped() -> None:
    watch = checked([6.92, 6.91] + [6.93] * 9)
    assert "has not fallen for 1,000 steps" in (watch.stuck(1100, 6.93, TEXT) or "")
    assert watch.stuck(1100, 5.8, TEXT) is None  # better than token frequencies: a plateau like any other
    assert watch.stuck(1100, 6.93, Frequencies(6.9, 5.9, warmup=1100 - MAX_STILL_STEPS + 1)) is None
    assert checked([6.92, 6.93], every=600).stuck(1200, 6.93, TEXT) is None  # two lines are too few to judge
    assert checked([7 - 0.02 * line for line in range(20)]).stuck(2000, 6.6, TEXT) is None  # slow, but falling


def test_near_uniform_token_frequencies_give_no_verdict() -> None:
    """Copying random tokens is learned after a long plateau at ln(vocabulary)."""
    random = Frequencies(6.9, 6.85, warmup=0)
    watch = checked([6.9] * 50)
    assert watch.stuck(5000, 6.9, random) is None and watch.unlearned(5000, 6.9, random) is None


def test_run_that_unlearns_is_not_called_finished() -> None:
    watch = checked([6.9, 5.0, 4.0, 4.8])
    assert "was 4.000 at step 300 and is 6.200 at the end" in (watch.unlearned(500, 6.2, TEXT) or "")
    assert watch.unlearned(500, 5.8, TEXT) is None
    assert checked([6.9, 6.4, 5.85, 6.0]).unlearned(500, 6.0, TEXT) is None  # about to cross, with noise
