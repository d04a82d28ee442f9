"""A study from start to end: open the text, plan, train, collect the results, write them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from residua.config.settings import ConfigError
from residua.data import Dataset, unigram_entropy
from residua.data.source import find_data, open_data
from residua.files import write_atomically
from residua.reading import counted
from residua.report.plain import outcome
from residua.study import entries, sentences
from residua.study.config import StudyConfig
from residua.study.diagnosed import SIDE_BY_SIDE, diagnose_runs
from residua.study.extend import (
    Extended,
    alone,
    extend,
    extend_sentences,
    missing_weights,
    refuse_other_weights,
    settled,
)
from residua.study.outliers import measure_outliers
from residua.study.page import Supplement, study_page
from residua.study.picture import picture
from residua.study.plan import (
    STARTED,
    STUDY,
    PlannedRun,
    StudyPlan,
    base_run,
    check_folders,
    left_out_sentences,
    make_plan,
    refuse_strangers,
    same_sentences,
    undone_sentences,
)
from residua.study.plots import Records
from residua.study.progress import LiveProgress
from residua.study.quantized import measure_runs
from residua.study.remembered import remember_results
from residua.study.results import DatasetFacts, StudyResult, collect
from residua.study.runner import own_results, run_plan, threads_per_run
from residua.study.runs import RunRecord, is_complete, read_run
from residua.study.saved import SavedStudy, save_study
from residua.study.side_tables import rate_sentence
from residua.study.tables import markdown
from residua.study.tasked import Questions, Recipes, open_questions, refuse_other_questions, score_runs
from residua.study.timing import keep_timings, read_timings, time_variants
from residua.study.trials import keep_rates
from residua.study.tuning import chosen_rates, known_rates
from residua.train.result import final_tokens
from residua.train.start import check_tokenizer

NOWHERE = Path(os.devnull)
"""The folder of a study that has none: nothing is found in it."""
RESULTS, TABLE, REPORT, PICTURE = "results.json", "results.md", "report.html", "gains.svg"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a study: its results, its page, and the page of diagnoses if there is one."""

    result: StudyResult
    report: Path
    diagnosis: Path | None = None

    @property
    def complete(self) -> bool:
        """Whether every run completed."""
        return all(run.status == "complete" for run in self.result.runs)


def conduct(
    study: StudyConfig,
    out: Path,
    console: Console,
    results: Path | None = None,
    command: str = "",
    supplement: Supplement | None = None,
) -> Outcome:
    """Train the incomplete runs, then write study.toml, results.json, results.md and report.html into `out`.

    The numbers are also kept in the file `results`, after every run. If it exists, the study extends it: runs in it are
    not trained again. No other study may write it meanwhile, and `out` remembers where it is. `command` is recorded
    there. `supplement` adds to the page and to results.md. What an earlier study in `out` measured in low precision or
    on tasks is kept, and so are the learning rates that it chose.
    """
    with own_results(results):
        study = settled(study, out, results)
        keeper = begin(study, out, console, results, command)
        if missing := missing_weights(keeper.whole):
            raise ConfigError(missing)
        remember_results(out, results)
        if keeper.whole.plan.trials:
            _tune(study, keeper.whole.plan, out, console)
            keeper = keeper.planned_again(study)
        whole = keeper.whole
        with LiveProgress(console, whole.new) as progress:
            problems = run_plan(study, whole.new, out, Kept(progress, keeper))
        keep_timings(whole.study, whole.plan, out, whole.timings)
        time_variants(study, whole.plan, out, console, whole.known)
        measure_outliers(whole.plan, console)
        if keeper.questions is not None:
            score_runs(keeper.questions, whole.plan, console, Recipes(study.quantize, study.calibration))
        measure_runs(study, whole.plan, console)
        diagnose_runs(study, whole.plan, out, keeper.dataset, console)
        keeper.write()
        write_atomically(out / STUDY, study.to_toml())
        (out / STARTED).unlink(missing_ok=True)
        return summarise(whole.study, whole.plan, out, problems, keeper.facts, whole.known, supplement, keeper.commands)


