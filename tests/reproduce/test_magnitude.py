"""The magnitude of a claim is judged separately from its direction: by our interval, and within 25% of the effect."""

import re

import pytest

from residua.reproduce.claims import PaperNumber, Verdict
from residua.reproduce.entry import Study, load, names
from residua.study.statistics import Interval

STATED = re.compile(r"\d(\.\d+)? ?(%|×|points)|halve|double|twice")


def measured(low: float | None, value: float, high: float | None) -> Interval:
    return Interval(value, 3, 0.1, low, high)


@pytest.mark.parametrize(
    ("paper", "found", "word"),
    [
        (0.944, (0.69, 0.70, 0.71), "larger"),  # an overhead of 5.9 %, and ours of 43 %
        (0.944, (0.92, 0.95, 0.98), "agrees"),  # inside
        (0.944, (0.953, 0.954, 0.955), "agrees"),  # outside a narrow interval, 18 % from the paper's effect
        (0.944, (0.97, 0.98, 0.99), "smaller"),
        (0.944, (0.98, 1.0, 1.02), "smaller"),  # the interval holds no effect, and not the paper's
        (0.944, (0.90, 0.95, 1.02), "not shown"),  # both
        (0.944, (1.05, 1.06, 1.07), "opposite"),
        (1.25, (1.05, 1.10, 1.15), "smaller"),
        (1.25, (1.8, 2.0, None), "larger"),
        (0.15, (0.09, 0.10, 0.11), "larger"),  # 21 % of the logarithm, but two thirds of the ratio
        (1.25, (1.1, 2.0, None), "agrees"),
        (1.25, (None, 1.3, None), "not shown"),  # one seed
    ],
)
def test_ratio_is_judged_by_interval_and_band(paper: float, found: tuple[float, ...], word: str) -> None:
    assert PaperNumber(paper, ratio=True).compare(measured(*found))[0] == word


@pytest.mark.parametrize(
    ("found", "word", "or_more"),
    [
        ((-0.05, -0.045, -0.042), "agrees", "agrees"),
        ((-0.09, -0.08, -0.07), "larger", "agrees"),
        ((-0.02, -0.015, -0.01), "smaller", "smaller"),
        ((0.01, 0.02, 0.03), "opposite", "opposite"),
    ],
)
def test_difference_beyond_a_lower_bound_counts_as_agreement(found: tuple[float, ...], word: str, or_more: str) -> None:
    assert PaperNumber(-0.04, ratio=False).compare(measured(*found))[0] == word
    assert PaperNumber(-0.04, ratio=False, or_more=True).compare(measured(*found))[0] == or_more


def test_paper_number_is_located_relative_to_our_interval() -> None:
    number = PaperNumber(0.944, ratio=True)
    assert number.compare(measured(0.69, 0.70, 0.71))[1] == "0.944×, above our interval"
    assert number.compare(measured(0.953, 0.954, 0.955))[1] == "0.944×, below our interval, but within 25%"
    assert number.compare(None) == ("not shown", "0.944×")


def test_sentence_states_direction_and_magnitude() -> None:
    verdict = Verdict("5.9 % overhead", "4096", "confirmed", "larger", "tokens per second 0.70×", "0.944×")
    assert "direction confirmed, magnitude larger than the paper's. tokens" in verdict.sentence
    assert "magnitude" not in Verdict("An order", "S", "confirmed", None, "a < b").sentence


def test_numbers_stated_in_claims_are_also_data() -> None:
    claims = [(name, claim) for name in names() if isinstance(entry := load(name), Study) for claim in entry.claims]
    stated = [(name, claim) for name, claim in claims if STATED.search(claim.text)]
    assert len(stated) >= 11
    for name, claim in stated:
        assert getattr(claim, "published", None) is not None, f"{name}: {claim.text}"
