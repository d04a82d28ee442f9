"""The study's report.html: the title answers, two pictures and a table show why, the rest explains it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from residua.report import Cell, Column, Link, Page, Picture, Section, Series, Sorted, theme
from residua.report.forest import height_of
from residua.study import entries, plots, sentences
from residua.study.answer import answer, best_row, by_gain, by_loss, comparisons_sentence, gain_key, provenance
from residua.study.config import StudyConfig
from residua.study.diagnosed import SIDE_BY_SIDE
from residua.study.inference import speed_is_shown
from residua.study.picture import break_even, ladder_scatter
from residua.study.plan import RUNS
from residua.study.plots import SECONDS, TOKENS, Records
from residua.study.results import LadderResult, RunResult, StudyResult, VariantResult, compute_points
from residua.study.side_tables import RATES, rate_sentence, side_tables
from residua.study.verdict import at_size, verdict
from residua.train.telemetry_curves import said

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

NAMED = 4
"""The lead names at most so many variants."""
SMALLEST = 320
"""Height of the two pictures of the verdict, at least, in pixels."""
FIRST = (
    "variant",
    "wall-clock gain",
    "pays",
    "equivalent tokens",
    "step-wise gain",
    "throughput",
    "Δ loss",
    "validation loss",
)
"""Columns of the table, in the order in which to look at them; the others follow."""


SORTED_BY = {
    "wall_clock_gain": "wall-clock gain", "equivalent_tokens": "equivalent tokens", "step_gain": "step-wise gain",
}  # fmt: skip
"""The column of each gain."""


class Supplement(Protocol):
    """What another command adds to a study: sections before the study's own, and text after results.md."""

    def draw(self, page: Page, result: StudyResult) -> None: ...

    def markdown(self, result: StudyResult) -> str: ...


def study_page(
    study: StudyConfig,
    result: StudyResult,
    records: dict[str, Records],
    out: Path,
    supplement: Supplement | None = None,
    commands: Sequence[str] = (),
) -> Page:
    """The page of a study; `records` are the complete runs by size and variant, `out` is the folder of the page.

    `commands` are those that made the study.
    """
    tone, title = answer(result)
    page = Page(title, _lead(result), tone)
    if supplement is not None:
        supplement.draw(page, result)
    _verdict(page, result)
    for ladder in result.ladder:
        _ladder(page, result, ladder)
    for size in result.sizes:
        _loss(page, result, records[size], size)
    for size in result.sizes:
        _telemetry(page, result, records[size], size)
    for size in result.sizes:
        _side_tables(page, result, size)
        _low_precision(page, result, size)
    if result.scaling:
        _scaling(page, result)
    _inside(page, records[result.sizes[-1]])
    _runs(page, result, out)
    _file(page, study)
    every = [run for by_variant in records.values() for runs in by_variant.values() for run in runs]
    page.made(provenance(result, every, commands))
    return page


def _lead(result: StudyResult) -> str:
    others = [name for name in dict.fromkeys(row.name for row in result.variants) if name != result.baseline]
    seeds = f"{len(result.seeds)} seeds" if len(result.seeds) > 1 else "one seed"
    unequal = sentences.unequal_seeds(result)
    seeds += f" ({unequal})" if unequal else ""
    done = sum(run.status == "complete" for run in result.runs)
    missing = f" {done} of {len(result.runs)} runs are complete."
    who = ", ".join(others) if len(others) <= NAMED else f"{len(others)} variants"
    return (
        f"{result.name}: {who} against {result.baseline}, {seeds}, the same tokens in the same order. "
        f"Above 1 is a gain. {sentences.validation_sentence(result)}".rstrip()
        + ("" if done == len(result.runs) else missing)
    )


def _verdict(page: Page, result: StudyResult) -> None:
    section = page.section("Verdict")
    _pictures(section, result)
    best = best_row(result)
    if best is not None:
        section.verdict(" ".join([verdict(best, result), comparisons_sentence(result)]).strip())
    _table(section, result, result.sizes[-1], explained=True)
    notes = (" ".join(sentences.matching_sentences(result)), sentences.side_by_side_sentence(result))
    for sentence in (*sentences.text_sentences(result), *notes, *sentences.ladder_sentences(result)):
        if sentence:
            section.note(sentence)
    for size in result.sizes[:-1]:
        with section.fold(f"The same at size {size}"):
            _table(section, result, size)
    last = result.rows(result.sizes[-1])
    said = [verdict(row, result) for row in by_gain(last, result.baseline) if row.name != result.baseline]
    with section.fold("Every variant in a sentence"):
        section.points([*said, *([facts] if (facts := sentences.dataset_sentence(result)) else [])])


