"""Verdicts from runs with known losses: on the claim's side, on the other, in between, and without an interval."""

from fractions import Fraction
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from residua.data import Dataset
from residua.reproduce.claims import Measured, Verdict, verdicts
from residua.reproduce.comparison import Comparison
from residua.reproduce.entry import AnyClaim, Study, load
from residua.reproduce.request import Request, build_study, selected
from residua.reproduce.scale import sentence
from residua.study.collect_results import collect
from residua.study.extend_study import complete_records
from residua.study.plan import PlannedRun, make_plan
from residua.study.results import DatasetFacts, StudyResult
from residua.study.run_study import summarise
from tests.reproduce.conftest import QUICK
from tests.study.recorded import write_run

pytestmark = pytest.mark.slow

NAME = "004:table1"
ROWS = ("full_attnres", "block4", "mgr", "mgr_independent")
END = {"prenorm": 2.0, "full_attnres": 1.9, "mgr": 1.95, "block4": 1.85, "mgr_independent": 1.9}
FACTS = DatasetFacts(
    path="text", vocab_size=10, train_tokens=9, validation_tokens=9, bytes_per_token=1.0, unigram_entropy=2.3
)


def loss(run: PlannedRun, step: int) -> float:
    """The seeds agree to 0.01, except where independent gates are near Full AttnRes."""
    wobble = 0.001 * run.seed if run.variant != "mgr_independent" else 0.05 * (run.seed - 1)
    return END[run.variant] + wobble + 0.5 * (1 - step / run.config.train.steps)


def recorded(
    dataset: Dataset, out: Path, seeds: int = 3, missing: str = "", problem: str = ""
) -> tuple[Comparison, StudyResult]:
    """The study of some rows at size S, with runs of known content; `missing` has none, for this reason."""
    changed = tuple(c for c in QUICK if not c.startswith("train.steps")) + ("train.steps=10", "model.layers=3")
    request = Request(Fraction(1, 10**6), ("S",), ROWS, seeds, changed, str(dataset.path))
    entry = load(NAME)
    assert isinstance(entry, Study)
    entry = selected(entry, request)
    study = build_study(NAME, entry, request)
    plan = make_plan(study, out, dataset)
    for run in plan.runs:
        if run.variant != missing:
            write_run(run, loss)
    problems = {run: problem for run in plan.runs if run.variant == missing}
    added = Comparison(NAME, entry, sentence(request.scale), out)
    if missing or seeds < 3:
        return added, collect(study, plan, complete_records(plan, {}), problems, FACTS)
    return added, summarise(study, plan, out, problems, FACTS, supplement=added).result


@pytest.fixture(scope="module")
def made(dataset: Dataset, tmp_path_factory) -> tuple[Comparison, StudyResult]:
    """Three seeds of every row, with a page."""
    return recorded(dataset, tmp_path_factory.mktemp("made") / "study")


def judged(comparison: Comparison, result: StudyResult, *claims: dict[str, object]) -> list[Verdict]:
    """The verdicts on other claims about the same runs."""
    other = tuple(TypeAdapter(AnyClaim).validate_python(claim) for claim in claims)
    return verdicts(Measured(comparison.entry.model_copy(update={"claims": other}), result, comparison.out))


def by_claim(comparison: Comparison, result: StudyResult) -> dict[str, Verdict]:
    found = verdicts(Measured(comparison.entry, result, comparison.out))
    return {verdict.claim: verdict for verdict in found}


def test_claims_are_confirmed_contradicted_or_not_shown(made: tuple[Comparison, StudyResult]) -> None:
    said = by_claim(*made)
    assert said["Competitive MGR (n=4) outperforms pre-norm"].direction == "confirmed"
    assert said["At n=4 competitive MGR outperforms Full AttnRes"].direction == "contradicted"
    assert said["At n=4 independent MGR outperforms Full AttnRes"].direction == "not shown"
    better = said["Full AttnRes outperforms pre-norm"]
    assert (better.direction, better.magnitude) == ("confirmed", "larger")
    assert "-0.1000 [-0.1000, -0.1000]" in better.found
    assert better.printed.startswith("-0.0374") and "above our interval" in better.printed


def test_one_seed_confirms_no_claim(dataset: Dataset, tmp_path: Path) -> None:
    said = by_claim(*recorded(dataset, tmp_path / "study", seeds=1))
    assert {verdict.direction for verdict in said.values()} == {"not shown"}
    assert "n = 1, no interval" in said["Full AttnRes outperforms pre-norm"].found


def test_page_and_table_show_paper_values_next_to_ours(made: tuple[Comparison, StudyResult]) -> None:
    out = made[0].out
    page, table = (out / "report.html").read_text("utf-8"), (out / "results.md").read_text("utf-8")
    for text in (page, table):
        assert "Paper, 004:table1: Table 1" in text
        assert "2.9066" in text and "1.9010" in text  # Full AttnRes: the paper's loss and ours
        assert "direction" in text and "magnitude" in text and "larger" in text
        assert "contradicted" in text and "losses depend on text and size" in text
    assert page.index("Paper, 004:table1") < page.index(">Verdict<")


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        ("by step 7 the loss is nan", "confirmed"),
        ("the run diverged: at step 9", "confirmed"),
        ("no space", "not shown"),
    ],
)
def test_divergence_is_a_claim_about_stopped_runs(problem: str, word: str, dataset: Dataset, tmp_path: Path) -> None:
    comparison, result = recorded(dataset, tmp_path / "study", missing="mgr", problem=problem)
    claim = {"kind": "diverges", "text": "It diverges", "row": "mgr"}
    found = judged(comparison, result, claim, {**claim, "row": "block4"})
    assert [verdict.direction for verdict in found] == [word, "contradicted"]


def test_an_order_holds_if_every_adjacent_pair_does(made: tuple[Comparison, StudyResult]) -> None:
    comparison, result = made

    def order(*rows: str) -> str:
        claim = {"kind": "order", "text": "An order", "rows": list(rows)}
        return judged(comparison, result, claim)[0].direction

    assert order("block4", "full_attnres", "mgr", "prenorm") == "confirmed"
    assert order("block4", "mgr", "full_attnres") == "contradicted"
    assert order("block4", "full_attnres", "mgr_independent", "prenorm") == "not shown"


def test_gains_are_judged_by_which_side_of_one_they_are_on(made: tuple[Comparison, StudyResult]) -> None:
    comparison, result = made
    claims = [
        {"kind": "gain", "text": "More", "row": "block4", "measure": "step_gain", "published": 9.0},
        {"kind": "gain", "text": "Slower", "row": "block4", "measure": "step_gain", "published": 0.5},
        {"kind": "gain", "text": "Compute", "row": "block4", "measure": "compute_advantage", "published": 1.2},
    ]
    more, slower, compute = judged(comparison, result, *claims)
    assert (more.direction, slower.direction, compute.direction) == ("confirmed", "contradicted", "not shown")
    assert (more.magnitude, slower.magnitude, compute.magnitude) == ("smaller", "opposite", "not shown")
    assert "above our interval" in more.printed and "below our interval" in slower.printed
    assert compute.size == "all"
