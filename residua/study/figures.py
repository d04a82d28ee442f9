"""The figures of a study: those of its page, drawn from the records of its runs, and SVG pictures for documents.

The pictures show the cost of a variant's step against its token gain, and the ladder behind that gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from residua.report import theme
from residua.report.figures import Curve, Estimate, curves, forest, heatmap
from residua.report.scatter import Line, Point, Scatter
from residua.study.gains import speed_is_shown
from residua.study.records import RunRecord
from residua.study.results import PROJECTED, LadderResult, StudyResult, VariantResult
from residua.study.statistics import Interval, mean, smooth
from residua.train import telemetry_curves as telemetry

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Records = dict[str, list[RunRecord]]  # by variant, in the order of the study
Points = list[tuple[float, float]]
TOKENS, SECONDS = "tokens", "seconds of training"
MAX_BANDS = 6
"""With more variants, bands would hide the curves."""
MILLION = 1e6


def loss_curves(records: Records, kind: str, against: str) -> Figure | None:
    """Validation or training loss: the mean over seeds with a band from min to max; None if it was not measured.

    The training loss is smoothed over about a twentieth of the run.
    """
    series = _series(
        {name: [_loss_points(run, kind, against) for run in runs] for name, runs in records.items()},
        markers=kind == "validation",
    )
    y_title = "validation loss (nats per token)" if kind == "validation" else "training loss, smoothed"
    return curves(series, against, y_title, y_range=_focus([curve.y for curve in series])) if series else None


def race_curves(result: StudyResult, records: Records, size: str) -> Figure | None:
    """Validation loss over seconds, from isolated step timings, and the target; None if no step was timed."""
    speeds = {row.name: row.timing.tokens_per_second for row in result.rows(size) if row.timing is not None}
    lines = {
        name: [[(tokens / speeds[name], loss) for tokens, loss in run.loss_curve] for run in runs if name in speeds]
        for name, runs in records.items()
    }
    if not (series := _series(lines, markers=True)) or result.target is None:
        return None
    ends, losses = [0.0, max(max(curve.x) for curve in series)], [curve.y for curve in series]
    goal = Curve(f"{result.target:g}", ends, [result.target] * 2, theme.SERIES[0], dash="dash", width=1.5)
    return curves([*series, goal], "seconds", "validation loss (nats per token)", y_range=_focus([*losses]))


def _loss_points(run: RunRecord, kind: str, against: str) -> Points:
    if kind == "validation" and against == TOKENS:
        return run.loss_curve
    rows = run.validation if kind == "validation" else run.train
    losses = [float(row["loss"]) for row in rows]
    x = [float(row["tokens" if against == TOKENS else "seconds"]) for row in rows]
    return list(zip(x, losses if kind == "validation" else smooth(losses, len(rows) / 20), strict=True))


def telemetry_curves(records: Records) -> dict[str, Figure]:
    """Telemetry recorded during training, aggregated over layers: family → curves over tokens."""
    views = {}
    for name in telemetry.measured([run.telemetry for runs in records.values() for run in runs]):
        lines = {v: [telemetry.whole_model(run.telemetry, name) for run in runs] for v, runs in records.items()}
        family = telemetry.FAMILIES[name]
        whole = {"max": "largest of all layers", "mean": "mean over layers"}[family.over]
        series = _series(lines, markers=False)
        if series:
            views[family.title] = curves(series, TOKENS, f"{family.title}, {whole}", log_y=family.logarithmic)
    return views


def difference_curves(records: Records, baseline: str) -> Figure:
    """Validation loss minus the baseline's, by seed and step: mean over seeds, with a band if variants are few."""
    reference = {_seed(run): dict(run.loss_curve) for run in records[baseline]}
    steps = sorted({x for curve in reference.values() for x in curve})
    zero = _curve(looks(records)[baseline], baseline, [(x, 0.0) for x in steps], dash="dash")
    paired = {
        name: [
            [(x, y - known[x]) for x, y in run.loss_curve if x in known]
            for run in runs
            if name != baseline and (known := reference.get(_seed(run)))
        ]
        for name, runs in records.items()
    }
    series = _series(paired, markers=True, few=sum(map(bool, records.values())) <= MAX_BANDS)
    return curves([zero, *series], TOKENS, f"loss − {baseline}'s", y_range=_focus_differences(series))


