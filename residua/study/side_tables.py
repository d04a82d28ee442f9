"""Tables beside the main one: accuracies on tasks, outliers of trained models and while training, tried rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from residua.report import Column, Value
from residua.study.entries import NONE
from residua.study.measures import MEAN, Interval, LowTaskMeans, TaskMeans
from residua.study.peaks import EARLY, HALF, Peaks, change
from residua.study.results import StudyResult, VariantResult
from residua.study.statistics import estimate_ratio, geometric_mean
from residua.study.trials import TunedRate

VARIANT = Column("variant", numeric=False)
RATES = "learning rates"
PEAKS = "peaks while training"


class SideTable(NamedTuple):
    """A table of one size: `look_for` says what is healthy, for the page."""

    title: str
    columns: list[Column]
    rows: list[list[Value]]
    look_for: str = ""


def side_tables(result: StudyResult, size: str) -> list[SideTable]:
    """The tables that there are numbers for."""
    made = (_tasks, _low_tasks, _outliers, peak_table, _rates)
    return [table for make in made if (table := make(result, size)) is not None]


def _tasks(result: StudyResult, size: str) -> SideTable | None:
    rows = [row for row in result.rows(size) if row.tasks]
    if not rows:
        return None
    level = f"{result.confidence * 100:g} %"
    names = list(dict.fromkeys(name for row in rows for name in row.tasks))
    first = names[0]
    columns = [VARIANT, _task_column(first, rows)]
    columns.append(
        Column(f"Δ {first} [{level}]", f"less that of {result.baseline}, in points, paired by seed, with its {level} "
               "Student-t interval. If it contains 0, no difference was shown")
    )  # fmt: skip
    columns += [_task_column(name, rows) for name in names[1:]]
    cells = [
        [
            Value(row.name),
            _accuracy(row.tasks.get(first)),
            _points(row.tasks.get(first), row.name == result.baseline),
            *(_accuracy(row.tasks.get(name)) for name in names[1:]),
        ]
        for row in rows
    ]
    return SideTable(
        "tasks",
        columns,
        cells,
        "Accuracy in %, as residua eval measures it: higher is better. Small models are near guessing on hard tasks; "
        "differences there say nothing.",
    )


def _low_tasks(result: StudyResult, size: str) -> SideTable | None:
    rows = [row for row in result.rows(size) if row.low_tasks]
    if not rows:
        return None
    level = f"{result.confidence * 100:g} %"
    columns = [VARIANT]
    for recipe in dict.fromkeys(recipe for row in rows for recipe in row.low_tasks):
        columns.append(Column(recipe, f"mean over all tasks in % after {recipe}: mean over seeds ± standard error"))
        columns.append(
            Column(f"Δ {recipe} [{level}]", "less that of the same models in high precision, in points, with its "
                   f"{level} Student-t interval. If it contains 0, no change was shown")
        )  # fmt: skip
    cells = [
        [Value(row.name), *(cell for column in columns[1::2] for cell in _low_task(row.low_tasks.get(column.title)))]
        for row in rows
    ]
    return SideTable(
        "tasks in low precision",
        columns,
        cells,
        "The tasks' mean accuracy after quantization, in %. The changes are paired with the same models.",
    )


def _low_task(found: LowTaskMeans | None) -> tuple[Value, Value]:
    if found is None:
        return Value(NONE), Value(NONE)
    return _accuracy(TaskMeans(accuracy=found.accuracy)), _change(found.change)


def _task_column(name: str, rows: Sequence[VariantResult]) -> Column:
    chance = next((row.tasks[name].chance for row in rows if name in row.tasks), None)
    guess = "" if chance is None else f"; guessing gives {100 * chance:.1f}"
    what = "mean over all tasks" if name == MEAN else "share of right answers"
    return Column(name, f"{what} in %: mean over seeds ± standard error{guess}")


def _accuracy(found: TaskMeans | None) -> Value:
    if found is None:
        return Value(NONE)
    value = found.accuracy
    error = "(n=1)" if value.error is None else f"± {100 * value.error:.2f}"
    return Value(f"{100 * value.value:.2f}", error, value.value)


def _points(found: TaskMeans | None, is_baseline: bool) -> Value:
    if is_baseline or found is None or found.difference is None:
        return Value(NONE, key=0.0 if is_baseline else None)
    return _change(found.difference)


def _change(change: Interval) -> Value:
    """A difference of accuracies in points, with its interval."""
    shown = f"{100 * change.value:+.2f}"
    if change.low is None or change.high is None:
        return Value(shown, "(n=1, no interval)", change.value)
    return Value(shown, f"[{100 * change.low:+.2f}, {100 * change.high:+.2f}]", change.value)


def _outliers(result: StudyResult, size: str) -> SideTable | None:
    found = [(row.name, row.outliers) for row in result.rows(size) if row.outliers is not None]
    if not found:
        return None
    uniform = next((each.uniform_attention for _, each in found if each.uniform_attention is not None), None)
    floor = "" if uniform is None else f"; uniform attention would give {uniform:.4f}"
    columns = [
        VARIANT,
        Column("peak activation", "the largest |h| that any sublayer reads on the validation text: mean over seeds ± "
               "standard error"),
        Column("residual-sink ratio", "mean |h| over tokens and depth, largest dimension / median dimension"),
        Column("attention sink", f"mean attention to the first token, over softmax layers{floor}"),
    ]  # fmt: skip
    rows = [
        [Value(name), _short(each.peak_activation), _short(each.sink_ratio), _short(each.attention_sink)]
        for name, each in found
    ]
    return SideTable(
        "outliers",
        columns,
        rows,
        "What the trained models have in them, after the last step. Large peaks and sink ratios cost in low precision; "
        "much attention on the first token means that heads have nothing to look at.",
    )


def _short(value: Interval | None) -> Value:
    if value is None:
        return Value(NONE)
    return Value(f"{value.value:.4g}", "(n=1)" if value.error is None else f"± {value.error:.2g}", value.value)


def peak_table(result: StudyResult, size: str, variants: Sequence[str] = ()) -> SideTable | None:
    """How peaks grew, of all variants or some: None if telemetry measured none."""
    rows = []
    for row in result.rows(size):
        found = [run.peaks for run in result.complete(size, row.name) if run.peaks is not None]
        if found and (not variants or row.name in variants):
            rows.append([Value(row.name), *_peak_cells(found, result.confidence)])
    if not rows:
        return None
    level = f"{result.confidence * 100:g} %"
    over = "geometric mean over seeds, the smallest and the largest"
    columns = [
        VARIANT,
        Column(f"at {EARLY:.0%}", f"the largest |h| that a sublayer reads when a tenth of the steps was done: {over}"),
        Column(f"at {HALF:.0%}", f"the same at half of the steps: {over}"),
        Column("at the end", f"the same after the last step: {over}"),
        Column(f"growth [{level}]", f"at the end / at {EARLY:.0%}, paired by seed, with its {level} Student-t interval "
               "of logarithms"),
        Column(f"second half [{level}]", f"at the end / at {HALF:.0%}, likewise"),
    ]  # fmt: skip
    return SideTable(
        PEAKS,
        columns,
        rows,
        "The largest |h| of any layer, on the same few tokens every time. Healthy: peaks that level off.",
    )


def _peak_cells(runs: Sequence[Peaks], level: float) -> list[Value]:
    early, half, last = ([run.at(share) for run in runs] for share in (EARLY, HALF, 1.0))
    return [
        *map(_over_seeds, (early, half, last)),
        _factor([change(before, after) for before, after in zip(early, last, strict=True)], level),
        _factor([change(before, after) for before, after in zip(half, last, strict=True)], level),
    ]


def _over_seeds(values: Sequence[float | None]) -> Value:
    known = [value for value in values if value]
    if len(known) < len(values):
        return Value(NONE)
    middle = geometric_mean(known)
    spread = "(n=1)" if len(known) == 1 else f"({_digits(min(known))} to {_digits(max(known))})"
    return Value(_digits(middle), spread, middle)


def _digits(value: float) -> str:
    """Three digits, without an exponent below a million."""
    return f"{float(f'{value:.3g}'):,g}"


def _factor(values: Sequence[float | None], level: float) -> Value:
    known = [value for value in values if value]
    if len(known) < len(values):
        return Value(NONE)
    found = estimate_ratio(known, level)
    if found.low is None or found.high is None:
        return Value(f"{found.value:.3g}×", "(n=1, no interval)", found.value)
    return Value(f"{found.value:.3g}×", f"[{found.low:.3g}, {found.high:.3g}]", found.value)


def _rates(result: StudyResult, size: str) -> SideTable | None:
    rates = [rate for rate in result.tuning if rate.size == size]
    if not rates:
        return None
    factors = sorted({trial.factor for rate in rates for trial in rate.trials})
    columns = [
        VARIANT,
        *(Column(f"{factor:g}× lr", "validation loss after the short run with this multiple") for factor in factors),
        Column("chosen", "the multiple of all the variant's runs, and the learning rate that it comes to"),
    ]
    rows = []
    for rate in rates:
        losses = {trial.factor: trial for trial in rate.trials}
        tried = [_trial(losses[f].loss) if f in losses else Value(NONE) for f in factors]
        rows.append([Value(rate.variant), *tried, Value(f"{rate.chosen:g}×", f"({rate.best.rate:g})", rate.chosen)])
    first = rates[0]
    return SideTable(
        RATES,
        columns,
        rows,
        f"Each variant's rate was chosen on runs of {first.steps} steps with seed {first.seed}, which no other run "
        "has, and then fixed. A choice at either end of the list was perhaps not searched far enough.",
    )


def _trial(loss: float | None) -> Value:
    return Value("failed") if loss is None else Value(f"{loss:.4f}")


def rate_sentence(rate: TunedRate, several: bool) -> str:
    """The rate that was chosen for a variant, in a sentence."""
    where = f" ({rate.size})" if several else ""
    note = f"; {rate.note}" if rate.note else ""
    return f"{rate.variant}{where}: learning rate {rate.best.rate:g}, {rate.chosen:g}× its own{note}."