def _pictures(section: Section, result: StudyResult) -> None:
    """Loss against the baseline, and beside it what a step costs against what it is worth."""
    rows, level = by_loss(result.rows(result.sizes[-1])), f"{result.confidence * 100:g} %"
    size = at_size(result.sizes[-1], result)
    height = max(SMALLEST, height_of(len(rows)))
    shown = []
    if rows:
        shown.append(
            Picture(
                plots.forest_of_losses(rows, result, height),
                f"Is the loss lower{size}?",
                f"The dashed line is {result.baseline}. An interval ({level}, paired by seed) that crosses it shows no "
                f"difference; a hollow mark has none.{_not_drawn(result, [row.name for row in rows])}",
            )
        )
    pays = break_even(result)
    if pays is not None:
        shown.append(
            Picture(
                _labelled(pays.figure(height, legend=False)),
                f"Is it worth its cost{size}?",
                f"Above the dashed line a variant gains more from its tokens than its steps cost. Whiskers are {level} "
                f"intervals.{_not_drawn(result, [point.name for point in pays.points])}",
            )
        )
    if shown:
        section.beside(*shown)


def _not_drawn(result: StudyResult, drawn: Iterable[str], size: str | None = None) -> str:
    """A sentence that names the variants of a size that a figure leaves out; empty if it has all."""
    seen = {*drawn, result.baseline}
    left = [row.name for row in result.rows(size or result.sizes[-1]) if row.name not in seen]
    return f" Not drawn, for want of numbers that can be stated: {', '.join(left)}." if left else ""


def _labelled(figure: Figure) -> Figure:
    """The two sides of the break-even line, in words."""
    for words, x, y, at in (("pays per second", 0.02, 0.99, "left"), ("does not pay", 0.98, 0.02, "right")):
        figure.add_annotation(
            text=f"<i>{words}</i>", xref="paper", yref="paper", x=x, y=y, xanchor=at, showarrow=False, font={"size": 12}
        )
    return figure


def _table(section: Section, result: StudyResult, size: str, explained: bool = False) -> None:
    """The rows of one size, largest gain first, the columns to look at first on the left.

    With a ladder, the step-wise gain, which it replaces, is in results.md alone.
    """
    columns, place = entries.columns(result), plots.places(result)
    shown = [i for i, column in enumerate(columns) if not (result.ladder and column.title == SORTED_BY["step_gain"])]
    order = sorted(shown, key=lambda i: _importance(columns[i].title))
    rows = by_gain(result.rows(size), result.baseline)
    cells = []
    for row in rows:
        values = entries.cells(row, result)
        name = Series(row.name, theme.colour(place[row.name]), values[0].detail)
        cells.append([name if i == 0 else values[i] for i in order])
    title = SORTED_BY[gain_key(rows)]
    known = any(getattr(row, gain_key(rows)) is not None for row in rows)
    gain = next((at for at, i in enumerate(order) if known and columns[i].title == title), 0)
    section.table(
        [columns[i] if explained else Column(columns[i].title, numeric=columns[i].numeric) for i in order],
        cells,
        emphasised=[index for index, row in enumerate(rows) if row.name == result.baseline],
        order=Sorted(gain, descending=gain > 0),
    )


def _importance(title: str) -> int:
    return next((place for place, known in enumerate(FIRST) if title.startswith(known)), len(FIRST))


def _ladder(page: Page, result: StudyResult, ladder: LadderResult) -> None:
    suffix = at_size(ladder.size, result)
    section = page.section(
        f"Equivalent tokens{suffix}",
        f"How long {result.baseline} would have to train, with a full schedule of its own, to reach each variant's "
        "loss. Trust points between its budgets; those beyond them rest on the fitted law.",
    )
    drawn = ladder_scatter(result, ladder)
    section.figure(
        drawn.figure(),
        f"Grey: {result.baseline} at its budgets, mean over seeds. Coloured: each variant where the law has its loss."
        f"{_not_drawn(result, [point.name for point in drawn.points], ladder.size)}",
    )