def forest_of_losses(rows: Sequence[VariantResult], result: StudyResult, height: int | None = None) -> Figure:
    """Δ loss of each row with its interval, in row order; the baseline is the line at 0."""
    look = looks_of(result)
    estimates = [_estimate(row.name, look[row.name], row.difference) for row in rows if row.difference is not None]
    return forest(estimates, "Δ loss, nats per token (left is better)", height=height)


def precision_costs(result: StudyResult, rows: Sequence[VariantResult], recipes: Sequence[str]) -> dict[str, Figure]:
    """The loss that each recipe of low precision adds to each variant, with its interval, if it is finite."""
    look, figures = looks_of(result), {}
    for recipe in recipes:
        costs = [(row.name, row.low_precision.costs[recipe]) for row in rows if row.low_precision is not None]
        shown = [_estimate(name, look[name], cost) for name, cost in costs if cost is not None]
        if shown:
            shown.sort(key=lambda estimate: estimate.value)
            figures[recipe] = forest(shown, "added loss, nats per token (left is better)")
    return figures


def looks(names: Iterable[str]) -> dict[str, theme.Look]:
    """The colour and marker of each variant, set by its position in the study and the same on every page."""
    return {name: theme.look(place) for place, name in enumerate(dict.fromkeys(names))}


def looks_of(result: StudyResult) -> dict[str, theme.Look]:
    """The colour and marker of each of a study's variants."""
    return looks(row.name for row in result.variants)


def _estimate(name: str, look: theme.Look, value: Interval) -> Estimate:
    low, high = ("…" if end is None else f"{end:+.4f}" for end in (value.low, value.high))
    interval = "one seed, so no interval" if value.ends is None else f"interval {low} to {high}"
    return Estimate(name, value.value, ends=value.ends, text=f"{value.value:+.4f}", detail=interval, **look)


def sublayer_curves(records: Records, key: str, y_title: str) -> Figure | None:
    """A quantity per sublayer, on a logarithmic axis; None if no run was inspected."""
    if not (series := _by_place(records, "sublayers", "sublayer", key)):
        return None
    return curves(series, "sublayer (even: attention, odd: FFN)", y_title, log_y=True, whole_x=True)


def depth_weights(records: Records) -> dict[str, Figure]:
    """The mean weight of every source at every reader, for variants with depth weights."""

    def rows(table: Any) -> dict[str, list[float]]:
        readers = [*(str(k + 1) for k in table["readers"][:-1]), "head"]
        return dict(zip(readers, table["mean"], strict=True))

    source = "source (0 is the embedding, or starts as it)"
    return _maps(records, "depth_weights", rows, source, "mean weight", "input of sublayer")


def gate_writes(records: Records) -> dict[str, Figure]:
    """β of Multi-Gate Residuals and highways: how much of each stream a sublayer replaces."""

    def rows(table: Any) -> dict[str, list[float]]:
        return {str(row["sublayer"]): row["mean"] for row in table}

    return _maps(records, "beta", rows, "stream", "mean β", "written by sublayer")


def expert_loads(records: Records) -> dict[str, Figure]:
    """The load of every expert (1 is its fair share), for variants with experts."""

    def rows(table: Any) -> dict[str, list[float]]:
        return {str(row["layer"]): [share * len(row["load"]) for share in row["load"]] for row in table}

    return _maps(records, "experts", rows, "expert", "load, 1 is equal", "layer")


def attention_gates(records: Records) -> dict[str, Figure]:
    """Per layer: the mean of the attention gate, and the share of nearly closed gates."""
    figures = {}
    for label, key in (("mean gate", "mean"), ("share below 0.2", "closed")):
        if series := _by_place(records, "gates", "layer", key):
            figures[label] = curves(series, "layer", label, whole_x=True, y_range=(0.0, 1.0), height=320)
    return figures


def _by_place(records: Records, section: str, place: str, key: str) -> list[Curve]:
    """A curve per variant: the mean over its runs of `key`, by layer or sublayer (hybrids have gates in some only)."""
    series = []
    for name, tables in _inspections(records, section):
        values = _mean_rows([[row[key] for row in table] for table in tables])
        if values:
            points = [(row[place], value) for row, value in zip(tables[0], values, strict=True)]
            series.append(_curve(looks(records)[name], name, points, markers=True))
    return series


