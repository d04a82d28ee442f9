"""The tables of a study: columns and cells, shared with the page, and their terminal and Markdown forms.

A column of the main table is declared once, with its cell for a row. The side tables show the other measurements: task
accuracies, outliers of trained models and during training, low precision, and tried learning rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from residua.report import Column, Value, plain
from residua.report.tables import DataTable
from residua.study import verdicts
from residua.study.gains import loses, pays, speed_is_shown
from residua.study.records import EARLY, HALF, change
from residua.study.results import MEAN, PROJECTED, LowTaskMeans, SourceMeans, StudyResult, TaskMeans, VariantResult
from residua.study.statistics import Interval, count, estimate_ratio, geometric_mean

NONE = "—"
UNSTATED = "not stated"  # a speed or gain measured too poorly to support conclusions
ONE, SAME = Value(NONE, key=1.0), Value(NONE, key=0.0)  # the baseline's gain and difference, only for sorting
VARIANT = Column("variant", numeric=False)
PAYS, STEPWISE, EQUIVALENT, TEXT_ERROR = "pays", "step-wise gain", "equivalent tokens", "± text"
LOW_PRECISION, RATES, PEAKS = "low precision", "learning rates", "peaks while training"
RACE = "race to a loss of "
SPARED = ("training loss", "bits/byte", "memory", "parameters")  # columns that a narrow terminal drops, in this order


class _MainColumn(NamedTuple):
    """A column of the main table: its cell for a variant, and the baseline's cell if it differs."""

    title: str
    meaning: str
    cell: Callable[[VariantResult], Value]
    baseline: Value | None = None
    shown: bool = True


def _main_columns(result: StudyResult) -> list[_MainColumn]:
    level, seeds, rows, first = f"{result.confidence * 100:g} %", len(result.seeds), result.variants, result.baseline
    how = "each step timed alone" if any(row.timing is not None for row in rows) else "in training"
    on_text = ""
    if result.validated_tokens is not None and result.dataset is not None:
        on_text = f", on {result.validated_tokens:,} of {result.dataset.validation_tokens:,} validation tokens"
    several = any(sum(row.corrected is not None for row in result.rows(size)) > 1 for size in result.sizes)
    declared = [
        _MainColumn("variant", "the architecture; all others are compared with the baseline",
            lambda row: Value(row.name, "(baseline)" * (row.name == first))),
        _MainColumn("parameters", "all parameters, including embedding and head, and the difference from the baseline",
            lambda row: Value(count(row.parameters), "" if row.name == first else f"({row.parameters_ratio - 1:+.2%})",
                              row.parameters)),
        _MainColumn("validation loss", f"cross-entropy in nats per token after the last step{on_text}: mean over "
            "seeds ± standard error; n is given where runs are missing. Lower is better",
            lambda row: _mean(row.loss, ".4f", ".4f", seeds=seeds)),
        _MainColumn("bits/byte", "the same loss per byte of text, which does not depend on the tokenizer",
            lambda row: Value(NONE if row.bits_per_byte is None else f"{row.bits_per_byte.value:.4f}")),
        _MainColumn(f"Δ loss [{level}]", "loss minus the baseline's, paired by seed (same data order), with its "
            f"{level} Student-t interval. If it contains 0, no difference was shown",
            lambda row: _difference(row.difference), SAME),
        _MainColumn(TEXT_ERROR, "standard error of Δ loss from sampling the validation text, paired by document. "
            "The interval of Δ loss covers seeds only",
            lambda row: Value(NONE if row.text_error is None else f"± {row.text_error:.4f}", key=row.text_error),
            shown=any(row.text_error is not None for row in rows)),  # results of older versions lack it
        _MainColumn(STEPWISE, "baseline tokens / our tokens to reach the higher of the two final losses. Above 1: "
            "the variant needs fewer tokens",
            lambda row: _ratio(row.step_gain), ONE),
        _MainColumn(EQUIVALENT, "tokens that the baseline, trained with a full schedule, needs for our loss / our "
            "tokens. From the fit L(D) = E + B·D^−b to the baseline's budgets; * lies outside them",
            lambda row: _ratio(row.equivalent_tokens, "*" * row.extrapolated), ONE, shown=bool(result.ladder)),
        _MainColumn("throughput", f"our tokens per second / the baseline's, {how}",
            lambda row: _throughput(row, result)),
        _MainColumn("wall-clock gain", f"{EQUIVALENT if result.ladder else STEPWISE} × throughput: baseline seconds / "
            "our seconds to the same loss",
            lambda row: _per_second(row, result), ONE),
        _MainColumn(PAYS, f"whether the wall-clock gain differs from 1, with its {level} interval after Holm's "
            "correction for the number of variants compared. Without a ladder, this needs three seeds",
            _judged, ONE, shown=several),
        _MainColumn("memory", "peak memory of one run: GPU allocations, or the process's resident set on a CPU",
            lambda row: Value(NONE if row.memory_gib is None else f"{row.memory_gib:.2f} GiB")),
        _MainColumn("training loss", "mean over the last 200 steps, or the last tenth of a short run, in nats per "
            "token: mean over seeds ± standard error",
            lambda row: _mean(row.train_loss, ".4f", ".4f", seeds=seeds),
            shown=any(row.train_loss is not None for row in rows)),  # results of older versions lack it
    ]  # fmt: skip
    return [column for column in declared if column.shown]