def begin(study: StudyConfig, out: Path, console: Console, results: Path | None, command: str) -> Keeper:
    """Plan and announce a study, merged with the one in the file `results` if that exists; trains nothing."""
    refuse_strangers(out)
    dataset = open_dataset(study, console)
    questions = None if study.tasks is None else open_questions(study.tasks)
    plan = make_plan(study, out, dataset, known_rates(out, results))
    first = next(iter(plan.models.values())).config
    check_tokenizer(first, open_data(first))  # once here, not in every run
    announce(console, study, plan)
    whole = _whole(study, plan, out, dataset, results)
    refuse_other_weights(whole, results)
    check_folders((*whole.new.settled, *plan.trials))
    told = left_out_sentences(whole.study, out)
    if results is not None and whole.known:
        if questions is not None:
            refuse_other_questions(results, questions, whole.known)
        told += extend_sentences(results, whole)
    for sentence in told:
        console.print(Text(f"• {sentence}"), soft_wrap=True)
    return Keeper(whole, out, dataset, results, command, questions)


def _whole(study: StudyConfig, plan: StudyPlan, out: Path, dataset: Dataset, results: Path | None) -> Extended:
    if results is None or not results.exists():
        return alone(study, plan)
    return extend(results, study, plan, dataset.fingerprint, out)


def _tune(study: StudyConfig, plan: StudyPlan, out: Path, console: Console) -> None:
    """Train the trials of learning rates, and keep which rate each variant gets."""
    trials = replace(plan, runs=plan.trials)
    with LiveProgress(console, trials) as progress:
        problems = run_plan(study, trials, out, progress)
    rates = chosen_rates(study, plan, problems)
    keep_rates(out, rates)
    for rate in rates:
        console.print(outcome(rate_sentence(rate, several=len(study.sizes) > 1)))


class Keeper:
    """Writes the numbers of the complete runs into the results file, if there is one.

    `questions` are those of the study's tasks.
    """

    def __init__(
        self,
        whole: Extended,
        out: Path,
        dataset: Dataset,
        results: Path | None,
        command: str,
        questions: Questions | None = None,
    ) -> None:
        self.whole, self.dataset, self.questions, self._out, self._results = whole, dataset, questions, out, results
        self._command = command
        self.commands = tuple(dict.fromkeys((*whole.commands, command) if command else whole.commands))

    def planned_again(self, study: StudyConfig) -> Keeper:
        """The same, once learning rates have been chosen."""
        return self.planned_as(study, make_plan(study, self._out, self.dataset, known_rates(self._out, self._results)))

    def planned_as(self, study: StudyConfig, plan: StudyPlan) -> Keeper:
        """The same with another study and plan, merged with what the file holds now."""
        whole = _whole(study, plan, self._out, self.dataset, self._results)
        return Keeper(whole, self._out, self.dataset, self._results, self._command, self.questions)

    @cached_property
    def facts(self) -> DatasetFacts:
        split = self.dataset.split("validation")
        return describe(self.dataset, final_tokens(self.whole.plan.runs[0].config, split.tokens))

    def write(self) -> None:
        """Write the file."""
        if self._results is None:
            return
        study, plan = self.whole.study, self.whole.plan
        records = complete_records(plan, self.whole.known)
        timings = {**self.whole.timings, **{k: v for k, v in read_timings(study, plan, self._out).items() if v}}
        saved = save_study(study, plan, records, self.dataset.fingerprint, self.facts, timings, self.commands)
        saved.write(self._results)


class Kept:
    """A Watcher that keeps the numbers after every run, so that a killed study loses none."""

    def __init__(self, shown: LiveProgress, keeper: Keeper) -> None:
        self._keeper = keeper
        self.started, self.advanced, self._finished = shown.started, shown.advanced, shown.finished

    def finished(self, run: PlannedRun, problem: str) -> None:
        self._finished(run, problem)
        self._keeper.write()


def complete_records(plan: StudyPlan, known: Mapping[PlannedRun, RunRecord]) -> dict[PlannedRun, RunRecord]:
    """What was measured in the complete runs: on disk, or `known` from elsewhere."""
    own = {run: read_run(run.folder, run.config) for run in plan.runs if is_complete(run.folder, run.config)}
    joined = {run: record.filled(known[run]) if run in known else record for run, record in own.items()}
    return {run: joined.get(run) or known[run] for run in plan.runs if run in own or run in known}


def open_dataset(study: StudyConfig, console: Console) -> Dataset:
    """The text of every run: the study's, else its base's, else the embedded corpus (made on first use)."""
    config = base_run(study, study.sizes[0])
    if study.data:
        return Dataset.open(study.data)
    return find_data(config, progress=console.is_terminal)