def _maps(
    records: Records,
    section: str,
    rows: Callable[[Any], dict[str, list[float]]],
    x_title: str,
    value: str,
    y_title: str,
) -> dict[str, Figure]:
    """A heat map per variant: the mean over its runs of the `rows` of a section."""
    figures = {}
    for name, tables in _inspections(records, section):
        every = [rows(table) for table in tables]
        means = [_mean_rows([each[row] for each in every]) for row in every[0]]
        width, highest = max(map(len, means)), max(map(max, means))
        padded = [[*row, *[None] * (width - len(row))] for row in means]
        x = [str(i) for i in range(width)]
        figures[name] = heatmap(padded, x, list(every[0]), x_title, y_title, value, bounds=(0.0, highest))
    return figures


def _inspections(records: Records, section: str) -> Iterator[tuple[str, list[Any]]]:
    """Per variant, this section of its runs' inspections; those with another structure than the first are omitted."""
    for name, runs in records.items():
        inspected = [run.inspection for run in runs if run.inspection]
        alike = [inspection for inspection in inspected if _frame(inspection) == _frame(inspected[0])]
        if tables := [inspection[section] for inspection in alike if section in inspection]:
            yield name, tables


def _frame(value: Any) -> Any:
    """The keys and lengths of nested tables and lists."""
    if isinstance(value, dict):
        return {key: _frame(inner) for key, inner in value.items()}
    return [_frame(inner) for inner in value] if isinstance(value, list) else None


def scaling_figure(points: dict[str, Points], result: StudyResult) -> Figure:
    """Final loss against compute on logarithmic axes, with the fitted power laws."""
    laws, series = {fit.name: fit for fit in result.scaling}, []
    for name, look in looks_of(result).items():
        runs = sorted(points.get(name, []))
        if not runs:
            continue
        series.append(_curve(look, name, runs, markers=True, lines=False))
        if name in laws:
            ends = [(compute, laws[name].scale * compute ** -laws[name].exponent) for compute, _ in (runs[0], runs[-1])]
            series.append(Curve(name, *_columns(ends), look["colour"], legend=False))
    return curves(series, "training FLOPs", "validation loss", log_x=True, log_y=True)


def gains_over_compute(result: StudyResult) -> Figure | None:
    """Equivalent tokens at each size against the baseline's compute, projections dashed; None if there are none."""
    flops = {row.size: row.flops_per_token for row in result.variants if row.name == result.baseline}
    tokens = {run.size: run.tokens for run in result.runs if run.variant == result.baseline and run.budget == 1.0}
    projected, series = {gain.name: gain for gain in result.projected}, []
    for name, look in looks_of(result).items():
        rows = [
            (flops[row.size] * trained, row.equivalent_tokens)
            for row in result.variants
            if row.name == name and row.equivalent_tokens is not None and (trained := tokens.get(row.size))
        ]
        if rows:
            ends = [gain.ends for _, gain in rows if gain.ends is not None]
            low, high = _columns(ends) if len(ends) == len(rows) else (None, None)
            drawn = [(x, gain.value) for x, gain in rows]
            series.append(_curve(look, name, drawn, markers=True, low=low, high=high))
        if (gain := projected.get(name)) is not None and (reach := gain.tokens.ends) is not None:
            start = gain.tokens.value / gain.trend.value
            drawn = [(gain.compute / PROJECTED, start), (gain.compute, gain.tokens.value)]
            low, high = [start, reach[0]], [start, reach[1]]
            series.append(_curve(look, name, drawn, markers=True, low=low, high=high, dash="dash", legend=False))
    return curves(series, "training FLOPs of the baseline", "equivalent tokens", log_x=True) if series else None


def _series(lines: dict[str, list[Points]], *, markers: bool, few: bool | None = None) -> list[Curve]:
    """A line per variant: the mean over its runs, with a band from min to max if there are few variants."""
    series, look = [], looks(lines)
    few = sum(any(runs) for runs in lines.values()) <= MAX_BANDS if few is None else few
    for name, every in lines.items():
        runs = [run for run in every if run and not any(math.isnan(x) for x, _ in run)]
        if not runs:
            continue
        columns = [([x for x, _ in points], [y for _, y in points]) for points in zip(*runs, strict=False)]
        middle = [(mean(x), mean(y)) for x, y in columns]  # x is averaged too, because seconds vary between runs
        band = {"low": [min(y) for _, y in columns], "high": [max(y) for _, y in columns]} if few and runs[1:] else {}
        series.append(_curve(look[name], name, middle, markers=markers, **band))
    return series