def columns(result: StudyResult) -> list[Column]:
    """The columns of the study's table, with their explanations."""
    return [Column(each.title, each.meaning, numeric=each.title != "variant") for each in _main_columns(result)]


def cells(row: VariantResult, result: StudyResult) -> list[Value]:
    """One row of the study's table."""
    is_baseline = row.name == result.baseline
    return [each.baseline if is_baseline and each.baseline else each.cell(row) for each in _main_columns(result)]


def study_tables(result: StudyResult) -> list[DataTable]:
    """Every table: the main and side tables of each size, and the fits over sizes."""
    several = len(result.sizes) > 1
    shown = [
        DataTable(f"size {size}" * several, columns(result), [cells(row, result) for row in result.rows(size)])
        for size in result.sizes
    ]
    low = [(size, table) for size in result.sizes if (table := precision_table(result, size)) is not None]
    beside = [(size, table) for size in result.sizes for table in side_tables(result, size)]
    shown += [
        table._replace(title=f"{table.title}, size {size}" if several else table.title)
        for size, table in (*low, *beside)
    ]
    over_sizes = (joint_table(result), scaling_table(result))
    return [*shown, *(table for table in over_sizes if table is not None)]


def side_tables(result: StudyResult, size: str) -> list[DataTable]:
    """The side tables that have data, except low precision, which has its own section."""
    makers = (race_table, _sources, _tasks, _low_tasks, _outliers, peak_table, _rates)
    return [table for make in makers if (table := make(result, size)) is not None]


def precision_table(result: StudyResult, size: str) -> DataTable | None:
    """Outliers, and the loss with every recipe; None if no model was quantized."""
    measured = [(row.name, row.low_precision) for row in result.rows(size) if row.low_precision is not None]
    if not measured:
        return None
    lows = [low for _, low in measured]
    return DataTable.of(
        LOW_PRECISION,
        "The loss added to each trained model by low precision. Healthy: little, with or without SmoothQuant. A "
        "large peak or sink ratio means outliers, which leave fewer levels for all other values.",
        _named(name for name, _ in measured),
        (Column("peak activation", "the largest value that any sublayer reads; mean over seeds"),
         [Value(f"{low.peak_activation:.4g}") for low in lows]),
        (Column("residual-sink ratio", "mean |h| over tokens and depth, largest dimension / median dimension"),
         [Value(f"{low.sink_ratio:.4g}") for low in lows]),
        (Column("loss", "validation loss in high precision (bf16 on a GPU, fp32 on a CPU), on the validation text "
            "used during training"),
         [_mean(low.loss, ".4f", ".4f") for low in lows]),
        *((Column(recipe, f"loss after {_describe_recipe(recipe)}, and the increase over high precision"),
           [_quantized(low.losses[recipe], low.costs[recipe]) for low in lows]) for recipe in lows[0].losses),
    )  # fmt: skip


def _describe_recipe(name: str) -> str:
    """A recipe in words: W8A8 or W4A4, the scheme, and SmoothQuant if used."""
    scheme, _, smoothing = name.partition("+")
    bits = "W4A4" if scheme.startswith("nvfp4") else "W8A8"
    return f"{bits} ({scheme}{', SmoothQuant' if smoothing else ''})"


