"""The results of a study, worked out by hand on recorded runs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.model.size import measure
from residua.study import StudyConfig
from residua.study.collect_results import collect, compute_points
from residua.study.extend_study import describe, unite
from residua.study.figures import break_even, ladder_scatter, picture
from residua.study.gains import concluded, product
from residua.study.page import Outcome, write_report
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from residua.study.records import is_complete, read_run
from residua.study.results import StudyResult, VariantResult
from residua.study.results_file import SavedStudy, save_study
from residua.study.run_study import summarise
from residua.study.statistics import Interval, t_quantile
from residua.study.tables import cells, markdown
from residua.study.timing import StepTiming
from residua.study.verdicts import answer, joint_sentence, verdict
from tests.faults import Disk, failing
from tests.study.conftest import changed, choose, printed, refusal
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


@pytest.fixture(scope="module")
def written(study: StudyConfig, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The study with its page, made once."""
    out = tmp_path_factory.mktemp("results")
    return outcome_of(study, make_plan(study, out, dataset), out)


@pytest.fixture
def result(written: Outcome) -> StudyResult:
    return written.result


def test_rows_report_means_differences_and_ratios_over_seeds(result: StudyResult) -> None:
    baseline, block = row(result, "prenorm"), row(result, "block_attnres")
    assert (baseline.loss.value, baseline.loss.error, baseline.loss.count) == pytest.approx((3.15, 0.3 / 2, 2))
    assert baseline.difference is None
    difference = (block.difference.value, block.difference.error)  # paired, so that the spread of seeds cancels
    assert difference == pytest.approx((-0.1, 0.0), abs=1e-9)
    # 0.1 lower everywhere reaches the baseline's final loss half a step earlier: 10 / 9.5 steps.
    assert block.step_gain.value == pytest.approx(10 / 9.5)
    # 0.05 worse: the common loss is ours, which the baseline reaches a quarter step earlier.
    assert row(result, "exoformer").step_gain.value == pytest.approx(9.75 / 10)
    assert block.throughput_ratio.value == pytest.approx(0.8)
    assert block.wall_clock_gain.value == pytest.approx(0.8 * 10 / 9.5)
    assert row(result, "mgr").wall_clock_gain.value == pytest.approx(0.5)


def test_results_json_reads_back_equal_and_states_its_version(written: Outcome) -> None:
    found = json.loads((written.report.parent / "results.json").read_text())
    assert found["version"] == 1 and StudyResult(**found) == written.result
    assert set(found["variants"][0]) == set(VariantResult.model_json_schema()["properties"])


def test_markdown_has_a_row_per_variant_and_the_verdicts(result: StudyResult) -> None:
    text = markdown(result)
    assert "| block_attnres | " in text and "| prenorm (baseline) | " in text
    assert "exoformer: FFN width 128 → " in text
    assert all(line.count("|") == text.splitlines()[2].count("|") for line in text.splitlines() if line.startswith("|"))


def test_markdown_escapes_names_and_messages(result: StudyResult) -> None:
    evil = "](javascript:x) <img src=x> | a\n# b `c`"
    failed = {"folder": evil, "problem": evil, "status": "failed", "diagnosis": f"x/{evil}"}
    runs = [result.runs[0].model_copy(update=failed), *result.runs[1:]]
    rows = [row.model_copy(update={"name": evil}) for row in result.variants]
    text = markdown(result.model_copy(update={"name": evil, "variants": rows, "runs": runs}))
    shown = MarkdownIt("commonmark").enable("table").render(text)
    assert not any(danger in shown for danger in ("<img", "<code>", 'href="javascript'))
    assert (shown.count("<h1>"), shown.count("<tr>"), shown.count("<a ")) == (1, 1 + len(rows), 1)


@pytest.mark.usefixtures("no_page")
def test_a_failed_run_is_listed_and_the_others_still_count(study: StudyConfig, plan: StudyPlan, out: Path) -> None:
    write_all(plan, straight, RATE)
    lost = next(run for run in plan.runs if (run.variant, run.seed) == ("mgr", 1))
    (lost.folder / "inspection.json").unlink()
    result = summarise(study, plan, out, {lost: "ended by signal 9"}, None).result
    assert [run.problem for run in result.runs if run.status == "failed"] == ["ended by signal 9"]
    difference = row(result, "mgr").difference
    assert difference is not None and (difference.count, difference.low) == (1, None)