def _focus(values: Sequence[Sequence[float | None]]) -> tuple[float, float] | None:
    """An axis range without the steep first tenth, to make differences visible. Double-click shows the whole curve."""
    ends = [[v for v in line if v is not None] for line in values]
    if not ends or any(len(line) < 5 for line in ends):
        return None
    low, high = min(min(line) for line in ends), max(line[len(line) // 10] for line in ends)
    return low - 0.04 * (high - low), high


def _focus_differences(series: Sequence[Curve]) -> tuple[float, float] | None:
    """The same for differences: the second half, with its bands and zero in view."""
    late = [
        v for curve in series for line in (curve.y, curve.low, curve.high) for v in (line or [])[len(curve.x) // 2 :]
    ]
    known = [v for v in late if v is not None]
    if not known:
        return None
    low, high = min(*known, 0.0), max(*known, 0.0)
    room = 0.25 * ((high - low) or 1.0)
    return low - room, high + room


def _mean_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _curve(look: theme.Look, name: str, points: Sequence[tuple[float, float]], **settings: Any) -> Curve:
    return Curve(name, *_columns(points), **look, **settings)


def _seed(run: RunRecord) -> str:
    """The seed from the folder's ending -seedN; it pairs a run with the baseline's."""
    return run.folder.name.rpartition("-")[2]


def break_even(result: StudyResult) -> Scatter | None:
    """Cost of a step against token gain at the last size; a variant above the line pays off per second.

    None if no variant has both a gain and a speed.
    """
    rows, look = result.rows(result.sizes[-1]), looks_of(result)
    points = [
        Point(row.name, 1 / row.throughput_ratio.value, gain.value, y_ends=gain.ends, **look[row.name],
              x_ends=None if (speeds := row.throughput_ratio.ends) is None else (1 / speeds[1], 1 / speeds[0]))
        for row in rows
        if row.throughput_ratio is not None and speed_is_shown(row, result)
        if (gain := row.equivalent_tokens or row.step_gain) is not None
    ]  # fmt: skip
    if not points:
        return None
    points.insert(0, Point(result.baseline, 1.0, 1.0, **look[result.baseline]))
    (left, right), (low, high) = Scatter(points, (), "", "").ranges
    ends = [min(left, low), max(right, high)]
    line = Line("break-even: above it, a variant pays per second", ends, ends, dash="dash")
    what = "equivalent tokens" if any(row.equivalent_tokens is not None for row in rows) else "step-wise gain"
    return Scatter(points, [line], f"step time, relative to {result.baseline}", f"{what}, × {result.baseline}'s")


def picture(result: StudyResult) -> str | None:
    """`break_even` as SVG, for a document; None if there is nothing to draw."""
    if (scatter := break_even(result)) is None:
        return None
    what = f"{result.name}, {result.sizes[-1]}" if len(result.sizes) > 1 else result.name
    return scatter.svg(f"{what}: what a step costs and what it is worth")


def ladder_scatter(result: StudyResult, ladder: LadderResult) -> Scatter:
    """Loss against tokens: the baseline's budgets, the law, and each variant where the law reaches its loss."""
    rungs = [
        Point(f"{rung.tokens / MILLION:.4g} M", rung.tokens / MILLION, rung.loss.value,
              theme.SERIES[0], None, rung.loss.ends)
        for rung in ladder.rungs
    ]  # fmt: skip
    tokens = {(run.variant, run.size): run.tokens for run in result.runs if run.budget == 1.0 and run.tokens}
    variants, look = [], looks_of(result)
    for row in result.rows(ladder.size):
        gain, trained = row.equivalent_tokens, tokens.get((row.name, row.size))
        if gain is not None and trained is not None and row.loss is not None:
            scale = trained / MILLION
            around = None if gain.ends is None else (gain.ends[0] * scale, gain.ends[1] * scale)
            x, y = gain.value * scale, row.loss.value
            variants.append(Point(row.name, x, y, x_ends=around, labelled=False, **look[row.name]))
    points = [*rungs, *variants]
    return Scatter(points, [_law(ladder, points)], "million tokens", "validation loss")


def _law(ladder: LadderResult, points: list[Point]) -> Line:
    if ladder.law is None:
        ends = (ladder.rungs[0], ladder.rungs[-1])
        return Line("a line in ln D", [rung.tokens / MILLION for rung in ends], [rung.loss.value for rung in ends])
    law, low, high = ladder.law, min(p.x for p in points), max(p.x for p in points)
    places = [low + (high - low) * share / 60 for share in range(61)]
    losses = [law.floor + law.scale * (place * MILLION) ** -law.exponent for place in places]
    scale = law.scale * MILLION**-law.exponent
    return Line(f"L = {law.floor:.3f} + {scale:.3g}·D^−{law.exponent:.3f}, D in millions", places, losses)