def _quantized(loss: Interval | None, cost: Interval | None, missing: str = "not finite") -> Value:
    if loss is None or cost is None:
        return Value(missing if loss is None or missing else f"{loss.value:.4f}")
    return Value(f"{loss.value:.4f}", f"({cost.value:+.4f}{'' if cost.error is None else f' ± {cost.error:.4f}'})")


def joint_table(result: StudyResult) -> DataTable | None:
    """Equivalent tokens at every size and projected beyond the largest; None without a law of sizes and budgets."""
    if result.joint is None:
        return None
    level = f"{result.confidence * 100:g} % intervals after Holm's correction for the variants compared"
    tenfold = f"at {PROJECTED:g}× the compute"
    names = [name for name in dict.fromkeys(row.name for row in result.variants) if name != result.baseline]
    at, by_name = {(row.name, row.size): row for row in result.variants}, {gain.name: gain for gain in result.projected}
    gains = [by_name.get(name) for name in names]
    return DataTable.of(
        "over sizes",
        verdicts.joint_sentence(result),
        _named(names),
        *((Column(Path(size).stem, f"{EQUIVALENT} at this size, from the fit over all sizes, with {level}"),
           [_sized(at.get((name, size))) for name in names]) for size in result.sizes),
        (Column("per tenfold compute", "the factor by which the gain changes per tenfold compute, at constant "
            "tokens per parameter; below 1 it shrinks"),
         [_ratio(None if gain is None else gain.trend) for gain in gains]),
        (Column(tenfold, f"the gain at {PROJECTED:g} times the compute of the largest run, if that trend continues, "
                f"with {level}"),
         [_ratio(None if gain is None else gain.corrected or gain.tokens) for gain in gains]),
        (Column(f"per second {tenfold}", "the same × throughput at the largest size, which is not extrapolated"),
         [_ratio(None if gain is None else gain.seconds_corrected or gain.seconds) for gain in gains]),
    )  # fmt: skip


def _sized(row: VariantResult | None) -> Value:
    if row is None:
        return Value(NONE)
    return _ratio(row.equivalent_corrected or row.equivalent_tokens, "*" * row.extrapolated)


def scaling_table(result: StudyResult) -> DataTable | None:
    """The fits of loss against compute; None if there are none."""
    fits = result.scaling
    return DataTable.of(
        "compute scaling",
        "If two lines are parallel, the advantage persists as models grow; if they meet, it vanishes. Two sizes "
        "always lie on a line: trust a fit of three or more.",
        (VARIANT, [Value(fit.name, "(baseline)" * (fit.name == result.baseline)) for fit in fits]),
        (Column("L = A·C^−α", "least-squares fit of ln L on ln C over all runs; C in training FLOPs"),
         [Value(f"{fit.scale:.4g}·C^−{fit.exponent:.4f}") for fit in fits]),
        (Column("α", "how fast loss falls with compute"), [Value(f"{fit.exponent:.4f}") for fit in fits]),
        (Column("fitted loss", "the fit at the largest compute of the baseline"),
         [Value(f"{fit.scale * fit.at_compute**-fit.exponent:.4f}") for fit in fits]),
        (Column(f"compute advantage [{result.confidence * 100:g} %]",
                "baseline's compute for that loss / ours. Above 1 saves compute"),
         [_ratio(None if fit.name == result.baseline else fit.advantage) for fit in fits]),
    )  # fmt: skip


def race_table(result: StudyResult, size: str) -> DataTable | None:
    """Tokens and seconds to the target; None without a target."""
    if result.target is None:
        return None
    level, rows = f"{result.confidence * 100:g} %", result.rows(size)
    races = [row.race for row in rows if row.race is not None]
    return DataTable.of(
        f"{RACE}{result.target:g}",
        verdicts.race_sentence(result, size),
        _named(row.name for row in rows if row.race is not None),
        (Column("reached", f"runs that reached a validation loss of {result.target:g} during training"),
         [Value(f"{race.reached} of {race.runs}") for race in races]),
        (Column("tokens", f"training tokens to reach that loss: geometric mean over runs, with its {level} interval"),
         [_tokens(race.tokens) for race in races]),
        (Column("seconds", "tokens × seconds of a step timed alone"),
         [Value(NONE if race.seconds is None else f"{race.seconds.value:,.4g} s") for race in races]),
        (Column(f"seconds / {result.baseline}'s", f"with its {level} interval; below 1 is faster"),
         [_ratio(race.ratio) for race in races]),
        (Column("p", "p-value of Welch's one-sided t-test that it is faster, after Holm's correction for the "
                f"variants compared; significant below {verdicts.RACE_LEVEL:g}"),
         [Value(NONE if race.adjusted is None else f"{race.adjusted:.2g}", key=race.adjusted) for race in races]),
    )  # fmt: skip