def _loss(page: Page, result: StudyResult, records: Records, size: str) -> None:
    suffix = at_size(size, result)
    if not any(records.values()):
        return
    section = page.section(
        f"Loss curves{suffix}",
        f"Below zero is better than {result.baseline} after the same tokens. A lead in tokens that vanishes against "
        "seconds is paid for in speed. Healthy curves stay apart in the same order to the end.",
    )
    stated = {row.name for row in result.rows(size) if row.name == result.baseline or speed_is_shown(row, result)}
    timed = {name: runs if name in stated else [] for name, runs in records.items()}
    views = {
        f"{kind}, by {words}": figure
        for kind, curves in (("validation", plots.validation_curves), ("training", plots.training_curves))
        for words, found in (("tokens", records), ("seconds", timed))
        if (found is records or sum(map(bool, timed.values())) > 1)
        and (figure := curves(found, TOKENS if found is records else SECONDS)) is not None
    }
    if records.get(result.baseline) and sum(bool(runs) for runs in records.values()) > 1:
        views = {f"difference to {result.baseline}": plots.difference_curves(records, result.baseline), **views}
    spans = "the band spans all seeds" if len(records) <= plots.BANDS else "click a name to hide its curve"
    left = _not_drawn(result, [name for name, runs in records.items() if runs], size)
    slow = [name for name, runs in records.items() if runs and name not in stated]
    left += f" Not drawn by seconds, since their speeds are not stated: {', '.join(slow)}." if slow else ""
    section.tabs(views, f"Mean over seeds; {spans}. Double-click shows the whole curve.{left}")


def _telemetry(page: Page, result: StudyResult, records: Records, size: str) -> None:
    views = plots.telemetry_curves(records)
    if not views:
        return
    suffix = at_size(size, result)
    section = page.section(
        f"Inside while training{suffix}",
        "Healthy: peaks that level off. A peak that grows to the end leaves less precision for all other values, and a "
        "sudden growth often comes before a divergence.",
    )
    section.tabs(views, "Measured on the same few tokens every time; each run's metrics.jsonl has every layer.")
    for run in (run for runs in records.values() for run in runs):
        for sentence in said(run.telemetry):
            section.note(f"{run.folder.name}: {sentence}")


def _side_tables(page: Page, result: StudyResult, size: str) -> None:
    """Accuracies, outliers and tried learning rates, those that were measured."""
    suffix = at_size(size, result)
    place = plots.places(result)
    for table in side_tables(result, size):
        section = page.section(f"{table.title.capitalize()}{suffix}", table.look_for)
        cells: list[list[Cell]] = [[_named(place, row[0].main), *row[1:]] for row in table.rows]
        section.table(table.columns, cells)
        if table.title == RATES:
            section.points([rate_sentence(rate, False) for rate in result.tuning if rate.size == size])


def _low_precision(page: Page, result: StudyResult, size: str) -> None:
    rows = [row for row in result.rows(size) if row.low_precision is not None]
    if not rows or rows[0].low_precision is None:
        return
    suffix = at_size(size, result)
    section = page.section(
        f"Low precision{suffix}",
        "The loss that low precision adds to each trained model. Healthy: little, with or without SmoothQuant. A large "
        "peak or sink ratio means outliers, which leave fewer levels for all other values.",
    )
    recipes = list(rows[0].low_precision.losses)
    place = plots.places(result)
    cells: list[list[Cell]] = [[_named(place, row.name), *entries.precision_cells(row)[1:]] for row in rows]
    section.table(entries.precision_columns(recipes), cells)
    costs = plots.precision_costs(result, rows, recipes)
    if costs:
        section.tabs(
            costs,
            f"Added to each variant's own loss, with {result.confidence * 100:g} % intervals over seeds."
            f"{_not_finite(rows, recipes)}",
        )


def _not_finite(rows: Sequence[VariantResult], recipes: Sequence[str]) -> str:
    """Which variants a figure of costs leaves out, by recipe; empty if none."""
    costs = {row.name: row.low_precision.costs for row in rows if row.low_precision is not None}
    left = {recipe: [name for name, found in costs.items() if found[recipe] is None] for recipe in recipes}
    named = "; ".join(f"{recipe}: {', '.join(names)}" for recipe, names in left.items() if names)
    return f" Not drawn, since the loss is not finite: {named}." if named else ""


