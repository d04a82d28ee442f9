"""The study's report.html: the title gives the answer, two pictures and a table show why, the rest explains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from residua.files import write_atomically
from residua.report import Cell, Column, Link, Page, Picture, Section, Series, Sorted
from residua.report.figures import height_of
from residua.report.tables import DataTable
from residua.study import figures, tables, verdicts
from residua.study.collect_results import compute_points
from residua.study.config import StudyConfig
from residua.study.figures import SECONDS, TOKENS, Records
from residua.study.gains import speed_is_shown
from residua.study.measurements import SIDE_BY_SIDE
from residua.study.plan import RUNS, PlannedRun
from residua.study.records import RunRecord
from residua.study.results import LadderResult, RunResult, StudyResult
from residua.study.results_file import NOWHERE, SavedStudy
from residua.study.statistics import count
from residua.study.tables import NONE
from residua.study.verdicts import at_size, verdict
from residua.train.telemetry_curves import said

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

RESULTS, TABLE, REPORT, PICTURE = "results.json", "results.md", "report.html", "gains.svg"
MAX_LEAD_NAMES = 4
"""The lead paragraph names at most this many variants."""
MIN_PICTURE_HEIGHT = 320
"""Minimum height of the verdict's two pictures, in pixels."""
FIRST = (
    "variant", "wall-clock gain", "pays", tables.EQUIVALENT, tables.STEPWISE, "throughput", "Δ loss", "validation loss",
)  # fmt: skip
"""The first columns of the table, most important first; the others follow."""
SORTED_BY = {
    "wall_clock_gain": "wall-clock gain", "equivalent_tokens": tables.EQUIVALENT, "step_gain": tables.STEPWISE,
}  # fmt: skip
"""The column that each gain sorts by."""
RACE_CAPTION = "Tokens × the seconds of a step timed alone; mean over runs. The dashed line is the target."
TREND_CAPTION = (
    "Dashed: the trend of each variant's gain; its band widens to the interval at ten times the largest run."
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a study: its results, its page, and the page of diagnoses if there is one."""

    result: StudyResult
    report: Path
    diagnosis: Path | None = None

    @property
    def complete(self) -> bool:
        return all(run.status == "complete" for run in self.result.runs)


class Supplement(Protocol):
    """Another command's additions to a study: sections before the study's own, and text after results.md."""

    def draw(self, page: Page, result: StudyResult) -> None: ...

    def markdown(self, result: StudyResult) -> str: ...


def write_report(
    study: StudyConfig,
    result: StudyResult,
    records: Mapping[PlannedRun, RunRecord],
    out: Path,
    supplement: Supplement | None = None,
    commands: Sequence[str] = (),
) -> Outcome:
    """Write results.json, results.md, gains.svg and report.html into `out`."""
    write_atomically(out / RESULTS, result.model_dump_json(indent=1) + "\n")
    added = "" if supplement is None else f"\n{supplement.markdown(result)}"
    write_atomically(out / TABLE, tables.markdown(result) + added)
    if (drawn := figures.picture(result)) is not None:
        write_atomically(out / PICTURE, drawn)
    by_size: dict[str, Records] = {size: {name: [] for name in study.variants} for size in study.sizes}
    for run, record in records.items():
        if run.budget == 1.0:
            by_size[run.size][run.variant].append(record)
    page = study_page(study, result, by_size, out, supplement, commands)
    inside = out / SIDE_BY_SIDE / REPORT
    return Outcome(result, page.write(out / REPORT), inside if inside.exists() else None)


def show_saved(
    saved: SavedStudy, out: Path | None = None, supplement: Supplement | None = None, baseline: str | None = None
) -> StudyResult:
    """The results of a saved study; with `out`, also write its files and page there, without run folders.

    `baseline` is a variant to compare with instead of the study's own.
    """
    result = saved.result(out or NOWHERE, baseline)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_report(saved.config, result, saved.records(saved.plan(out)), out, supplement, saved.commands)
    return result


def study_page(
    study: StudyConfig,
    result: StudyResult,
    records: dict[str, Records],
    out: Path,
    supplement: Supplement | None = None,
    commands: Sequence[str] = (),
) -> Page:
    """Build the page of a study; `records` are the complete runs by size and variant, `out` is the page's folder.

    `commands` are those that produced the study.
    """
    tone, title = verdicts.answer(result)
    page = Page(title, _lead(result), tone)
    if supplement is not None:
        supplement.draw(page, result)
    _verdict(page.section("Verdict"), result)
    for size in result.sizes:
        if (table := tables.race_table(result, size)) is not None:
            drawn = figures.race_curves(result, records[size], size)
            _side_table(page, result, table, at_size(size, result), drawn, RACE_CAPTION)
    if (table := tables.joint_table(result)) is not None:
        caption = f"Bands are {result.confidence * 100:g} % intervals, before correction. {TREND_CAPTION}"
        _side_table(page, result, table, figure=figures.gains_over_compute(result), caption=caption)
    for ladder in result.ladder:
        _ladder(page, result, ladder)
    for section in (_loss, _telemetry):
        for size in result.sizes:
            section(page, result, records[size], size)
    for size in result.sizes:
        _side_tables(page, result, size)
    if (table := tables.scaling_table(result)) is not None:
        points = compute_points(result.runs, result.variants)
        drawn = figures.scaling_figure(points, result)
        _side_table(page, result, table, figure=drawn, caption=_not_drawn(result, points).strip())
    _inside(page, records[result.sizes[-1]])
    _runs(page, result, out)
    source = page.section("How this was made", "The same study file reproduces the same runs.")
    with source.fold("The study file"):
        source.code(study.to_toml())
    every = [run for by_variant in records.values() for runs in by_variant.values() for run in runs]
    page.made(provenance(result, every, commands))
    return page


def _lead(result: StudyResult) -> str:
    others = [name for name in dict.fromkeys(row.name for row in result.variants) if name != result.baseline]
    seeds = f"{len(result.seeds)} seeds" if len(result.seeds) > 1 else "one seed"
    unequal = verdicts.unequal_seeds(result)
    seeds += f" ({unequal})" if unequal else ""
    done = sum(run.status == "complete" for run in result.runs)
    missing = f" {done} of {len(result.runs)} runs are complete." * (done < len(result.runs))
    who = ", ".join(others) if len(others) <= MAX_LEAD_NAMES else f"{len(others)} variants"
    why = verdicts.explanation(result)
    return (
        f"{why}{' ' * bool(why)}{result.name}: {who} against {result.baseline}, {seeds}, the same tokens in the same "
        f"order. Above 1 is a gain.{missing}"
    )


def _verdict(section: Section, result: StudyResult) -> None:
    _pictures(section, result)
    best = verdicts.best_row(result)
    if best is not None:
        section.verdict(" ".join([verdict(best, result), verdicts.comparisons_sentence(result)]).strip())
    _table(section, result, result.sizes[-1], explained=True)
    notes = (" ".join(verdicts.matching_sentences(result)), verdicts.side_by_side_sentence(result))
    texts = (
        verdicts.own_baseline_sentence(result),
        verdicts.validation_sentence(result),
        *verdicts.text_sentences(result),
    )
    for sentence in (*texts, *notes, *verdicts.ladder_sentences(result)):
        if sentence:
            section.note(sentence)
    for size in result.sizes[:-1]:
        with section.fold(f"The same at size {size}"):
            _table(section, result, size)
    rows = verdicts.by_gain(result.rows(result.sizes[-1]), result.baseline)
    sentences = [verdict(row, result) for row in rows if row.name != result.baseline]
    with section.fold("Each variant in a sentence"):
        section.points(filter(None, [*sentences, verdicts.dataset_sentence(result)]))


def _pictures(section: Section, result: StudyResult) -> None:
    """Two pictures: loss against the baseline, and step cost against token gain."""
    rows, level = verdicts.by_loss(result.rows(result.sizes[-1])), f"{result.confidence * 100:g} %"
    size = at_size(result.sizes[-1], result)
    height = max(MIN_PICTURE_HEIGHT, height_of(len(rows)))
    shown = []
    if rows:
        caption = (
            f"The dashed line is {result.baseline}. An interval ({level}, paired by seed) that crosses it "
            f"shows no difference; hollow marks have no interval.{_not_drawn(result, [row.name for row in rows])}"
        )
        shown.append(Picture(figures.forest_of_losses(rows, result, height), f"Is the loss lower{size}?", caption))
    if (pays := figures.break_even(result)) is not None:
        caption = (
            f"Above the dashed line, a variant gains more per token than its steps cost. Whiskers are {level} "
            f"intervals.{_not_drawn(result, [point.name for point in pays.points])}"
        )
        shown.append(Picture(_labelled(pays.figure(height, legend=False)), f"Is it worth its cost{size}?", caption))
    if shown:
        section.beside(*shown)


def _not_drawn(result: StudyResult, drawn: Iterable[str], size: str | None = None) -> str:
    """A sentence that names the variants of a size that a figure omits; empty if it shows all."""
    named = {*drawn, result.baseline}
    left = [row.name for row in result.rows(size or result.sizes[-1]) if row.name not in named]
    return f" Not drawn, because their speeds are not known well enough: {', '.join(left)}." if left else ""


def _labelled(figure: Figure) -> Figure:
    """Label the two sides of the break-even line."""
    for words, x, y, at in (("pays per second", 0.02, 0.99, "left"), ("does not pay", 0.98, 0.02, "right")):
        figure.add_annotation(
            text=f"<i>{words}</i>", xref="paper", yref="paper", x=x, y=y, xanchor=at, showarrow=False, font={"size": 12}
        )
    return figure


def _table(section: Section, result: StudyResult, size: str, explained: bool = False) -> None:
    """The rows of one size, largest gain first, with the most important columns on the left.

    With a ladder, which replaces the step-wise gain, that gain appears only in results.md.
    """
    columns, look = tables.columns(result), figures.looks_of(result)
    shown = [i for i, column in enumerate(columns) if not (result.ladder and column.title == SORTED_BY["step_gain"])]
    first = {i: [columns[i].title.startswith(title) for title in FIRST] for i in shown}
    order = sorted(shown, key=lambda i: first[i].index(True) if any(first[i]) else len(FIRST))
    rows = verdicts.by_gain(result.rows(size), result.baseline)
    cells = []
    for row in rows:
        values = tables.cells(row, result)
        name = Series(row.name, look[row.name]["colour"], values[0].detail)
        cells.append([name if i == 0 else values[i] for i in order])
    title = SORTED_BY[verdicts.gain_key(rows)]
    known = any(getattr(row, verdicts.gain_key(rows)) is not None for row in rows)
    gain = next((at for at, i in enumerate(order) if known and columns[i].title == title), 0)
    section.table(
        [columns[i] if explained else Column(columns[i].title, numeric=columns[i].numeric) for i in order],
        cells,
        emphasised=[index for index, row in enumerate(rows) if row.name == result.baseline],
        order=Sorted(gain, descending=gain > 0),
    )


def _ladder(page: Page, result: StudyResult, ladder: LadderResult) -> None:
    section = page.section(
        f"Equivalent tokens{at_size(ladder.size, result)}",
        f"How long {result.baseline} would have to train, with a full schedule, to reach each variant's "
        "loss. Trust points between its budgets; others extrapolate the fitted law.",
    )
    drawn = figures.ladder_scatter(result, ladder)
    section.figure(
        drawn.figure(),
        f"Grey: {result.baseline} at its budgets, mean over seeds. Coloured: each variant where the law gives its loss."
        f"{_not_drawn(result, [point.name for point in drawn.points], ladder.size)}",
    )


def _loss(page: Page, result: StudyResult, records: Records, size: str) -> None:
    if not any(records.values()):
        return
    section = page.section(
        f"Loss curves{at_size(size, result)}",
        f"Below zero is better than {result.baseline} after the same tokens. A lead in tokens that vanishes "
        "in seconds is cancelled by slower steps. Healthy curves stay apart in the same order to the end.",
    )
    stated = {row.name for row in result.rows(size) if row.name == result.baseline or speed_is_shown(row, result)}
    timed = {name: runs if name in stated else [] for name, runs in records.items()}
    views = {
        f"{kind}, by {words}": figure
        for kind in ("validation", "training")
        for words, shown in (("tokens", records), ("seconds", timed))
        if (shown is records or sum(map(bool, timed.values())) > 1)
        and (figure := figures.loss_curves(shown, kind, TOKENS if shown is records else SECONDS)) is not None
    }
    if records.get(result.baseline) and sum(bool(runs) for runs in records.values()) > 1:
        views = {f"difference to {result.baseline}": figures.difference_curves(records, result.baseline), **views}
    spans = "the band spans all seeds" if len(records) <= figures.MAX_BANDS else "click a name to hide its curve"
    left = _not_drawn(result, [name for name, runs in records.items() if runs], size)
    slow = [name for name, runs in records.items() if runs and name not in stated]
    left += f" Not drawn by seconds, because their speeds are not known well enough: {', '.join(slow)}." if slow else ""
    section.tabs(views, f"Mean over seeds; {spans}. Double-click to show the whole curve.{left}")


def _telemetry(page: Page, result: StudyResult, records: Records, size: str) -> None:
    views = figures.telemetry_curves(records)
    if not views:
        return
    section = page.section(
        f"Inside while training{at_size(size, result)}",
        "Healthy: peaks that level off. A peak that keeps growing leaves less precision for all other "
        "values, and sudden growth often precedes a divergence.",
    )
    section.tabs(views, "Always measured on the same few tokens; each run's metrics.jsonl has every layer.")
    for run in (run for runs in records.values() for run in runs):
        for sentence in said(run.telemetry):
            section.note(f"{run.folder.name}: {sentence}")


def _side_tables(page: Page, result: StudyResult, size: str) -> None:
    """Tables of accuracies, outliers, tried learning rates and low precision, as far as measured."""
    for table in tables.side_tables(result, size):
        if table.title.startswith(tables.RACE):  # has its own section above
            continue
        section = _side_table(page, result, table, at_size(size, result))
        if table.title == tables.RATES:
            section.points([rate.sentence(False) for rate in result.tuning if rate.size == size])
    if (low := tables.precision_table(result, size)) is None:
        return
    section = _side_table(page, result, low, at_size(size, result))
    costs = {row.name: row.low_precision.costs for row in result.rows(size) if row.low_precision is not None}
    recipes = list(next(iter(costs.values())))
    left = {recipe: ", ".join(name for name, cost in costs.items() if cost[recipe] is None) for recipe in recipes}
    named = "; ".join(f"{recipe}: {names}" for recipe, names in left.items() if names)
    if drawn := figures.precision_costs(result, result.rows(size), recipes):
        section.tabs(
            drawn,
            f"Added to each variant's own loss, with {result.confidence * 100:g} % intervals over seeds."
            + (f" Not drawn, since the loss is not finite: {named}." if named else ""),
        )


def _side_table(
    page: Page, result: StudyResult, table: DataTable, suffix: str = "", figure: Figure | None = None, caption: str = ""
) -> Section:
    """A section with the figure, if any, and the table, with variants in their colours."""
    section, look = page.section(f"{table.title.capitalize()}{suffix}", table.look_for), figures.looks_of(result)
    if figure is not None:
        section.figure(figure, caption)
    section.table(table.columns, [[Series(row[0].main, look[row[0].main]["colour"]), *row[1:]] for row in table.rows])
    return section


def _inside(page: Page, records: Records) -> None:
    """Show the internals of the trained models, from each run's inspection."""
    for title, look_for, drawn in (
        ("Magnitude per sublayer",
         "Healthy: outputs of similar size from first to last. A steep climb means that late layers need larger "
         "and larger outputs to change a growing stream, as in plain pre-norm.",
         [figures.sublayer_curves(records, "output_rms", "RMS of the output")]),
        ("Gradient per layer",
         "Healthy: a flat line. A first layer far above the rest means that layers train at very different rates.",
         [figures.sublayer_curves(records, "gradient_rms", "RMS of the gradient")]),
        ("Depth weights",
         "Each row is a reader and sums to 1. Healthy: structure (a strong diagonal, a few far sources). A uniform "
         "map has not learned to choose. A large weight does not prove importance: only ablation does.",
         [figures.depth_weights(records)]),
        ("Gate statistics",
         "Healthy: gates that differ between streams and layers. β near 0 everywhere writes nothing, near 1 "
         "forgets everything; an attention gate mostly below 0.2 has switched its head off.",
         [figures.gate_writes(records), figures.attention_gates(records)]),
        ("Expert load",
         "How often each expert is chosen; 1 is an equal share. Healthy: all near 1. An expert near 0 is unused; "
         "one far above 1 does the work of several.",
         [figures.expert_loads(records)]),
    ):  # fmt: skip
        if any(drawn):
            section = page.section(title, look_for)
            for figure in filter(None, drawn):
                section.tabs(figure) if isinstance(figure, dict) else section.figure(figure)


def _runs(page: Page, result: StudyResult, out: Path) -> None:
    section = page.section("Runs", "Every run of the study, with its folder; for failed runs, the reason.")
    inside = f"{SIDE_BY_SIDE}/{REPORT}"
    if (out / inside).exists():
        section.facts({"diagnoses": Link("comparison of the variants, first seed", inside)})
    for run in result.runs:
        if run.problem:
            section.note(f"{run.folder}: {run.problem}")
    titles = ("variant", "size", "seed", "status", "loss", "tokens/s", "memory", "folder", "diagnosis")
    numeric = {"seed", "loss", "tokens/s", "memory"}
    columns = [Column(title, numeric=title in numeric) for title in titles]
    look = figures.looks_of(result)
    rows = [_run_cells(run, out, look[run.variant]["colour"]) for run in result.runs]
    done = sum(run.status == "complete" for run in result.runs)
    with section.fold(f"{done} of {len(result.runs)} runs are complete"):
        section.table(columns, rows, order=Sorted(0, False))


def _run_cells(run: RunResult, out: Path, colour: str) -> list[Cell]:
    folder = f"{RUNS}/{run.folder}"
    return [
        Series(run.variant, colour, "" if run.budget == 1.0 else f"ladder {run.budget:g}×"),
        run.size,
        str(run.seed),
        run.status,
        NONE if run.loss is None else f"{run.loss:.4f}",
        NONE if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        NONE if run.memory_gib is None else f"{run.memory_gib:.2f} GiB",
        Link(run.folder, folder) if (out / folder).exists() else run.folder,
        NONE if run.diagnosis is None else Link("open", run.diagnosis),
    ]


def provenance(result: StudyResult, runs: Sequence[RunRecord], commands: Sequence[str]) -> dict[str, Cell]:
    """Text, tokens, seeds, date, hardware, versions, commit and command; unknown items are omitted."""
    facts: dict[str, Cell] = {}
    if about := result.dataset:
        facts |= {
            "text": Path(about.path).name,
            "training text": f"{count(about.train_tokens)} tokens",
            "vocabulary": f"{about.vocab_size:,}",
            "unigram entropy": f"{about.unigram_entropy:.4f} nats per token",
        }
    tokens = _unique(count(run.tokens) for run in result.runs if run.tokens is not None and run.budget == 1.0)
    facts |= {"seen by a run": f"{' or '.join(tokens)} tokens"} if tokens else {}
    facts["seeds"] = str(len(result.seeds))
    environments = [run.environment for run in runs]
    started = sorted(s["started"][:10] for e in environments for s in e.get("sessions") or () if s.get("started"))
    known = {
        "trained": [started[0], *started[-1:]] if started else [],
        "hardware": [run.hardware for run in runs],
        "software": map(_software, environments),
        "commit": map(_commit, environments),
    }
    for name, values in known.items():
        if shown := _unique(values):
            facts[name] = (" to " if name == "trained" else "; ").join(shown)
    return {**facts, "command": "; ".join(commands)} if commands else facts


def _software(about: Mapping[str, Any]) -> str:
    titles = {"residua": "Residua", "torch": "PyTorch", "triton": "Triton", "cuda": "CUDA", "python": "Python"}
    return ", ".join(f"{title} {about[key]}" for key, title in titles.items() if about.get(key))


def _commit(about: Mapping[str, Any]) -> str:
    commit, _, changed = str(about.get("commit") or "").partition("+")
    return f"{commit[:12]}{' with changes' if changed else ''}" if commit else ""


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))