def test_a_damaged_inspection_is_written_again(plan: StudyPlan) -> None:
    write_all(plan, straight, RATE)
    run = plan.runs[0]
    assert is_complete(run.folder, run.config)
    one = {"sublayer": 0, "output_rms": 1.0, "gradient_rms": 1.0}
    # a value of another type, rows that are missing, a section of another type, a list
    for damage in ({"sublayers": [{**one, "output_rms": {}}]}, {"sublayers": [one]}, {"gates": 3}, []):
        (run.folder / "inspection.json").write_text(json.dumps(damage))
        assert not is_complete(run.folder, run.config), damage


@pytest.mark.usefixtures("no_page")
def test_scaling_recovers_the_law_that_generated_the_runs(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    several = changed(study, set=["train.steps=100", "train.schedule.warmup=1"], scaling={"sizes": SIZES})
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


@pytest.mark.usefixtures("no_page")
def test_sizes_and_budgets_are_fitted_by_one_law(
    study: StudyConfig, dataset: Dataset, out: Path, tmp_path: Path
) -> None:
    """Every tenfold compute takes a tenth off the gain of 1.5 that the variant has at the largest run."""
    changes = ["train.steps=100", "train.schedule.warmup=1"]
    several = changed(
        study, set=changes, scaling={"sizes": SIZES}, variants=["prenorm", "mgr"], ladder=[0.5, 2], ladder_of="all"
    )
    plan = make_plan(several, out, dataset)
    flops = {size: plan.models[size, "prenorm"].flops_per_token for size in SIZES}
    own = {size: measure(plan.models[size, "prenorm"].config.model).active for size in SIZES}
    largest = flops[SIZES[-1]] * 100 * plan.models[SIZES[-1], "prenorm"].config.tokens_per_step

    def law(run: PlannedRun, step: int) -> float:
        tokens = step * run.config.tokens_per_step
        share = math.log10(flops[run.size] * run.config.train.steps * run.config.tokens_per_step / largest)
        gain = 1.5 * 0.9**share if run.variant == "mgr" else 1.0
        return 1.7 + 40 * own[run.size] ** -0.3 + 30 * (gain * tokens) ** -0.4 + 0.01 * run.seed

    write_all(plan, law)
    result = summarise(several, plan, out, {}, None).result
    assert result.joint is not None and result.joint.size is not None and not result.scaling
    assert result.joint.tokens.exponent == pytest.approx(0.4, rel=1e-3) and result.joint.parameters == own
    assert (result.joint.size.floor, result.joint.size.exponent) == pytest.approx((1.705, 0.3), rel=0.01)
    at_sizes = [row.equivalent_tokens for row in result.variants if row.name == "mgr"]
    assert at_sizes[-1] is not None and at_sizes[-1].value == pytest.approx(1.5, rel=1e-3)
    (projected,) = result.projected
    assert (projected.tokens.value, projected.trend.value) == pytest.approx((1.35, 0.9), rel=5e-3)
    assert "L = 1.705 + " in joint_sentence(result)
    assert "| mgr | " in "\n".join(markdown(result).split("over sizes")[1:])

    halves = []
    for index, sizes in enumerate((SIZES[:1], SIZES[1:])):
        runs = tuple(run for run in plan.runs if run.size in sizes)
        part = replace(plan, models={k: m for k, m in plan.models.items() if k[0] in sizes}, runs=runs)
        asked = {"base": sizes[0], "scaling": {"sizes": sizes} if len(sizes) > 1 else None}
        records = {run: read_run(run.folder, run.config) for run in runs}
        config = StudyConfig(**{**several.model_dump(exclude_none=True), **asked})
        halves.append(tmp_path / f"{index}.json")
        save_study(config, part, records, dataset.fingerprint, None).write(halves[-1])
    united = unite(halves).result()
    assert united.joint == result.joint and united.projected == result.projected
    assert united.sizes == list(SIZES) and unite([halves[0], halves[0]]).result().sizes == list(SIZES[:1])
    both = tmp_path / "both.json"
    assert f"All {len(plan.runs)} runs are in {both}" in printed(*halves, "--results", both)
    saved = SavedStudy.read(both)
    assert saved.result() == united and len(saved.runs) == len(plan.runs) and len(saved.environments) == 1
    assert refusal(*halves, "--results", both) == f"{both} exists: name a new file for the joined results."
    other = SavedStudy.read(halves[1]).model_copy(update={"fingerprint": "another"})
    other.write(halves[1])
    with pytest.raises(ConfigError, match="fingerprint"):
        unite(halves)


def test_joined_files_keep_settings_but_no_other_sessions_speeds(tmp_path: Path) -> None:
    """Of two halves of a study, one has the outliers of a run and the other was timed on a slower machine."""
    saved = SavedStudy.read(Path("docs/results/scaling.json"))
    slow = [model for model in saved.models if model.variant in ("prenorm", "resformer")]
    fast = [model for model in saved.models if model.variant != "resformer"]
    slow = [m.model_copy(update={"timings": {d: t.scaled(1.5) for d, t in m.timings.items()}}) for m in slow]
    halves = []
    for index, models in enumerate((fast, slow)):
        names = [model.variant for model in models]
        runs = tuple(run for run in saved.runs if run.variant in names)
        runs = runs if index else (runs[0].model_copy(update={"outliers": None}), *runs[1:])
        asked = {**saved.study, "variants": {k: v for k, v in saved.study["variants"].items() if k in names}}
        halves.append(tmp_path / f"{index}.json")
        saved.model_copy(update={"models": tuple(models), "runs": runs, "study": asked}).write(halves[-1])
    united = unite(halves)
    assert united.config.scaling == saved.config.scaling
    timed = {model.variant for model in united.models if model.timings}
    assert timed == {"prenorm", "mgr_resformer", "mgr2_resformer"}
    assert united.runs[0].outliers == saved.runs[0].outliers is not None
    tuned = Path("docs/results/twenty.json")
    assert unite([tuned, tuned]).tuning == SavedStudy.read(tuned).tuning


@pytest.mark.usefixtures("no_page")
def test_seeds_with_inconsistent_speeds_give_no_wall_clock_gain(
    study: StudyConfig, dataset: Dataset, out: Path
) -> None:
    rates = {("prenorm", 0): 1000.0, ("prenorm", 1): 4000.0, ("mgr", 0): 900.0, ("mgr", 1): 400.0}
    plan = make_plan(study, out, dataset)
    for run in plan.runs:
        write_run(run, straight, rate=rates.get((run.variant, run.seed), 1000.0))
    result = summarise(study, plan, out, {}, None).result
    ours, baseline = row(result, "mgr"), row(result, "prenorm")
    assert ours.throughput_ratio.value == pytest.approx(0.3)
    assert ours.tokens_per_second / baseline.tokens_per_second == pytest.approx(0.3)
    told = verdict(ours, result)
    assert "× per step (interval 1.00 to 1.00); its speed against prenorm is not shown (" in told
    assert told.endswith(" (interval too wide), nor a gain per second.")
    assert [cell.joined() for cell in cells(ours, result)][6:8] == ["not stated", "not stated"]


def between(value: float, low: float | None = None, high: float | None = None, count: int = 3) -> Interval:
    return Interval(value=value, count=count, error=None if low is None else 0.1, low=low, high=high)


SCATTERED = {"throughput_ratio": between(1.1, 0.2, 6.0)}
WORTH = {"equivalent_tokens": between(1.06, 0.94, 1.21), **SCATTERED}
SAME = "mgr: the same loss to four digits, but with n = 1 there is no interval and no claim; "
FEW = "run (train.validate_every) and losses that fall after the first."


@pytest.mark.parametrize(
    ("name", "keys", "begins", "ends"),
    [
        ("block_attnres", {}, "block_attnres: lower loss by 0.1000 (n = 2)", ""),
        ("block_attnres", {"difference": between(-0.1)}, "block_attnres: lower loss by 0.1000, but with n = 1 ", ""),
        ("block_attnres", {"difference": between(-0.1, -0.3, 0.1)}, "block_attnres: no difference shown", ""),
        ("mgr", {"difference": Interval(value=0.0, count=1)}, SAME, ""),
        ("mgr", {"difference": Interval(value=-0.00004, count=1)}, SAME, ""),
        ("mgr", WORTH, "", "; worth 1.06× the tokens (interval 0.94 to 1.21); its speed"),
        ("mgr", {**WORTH, "extrapolated": True}, "", "; worth 1.06× the tokens (extrapolated, interval 0.94 to 1.21)"),
        ("mgr", {**SCATTERED, "step_gain": between(1.06, 0.94, 1.21)}, "", "; 1.06× per step (interval 0.94 to 1.21)"),
        ("mgr", {**SCATTERED, "step_gain": between(1.06, 1e-3, 1100)}, "", "; 1.06× per step (interval too wide); its"),
        ("mgr", {"equivalent_tokens": between(1.21, count=2), "throughput_ratio": None, "wall_clock_gain": None}, "",
         "; worth 1.21× the tokens, without speeds to compare."),
        ("block_attnres", {"step_gain": None, "wall_clock_gain": None}, "block_attnres: lower loss by 0.1000 (", FEW),
        ("block_attnres", {"difference": None}, "block_attnres: nothing to compare it with.", ""),
        # five runs at a time once gave GatedNorm 1.56× the baseline's speed, interval 0.08 to 30, and a verdict
        ("block_attnres", {"step_gain": between(1.006, 0.96, 1.05), "throughput_ratio": between(1.56, 0.08, 30.0)}, "",
         "1.01× per step (interval 0.96 to 1.05); its speed against prenorm is not shown (interval 0.08 to 30.00), "
         "nor a gain per second."),
        ("block_attnres", {}, "", " at 0.80× the speed of prenorm"),
    ],
)  # fmt: skip
def test_a_verdict_claims_no_more_than_its_intervals(
    result: StudyResult, name: str, keys: dict[str, object], begins: str, ends: str
) -> None:
    told = verdict(row(result, name).model_copy(update=keys), result)
    assert told.startswith(begins) and ends in told


def test_a_verdict_names_missing_seeds_and_speeds(result: StudyResult) -> None:
    single = row(result, "block_attnres").model_copy(update={"step_gain": None, "wall_clock_gain": None})
    apart = result.model_copy(update={"runs": tuple(run for run in result.runs if run.variant != "prenorm")})
    assert verdict(single, apart).endswith("no gain per step, since no seed completed in both.")
    shared = verdict(row(result, "mgr"), result.model_copy(update={"side_by_side": 5}))
    assert shared.endswith("; its speed was not measured alone, so no gain per second is stated (--time-alone).")
    assert cells(row(result, "block_attnres"), result)[7].joined() == "0.84× [0.84, 0.84]"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.05, 1.20, "so 1.10× per second (interval 1.05 to 1.20)."),
        (0.97, 1.25, "so 1.10× per second, but no gain or loss per second is shown (interval 0.97 to 1.25)."),
        (1.05, None, "so 1.10× per second (interval above 1.05)."),
        (0.90, None, "so 1.10× per second, but no gain or loss per second is shown (interval above 0.90)."),
        (None, None, "so 1.10× per second, without an interval."),
    ],
)
def test_a_gain_is_claimed_only_if_its_interval_excludes_one(
    result: StudyResult, low: float | None, high: float | None, said: str
) -> None:
    gain = {"wall_clock_gain": Interval(value=1.10, count=3, low=low, high=high)}
    rows = (row(result, "prenorm"), row(result, "mgr").model_copy(update=gain))
    after = concluded(result.model_copy(update={"variants": rows}))
    assert verdict(row(after, "mgr"), after).endswith(said)