def _tokens(tokens: Interval | None) -> Value:
    if tokens is None:
        return Value(NONE)
    ends = "" if tokens.low is None or tokens.high is None else f"[{count(tokens.low)}, {count(tokens.high)}]"
    return Value(count(tokens.value), ends)


def _sources(result: StudyResult, size: str) -> DataTable | None:
    rows = [row for row in result.rows(size) if row.sources]
    meaning = (
        f"bits per byte on this source, mean over seeds, and the difference from {result.baseline} ± its "
        "standard error over seeds"
    )
    return DataTable.of(
        "bits per byte by source",
        "The last validation, split by the sources of the text. Lower is better; a gain on only one source "
        "may be specific to that text.",
        _named(row.name for row in rows),
        *(
            (Column(name, meaning), [_bits(row.sources.get(name)) for row in rows])
            for name in dict.fromkeys(name for row in rows for name in row.sources)
        ),
    )


def _bits(source: SourceMeans | None) -> Value:
    if source is None:
        return Value(NONE)
    return _quantized(source.bits_per_byte, source.difference, missing="")


def _tasks(result: StudyResult, size: str) -> DataTable | None:
    rows = [row for row in result.rows(size) if row.tasks]
    if not rows:
        return None
    level = f"{result.confidence * 100:g} %"
    first, *others = (
        (_task_column(name, rows), [_accuracy(row.tasks.get(name)) for row in rows])
        for name in dict.fromkeys(name for row in rows for name in row.tasks)
    )
    name = first[0].title
    changes = {row.name: row.tasks[name].difference for row in rows if name in row.tasks}
    difference = Column(
        f"Δ {name} [{level}]",
        f"minus that of {result.baseline}, in points, paired by seed, with its {level} Student-t interval. If it "
        "contains 0, no difference was shown",
    )
    return DataTable.of(
        "tasks",
        "Accuracy in %, as residua eval measures it: higher is better. Small models are near guessing on "
        "hard tasks, where differences mean nothing.",
        _named(row.name for row in rows),
        first,
        (
            difference,
            [
                SAME if row.name == result.baseline else _difference(changes.get(row.name), "+.2f", scale=100)
                for row in rows
            ],
        ),
        *others,
    )


def _low_tasks(result: StudyResult, size: str) -> DataTable | None:
    rows, level = [row for row in result.rows(size) if row.low_tasks], f"{result.confidence * 100:g} %"
    columns = [_named(row.name for row in rows)]
    for recipe in dict.fromkeys(recipe for row in rows for recipe in row.low_tasks):
        means = [row.low_tasks.get(recipe) for row in rows]
        columns += [
            (Column(recipe, f"mean over all tasks in % after {recipe}: mean over seeds ± standard error"),
             [_accuracy(low) for low in means]),
            (Column(f"Δ {recipe} [{level}]", "minus that of the same models in high precision, in points, with its "
                    f"{level} Student-t interval. If it contains 0, no change was shown"),
             [_difference(None if low is None else low.change, "+.2f", scale=100) for low in means]),
        ]  # fmt: skip
    look_for = (
        "Mean accuracy over tasks after quantization, in %. Changes are relative to the same models before "
        "quantization."
    )
    return DataTable.of("tasks in low precision", look_for, *columns)


def _task_column(name: str, rows: Sequence[VariantResult]) -> Column:
    chance = next((row.tasks[name].chance for row in rows if name in row.tasks), None)
    guess = "" if chance is None else f"; guessing gives {100 * chance:.1f}"
    what = "mean over all tasks" if name == MEAN else "share of correct answers"
    return Column(name, f"{what} in %: mean over seeds ± standard error{guess}")


def _accuracy(value: TaskMeans | LowTaskMeans | None) -> Value:
    return _mean(None if value is None else value.accuracy, ".2f", ".2f", scale=100)


