"""Pictures of a study: what a variant's step costs against what its tokens are worth, and the ladder behind it; how
gains change with the size or the depth of models, and peaks over tokens."""

from __future__ import annotations

from collections.abc import Sequence

from residua.report import theme
from residua.report.forest import both_ends
from residua.report.scatter import Line, Point, Scatter
from residua.study.inference import speed_is_shown
from residua.study.results import Interval, LadderResult, RunResult, StudyResult, VariantResult
from residua.study.statistics import geometric_mean

MILLION = 1e6


def break_even(result: StudyResult, size: str | None = None) -> Scatter | None:
    """Cost of a step against token gain, at one size (default: the last); above the line a variant pays per second.

    None if no variant has both a gain and a speed.
    """
    rows = result.rows(size or result.sizes[-1])
    points = [
        Point(row.name, 1 / row.throughput_ratio.value, gain.value, theme.colour(index),
              _inverse(_ends(row.throughput_ratio)), _ends(gain), symbol=theme.symbol(index))
        for index, row in enumerate(rows)
        if row.throughput_ratio is not None and speed_is_shown(row, result) and (gain := _gain(row)) is not None
    ]  # fmt: skip
    if not points:
        return None
    at = next(index for index, row in enumerate(rows) if row.name == result.baseline)
    points.insert(0, Point(result.baseline, 1.0, 1.0, theme.colour(at), symbol=theme.symbol(at)))
    (left, right), (low, high) = Scatter(points, (), "", "").ranges
    ends = [min(left, low), max(right, high)]
    line = Line("breaks even: above it, a variant pays per second", ends, ends, dash="dash")
    what = "equivalent tokens" if any(row.equivalent_tokens is not None for row in rows) else "step-wise gain"
    return Scatter(points, [line], f"time of a step, × {result.baseline}'s", f"{what}, × {result.baseline}'s")


def picture(result: StudyResult, size: str | None = None) -> str | None:
    """`break_even` as SVG, for a document; None if there is nothing to draw."""
    found, size = break_even(result, size), size or result.sizes[-1]
    if found is None:
        return None
    what = f"{result.name}, {size}" if len(result.sizes) > 1 else result.name
    return found.svg(f"{what}: what a step costs and what it is worth")


def ladder_scatter(result: StudyResult, ladder: LadderResult) -> Scatter:
    """Loss against tokens: the baseline's budgets, the law, and each variant where the law has its loss."""
    rungs = [
        Point(f"{rung.tokens / MILLION:.4g} M", rung.tokens / MILLION, rung.loss.value,
              theme.SERIES[0], None, _ends(rung.loss))
        for rung in ladder.rungs
    ]  # fmt: skip
    tokens = {(run.variant, run.size): run.tokens for run in result.runs if run.budget == 1.0 and run.tokens}
    variants = []
    for index, row in enumerate(result.rows(ladder.size)):
        gain, trained = row.equivalent_tokens, tokens.get((row.name, row.size))
        if gain is not None and trained is not None and row.loss is not None:
            scale, ends = trained / MILLION, _ends(gain)
            around = None if ends is None else (ends[0] * scale, ends[1] * scale)
            variants.append(
                Point(row.name, gain.value * scale, row.loss.value, theme.colour(index), around,
                      labelled=False, symbol=theme.symbol(index))
            )  # fmt: skip
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


def sizes_picture(result: StudyResult) -> str | None:
    """How much lower each variant's loss is than the baseline's, over the sizes, as SVG; None with fewer than two."""
    rows = {size: result.rows(size) for size in result.sizes}
    found = [(row.parameters / MILLION, row) for size in result.sizes for row in rows[size]]
    names = [row.name for row in rows[result.sizes[-1]]]
    axes = ("million parameters", f"validation loss below {result.baseline}'s")
    return _gains(names, found, axes, f"{result.name}: gains over {len(result.sizes)} sizes")


def depths_picture(own: StudyResult, studies: Sequence[tuple[int, StudyResult]]) -> str | None:
    """The same over the layers of several studies' models, for the variants of one's own; None with one depth only.

    Of studies with as many layers, each has its point.
    """
    depths = sorted(studies, key=lambda study: study[0])
    found = [(float(layers), row) for layers, result in depths for row in result.rows(result.sizes[-1])]
    if depths[0][0] == depths[-1][0]:
        return None
    names = [row.name for row in own.rows(own.sizes[-1])]
    axes = ("layers", f"validation loss below {own.baseline}'s")
    return _gains(names, found, axes, f"{own.name}: gains over {len({layers for layers, _ in depths})} depths")


def _gains(
    names: Sequence[str], rows: Sequence[tuple[float, VariantResult]], axes: tuple[str, str], title: str
) -> str | None:
    """Variants stand a little beside each other, so that their intervals can be told apart."""
    lines, points = [], []
    for index, name in enumerate(names):
        found = [(x * (1 + index / 100), row.difference) for x, row in rows if row.name == name and row.difference]
        if len(found) > 1:
            colour, symbol = theme.colour(index), theme.symbol(index)
            lines.append(Line("", [x for x, _ in found], [-gain.value for _, gain in found], colour))
            points += [Point(name if x == found[-1][0] else "", x, -gain.value, colour, None, _opposite(_ends(gain)),
                             symbol=symbol) for x, gain in found]  # fmt: skip
    return Scatter(points, lines, *axes).svg(title) if lines else None


def peak_picture(result: StudyResult, variants: Sequence[str] = (), size: str | None = None) -> str | None:
    """The largest |h| over tokens as SVG, the geometric mean over seeds, of all variants or some; None without any."""
    size, lines, points = size or result.sizes[-1], [], []
    for index, row in enumerate(result.rows(size)):
        runs = [run for run in result.complete(size, row.name) if run.peaks is not None]
        curve = _peak_curve(runs)
        if curve and (not variants or row.name in variants):
            colour = theme.colour(index)
            lines.append(Line("", [x for x, _ in curve], [y for _, y in curve], colour))
            points.append(Point(row.name, *curve[-1], colour, symbol=theme.symbol(index)))
    if not lines:
        return None
    low, high = min(min(line.y) for line in lines), max(max(line.y) for line in lines)
    bounds = (0.0, 1.25 * max(point.x for point in points)), (low / 1.5, high * 1.5)  # labels stand at the right
    axes = ("million tokens", "largest |h| that a sublayer reads")
    drawn = Scatter(points, lines, *axes, bounds=bounds, log_y=True, column=True)
    what = f"{result.name}, {size}" if len(result.sizes) > 1 else result.name
    return drawn.svg(f"{what}: peak |h| while training")


def _peak_curve(runs: Sequence[RunResult]) -> list[tuple[float, float]]:
    """(million tokens, peak): the geometric mean over the runs, where all of them have one."""
    found = []
    for points in zip(*(_peak_points(run) for run in runs), strict=False):
        values = [peak for _, peak in points if peak]
        if len(values) == len(runs):
            found.append((points[0][0], geometric_mean(values)))
    return found


def _peak_points(run: RunResult) -> list[tuple[float, float | None]]:
    if run.peaks is None or run.tokens is None:
        return []
    per_step = run.tokens / run.peaks.step[-1] / MILLION
    return [(step * per_step, peak) for step, peak in zip(run.peaks.step, run.peaks.peak, strict=True)]


def _gain(row: VariantResult) -> Interval | None:
    return row.equivalent_tokens or row.step_gain


def _ends(value: Interval) -> tuple[float, float] | None:
    return both_ends(value.low, value.high)


def _inverse(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (1 / ends[1], 1 / ends[0])


def _opposite(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (-ends[1], -ends[0])
