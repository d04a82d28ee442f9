"""What a study reports, worked out by hand on recorded runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from residua.data import Dataset
from residua.study import StudyConfig
from residua.study.conduct import Outcome, summarise
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from residua.study.results import StudyResult, VariantResult, compute_points
from residua.study.sentences import cells, verdict
from residua.study.tables import markdown
from tests.study.recorded import write_all, write_run

pytestmark = pytest.mark.slow

OFFSET = {"prenorm": 0.0, "block_attnres": -0.1, "mgr": 0.0, "exoformer": 0.05}
RATE = {"prenorm": 1000.0, "block_attnres": 800.0, "mgr": 500.0, "exoformer": 1000.0}


def straight(run: PlannedRun, step: int) -> float:
    """Loss falls on a line from 5, by 0.2 each step; seeds lie 0.3 apart; a variant is better or worse throughout."""
    return 5.0 - 0.2 * step + 0.3 * run.seed + OFFSET[run.variant]


def outcome_of(study: StudyConfig, plan: StudyPlan, out: Path) -> Outcome:
    write_all(plan, straight, RATE)
    return summarise(study, plan, out, {}, None)


def row(result: StudyResult, name: str) -> VariantResult:
    return next(row for row in result.variants if row.name == name)


@pytest.fixture
def result(study: StudyConfig, dataset: Dataset, out: Path) -> StudyResult:
    return outcome_of(study, make_plan(study, out, dataset), out).result


def test_loss_is_mean_and_standard_error_over_seeds(result: StudyResult) -> None:
    loss = row(result, "prenorm").loss
    assert loss is not None
    assert (loss.value, loss.count) == (pytest.approx(3.15), 2)
    assert loss.error == pytest.approx(0.3 / 2)


def test_the_difference_is_paired_so_seed_spread_cancels(result: StudyResult) -> None:
    difference = row(result, "block_attnres").difference
    assert difference is not None
    assert difference.value == pytest.approx(-0.1)
    assert difference.error == pytest.approx(0.0, abs=1e-9)
    assert row(result, "prenorm").difference is None


def test_step_gain_is_the_quotient_of_tokens_at_the_same_loss(result: StudyResult) -> None:
    # 0.1 lower everywhere reaches the baseline's final loss half a step earlier: 10 / 9.5 steps.
    gain = row(result, "block_attnres").step_gain
    assert gain is not None and gain.value == pytest.approx(10 / 9.5)
    # 0.05 worse: the common loss is ours, which the baseline reaches a quarter step earlier.
    worse = row(result, "exoformer").step_gain
    assert worse is not None and worse.value == pytest.approx(9.75 / 10)


def test_wall_clock_gain_is_step_gain_times_throughput(result: StudyResult) -> None:
    block = row(result, "block_attnres")
    assert block.throughput_ratio is not None and block.wall_clock_gain is not None
    assert block.throughput_ratio.value == pytest.approx(0.8)
    assert block.wall_clock_gain.value == pytest.approx(0.8 * 10 / 9.5)
    equal = row(result, "mgr")
    assert equal.wall_clock_gain is not None and equal.wall_clock_gain.value == pytest.approx(0.5)


def test_results_json_reads_back_equal_and_says_its_version(result: StudyResult, out: Path) -> None:
    written = json.loads((out / "results.json").read_text())
    assert written["version"] == 1
    assert StudyResult(**written) == result
    assert set(written["variants"][0]) == set(VariantResult.model_json_schema()["properties"])


def test_markdown_has_a_row_per_variant_and_the_verdicts(result: StudyResult) -> None:
    text = markdown(result)
    assert "| block_attnres | " in text and "| prenorm (baseline) | " in text
    assert "exoformer: FFN width 128 → " in text
    assert all(line.count("|") == text.splitlines()[2].count("|") for line in text.splitlines() if line.startswith("|"))


def test_a_failed_run_is_listed_and_the_others_still_count(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    plan = make_plan(study, out, dataset)
    write_all(plan, straight, RATE)
    lost = next(run for run in plan.runs if (run.variant, run.seed) == ("mgr", 1))
    (lost.folder / "inspection.json").unlink()
    result = summarise(study, plan, out, {lost: "ended by signal 9"}, None).result
    assert [run.problem for run in result.runs if run.status == "failed"] == ["ended by signal 9"]
    difference = row(result, "mgr").difference
    assert difference is not None and (difference.count, difference.low) == (1, None)


def test_verdicts_claim_nothing_from_one_seed_or_an_interval_over_zero(result: StudyResult) -> None:
    base = row(result, "block_attnres")
    assert base.difference is not None
    one = base.model_copy(update={"difference": base.difference.model_copy(update={"low": None, "high": None})})
    assert "no claim" in verdict(one, "prenorm", 0.95)
    wide = base.model_copy(update={"difference": base.difference.model_copy(update={"low": -0.3, "high": 0.1})})
    assert "no difference shown" in verdict(wide, "prenorm", 0.95)
    assert verdict(base, "prenorm", 0.95).startswith("block_attnres: lower loss by 0.1000 (n = 2)")


def test_scaling_recovers_the_law_the_runs_were_made_with(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    several = StudyConfig(
        **{**study.model_dump(), "set": ["train.steps=100", "train.schedule.warmup=1"], "scaling": {"sizes": SIZES}}
    )
    plan = make_plan(several, out, dataset)
    scale = {"prenorm": 20.0, "block_attnres": 19.0, "mgr": 20.0, "exoformer": 20.0}

    def law(run: PlannedRun, step: int) -> float:
        model = plan.models[run.size, run.variant]
        return scale[run.variant] * (model.flops_per_token * step * run.config.tokens_per_step) ** -0.05

    write_all(plan, law)
    result = summarise(several, plan, out, {}, None).result
    found = {fit.name: fit for fit in result.scaling}
    assert found["prenorm"].exponent == pytest.approx(0.05)
    assert found["prenorm"].advantage is None
    advantage = found["block_attnres"].advantage
    assert advantage is not None and advantage.value == pytest.approx((20 / 19) ** (1 / 0.05))
    points = compute_points(result.runs, result.variants)["prenorm"]
    assert len(points) == 6 and all(math.isfinite(compute) for compute, _ in points)


def with_rates(study: StudyConfig, plan: StudyPlan, out: Path, rates: dict[tuple[str, int], float]) -> StudyResult:
    for run in plan.runs:
        write_run(run, straight, rate=rates.get((run.variant, run.seed), 1000.0))
    return summarise(study, plan, out, {}, None).result


def test_the_speeds_of_the_table_give_its_throughput(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    rates = {("prenorm", 0): 1000.0, ("prenorm", 1): 4000.0, ("mgr", 0): 900.0, ("mgr", 1): 400.0}
    result = with_rates(study, make_plan(study, out, dataset), out, rates)
    ours, baseline = row(result, "mgr"), row(result, "prenorm")
    assert ours.throughput_ratio is not None and ours.tokens_per_second and baseline.tokens_per_second
    assert ours.throughput_ratio.value == pytest.approx(0.3)
    assert ours.tokens_per_second / baseline.tokens_per_second == pytest.approx(0.3)


def test_seeds_whose_speeds_disagree_allow_no_factor(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    rates = {("prenorm", 0): 1000.0, ("prenorm", 1): 4000.0, ("mgr", 0): 900.0, ("mgr", 1): 400.0}
    result = with_rates(study, make_plan(study, out, dataset), out, rates)
    told = verdict(row(result, "mgr"), "prenorm", 0.95)
    assert told.endswith("× per step; the seeds' speeds against prenorm disagree, so none is stated.")
    shown = [cell.joined() for cell in cells(row(result, "mgr"), "prenorm")]
    assert shown[7] == "0.30× (no interval)"


def test_seeds_whose_speeds_agree_give_a_factor(result: StudyResult) -> None:
    assert "at 0.80× the speed of prenorm" in verdict(row(result, "block_attnres"), "prenorm", 0.95)
    assert cells(row(result, "block_attnres"), "prenorm")[7].joined() == "0.84× [0.84, 0.84]"


def test_one_validation_gives_a_difference_and_says_what_a_gain_needs(result: StudyResult) -> None:
    single = row(result, "block_attnres").model_copy(update={"step_gain": None, "wall_clock_gain": None})
    told = verdict(single, "prenorm", 0.95)
    assert told.startswith("block_attnres: lower loss by 0.1000 (n = 2); no gain per step")
    assert told.endswith("the curves have one validation point each: make train.validate_every smaller.")
    alone = single.model_copy(update={"difference": None})
    assert verdict(alone, "prenorm", 0.95) == "block_attnres: nothing to compare it with."
    apart = single.model_copy(update={"throughput_ratio": None})
    assert verdict(apart, "prenorm", 0.95).endswith("no gain per step, since no seed completed in both.")


SIZES = ["tiny", "mini", "mgr-s-prenorm"]