def _outliers(result: StudyResult, size: str) -> DataTable | None:
    measured = [(row.name, row.outliers) for row in result.rows(size) if row.outliers is not None]
    outliers = [each for _, each in measured]
    uniform = next((each.uniform_attention for each in outliers if each.uniform_attention is not None), None)
    floor = "" if uniform is None else f"; uniform attention would give {uniform:.4f}"
    return DataTable.of(
        "outliers",
        "Activations of the trained models, after the last step. Large peaks and sink ratios are costly in low "
        "precision; much attention on the first token means that heads find nothing to attend to.",
        _named(name for name, _ in measured),
        (Column("peak activation", "the largest |h| that any sublayer reads on the validation text: mean over seeds ± "
                "standard error"),
         [_mean(each.peak_activation) for each in outliers]),
        (Column("residual-sink ratio", "mean |h| over tokens and depth, largest dimension / median dimension"),
         [_mean(each.sink_ratio) for each in outliers]),
        (Column("attention sink", f"mean attention to the first token, over softmax layers{floor}"),
         [_mean(each.attention_sink) for each in outliers]),
    )  # fmt: skip


def _mean(value: Interval | None, form: str = ".4g", error: str = ".2g", scale: float = 1, seeds: int = 0) -> Value:
    """Mean and standard error, with the number of runs if it is 1 or less than `seeds`."""
    if value is None:
        return Value(NONE)
    runs = f" (n={value.count})" if value.count < seeds else ""
    detail = "(n=1)" if value.error is None else f"± {scale * value.error:{error}}{runs}"
    return Value(f"{scale * value.value:{form}}", detail, value.value)


def peak_table(result: StudyResult, size: str, variants: Sequence[str] = ()) -> DataTable | None:
    """The growth of peaks, for all or some variants; None if telemetry measured none."""
    peaks = {
        row.name: [run.peaks for run in result.complete(size, row.name) if run.peaks is not None]
        for row in result.rows(size)
        if not variants or row.name in variants
    }
    peaks = {name: runs for name, runs in peaks.items() if runs}
    early, half, last = ([[run.at(share) for run in runs] for runs in peaks.values()] for share in (EARLY, HALF, 1.0))

    def growth(since: list[list[float | None]]) -> list[Value]:
        pairs = (zip(*both, strict=True) for both in zip(since, last, strict=True))
        return [_factor([change(*pair) for pair in of_seeds], result.confidence) for of_seeds in pairs]

    level = f"{result.confidence * 100:g} %"
    over = "geometric mean over seeds, with the smallest and the largest"
    return DataTable.of(
        PEAKS,
        "The largest |h| of any layer, always on the same few tokens. Healthy: peaks that level off.",
        _named(peaks),
        (Column(f"at {EARLY:.0%}", f"the largest |h| that a sublayer reads after a tenth of the steps: {over}"),
         map(_over_seeds, early)),
        (Column(f"at {HALF:.0%}", f"the same after half of the steps: {over}"), map(_over_seeds, half)),
        (Column("at the end", f"the same after the last step: {over}"), map(_over_seeds, last)),
        (Column(f"growth [{level}]", f"at the end / at {EARLY:.0%}, paired by seed, with its {level} Student-t "
                "interval of logarithms"), growth(early)),
        (Column(f"second half [{level}]", f"at the end / at {HALF:.0%}, likewise"), growth(half)),
    )  # fmt: skip


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
    return _difference(estimate_ratio(known, level), ".3g", "×")


def _rates(result: StudyResult, size: str) -> DataTable | None:
    rates = [rate for rate in result.tuning if rate.size == size]
    if not rates:
        return None
    tried = [
        {trial.factor: "failed" if trial.loss is None else f"{trial.loss:.4f}" for trial in rate.trials}
        for rate in rates
    ]
    return DataTable.of(
        RATES,
        "Learning rates at this size were not searched: they follow the fit over smaller sizes."
        if rates[0].law
        else f"Each variant's learning rate was chosen on runs of {rates[0].steps} steps with seed "
            f"{rates[0].seed}, which no other run uses, and then fixed. If the choice is at either end of the list, a "
            "wider search may find a better one.",
        _named(rate.variant for rate in rates),
        *((Column(f"{factor:g}× lr", "validation loss after the short run with this multiple"),
           [Value(losses.get(factor, NONE)) for losses in tried])
          for factor in sorted({trial.factor for rate in rates for trial in rate.trials if not rate.law})),
        (Column("chosen", "the multiple used by all runs of the variant, and the resulting learning rate"),
         [Value(f"{rate.chosen:.3g}×", f"({rate.best.rate:g})", rate.chosen) for rate in rates]),
    )  # fmt: skip


