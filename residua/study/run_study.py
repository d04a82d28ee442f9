"""Run a whole study: open the text, plan, train, measure, collect the results, and write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from residua.study import measurements, train_runs
from residua.study.collect_results import collect
from residua.study.config import StudyConfig
from residua.study.extend_study import StudyRecords, complete_records, join, link_results, plan_study, settle
from residua.study.page import Outcome, Supplement, write_report
from residua.study.plan import PlannedRun, StudyPlan, open_dataset
from residua.study.records import RunRecord
from residua.study.results import DatasetFacts
from residua.study.timing import TimingMeasurement, keep_timings, read_timings


def run_study(
    study: StudyConfig,
    out: Path,
    console: Console,
    results: Path | None = None,
    command: str = "",
    supplement: Supplement | None = None,
) -> Outcome:
    """Train the incomplete runs, then write study.toml, results.json, results.md and report.html into `out`.

    The numbers are also saved in the file `results` after every run. If it exists, the study extends it and does not
    train its runs again. No other study may write it meanwhile. The file records `command`; `out` records its path.
    `supplement` adds to the page and to results.md. Low-precision and task measurements and learning rates from an
    earlier study in `out` are reused.
    """
    with train_runs.lock_results(results):
        study = settle(study, out, results)
        whole, questions = begin(study, out, console, results, command)
        whole.require_weights()
        link_results(out, results)
        if whole.plan.trials:
            train_runs.tune_rates(study, whole.plan, out, console)
            whole = join(study, plan_study(study, out, whole.dataset, results), out, whole.dataset, results, command)
        # a killed study loses no numbers
        with train_runs.LiveProgress(console, whole.new, after_each=whole.write) as progress:
            problems = train_runs.run_plan(study, whole.new, out, progress)
        keep_timings(whole.study, whole.plan, out, whole.timings)
        for measurement in measurements_of(study, whole, questions):
            measurement.measure(whole.plan, console)
        whole.write()
        train_runs.finish(study, out)
        return summarise(whole.study, whole.plan, out, problems, whole.facts, whole.known, supplement, whole.commands)


def begin(
    study: StudyConfig, out: Path, console: Console, results: Path | None, command: str
) -> tuple[StudyRecords, measurements.Questions | None]:
    """Plan and announce a study, joined with the one in the file `results` if it exists. Trains nothing."""
    train_runs.refuse_strangers(out)
    dataset = open_dataset(study, progress=console.is_terminal)
    questions = None if study.tasks is None else measurements.open_questions(study.tasks)
    plan = plan_study(study, out, dataset, results)
    plan.check_tokenizer()  # once here, not in every run
    train_runs.announce(console, study, plan)
    whole = join(study, plan, out, dataset, results, command)
    whole.refuse_other_weights()
    train_runs.check_folders((*whole.new.settled, *plan.trials))
    if results is not None and questions is not None:
        measurements.refuse_other_questions(results, questions, whole.known)
    for sentence in (*train_runs.left_out_sentences(whole.study, out), *whole.sentences()):
        console.print(Text(f"• {sentence}"), soft_wrap=True)
    return whole, questions


def measurements_of(
    study: StudyConfig, whole: StudyRecords, questions: measurements.Questions | None
) -> Iterator[TimingMeasurement | measurements.RunMeasurement]:
    """The measurements of a study, in order."""
    yield TimingMeasurement(study, whole.out, whole.known)
    yield measurements.OutlierMeasurement()
    if questions is not None:
        yield measurements.TaskMeasurement(questions, study.quantize, study.calibration)
    if study.quantize:
        yield measurements.PrecisionMeasurement(study)
    if study.diagnose:
        yield measurements.DiagnosisMeasurement(study, whole.out, whole.dataset)


def preview(study: StudyConfig, out: Path, console: Console, results: Path | None = None) -> None:
    """Announce a study (`--plan`): list what remains to train, and add complete runs of `out` to the file `results`.

    Trains nothing. The file changes only if it lacks complete runs of `out`.
    """
    study = settle(study, out, results)
    whole, _ = begin(study, out, console, results, "")
    console.print(whole.progress_sentence(), highlight=False)
    if missing := whole.missing_weights():
        console.print(Text(f"• {missing}"), soft_wrap=True)
    if results is not None:
        console.print(Text(whole.add_complete(study)), soft_wrap=True)


def summarise(
    study: StudyConfig,
    plan: StudyPlan,
    out: Path,
    problems: Mapping[PlannedRun, str],
    dataset: DatasetFacts | None,
    known: Mapping[PlannedRun, RunRecord] | None = None,
    supplement: Supplement | None = None,
    commands: Sequence[str] = (),
) -> Outcome:
    """Collect results from the runs on disk and those `known` from elsewhere, and write the files."""
    records = complete_records(plan, known or {})
    result = collect(study, plan, records, problems, dataset, read_timings(study, plan, out))
    return write_report(study, result, records, out, supplement, commands)
