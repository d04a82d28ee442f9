"""The study's report.html: the verdict first, then what explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from residua.report import Column, Link, Page, Value
from residua.study import plots, sentences
from residua.study.config import StudyConfig
from residua.study.diagnosed import SIDE_BY_SIDE
from residua.study.picture import break_even, ladder_scatter
from residua.study.plan import RUNS
from residua.study.plots import SECONDS, TOKENS, Records
from residua.study.results import LadderResult, RunResult, StudyResult, compute_points


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
) -> Page:
    """The page of a study; `records` are the complete runs by size and variant, `out` is the folder of the page."""
    page = Page(_title(result), _lead(result))
    if supplement is not None:
        supplement.draw(page, result)
    _verdict(page, result)
    for ladder in result.ladder:
        _ladder(page, result, ladder)
    for size in result.sizes:
        _loss(page, result, records[size], size)
    for size in result.sizes:
        _low_precision(page, result, size)
    if result.scaling:
        _scaling(page, result)
    _inside(page, records[result.sizes[-1]])
    _runs(page, result, out)
    _provenance(page, study)
    return page


def _title(result: StudyResult) -> str:
    return f"{result.name}: does it pay against {result.baseline}?"


def _lead(result: StudyResult) -> str:
    others = [name for name in dict.fromkeys(row.name for row in result.variants) if name != result.baseline]
    seeds = f"{len(result.seeds)} seeds" if len(result.seeds) > 1 else "one seed"
    return (
        f"{', '.join(others)} against {result.baseline}, {seeds}, on the same tokens in the same order. "
        "Gains above 1 are in the variant's favour."
    )


def _verdict(page: Page, result: StudyResult) -> None:
    section = page.section(
        "Verdict",
        "Look at the wall-clock gain first: it is what a variant gains per second of training. If the interval of "
        "Δ loss contains 0, no difference was shown, however good the mean looks.",
    )
    if result.dataset:
        facts = result.dataset
        section.facts(
            {
                "text": Path(facts.path).name,
                "training tokens": sentences.count(facts.train_tokens),
                "vocabulary": f"{facts.vocab_size:,}",
                "unigram entropy": f"{facts.unigram_entropy:.4f} nats/token",
                "seeds": str(len(result.seeds)),
            }
        )
    for size in result.sizes:
        rows = result.rows(size)
        if len(result.sizes) > 1:
            section.subheading(f"Size {size}")
        columns = sentences.columns(result)
        # A ladder's column takes the room of another, which results.md still has.
        shown = [i for i, column in enumerate(columns) if not result.ladder or column.title != "bits/byte"]
        kept = columns if size == result.sizes[-1] else _titles(result)
        cells = [sentences.cells(row, result) for row in rows]
        section.table(
            [kept[i] for i in shown],
            [[row[i] for i in shown] for row in cells],
            emphasised=[index for index, row in enumerate(rows) if row.name == result.baseline],
        )
    last, level = result.rows(result.sizes[-1]), f"{result.confidence * 100:g} %"
    verdicts = [sentences.verdict(row, result) for row in last if row.name != result.baseline]
    section.points([*verdicts, *([sentences.dataset_sentence(result.dataset, last)] if result.dataset else [])])
    pays = break_even(result)
    if pays is not None:
        section.figure(
            pays.figure(),
            f"Points above the dashed line gain more from their tokens than their steps cost. Whiskers are {level} "
            "intervals.",
        )
    gains = plots.gains(result)
    if gains is not None:
        section.figure(gains, "The dotted line is the baseline. Wall-clock gain is the product of the other two.")
    for sentence in (" ".join(sentences.matching_sentences(result)), sentences.side_by_side_sentence(result)):
        if sentence:
            section.note(sentence)


def _ladder(page: Page, result: StudyResult, ladder: LadderResult) -> None:
    suffix = f" at {ladder.size}" if len(result.sizes) > 1 else ""
    section = page.section(
        f"Equivalent tokens{suffix}",
        f"How long {result.baseline} would have to train, with a full schedule of its own, to reach each variant's "
        "loss. Trust points between its budgets; those beyond them rest on the fitted law.",
    )
    section.figure(
        ladder_scatter(result, ladder).figure(),
        f"Grey: {result.baseline} at its budgets, mean over seeds. Coloured: each variant where the law has its loss.",
    )


def _titles(result: StudyResult) -> list[Column]:
    """The columns without their meanings, which only the last table on the page explains."""
    return [Column(column.title, numeric=column.numeric) for column in sentences.columns(result)]


def _loss(page: Page, result: StudyResult, records: Records, size: str) -> None:
    suffix = f" at {size}" if len(result.sizes) > 1 else ""
    if not any(records.values()):
        return
    section = page.section(
        f"Loss curves{suffix}",
        "Healthy curves fall smoothly and stay apart in the same order to the end. A lead in tokens that vanishes "
        "against seconds is paid for in speed.",
    )
    section.tabs(
        {
            "validation, by tokens": plots.validation_curves(records, TOKENS),
            "validation, by seconds": plots.validation_curves(records, SECONDS),
            "training, by tokens": plots.training_curves(records, TOKENS),
            "training, by seconds": plots.training_curves(records, SECONDS),
        },
        "Mean over seeds; the band spans all seeds. Double-click shows the whole curve.",
    )
    if records.get(result.baseline) and sum(bool(runs) for runs in records.values()) > 1:
        section.figure(
            plots.difference_curves(records, result.baseline),
            "Below zero is better than the baseline at the same number of tokens.",
        )


def _low_precision(page: Page, result: StudyResult, size: str) -> None:
    rows = [row for row in result.rows(size) if row.low_precision is not None]
    if not rows or rows[0].low_precision is None:
        return
    suffix = f" at {size}" if len(result.sizes) > 1 else ""
    section = page.section(
        f"Low precision{suffix}",
        "The loss that low precision adds to each trained model. Healthy: little, with or without SmoothQuant. A large "
        "peak or sink ratio means outliers, which leave fewer levels for all other values.",
    )
    recipes = list(rows[0].low_precision.losses)
    section.table(sentences.precision_columns(recipes), [sentences.precision_cells(row) for row in rows])
    section.figure(plots.precision_costs(rows, recipes), "Nats per token added to each variant's own loss.")


def _scaling(page: Page, result: StudyResult) -> None:
    section = page.section(
        "Compute scaling",
        "If two lines are parallel, the advantage holds as models grow; if they meet, it disappears. Two sizes always "
        "lie on a line: trust a fit over three or more.",
    )
    order = list(dict.fromkeys(row.name for row in result.variants))
    section.figure(plots.scaling_figure(compute_points(result.runs, result.variants), result.scaling, order))
    section.table(
        sentences.scaling_columns(result.confidence),
        [sentences.scaling_cells(row, result.baseline) for row in result.scaling],
    )


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
    titles = ("variant", "size", "seed", "status", "loss", "tokens/s", "memory", "folder", "diagnosis")
    numeric = {"seed", "loss", "tokens/s", "memory"}
    columns = [Column(title, numeric=title in numeric) for title in titles]
    section.table(columns, [_run_cells(run, out) for run in result.runs])
    inside = f"{SIDE_BY_SIDE}/report.html"
    if (out / inside).exists():
        section.facts({"diagnoses": Link("the variants side by side, first seed", inside)})
    for run in result.runs:
        if run.problem:
            section.note(f"{run.folder}: {run.problem}")


def _run_cells(run: RunResult, out: Path) -> list[str | Link | Value]:
    folder = f"{RUNS}/{run.folder}"
    return [
        Value(run.variant, "" if run.budget == 1.0 else f"ladder {run.budget:g}×"),
        run.size,
        str(run.seed),
        run.status,
        sentences.NONE if run.loss is None else f"{run.loss:.4f}",
        sentences.NONE if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        sentences.NONE if run.memory_gib is None else f"{run.memory_gib:.2f} GiB",
        Link(run.folder, folder) if (out / folder).exists() else run.folder,
        sentences.NONE if run.diagnosis is None else Link("open", run.diagnosis),
    ]


def _provenance(page: Page, study: StudyConfig) -> None:
    section = page.section("How this was made", "The same study file gives the same runs.")
    section.code(study.to_toml())
