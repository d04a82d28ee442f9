"""The title, lead and footer of the study's page, without a browser."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from residua.report import Tone, theme
from residua.study.figures import Records, break_even, difference_curves, forest_of_losses, precision_costs
from residua.study.gains import concluded
from residua.study.page import provenance, study_page
from residua.study.records import RunRecord
from residua.study.results import RunResult, StudyResult
from residua.study.statistics import Interval
from residua.study.tables import cells, columns, markdown
from residua.study.timing import StepTiming
from residua.study.verdicts import answer, best_row, by_gain, comparisons_sentence, explanation, unequal_seeds, verdict
from tests.study.pretend import Pretended, pretended, with_rows


def changed(result: StudyResult, **keys: object) -> StudyResult:
    """The same study with other values in the rows of the variants."""
    return with_rows(result, (row if row.name == "prenorm" else row.model_copy(update=keys) for row in result.variants))


UNKNOWN = {"throughput_ratio": None, "wall_clock_gain": None}
WIDE = Interval(value=-0.0433, count=3, error=0.02, low=-0.1336, high=0.0470)
CLEAR = Interval(value=-0.0433, count=3, error=0.01, low=-0.08, high=-0.01)
LOST = Interval(value=0.97, low=0.96, high=0.98, count=3)
ALONE = StepTiming(device="H200", tokens=64, median=0.1, p10=0.1, p90=0.1, count=100, error=0.001)
NOT_LOWER = "no lower loss is shown (mgr -0.0433, interval -0.1336 to +0.0470)"
LOWER = "the loss of mgr is -0.0433 against prenorm"


def last_row(result: StudyResult, **keys: object) -> StudyResult:
    *rows, last = result.variants
    return with_rows(result, (*rows, last.model_copy(update=keys)))


def scattered(mgr: Interval) -> StudyResult:
    """The study of only prenorm and mgr, whose speeds scatter."""
    result, scatter = pretended(3).result, Interval(value=0.8, count=3, low=0.2, high=3.2)
    rows = tuple(row for row in result.variants if row.name in ("prenorm", "mgr"))
    alone = result.model_copy(update={"variants": rows})
    return changed(alone, difference=mgr, throughput_ratio=scatter, wall_clock_gain=scatter)


def without(status: str, lost: Callable[[RunResult], bool]) -> StudyResult:
    """Nothing can be compared: these runs have failed, or are missing."""
    result = pretended(3).result
    runs = tuple(run.model_copy(update={"status": status}) if lost(run) else run for run in result.runs)
    bare = changed(result, difference=None, **UNKNOWN)
    return bare.model_copy(update={"runs": runs})


@pytest.mark.parametrize(
    ("result", "tone", "title"),
    [
        # "Yes" and "No" only where the intervals say so
        (lambda: pretended(3), "good", "Yes: the best of 2, block_attnres, is 1.06× per second"),
        (lambda: pretended(3, best=0.95), "bad", "No: the best of 2, block_attnres, is 0.95× per second"),
        (lambda: pretended(3, best=1.01), "unsure",
         "Not shown: the best of 2, block_attnres, is 1.01× per second, interval 0.98 to 1.04"),
        (lambda: pretended(3, seeds=1, best=1.50), "unsure",
         "Not shown: the best of 2, block_attnres, is 1.50× per second, but one seed gives no interval"),
        # several seeds without an interval: one of three runs may have a speed, or the ladder two budgets
        (lambda: changed(pretended(2).result, wall_clock_gain=Interval(value=1.2, count=3)), "unsure",
         "Not shown: block_attnres is 1.20× per second, without an interval"),
        # neither a gain per step alone nor one variant that may gain makes a "No"
        (lambda: pretended(3, ladder=False, best=0.95), "unsure",
         "Not shown: the best of 2, block_attnres, is 0.95× per second by steps, which understate it: use --ladder"),
        (lambda: changed(pretended(3, ladder=False, best=0.95).result, step_gain=LOST), "bad",
         "No: the best of 2, block_attnres, is 0.95× per second"),
        (lambda: last_row(changed(pretended(3, ladder=False, best=0.95).result, step_gain=LOST),
                          step_gain=Interval(value=1.01, count=3)), "unsure",
         "Not shown: the best of 2, block_attnres, is 0.95× per second, but others gain per step: use --ladder"),
        (lambda: last_row(pretended(3, best=0.95).result,
                          wall_clock_gain=Interval(value=0.9, count=3, error=0.05, low=0.7, high=1.1)), "unsure",
         "Not shown: the best of 2, block_attnres, is 0.95× per second, but other variants are not measured well "
         "enough"),
        # without speeds the title states the loss, and without runs neither
        (lambda: changed(pretended(3).result, **UNKNOWN), "unsure",
         "Not shown: speeds are unknown; block_attnres has the lowest loss, -0.0450 against prenorm"),
        (lambda: scattered(WIDE), "unsure", f"Not shown: speeds scatter too much (use --time-alone); {NOT_LOWER}"),
        (lambda: concluded(scattered(WIDE).model_copy(update={"side_by_side": 4})), "unsure",
         f"Not shown: speeds were not measured alone (use --time-alone); {NOT_LOWER}"),
        (lambda: changed(scattered(WIDE), timing=ALONE), "unsure", f"Not shown: speeds scatter too much; {NOT_LOWER}"),
        (lambda: changed(scattered(WIDE), throughput_ratio=Interval(value=0.8, count=3, low=0.79, high=0.81),
                         wall_clock_gain=None), "unsure", f"Not shown: gains per second are unknown; {NOT_LOWER}"),
        (lambda: scattered(CLEAR), "unsure", f"Not shown: speeds scatter too much (use --time-alone); {LOWER}"),
        (lambda: scattered(Interval(value=-0.0433, count=1)), "unsure",
         f"Not shown: speeds scatter too much (use --time-alone); {LOWER}, one seed"),
        (lambda: without("missing", lambda run: run.variant == "prenorm"), "unsure",
         "No answer yet: 6 of 9 runs are complete"),
        (lambda: without("missing", lambda run: True), "unsure", "No answer yet: 0 of 9 runs are complete"),
        (lambda: without("failed", lambda run: run.variant == "prenorm"), "unsure", "No answer: prenorm failed"),
        (lambda: without("failed", lambda run: run.variant != "prenorm"), "unsure",
         "No answer: block_attnres, mgr failed"),
        (lambda: without("failed", lambda run: True), "unsure", "No answer: every run failed"),
        (lambda: without("failed", lambda run: (run.variant == "prenorm") == (run.seed > 0)), "unsure",
         "No answer: no variant completed a seed that prenorm completed"),
    ],
)  # fmt: skip
def test_the_title_states_the_answer(result: Callable[[], StudyResult | Pretended], tone: Tone, title: str) -> None:
    made = result()
    assert answer(made.result if isinstance(made, Pretended) else made) == (tone, title)


@pytest.mark.parametrize(
    ("best", "words"),
    [
        (1.3, "; the whole interval 1.2[0-9] to 1.3[0-9] is above 1, where both are equally fast."),
        (0.8, "; the whole interval 0.7[0-9] to 0.8[0-9] is below 1, where both are equally fast."),
        (1.01, "; a yes needs a whole interval above 1, a no needs it below."),
    ],
)
def test_the_page_explains_its_answer_in_one_sentence(best: float, words: str, tmp_path: Path) -> None:
    made = pretended(2, best=best)
    row = made.result.variants[1]
    need, time = 1 / row.equivalent_tokens.value, 1 / row.throughput_ratio.value
    assert need * time == pytest.approx(1 / row.wall_clock_gain.value)
    facts = (
        f"For the same loss block_attnres needs {need:.2f}× the tokens of prenorm, and each takes {time:.2f}× the time"
    )
    assert re.fullmatch(re.escape(facts) + words, explanation(made.result))
    assert made.page(tmp_path).lead.startswith(f"{facts};")


def test_an_undecided_answer_explains_only_known_remedies(tmp_path: Path) -> None:
    busy = explanation(changed(pretended(2).result, timing=ALONE.model_copy(update={"p90": 0.2})))
    assert busy.startswith("For a yes or no, remove timings/ from the study's folder")
    unknown = pretended(2)
    unknown = replace(unknown, result=changed(unknown.result, **UNKNOWN))
    assert explanation(unknown.result) == explanation(without("missing", lambda run: True)) == ""
    assert unknown.page(tmp_path).lead.startswith(f"{unknown.result.name}: ")


def test_a_variant_with_a_failed_seed_is_not_a_yes() -> None:
    made = pretended(2, best=1.3).result
    assert answer(made)[0] == "good"
    last = made.runs[-1].model_copy(update={"status": "failed", "problem": "the loss was not finite"})
    assert (last.variant, last.budget) == ("block_attnres", 1.0)
    tone, title = answer(lucky := made.model_copy(update={"runs": (*made.runs[:-1], last)}))
    assert tone == "unsure" and title.endswith("but 1 of its 3 seeds failed")
    assert explanation(lucky).endswith("; 1 of its 3 seeds failed, and those left may be the lucky ones.")


def test_a_significant_gain_precedes_a_larger_uncertain_one() -> None:
    result = pretended(3, best=1.3).result
    first, second, third = result.variants
    wide = second.model_copy(update={"wall_clock_gain": Interval(value=1.39, count=3, low=0.9, high=1.6)})
    gains = with_rows(result, (first, wide, third))
    title = f"Yes: the best significant variant, mgr, is {third.wall_clock_gain.value:.2f}× per second"
    assert (answer(gains), best_row(gains)) == (("good", title), gains.variants[2])

    first, second, third = (silent := changed(pretended(3).result, **UNKNOWN)).variants
    wide = second.model_copy(update={"difference": Interval(value=-0.06, count=3, error=0.03, low=-0.2, high=0.1)})
    losses = with_rows(silent, (first, wide, third))
    title = "Not shown: speeds are unknown; mgr has a lower loss, -0.0318 against prenorm"
    assert (answer(losses)[1], best_row(losses)) == (title, losses.variants[2])
    rows = by_gain(pretended(6).result.variants, "prenorm")
    assert [row.name for row in rows][:3] == ["block_attnres", "mgr", "prenorm"]  # the baseline at one


def test_a_gain_shown_only_by_the_ladder_is_reported() -> None:
    unsure = Interval(value=-0.02, count=2, error=0.01, low=-0.05, high=0.01)
    result = changed(pretended(2, best=1.21).result, difference=unsure)
    told = verdict(result.variants[1], result)
    assert told.startswith(
        "block_attnres: no difference shown across seeds (Δ -0.0200, 95 % interval [-0.0500, +0.0100]), "
        "but the ladder, which pools the noise of all its runs, shows a difference; worth 1.28× the tokens ("
    )
    steps = changed(pretended(2, best=1.21, ladder=False).result, difference=unsure)
    assert "), but the gain in steps to the same loss is; 1.19× per step (" in verdict(steps.variants[1], steps)
    neither = changed(result, equivalent_tokens=Interval(value=1.02, count=2, low=0.95, high=1.1))
    assert "block_attnres: no difference shown (Δ -0.0200, " in verdict(neither.variants[1], neither)


def test_gap_to_the_unigram_entropy_is_not_rounded_up() -> None:
    result = pretended(2).result
    entropy = max(row.loss.value for row in result.variants if row.loss) + 0.1452
    known = result.model_copy(update={"dataset": result.dataset.model_copy(update={"unigram_entropy": entropy})})
    assert "ends at least 0.14 below it" in markdown(known)


def test_terminal_and_page_name_the_size_if_there_are_several(tmp_path: Path) -> None:
    pretend = pretended(2)
    large = pretend.result.variants
    loss = Interval(value=7.35, count=3, error=0.01, low=7.3, high=7.4)
    small = tuple(row.model_copy(update={"size": "tiny", "loss": loss}) for row in large)
    result = with_rows(pretend.result, (*small, *large))
    learned = "every variant at mini ends at least 4.00 below it."
    html = study_page(pretend.study, result, {**pretend.records, "tiny": {}}, tmp_path).html()
    told = markdown(result).replace("\\", "")
    assert learned in told and learned in html and "ends at least 0.0" not in told + html
    assert "- block_attnres at mini: lower loss by " in told and "block_attnres at mini: lower loss by " in html
    assert " at mini: " not in markdown(pretend.result)
    assert answer(result)[1].startswith("Yes: block_attnres is 1.06× per second at mini")
    silent = changed(result, **UNKNOWN)
    assert answer(silent)[1].startswith("Not shown at mini: speeds are unknown; ")


def timed(result: StudyResult, busy: str, spread: float) -> StudyResult:
    """The study with isolated step timings, those of one variant with this spread."""
    timing = StepTiming(device="H200", tokens=64, median=1.0, p10=1.0, p90=1.0, count=100, error=0.001)
    wide = timing.model_copy(update={"p10": 1.0 - 0.4 * spread, "p90": 1.0 + 0.6 * spread})
    rows = (row.model_copy(update={"timing": wide if row.name == busy else timing}) for row in result.variants)
    return with_rows(result, rows)


@pytest.mark.parametrize(
    ("busy", "silent", "title"),
    [
        ("block_attnres", ["block_attnres"], "Yes: mgr is "),
        ("prenorm", ["block_attnres", "mgr"], "Not shown: speeds were timed while the machine was busy; "),
    ],
)
def test_steps_timed_on_a_busy_machine_give_no_gain_per_second(
    busy: str, silent: list[str], title: str, tmp_path: Path
) -> None:
    pretend = pretended(3, best=1.2)
    result = timed(pretend.result, busy, 0.51)
    assert answer(result)[1].startswith(title)
    others = [row for row in result.variants if row.name != "prenorm"]
    told = "its speed was timed on a busy machine, so no gain per second is stated."
    assert [row.name for row in others if verdict(row, result).endswith(told)] == silent
    drawn = break_even(result)
    assert {row.name for row in others} - {point.name for point in (drawn.points if drawn else ())} == set(silent)
    sentence = f"The steps of {busy} were timed while the machine was busy (they spread by more than 50%)"
    html = study_page(pretend.study, result, pretend.records, tmp_path).html()
    assert sentence in html and sentence in markdown(result).replace("\\", "")
    assert "remove timings/ from the study's folder and run the study again" in markdown(result)
    titles = [column.title for column in columns(result)]
    for row in others:  # no cell, order or picture uses values that are not stated
        shown = dict(zip(titles, (cell.joined() for cell in cells(row, result)), strict=True))
        stated = {shown["throughput"] != "not stated", shown["wall-clock gain"] != "not stated"}
        assert stated == {row.name not in silent}
    gains = {row.name: row.wall_clock_gain for row in pretend.result.variants if row.wall_clock_gain is not None}
    for line in markdown(result).splitlines():
        name = line.removeprefix("| ").partition(" |")[0]
        assert name not in silent or f"{gains[name].value:.2f}×" not in line
    assert len(silent) == 2 or by_gain(result.variants, "prenorm")[-1].name == silent[0]
    assert ("Not drawn, because their speeds are not known well enough: block_attnres." in html) == (len(silent) == 1)
    assert f"Not drawn by seconds, because their speeds are not known well enough: {', '.join(silent)}." in html
    assert ("validation, by seconds" in html) == (len(silent) == 1)
    assert "busy" not in markdown(timed(pretend.result, busy, 0.49))


def test_the_page_reports_missing_runs_or_ladder(tmp_path: Path) -> None:
    made = pretended(3)
    assert "complete" not in made.page(tmp_path).lead
    missing = tuple(run.model_copy(update={"status": "missing"}) for run in made.result.runs[:2])
    below = {"step_gain": Interval(value=1.04, count=3), "wall_clock_gain": Interval(value=0.9, count=3)}
    lacking = {"runs": (*missing, *made.result.runs[2:]), "ladder": ()}
    page = replace(made, result=changed(made.result.model_copy(update=lacking), **below)).page(tmp_path)
    assert page.lead.endswith("7 of 9 runs are complete.") and "Use --ladder before concluding" in page.html()


def test_seeds_that_a_variant_lacks_are_reported(tmp_path: Path) -> None:
    made = pretended(3)
    assert "of 3 seeds" not in made.page(tmp_path).lead + markdown(made.result)
    rows = [row for row in made.result.variants if row.name != "mgr"]
    mgr = made.result.variants[2]
    mgr = mgr.model_copy(update={"loss": replace(mgr.loss, count=2)})
    last = made.result.runs[-1].model_copy(update={"status": "failed", "problem": "no memory"})
    unequal = made.result.model_copy(update={"variants": (*rows, mgr), "runs": (*made.result.runs[:-1], last)})
    lead = replace(made, result=unequal).page(tmp_path).lead
    assert "block_attnres, mgr against prenorm, 3 seeds (mgr: 2 of 3 seeds), the same tokens" in lead
    text = markdown(unequal)
    assert "- Seeds differ (mgr: 2 of 3 seeds): Δ loss uses only those that a variant shares with prenorm." in text
    shown = {row.name: cells(row, unequal)[2].joined() for row in unequal.variants}
    assert shown["mgr"] == "3.3810 ± 0.0031 (n=2)" and "n=" not in shown["prenorm"]


def test_seeds_missing_in_all_variants_are_not_reported() -> None:
    result = pretended(3).result

    def lacking(missing: Callable[[RunResult], bool]) -> str:
        lost = {"status": "missing"}
        runs = tuple(run.model_copy(update=lost) if missing(run) else run for run in result.runs)
        return unequal_seeds(result.model_copy(update={"runs": runs}))

    assert lacking(lambda run: run.seed == 2) == ""
    crossed = lacking(lambda run: run.seed == (2 if run.variant == "mgr" else 1))
    assert crossed == "prenorm, block_attnres, mgr: 2 of 3 seeds"


def test_comparisons_are_corrected_and_the_best_is_shrunk() -> None:
    assert comparisons_sentence(pretended(2).result) == ""
    result = pretended(16).result
    best = result.variants[1]
    assert best.corrected.low < best.wall_clock_gain.low and best.shrunk.value < best.wall_clock_gain.value
    title = f"Yes: the best of 15, block_attnres, is about {best.shrunk.value:.2f}× per second"
    assert answer(result) == ("good", title)
    told = comparisons_sentence(result)
    assert told.startswith("After Holm's correction for 15 comparisons, gains per second above 1: 1, below 1: 13. ")
    assert f" block_attnres is {best.shrunk.value:.2f}× [{best.shrunk.low:.2f}, {best.shrunk.high:.2f}]." in told
    assert told in markdown(result).replace("\\", "")
    corrected = f"; corrected for 15 comparisons {best.corrected.low:.2f} to {best.corrected.high:.2f})."
    assert verdict(best, result).endswith(corrected)


@pytest.mark.parametrize(("low", "high", "said"), [(1.02, None, "above 1.0"), (None, 1.2, "below 1.")])
def test_an_open_interval_of_the_best_is_put_in_words(low: float | None, high: float | None, said: str) -> None:
    first, *others = (result := pretended(4).result).variants
    gains = [replace(row.wall_clock_gain, low=low, high=high) for row in others]
    rows = [row.model_copy(update={"wall_clock_gain": gain}) for row, gain in zip(others, gains, strict=True)]
    assert f"× (interval {said}" in comparisons_sentence(with_rows(result, (first, *rows)))


def test_verdict_is_not_yes_if_correction_removes_the_gain() -> None:
    weak = Interval(value=1.05, count=3, error=0.02, low=1.01, high=1.09)
    result = changed(pretended(9).result, wall_clock_gain=weak)
    assert answer(result)[0] == "unsure" and " after correction for 8 comparisons" in answer(result)[1]
    told = "), but no gain or loss per second is shown (corrected for 8 comparisons "
    assert told in verdict(result.variants[1], result)
    title = next(i for i, column in enumerate(columns(result)) if column.title == "pays")
    assert {cells(row, result)[title].main for row in result.variants[1:]} == {"not shown"}


@pytest.mark.parametrize(("seeds", "ladder", "tone"), [(2, False, "unsure"), (3, False, "good"), (2, True, "good")])
def test_yes_needs_three_seeds_or_a_ladder(seeds: int, ladder: bool, tone: Tone) -> None:
    result = pretended(2, seeds=seeds, ladder=ladder, best=1.29).result
    assert answer(result)[0] == tone
    few = "2 seeds without a ladder cannot show a gain or loss (use --seeds 3 or --ladder)"
    assert (few in answer(result)[1]) == (few in verdict(result.variants[1], result)) == (tone == "unsure")


def test_the_footer_states_how_the_numbers_were_produced() -> None:
    made = pretended(3)
    runs = [run for found in made.records["mini"].values() for run in found]
    assert provenance(made.result, runs, ["residua compare x"]) == {
        "text": "wiki",
        "training text": "117.00 M tokens",
        "vocabulary": "32,768",
        "unigram entropy": "7.4142 nats per token",
        "seen by a run": "32.77 M tokens",
        "seeds": "3",
        "trained": "2026-11-02",
        "hardware": "NVIDIA H200",
        "software": "Residua 0.2.0, PyTorch 2.13.0, Triton 3.7.1, CUDA 13.0, Python 3.11.9",
        "commit": "0123456789ab",
        "command": "residua compare x",
    }
    assert "trained" not in provenance(made.result, [], [])


def test_a_variant_has_one_colour_in_every_figure() -> None:
    made = pretended(16)
    rows = [row for row in made.result.variants if row.difference is not None][::-1]
    for figure in (
        forest_of_losses(rows, made.result),
        difference_curves(made.records["mini"], "prenorm"),
        precision_costs(made.result, made.result.variants, ["fp8"])["fp8"],
    ):
        for trace in figure.data:
            place = next(i for i, row in enumerate(made.result.variants) if row.name == trace.meta["series"])
            assert (trace.line.color or trace.marker.color) == theme.colour(place)


def test_difference_curves_are_paired_by_seed() -> None:
    made = pretended(3)

    def last(records: Records) -> float:
        traces = difference_curves(records, "prenorm").data
        (line,) = (t for t in traces if t.meta["series"] == "mgr" and t.mode == "lines+markers")
        return line.y[-1]

    everyone = last(made.records["mini"])
    assert everyone == pytest.approx(made.result.variants[2].difference.value, abs=0.004)
    fewer = {**made.records["mini"], "mgr": made.records["mini"]["mgr"][2:]}  # only the last seed completed
    assert abs(last(fewer) - everyone) < 0.004  # against its own seed, which is 0.008 above the first


def test_sections_that_repeat_the_table_are_collapsed(tmp_path: Path) -> None:
    html = pretended(3).page(tmp_path).html()
    for folded in ("Each variant in a sentence", "9 of 9 runs are complete", "The study file"):
        assert f"<summary>{folded}</summary>" in html
    assert html.index("<summary>The study file</summary>") < html.index("[variants]") < html.rindex("</details>")


def test_views_without_numbers_are_omitted(tmp_path: Path) -> None:
    made = pretended(3)

    def bare(run: RunRecord) -> RunRecord:
        return replace(run, train=[], validation=[{**row, "seconds": math.nan} for row in run.validation])

    records = {name: [bare(run) for run in runs] for name, runs in made.records["mini"].items()}
    html = study_page(made.study, made.result, {"mini": records}, tmp_path).html()
    tabs = re.findall(r'<button type="button" role="tab"[^>]*>([^<]*)<', html)
    assert tabs[:2] == ["difference to prenorm", "validation, by tokens"]
    assert not {"validation, by seconds", "training, by tokens", "training, by seconds"} & set(tabs)
