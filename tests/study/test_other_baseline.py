"""A saved study shown relative to another of its variants than its own baseline."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from residua.data import Dataset
from residua.errors import UserError
from residua.study.plan import PlannedRun, make_plan
from residua.study.records import read_run
from residua.study.results import StudyResult, VariantResult
from residua.study.results_file import SavedStudy, save_study
from residua.study.timing import StepTiming, comparable_with_any
from residua.study.verdicts import matching_sentences, own_baseline_sentence, study_sentences
from tests.study.conftest import choose, printed, refusal
from tests.study.recorded import write_all

pytestmark = pytest.mark.slow

WORTH = {"prenorm": 1.0, "mgr": 1.5, "exoformer": 1.2}  # in tokens of pre-norm


def law(run: PlannedRun, step: int) -> float:
    """Pre-norm's law, read at a variant's worth of its tokens; seeds lie 0.01 apart."""
    tokens = WORTH[run.variant] * step * run.config.tokens_per_step
    noise = 1e-4 * ((7 * run.seed + 3 * len(run.variant) + 5 * int(run.budget)) % 4 - 1.5)
    return 2.0 + 30.0 * tokens**-0.4 + 0.01 * run.seed + noise


def timed(rate: float, error: float) -> StepTiming:
    return StepTiming(device="H200", tokens=64, median=64 / rate, p10=0.1, p90=0.1, count=100, error=error)


TIMINGS = {
    ("tiny", "prenorm"): {"H200": timed(1000.0, 0.02)},
    ("tiny", "mgr"): {"H200": timed(800.0, 0.003)},
    ("tiny", "exoformer"): {"H200": timed(500.0, 0.004)},
}


def saved(dataset: Dataset, out: Path, **changes: Any) -> SavedStudy:
    """The file of a complete study with three seeds and, unless changed, every variant at three budgets."""
    settings = {"seeds": 3, "ladder": [2, 4], "ladder_of": "all", "time_alone": True, **changes}
    study = choose(dataset, "mgr", "exoformer", **settings)
    plan = make_plan(study, out, dataset)
    write_all(replace(plan, runs=tuple(run for run in plan.runs if not run.folder.exists())), law)
    records = {run: read_run(run.folder, run.config) for run in plan.runs}
    return save_study(study, plan, records, dataset.fingerprint, None, TIMINGS)


@pytest.fixture(scope="module")
def laddered(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> SavedStudy:
    return saved(dataset, tmp_path_factory.mktemp("laddered"))


def row(result: StudyResult, name: str) -> VariantResult:
    return next(row for row in result.variants if row.name == name)


def test_gains_over_another_variant_by_hand(laddered: SavedStudy) -> None:
    result = laddered.result(baseline="exoformer")
    assert (result.baseline, result.own_baseline) == ("exoformer", "prenorm")
    mgr, prenorm, reference = row(result, "mgr"), row(result, "prenorm"), row(result, "exoformer")
    assert reference.difference is None and reference.wall_clock_gain is None
    assert mgr.difference.value == pytest.approx(mgr.loss.value - reference.loss.value) and mgr.difference.count == 3
    assert mgr.equivalent_tokens.value == pytest.approx(1.5 / 1.2, rel=1e-2) and not mgr.extrapolated
    assert prenorm.equivalent_tokens.value == pytest.approx(1 / 1.2, rel=1e-2) and prenorm.extrapolated
    # Both were timed relative to pre-norm: 800 / 500 with the errors 0.003 and 0.004, pre-norm's 1000 / 500 with 0.004.
    assert (mgr.throughput_ratio.value, mgr.throughput_ratio.error) == pytest.approx((1.6, 0.005))
    assert mgr.throughput_ratio.freedom == pytest.approx(9 * 0.005**4 / (0.003**4 + 0.004**4))
    assert (prenorm.throughput_ratio.value, prenorm.throughput_ratio.error) == pytest.approx((2.0, 0.004))
    assert prenorm.throughput_ratio.freedom == pytest.approx(9)
    assert mgr.wall_clock_gain.value == pytest.approx(mgr.equivalent_tokens.value * 1.6)
    assert mgr.corrected is not None and mgr.corrected.low < mgr.wall_clock_gain.low


def test_results_equal_those_of_a_study_with_that_baseline(dataset: Dataset, tmp_path: Path) -> None:
    kept = {"match": {"kind": "none"}}  # both have the same models
    ours = saved(dataset, tmp_path, **kept).result(baseline="mgr")
    alike = saved(dataset, tmp_path, baseline="mgr", **kept).result()
    of_timing = {"timing", "throughput_ratio", "wall_clock_gain", "corrected", "shrunk"}
    for one, other in zip(ours.variants, alike.variants, strict=True):
        assert one.model_dump(exclude=of_timing) == other.model_dump(exclude=of_timing)
        if one.name != "mgr":
            assert one.wall_clock_gain.value == other.wall_clock_gain.value
            assert one.throughput_ratio.value == other.throughput_ratio.value
    assert ours.ladder == alike.ladder and ours.ladder[0].law is not None
    assert ours.baseline == alike.baseline and alike.own_baseline is None


def test_losses_models_and_matching_stay_those_of_the_study(laddered: SavedStudy) -> None:
    own, other = laddered.result(), laddered.result(baseline="exoformer")
    for key in ("loss", "matching", "parameters", "flops_per_token", "memory_gib"):
        assert [getattr(each, key) for each in own.variants] == [getattr(each, key) for each in other.variants]
    assert own.runs == other.runs
    sentences = [each.replace("the baseline's", "prenorm's") for each in matching_sentences(own)]
    assert sentences == matching_sentences(other) != []
    told = own_baseline_sentence(other)
    assert told == (
        "Variants are compared with exoformer. The study's own baseline is prenorm: models were matched to it and "
        "steps were timed relative to its step."
    )
    assert study_sentences(other)[0] == told and own_baseline_sentence(own) == ""
    assert laddered.result(baseline="prenorm") == own


def test_without_its_own_ladder_a_baseline_gives_steps(dataset: Dataset, tmp_path: Path) -> None:
    study = saved(dataset, tmp_path, ladder_of="baseline")
    assert study.result().ladder and row(study.result(), "mgr").equivalent_tokens is not None
    result = study.result(baseline="exoformer")
    mgr = row(result, "mgr")
    assert result.ladder == () and result.joint is None and mgr.equivalent_tokens is None
    assert mgr.step_gain.value > 1 and mgr.wall_clock_gain.value == pytest.approx(mgr.step_gain.value * 1.6)


def test_timings_without_the_own_baseline_are_left_out() -> None:
    other = {"B200": timed(1.0, 0.1)}
    found = comparable_with_any({**TIMINGS, ("tiny", "mgr"): {**TIMINGS["tiny", "mgr"], **other}}, "prenorm")
    assert found["tiny", "mgr"] == TIMINGS["tiny", "mgr"]
    assert found["tiny", "prenorm"]["H200"] == timed(1000.0, 0.0)


def test_the_command_shows_another_baseline_and_keeps_the_file(laddered: SavedStudy, tmp_path: Path) -> None:
    file, page = tmp_path / "x.json", tmp_path / "page"
    laddered.write(file)
    before = file.read_text()
    said = " ".join(printed(file, "--baseline", "mgr", "--out", page).split())
    assert "Variants are compared with mgr. The study's own baseline is prenorm" in said
    assert "the speed of mgr" in said and "the speed of prenorm" not in said
    summary = json.loads((page / "results.json").read_text())
    assert (summary["baseline"], summary["own_baseline"]) == ("mgr", "prenorm")
    html = (page / "report.html").read_text()
    assert "exoformer against mgr" in html and "own baseline is prenorm" in html
    assert "baseline = &quot;prenorm&quot;" in html, "the study file that made the runs"
    said = refusal(file, "--baseline", "hyper")
    assert said == (
        "the study small has no complete run of 'hyper' to compare with: choose one of prenorm, mgr, exoformer."
    )
    assert "keeps its own: leave --results out" in refusal(file, "--baseline", "mgr", "--results", tmp_path / "y.json")
    assert file.read_text() == before and not (tmp_path / "y.json").exists()
    assert "Variants are compared with mgr" in printed(file, file, "--baseline", "mgr"), "several files, one study"


def test_a_baseline_needs_a_run_at_every_size() -> None:
    study = SavedStudy.read(Path("docs/results/scaling.json"))
    size = study.config.sizes[0]
    assert study.result(baseline="resformer").scaling != ()
    models = tuple(model for model in study.models if (model.size, model.variant) != (size, "resformer"))
    untrained = tuple(run for run in study.runs if (run.size, run.variant) != (size, "resformer"))
    begun = tuple(run for run in study.runs if run.size != size)  # this size is planned, without the variant
    for changes in ({"runs": untrained}, {"runs": begun, "models": models}):
        with pytest.raises(UserError, match=r"no complete run of 'resformer' at every size .* one of prenorm"):
            study.model_copy(update=changes).result(baseline="resformer")