def describe(dataset: Dataset, limit_tokens: int) -> DatasetFacts:
    """Facts to compare the losses with; the entropy is of the text that losses are measured on."""
    return DatasetFacts(
        path=str(dataset.path),
        vocab_size=dataset.vocab_size,
        train_tokens=dataset.split("train").tokens,
        validation_tokens=dataset.split("validation").tokens,
        bytes_per_token=dataset.bytes_per_token("validation"),
        unigram_entropy=unigram_entropy(dataset, limit_tokens=limit_tokens),
    )


def summarise(
    study: StudyConfig,
    plan: StudyPlan,
    out: Path,
    problems: dict[PlannedRun, str],
    dataset: DatasetFacts | None,
    known: Mapping[PlannedRun, RunRecord] | None = None,
    supplement: Supplement | None = None,
    commands: Sequence[str] = (),
) -> Outcome:
    """Collect the runs on disk, and those `known` from elsewhere, into results, and write the files."""
    records = complete_records(plan, known or {})
    result = collect(study, plan, records, problems, dataset, read_timings(study, plan, out))
    return _write(study, result, records, out, supplement, commands)


def _write(
    study: StudyConfig,
    result: StudyResult,
    records: dict[PlannedRun, RunRecord],
    out: Path,
    supplement: Supplement | None = None,
    commands: Sequence[str] = (),
) -> Outcome:
    write_atomically(out / RESULTS, result.model_dump_json(indent=1) + "\n")
    added = "" if supplement is None else f"\n{supplement.markdown(result)}"
    write_atomically(out / TABLE, markdown(result) + added)
    if (drawn := picture(result)) is not None:
        write_atomically(out / PICTURE, drawn)
    page = study_page(study, result, _by_size(study, records), out, supplement, commands)
    inside = out / SIDE_BY_SIDE / REPORT
    return Outcome(result, page.write(out / REPORT), inside if inside.exists() else None)


def show_saved(saved: SavedStudy, out: Path | None = None, supplement: Supplement | None = None) -> StudyResult:
    """The results of a saved study; with `out`, also its files and page there, without folders of runs."""
    study, plan = saved.config, saved.plan(out or NOWHERE)
    records = saved.records(plan)
    result = collect(study, plan, records, {}, saved.dataset, saved.timings)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _write(study, result, records, out, supplement, saved.commands)
    return result


def announce(console: Console, study: StudyConfig, plan: StudyPlan) -> None:
    """Print the planned models, and what parameter matching changed."""
    first = plan.runs[0].config
    console.print(
        f"{counted(len(study.variants), 'variant')} × {counted(len(study.seeds), 'seed')}"
        f"{f' × {len(study.sizes)} sizes' if study.scaling else ''} = {counted(len(plan.compared), 'run')}, "
        f"{f'and {len(plan.ladder)} of the ladder, ' if plan.ladder else ''}"
        f"{f'and {len(plan.trials)} to tune learning rates, ' if plan.trials else ''}"
        f"{study.workers} at a time on {counted(threads_per_run(study), 'thread')} each",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("size", "variant", "parameters", "steps", "tokens", "matching"):
        table.add_column(title, justify="left" if title in ("size", "variant", "matching") else "right")
    for (size, name), model in plan.models.items():
        steps = model.config.train.steps
        tokens = entries.count(steps * model.config.tokens_per_step)
        table.add_row(
            Text(size), Text(name), f"{model.parameters:,}", str(steps), tokens, model.matching or "unchanged"
        )
    for run in plan.ladder:
        if run.seed == study.seeds[0]:
            model, steps = plan.models[run.size, run.variant], run.config.train.steps
            tokens = entries.count(steps * run.config.tokens_per_step)
            named = Text(f"{run.variant}, ladder {run.budget:g}×")
            table.add_row(Text(run.size), named, f"{model.parameters:,}", str(steps), tokens, "unchanged")
    console.print(table)
    console.print(f"text: {first.data.path}, vocabulary {first.model.vocab_size:,}", highlight=False, soft_wrap=True)
    for sentence in (*sentences.cost_sentences(plan), *undone_sentences(study), *same_sentences(study, plan)):
        console.print(Text(f"• {sentence}"), soft_wrap=True)


def _by_size(study: StudyConfig, records: dict[PlannedRun, RunRecord]) -> dict[str, Records]:
    return {
        size: {
            name: [
                record for run, record in records.items() if (run.size, run.variant, run.budget) == (size, name, 1.0)
            ]
            for name in study.variants
        }
        for size in study.sizes
    }
