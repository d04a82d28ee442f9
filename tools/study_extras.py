"""What only the documentation's studies need: gains by another study's ladder, pictures over sizes, depths and time.

`results.py` and `answer.py` share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from residua.config.run import RunConfig, settings
from residua.config.settings import ConfigError
from residua.report import theme
from residua.report.scatter import Line, Point, Scatter
from residua.study.figures import MILLION, Points
from residua.study.gains import concluded, product
from residua.study.ladder import equivalent_tokens
from residua.study.plan import PLACE
from residua.study.results import RunResult, StudyResult, VariantResult
from residua.study.results_file import SavedStudy
from residua.study.statistics import geometric_mean

Rungs = dict[float, dict[int, float]]  # the baseline's losses by tokens and seed
LINE = 13.0  # pixels
VALIDATED = {"vocab_size", "validation_tokens", "bytes_per_token"}
LENGTH = (*PLACE, "data.seed", "train.seed", "train.steps", "train.validate_every")


def with_external_ladder(saved: SavedStudy, other: SavedStudy) -> tuple[StudyResult, Rungs]:
    """The study with gains from longer runs of its baseline in another study, and the ladder that has them.

    New text where its own longest run read its text twice: the other study has the same baseline with more steps. Its
    complete runs take the place of the largest budget of the ladder; speeds stay the study's own.
    """
    _check_alike(saved, other)
    result, longer = saved.result(), other.result()
    _check_same_tokens(result, longer)
    own = _losses(result.runs, result)
    new = _losses(longer.complete(longer.sizes[-1], longer.baseline), longer)  # without its ladder
    rungs = {tokens: losses for tokens, losses in own.items() if tokens < max(own)} | new
    rows = tuple(_regained(row, result, rungs) for row in result.variants)
    return concluded(result.model_copy(update={"variants": rows})), rungs


def _check_alike(saved: SavedStudy, other: SavedStudy) -> None:
    """Refuse budgets of another model or recipe, or whose loss is that of another text."""
    names = saved.config.name, other.config.name
    validated = [s.dataset and s.dataset.model_dump(include=VALIDATED) for s in (saved, other)]
    if validated[0] != validated[1]:
        raise ConfigError(f"the ladder of {names[0]} cannot have budgets of {names[1]}: the validation text differs.")
    ours, theirs = (
        settings(next(RunConfig(**m.config) for m in s.models if m.variant == s.config.baseline), without=LENGTH)
        for s in (saved, other)
    )
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    if differing:
        raise ConfigError(f"the ladder of {names[0]} cannot have budgets of {names[1]}: {differing[0]} differs.")


def _check_same_tokens(result: StudyResult, longer: StudyResult) -> None:
    """Refuse losses on another part of the text."""
    ours, theirs = result.validated_tokens, longer.validated_tokens
    if ours != theirs:
        raise ConfigError(
            f"the ladder of {result.name} cannot have budgets of {longer.name}: its losses are on {ours} validation "
            f"tokens, those of {longer.name} on {theirs}; use runs that were validated on the same text."
        )


def _losses(runs: Sequence[RunResult], result: StudyResult) -> Rungs:
    """Of the largest size."""
    found: Rungs = {}
    for run in runs:
        if (run.variant, run.size) == (result.baseline, result.sizes[-1]) and run.loss is not None and run.tokens:
            found.setdefault(float(run.tokens), {})[run.seed] = run.loss
    return found


def _regained(row: VariantResult, result: StudyResult, rungs: Rungs) -> VariantResult:
    """The row with the gains that these budgets of the baseline give."""
    if row.name == result.baseline or row.loss is None or row.size != result.sizes[-1]:
        return row
    runs = result.complete(row.size, row.name)
    losses = {run.seed: run.loss for run in runs if run.loss is not None}
    gain = equivalent_tokens(rungs, losses, max(run.tokens or 0 for run in runs), result.confidence)
    changed = {
        "equivalent_tokens": None if gain is None else gain.interval,
        "extrapolated": gain is not None and gain.extrapolated,
        "wall_clock_gain": product(gain, row.throughput_ratio),
    }
    return row.model_copy(update=changed)


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
        gains = [(x * (1 + index / 100), row.difference) for x, row in rows if row.name == name and row.difference]
        if len(gains) > 1:
            colour, symbol, last = theme.colour(index), theme.symbol(index), gains[-1][0]
            lines.append(Line("", [x for x, _ in gains], [-gain.value for _, gain in gains], colour))
            for x, gain in gains:
                ends = None if gain.ends is None else (-gain.ends[1], -gain.ends[0])
                points.append(Point(name if x == last else "", x, -gain.value, colour, None, ends, symbol=symbol))
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
    drawn = CurveEnds(points, lines, "million tokens", "largest |h| that a sublayer reads")
    what = f"{result.name}, {size}" if len(result.sizes) > 1 else result.name
    return drawn.svg(f"{what}: peak |h| while training")


class CurveEnds(Scatter):
    """Curves over a logarithmic axis, with their ends' labels in a column at the right, apart from each other."""

    @property
    def ranges(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """With room for the labels."""
        values = [*(point.y for point in self.points), *(y for line in self.lines for y in line.y)]
        return (0.0, 1.25 * max(point.x for point in self.points)), (min(values) / 1.5, max(values) * 1.5)

    def _pixel(self, x: float, y: float) -> tuple[float, float]:
        low, high = self.ranges[1]
        return super()._pixel(x, low + (high - low) * math.log(y / low) / math.log(high / low))

    def _levels(self, low: float, high: float) -> list[float]:
        """1, 2 and 5 times powers of ten, or these powers alone if there are many."""
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(powers) < 5 else (1,)
        return [value for power in powers for f in factors if low <= (value := float(f"{f}e{power}")) <= high]

    def _drawn_points(self) -> Iterator[str]:
        """Labels one below the other, and a thin line from each to its point."""
        points = sorted(self.points, key=lambda point: -point.y)
        centres = [self._pixel(point.x, point.y) for point in points]
        top, bottom = (self._pixel(0.0, end)[1] for end in reversed(self.ranges[1]))
        places = spread([y for _, y in centres], LINE, top + LINE / 2, bottom - LINE / 2)
        aside = max(x for x, _ in centres) + 26
        for point, (x, y), place in zip(points, centres, places, strict=True):
            yield (
                f'<path d="M{x:.1f} {y:.1f}L{aside - 4:.1f} {place:.1f}" stroke="{point.colour}" stroke-opacity="0.4"/>'
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{point.colour}"/>'
                f'<text x="{aside:.1f}" y="{place + 4:.1f}" fill="{point.colour}">{escape(point.name)}</text>'
            )


def spread(places: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """These rising places, moved as little as it takes to have neighbours `apart` and all within both ends.

    The least squares: y_i = place_i − i·apart must not fall, so what falls is replaced by its mean. If there is no
    room, the first ones leave the lower end.
    """
    groups: list[tuple[float, int]] = []  # mean of y, count
    for index, place in enumerate(places):
        mean, count = place - index * apart, 1
        while groups and groups[-1][0] > mean:
            before, size = groups.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        groups.append((mean, count))
    last = high - (len(places) - 1) * apart
    level = [min(max(mean, low), last) for mean, count in groups for _ in range(count)]
    return [y + index * apart for index, y in enumerate(level)]


def _peak_curve(runs: Sequence[RunResult]) -> Points:
    """(million tokens, peak): the geometric mean over the runs, where all of them have one."""
    every = [
        [(step * (run.tokens / run.peaks.step[-1] / MILLION), peak)
         for step, peak in zip(run.peaks.step, run.peaks.peak, strict=True)]
        for run in runs
        if run.peaks is not None and run.tokens is not None
    ]  # fmt: skip
    curve = []
    for points in zip(*every, strict=False):
        values = [peak for _, peak in points if peak]
        if len(values) == len(runs):
            curve.append((points[0][0], geometric_mean(values)))
    return curve