def _scaling(page: Page, result: StudyResult) -> None:
    section = page.section(
        "Compute scaling",
        "If two lines are parallel, the advantage holds as models grow; if they meet, it disappears. Two sizes always "
        "lie on a line: trust a fit over three or more.",
    )
    place = plots.places(result)
    points = compute_points(result.runs, result.variants)
    section.figure(plots.scaling_figure(points, result.scaling, list(place)), _not_drawn(result, points).strip())
    section.table(
        entries.scaling_columns(result.confidence),
        [[_named(place, row.name), *entries.scaling_cells(row, result.baseline)[1:]] for row in result.scaling],
    )


def _named(place: dict[str, int], name: str) -> Series:
    return Series(name, theme.colour(place[name]))


def _inside(page: Page, records: Records) -> None:
    """What the trained models look like inside, from each run's inspection."""
    magnitude = plots.sublayer_curves(records, "output_rms", "RMS of the output")
    if magnitude is not None:
        page.section(
            "Magnitude per sublayer",
            "Healthy: outputs of similar size from first to last. A steep climb means that late layers need larger "
            "and larger outputs to change a growing stream, as in plain pre-norm.",
        ).figure(magnitude)
    gradient = plots.sublayer_curves(records, "gradient_rms", "RMS of the gradient")
    if gradient is not None:
        page.section(
            "Gradient per layer",
            "Healthy: a flat line. A first layer far above the rest means that layers train at very different rates.",
        ).figure(gradient)
    weights = plots.depth_weights(records)
    if weights:
        page.section(
            "Depth weights",
            "Each row is a reader and sums to 1. Healthy: structure (a strong diagonal, a few far sources). A uniform "
            "map has not learned to choose. A large weight alone does not prove importance: ablation does.",
        ).tabs(weights)
    writes, gates = plots.gate_writes(records), plots.attention_gates(records)
    if writes or gates:
        section = page.section(
            "Gate statistics",
            "Healthy: gates that differ between streams and layers. β near 0 everywhere writes nothing, near 1 "
            "forgets everything; an attention gate mostly below 0.2 has switched its head off.",
        )
        for figures in (writes, gates):
            if figures:
                section.tabs(figures)
    loads = plots.expert_loads(records)
    if loads:
        page.section(
            "Expert load",
            "How often each expert is chosen; 1 is its fair share. Healthy: all near 1. An expert near 0 is not used; "
            "one far above 1 does the work of several.",
        ).tabs(loads)


def _runs(page: Page, result: StudyResult, out: Path) -> None:
    section = page.section("Runs", "Every run of the study, with its folder; for failed runs, the reason.")
    inside = f"{SIDE_BY_SIDE}/report.html"
    if (out / inside).exists():
        section.facts({"diagnoses": Link("the variants side by side, first seed", inside)})
    for run in result.runs:
        if run.problem:
            section.note(f"{run.folder}: {run.problem}")
    titles = ("variant", "size", "seed", "status", "loss", "tokens/s", "memory", "folder", "diagnosis")
    numeric = {"seed", "loss", "tokens/s", "memory"}
    columns = [Column(title, numeric=title in numeric) for title in titles]
    place = plots.places(result)
    done = sum(run.status == "complete" for run in result.runs)
    with section.fold(f"{done} of {len(result.runs)} runs are complete"):
        section.table(
            columns, [_run_cells(run, out, place[run.variant]) for run in result.runs], order=Sorted(0, False)
        )


def _run_cells(run: RunResult, out: Path, place: int) -> list[Cell]:
    folder = f"{RUNS}/{run.folder}"
    return [
        Series(run.variant, theme.colour(place), "" if run.budget == 1.0 else f"ladder {run.budget:g}×"),
        run.size,
        str(run.seed),
        run.status,
        entries.NONE if run.loss is None else f"{run.loss:.4f}",
        entries.NONE if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        entries.NONE if run.memory_gib is None else f"{run.memory_gib:.2f} GiB",
        Link(run.folder, folder) if (out / folder).exists() else run.folder,
        entries.NONE if run.diagnosis is None else Link("open", run.diagnosis),
    ]


def _file(page: Page, study: StudyConfig) -> None:
    section = page.section("How this was made", "The same study file gives the same runs.")
    with section.fold("The study file"):
        section.code(study.to_toml())