def _named(variants: Iterable[str]) -> tuple[Column, list[Value]]:
    """The first column of a side table."""
    return VARIANT, [Value(name) for name in variants]


def _difference(value: Interval | None, form: str = "+.4f", unit: str = "", scale: float = 1) -> Value:
    """A value with its interval."""
    if value is None:
        return Value(NONE)
    ends = "(n=1, no interval)"
    if value.low is not None and value.high is not None:
        ends = f"[{scale * value.low:{form}}, {scale * value.high:{form}}]"
    return Value(f"{scale * value.value:{form}}{unit}", ends, value.value)


def _ratio(value: Interval | None, mark: str = "") -> Value:
    if value is None:
        return Value(NONE)
    shown = f"{value.value:.2f}×{mark}"
    if value.low is None and value.high is None:
        return Value(shown, key=value.value)
    low, high = ("…" if end is None else f"{end:.2f}" for end in (value.low, value.high))
    return Value(shown, f"({verdicts.TOO_WIDE})" if verdicts.too_wide(value) else f"[{low}, {high}]", value.value)


def _per_second(row: VariantResult, result: StudyResult) -> Value:
    if row.wall_clock_gain is None and row.throughput_ratio is not None and not speed_is_shown(row, result):
        return Value(UNSTATED)
    return _ratio(row.wall_clock_gain)


def _judged(row: VariantResult) -> Value:
    if row.corrected is None:
        return Value(NONE)
    word = "pays" if pays(row) else "loses" if loses(row) else "not shown"
    return Value(word, _ratio(row.corrected).detail, row.corrected.low)


def _throughput(row: VariantResult, result: StudyResult) -> Value:
    speed = row.tokens_per_second if row.timing is None else row.timing.tokens_per_second
    if speed is None:
        return Value(NONE)
    rate = f"{count(speed)} tok/s"
    if row.name == result.baseline:
        compared = [other for other in result.rows(row.size) if other.throughput_ratio is not None]
        unstated = compared and not any(speed_is_shown(other, result) for other in compared)
        return Value(UNSTATED if unstated else rate, key=1.0)
    if row.throughput_ratio is None:
        return Value(rate)
    if not speed_is_shown(row, result):
        return Value(UNSTATED)
    return Value(f"{row.throughput_ratio.value:.2f}×", rate, row.throughput_ratio.value)


def print_study(console: Console, result: StudyResult) -> None:
    """Print the table, verdicts and warnings on a terminal, and finally the answer.

    With a ladder, the gain that it replaces may be dropped too. The verdict sentence repeats the corrected gain.
    """
    for table in study_tables(result):
        laddered = any(column.title == EQUIVALENT for column in table.columns)
        table.print(console, [*SPARED, *([STEPWISE] if laddered else []), TEXT_ERROR, PAYS])
    for sentence in verdicts.study_sentences(result):
        console.print(Text(f"• {sentence}"))
    console.print(Text(f"\n{verdicts.answer(result)[1]}", style="bold"))
    if why := verdicts.explanation(result):
        console.print(Text(why))


def markdown(result: StudyResult) -> str:
    """The same content as a Markdown page."""
    parts = [f"# {plain.markdown(result.name)}", "", *markdown_tables(result), ""]
    parts += [f"- {plain.markdown(sentence, begins=True)}" for sentence in verdicts.study_sentences(result)]
    inside = [f"[{plain.markdown(run.folder)}]({plain.link(run.diagnosis)})" for run in result.runs if run.diagnosis]
    parts += [f"- Diagnoses: {', '.join(inside)}."] if inside else []
    meanings = [column for column in columns(result) if column.meaning]
    parts += ["", "Columns:", "", *(f"- **{column.title}**: {column.meaning}." for column in meanings)]
    return "\n".join(parts) + "\n"


def markdown_tables(result: StudyResult) -> list[str]:
    """Only the tables, as lines of Markdown."""
    parts: list[str] = []
    for table in study_tables(result):
        parts += [*([""] if parts else []), *([f"## {plain.markdown(table.title)}", ""] if table.title else [])]
        parts += table.markdown()
    return parts