def laddered(study: StudyConfig, out: Path, dataset: Dataset, budgets: tuple[float, ...]) -> StudyResult:
    """A study with a ladder whose losses follow a law; block_attnres is as good as 1.25 times the tokens."""
    steps = ("train.steps=40", "train.schedule.warmup=2")
    longer = changed(study, set=(*study.set, *steps), ladder=budgets)
    plan = make_plan(longer, out, dataset)
    worth = {"prenorm": 1.0, "block_attnres": 1.25, "mgr": 0.9, "exoformer": 3.0}

    def law(run: PlannedRun, step: int) -> float:
        shape = run.config.train.steps / step  # a curve that falls to the end, and ends on the law
        return 2.0 + 3.0 * (worth[run.variant] * step) ** -0.4 * shape**0.1 + 0.1 * run.seed

    write_all(plan, law, RATE)
    return summarise(longer, plan, out, {}, None).result


@pytest.mark.usefixtures("no_page")
def test_a_ladder_gives_equivalent_tokens_and_step_gains(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    result = laddered(study, out, dataset, (0.5, 1, 1.5, 2))
    (ladder,) = result.ladder
    assert [rung.tokens / 64 for rung in ladder.rungs] == [20, 40, 60, 80]
    assert ladder.law is not None and ladder.law.exponent == pytest.approx(0.4, rel=1e-3)
    block = row(result, "block_attnres")
    assert block.equivalent_tokens.value == pytest.approx(1.25, rel=1e-3) and not block.extrapolated
    assert block.wall_clock_gain.value == pytest.approx(1.25 * 0.8, rel=1e-3)
    assert 1.0 < block.step_gain.value < 1.25
    far = row(result, "exoformer")
    assert far.extrapolated and far.equivalent_tokens.value == pytest.approx(3.0, rel=1e-2)
    assert "worth 3.00× the tokens (extrapolated, interval 3.00 to 3.00) at 1.00× the speed" in verdict(far, result)
    assert row(result, "prenorm").equivalent_tokens is None
    assert {run.budget for run in result.runs} == {0.5, 1.0, 1.5, 2.0}
    assert row(result, "prenorm").loss.count == 2  # the ladder's runs do not count as seeds of the baseline
    text = markdown(result)
    assert "The law of the ladder" not in text
    bent = ladder.model_copy(update={"law": replace(ladder.law, scale=ladder.law.scale * 0.96)})
    # 0.96^(1/0.4)
    missed = "misses the losses of prenorm: its run of 1.28 k tokens would be worth 0.90× its own tokens."
    assert missed in markdown(result.model_copy(update={"ladder": (bent,)}))
    assert "| equivalent tokens |" in text and "1.25× [1.25, 1.25]" in text and "3.00×\\* [" in text


def test_a_gain_without_a_ladder_is_reported_as_understated(result: StudyResult) -> None:
    said = "Use --ladder before concluding that a variant does not pay."
    assert row(result, "block_attnres").step_gain.value > 1 > row(result, "block_attnres").wall_clock_gain.value
    assert said in markdown(result)
    worse = tuple(row for row in result.variants if row.name in ("prenorm", "exoformer"))
    assert said not in markdown(result.model_copy(update={"variants": worse}))


@pytest.mark.usefixtures("no_page")
def test_the_picture_plots_step_cost_against_equivalent_tokens(study: StudyConfig, dataset: Dataset, out: Path) -> None:
    result = laddered(study, out, dataset, (0.5, 1, 1.5, 2))
    drawn = break_even(result)
    places = {point.name: (point.x, point.y) for point in drawn.points}
    assert places["prenorm"] == (1.0, 1.0)
    assert places["block_attnres"] == pytest.approx((1 / 0.8, 1.25), rel=1e-3)
    assert drawn.y_title == "equivalent tokens, × prenorm's"
    stored = StudyResult(**json.loads((out / "results.json").read_text()))
    assert picture(stored) == (out / "gains.svg").read_text()  # rebuilt from the stored results, the same
    shared = result.model_copy(update={"side_by_side": 5})
    assert break_even(shared) is None  # no speed was measured in isolation
    law = ladder_scatter(result, result.ladder[0])
    labels = [point.name for point in law.points if point.labelled]
    assert labels == ["0.00128 M", "0.00256 M", "0.00384 M", "0.00512 M"]
    worth = next(point for point in law.points if point.name == "block_attnres")
    assert worth.x == pytest.approx(1.25 * 0.00256, rel=1e-3)


def timed(tokens_per_second: float, error: float = 0.001, device: str = "H200") -> StepTiming:
    seconds = 64 / tokens_per_second
    return StepTiming(device=device, tokens=64, median=seconds, p10=seconds, p90=seconds, count=100, error=error)


def test_isolated_timings_give_throughput_and_wall_clock_gain(study: StudyConfig, plan: StudyPlan) -> None:
    write_all(plan, straight, RATE)
    records = {run: read_run(run.folder, run.config) for run in plan.runs}
    timings = {
        ("tiny", "prenorm"): {"CPU": timed(10, device="CPU"), "H200": timed(1000)},
        ("tiny", "block_attnres"): {"H200": timed(900)},
        ("tiny", "mgr"): {"A100": timed(700, device="A100")},
    }
    several = study.model_copy(update={"workers": 4})
    result = collect(several, plan, records, {}, None, timings)
    block = row(result, "block_attnres")
    assert block.throughput_ratio.value == pytest.approx(0.9)
    assert block.throughput_ratio.low == pytest.approx(0.9 * math.exp(-t_quantile(0.975, 18) * 0.001 * 2**0.5))
    assert block.wall_clock_gain.value == pytest.approx(0.9 * 10 / 9.5)
    assert "at 0.90× the speed of prenorm" in verdict(block, result)
    alone = "Speeds are those of each variant's step timed alone, after its runs (H200)"
    from_training = "except mgr, exoformer, measured in training (--time-alone)."
    assert f"{alone}, {from_training}" in markdown(result)
    everywhere = {("tiny", name): {"H200": timed(900)} for name in OFFSET}
    assert f"{alone}.\n" in markdown(collect(several, plan, records, {}, None, everywhere))
    slow = {
        run: replace(record, tokens_per_second=math.nan) for run, record in records.items()
    }  # no speeds of training
    (line,) = [
        line for line in markdown(collect(study, plan, slow, {}, None, timings)).splitlines()
        if line.startswith("| block_attnres")
    ]  # fmt: skip
    assert "| 0.90× 900 tok/s |" in line
    other = row(result, "mgr")  # timed on a device that the baseline was not timed on
    assert other.timing is None and "not measured alone" in verdict(other, result)


def test_interval_of_a_product_of_ratios_combines_errors() -> None:
    gain, speed = Interval(1.2, 3, 0.05, 1.1, 1.4), Interval(0.8, 10, 0.01, 0.78, 0.82)
    found = product(gain, speed)
    assert found.value == pytest.approx(0.96)
    assert math.log(0.96 / found.low) ** 2 == pytest.approx(math.log(1.2 / 1.1) ** 2 + math.log(0.8 / 0.78) ** 2)
    assert math.log(found.high / 0.96) ** 2 == pytest.approx(math.log(1.4 / 1.2) ** 2 + math.log(0.82 / 0.8) ** 2)
    half_open = product(Interval(1.2, 3, 0.05, 1.1, None), speed)
    assert half_open is not None and half_open.low is not None and half_open.high is None
    assert product(None, speed) is None


def by_document(run: PlannedRun) -> dict[str, object]:
    """A last validation on four documents: the loss of a variant differs from pre-norm's by another amount in each."""
    tokens, change = (10, 20, 30, 40), {"prenorm": 0.0, "mgr": 1.0}.get(run.variant, 0.5)
    losses = [3.0 * n - change * more for n, more in zip(tokens, (1.0, 2.0, 4.0, 3.0), strict=True)]
    return {
        "loss": sum(losses) / 100, "bits_per_byte": 1.0, "tokens": 100,
        "document_tokens": tokens, "document_losses": losses,
        "sources": {"wiki": {"tokens": 60, "bits_per_byte": 1.2 - change / 10 + run.seed / 100}},
    }  # fmt: skip


@pytest.mark.usefixtures("no_page")
def test_document_losses_give_the_error_of_the_text(
    study: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path
) -> None:
    for run in plan.runs:
        write_run(run, straight, final=by_document(run))
    facts = describe(dataset, 256)
    result = summarise(study, plan, out, {}, facts).result
    mgr = row(result, "mgr")
    assert mgr.loss is not None and mgr.loss.value == pytest.approx(2.9) and result.validated_tokens == 100
    # By hand: D = -10/100, d - D·n = -1+1, -2+2, -4+3, -3+4, so √(4/3 · 2)/100.
    assert mgr.text_error == pytest.approx((4 / 3 * 2) ** 0.5 / 100)
    wiki = mgr.sources["wiki"].difference
    assert wiki is not None and (wiki.value, wiki.count) == (pytest.approx(-0.1), 2)
    text = markdown(result)
    assert "## bits per byte by source" in text and "| mgr | 1.1050 (-0.1000 ± 0.0000) |" in text
    assert f"on 100 of the {facts.validation_tokens:,} validation tokens.\n" in text and "| ± 0.0163 |" in text
    less = markdown(result.model_copy(update={"curve_tokens": 64}))
    assert result.curve_tokens == 256 and "Curves and step-wise gains use the first 64 of them." in less
    (plan.runs[0].folder / "validation.json").unlink()  # one run of an older version: all are on the part that it read
    older = summarise(study, plan, out, {}, facts).result
    assert row(older, "mgr").loss.value != pytest.approx(2.9) and row(older, "mgr").text_error is None
    assert older.validated_tokens == 256
    assert "The error from sampling this text is not known." in markdown(older)


@pytest.mark.usefixtures("no_page")
def test_tiny_texts_and_untrained_models_give_a_warning(
    study: StudyConfig, plan: StudyPlan, dataset: Dataset, out: Path
) -> None:
    write_all(plan, lambda run, step: 30.0 - step / 100)
    facts = describe(dataset, 256)
    text = markdown(summarise(study, plan, out, {}, facts).result)
    assert "- The validation text is tiny (256 tokens), so losses on it are uncertain.\n" in text
    entropy = f"{facts.unigram_entropy:.4f} nats per token"
    assert f"does worse than predicting by token frequency alone ({entropy}), so" in text
    ample = facts.model_copy(update={"unigram_entropy": 40.0})
    assert "worse than predicting" not in markdown(summarise(study, plan, out, {}, ample).result)


SIZES = ["tiny", "mini", "mgr-s-prenorm"]


def test_runs_are_kept_if_results_cannot_be_written(study: StudyConfig, plan: StudyPlan, out: Path) -> None:
    write_all(plan, lambda run, step: 3.0 + 1 / step + 0.1 * run.seed, RATE)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with failing(counted := Disk(out)):
        summarise(study, plan, out, {}, None)
    for moment in (1, counted.done):
        with failing(Disk(out, moment)), pytest.raises(OSError, match=rf"could not write {out}/\S+: No space left"):
            summarise(study, plan, out, {}, None)
        assert not list(out.rglob(".unfinished-*"))
        assert {path: path.read_bytes() for path in before} == before


def test_the_title_reports_the_result_of_a_race(dataset: Dataset, out: Path) -> None:
    study = choose(dataset, "mgr", seeds=4, target=3.5)
    plan = make_plan(study, out, dataset)
    write_all(plan, lambda run, step: 5.0 - 0.2 * step * (1.2 if run.variant == "mgr" else 1.0) + 0.01 * run.seed)
    timings = {("tiny", name): {"H200": timed(1.0, 0.001)} for name in study.variants}
    records = {run: read_run(run.folder, run.config) for run in plan.runs}
    result = collect(study, plan, records, {}, None, timings)
    found = row(result, "mgr").race
    assert found is not None and found.ratio is not None and found.ratio.value == pytest.approx(1 / 1.2, rel=0.01)
    page = write_report(study, result, records, out).report.read_text()
    assert "Yes: mgr reaches 3.5 in 0.833× the seconds of prenorm" in page and "Race to a loss of 3.5" in page
    assert "Shown to reach 3.5 before prenorm: mgr in 0.833× the seconds (p = " in markdown(result)
    again = collect(study, plan, records, {}, None, {})
    assert answer(again) == ("unsure", "Not shown: no variant can be tested against prenorm to a loss of 3.5")
    kept = {run: record for run, record in records.items() if (run.variant, run.seed) != ("mgr", 3)}
    file = save_study(study, plan, kept, dataset.fingerprint, None, timings).result()  # a failed run is not in the file
    survivors = row(file, "mgr").race
    assert survivors is not None and survivors.runs == survivors.reached == 3 and survivors.p is None
