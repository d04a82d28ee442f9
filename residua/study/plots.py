"""The figures of a study's page, made from the records of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from residua.report import theme
from residua.report.figures import Curve, curves, grouped_bars, heatmap
from residua.study.results import ScalingResult, StudyResult, VariantResult
from residua.study.runs import RunRecord
from residua.study.sentences import speed_is_shown
from residua.study.statistics import mean, smooth

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Records = dict[str, list[RunRecord]]  # by variant, in the order of the study
TOKENS, SECONDS = "tokens", "seconds of training"


def validation_curves(records: Records, against: str) -> Figure:
    """Validation loss: the mean over seeds, with a band that spans all seeds."""
    lines = {name: [_validation_points(run, against) for run in runs] for name, runs in records.items()}
    return _loss_figure(lines, against, "validation loss (nats per token)", markers=True)


def training_curves(records: Records, against: str) -> Figure:
    """Training loss, smoothed over about a twentieth of the run."""
    lines = {name: [_training_points(run, against) for run in runs] for name, runs in records.items()}
    return _loss_figure(lines, against, "training loss, smoothed", markers=False)


def difference_curves(records: Records, baseline: str) -> Figure:
    """Validation loss minus the baseline's at the same step, mean over seeds."""
    reference = dict(_mean_curve([run.loss_curve for run in records[baseline]]))
    series = [Curve(baseline, list(reference), [0.0] * len(reference), _colour(records, baseline), dash="dot")]
    for name, runs in records.items():
        points = [(x, y - reference[x]) for x, y in _mean_curve([run.loss_curve for run in runs]) if x in reference]
        if name != baseline:
            series.append(Curve(name, *_columns(points), _colour(records, name), markers=True))
    return curves(series, TOKENS, "loss − baseline's loss", height=340)


def gains(result: StudyResult) -> Figure | None:
    """Token gain, throughput and wall-clock gain of each variant at the last size, relative to the baseline.

    No bars for a speed that is not known, nor for what follows from it.
    """
    parts: dict[str, list[float | None]] = {}
    colours = []
    for index, row in enumerate(result.rows(result.sizes[-1])):
        found = (row.equivalent_tokens or row.step_gain, row.throughput_ratio, row.wall_clock_gain)
        values = [part.value for part in found if part is not None]
        if len(values) == len(found):
            parts[row.name] = [*values] if speed_is_shown(row, result) else [values[0], None, None]
            colours.append(theme.colour(index))
    if not parts:
        return None
    names = ["equivalent tokens" if result.ladder else "step-wise gain", "throughput", "wall-clock gain"]
    return grouped_bars(names, parts, colours, "× baseline", line_at=1.0)


def precision_costs(rows: Sequence[VariantResult], recipes: Sequence[str]) -> Figure:
    """The loss that low precision adds to each variant; no bar where it was not finite."""
    parts = {
        row.name: [None if (cost := row.low_precision.costs[name]) is None else cost.value for name in recipes]
        for row in rows
        if row.low_precision is not None
    }
    return grouped_bars(recipes, parts, [theme.colour(i) for i in range(len(parts))], "added loss, nats")


def sublayer_curves(records: Records, key: str, y_title: str) -> Figure | None:
    """A quantity per sublayer, on a logarithmic axis; None if no run was inspected."""
    series = []
    for name, runs in records.items():
        values = _mean_rows([[row[key] for row in run.inspection.get("sublayers", [])] for run in _inspected(runs)])
        if values:
            series.append(Curve(name, list(range(len(values))), values, _colour(records, name), markers=True))
    if not series:
        return None
    return curves(series, "sublayer (even: attention, odd: feed-forward)", y_title, log_y=True, whole_x=True)


def depth_weights(records: Records) -> dict[str, Figure]:
    """The mean weight of every source at every reader, for the variants that have depth weights."""
    found = {}
    for name, runs in records.items():
        tables = [run.inspection["depth_weights"] for run in _inspected(runs) if "depth_weights" in run.inspection]
        if tables:
            rows = [_mean_rows([table["mean"][r] for table in tables]) for r in range(len(tables[0]["mean"]))]
            readers = [str(k + 1) for k in tables[0]["readers"]]
            readers[-1] = "head"
            found[name] = _matrix(rows, readers, "source (0 is, or begins as, the embedding)", "mean weight")
    return found


def gate_writes(records: Records) -> dict[str, Figure]:
    """β of Multi-Gate Residuals and highways: how much of each stream a sublayer replaces."""
    found = {}
    for name, runs in records.items():
        tables = [run.inspection["beta"] for run in _inspected(runs) if "beta" in run.inspection]
        if tables:
            rows = [_mean_rows([table[r]["mean"] for table in tables]) for r in range(len(tables[0]))]
            writers = [str(row["sublayer"]) for row in tables[0]]
            found[name] = _matrix(rows, writers, "stream", "mean β", y_title="written by sublayer")
    return found


def attention_gates(records: Records) -> dict[str, Figure]:
    """Per layer: the mean of the attention gate, and the share of gate values that are nearly closed."""
    found = {}
    for label, key in (("mean gate", "mean"), ("share below 0.2", "closed")):
        series = []
        for name, runs in records.items():
            tables = [run.inspection["gates"] for run in _inspected(runs) if "gates" in run.inspection]
            values = _mean_rows([[row[key] for row in table] for table in tables])
            if values:
                layers = [row["layer"] for row in tables[0]]  # in a hybrid, only some layers
                series.append(Curve(name, layers, values, _colour(records, name), markers=True))
        if series:
            found[label] = curves(series, "layer", label, whole_x=True, y_range=(0.0, 1.0), height=320)
    return found


def expert_loads(records: Records) -> dict[str, Figure]:
    """The load of every expert (1 is its fair share), for the variants that have experts."""
    found = {}
    for name, runs in records.items():
        tables = [run.inspection["experts"] for run in _inspected(runs) if "experts" in run.inspection]
        if tables:
            rows = [_mean_rows([_fair(table[r]["load"]) for table in tables]) for r in range(len(tables[0]))]
            layers = [str(row["layer"]) for row in tables[0]]
            found[name] = _matrix(rows, layers, "expert", "load, 1 is fair", y_title="layer")
    return found


def _fair(load: Sequence[float]) -> list[float]:
    return [share * len(load) for share in load]


def scaling_figure(
    points: dict[str, list[tuple[float, float]]], fits: Sequence[ScalingResult], order: Sequence[str]
) -> Figure:
    """Final loss against compute on logarithmic axes, with the fitted power laws."""
    laws = {fit.name: fit for fit in fits}
    series = []
    for index, name in enumerate(order):
        found = sorted(points.get(name, []))
        if not found:
            continue
        colour = theme.colour(index)
        series.append(Curve(name, *_columns(found), colour, markers=True, lines=False))
        if name in laws:
            ends = [found[0][0], found[-1][0]]
            fitted = [laws[name].scale * c ** -laws[name].exponent for c in ends]
            series.append(Curve(name, ends, fitted, colour, legend=False))
    return curves(series, "training FLOPs", "validation loss", log_x=True, log_y=True)


def _matrix(
    rows: Sequence[Sequence[float]], names: Sequence[str], x_title: str, value: str, y_title: str = "input of sublayer"
) -> Figure:
    width = max(len(row) for row in rows)
    padded = [[*row, *[None] * (width - len(row))] for row in rows]
    highest = max(max(row) for row in rows)
    return heatmap(padded, [str(i) for i in range(width)], names, x_title, y_title, value, bounds=(0.0, highest))


def _loss_figure(
    lines: dict[str, list[list[tuple[float, float]]]], against: str, y_title: str, *, markers: bool
) -> Figure:
    series = []
    for index, (name, runs) in enumerate(lines.items()):
        runs = [run for run in runs if run]
        if not runs:
            continue
        x, y = _columns(_mean_curve(runs))
        band = _band(runs) if len(runs) > 1 else (None, None)
        series.append(Curve(name, x, y, theme.colour(index), markers=markers, low=band[0], high=band[1]))
    return curves(series, against, y_title, y_range=_focus([curve.y for curve in series]))


def _focus(values: Sequence[Sequence[float | None]]) -> tuple[float, float] | None:
    """A range without the steep first tenth, so that the differences show. Double-click shows the whole curve."""
    ends = [[v for v in line if v is not None] for line in values]
    if not ends or any(len(line) < 5 for line in ends):
        return None
    low, high = min(min(line) for line in ends), max(line[len(line) // 10] for line in ends)
    return low - 0.04 * (high - low), high


def _validation_points(run: RunRecord, against: str) -> list[tuple[float, float]]:
    if against == TOKENS:
        return run.loss_curve
    return [(float(row["seconds"]), float(row["loss"])) for row in run.validation]


def _training_points(run: RunRecord, against: str) -> list[tuple[float, float]]:
    x = [float(row["tokens" if against == TOKENS else "seconds"]) for row in run.train]
    return list(zip(x, smooth([float(row["loss"]) for row in run.train], len(run.train) / 20), strict=True))


def _mean_curve(runs: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of curves measured at the same steps; x is averaged too, because seconds differ between runs."""
    return [(mean([p[0] for p in points]), mean([p[1] for p in points])) for points in zip(*runs, strict=False)]


def _band(runs: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    columns = [[point[1] for point in points] for points in zip(*runs, strict=False)]
    return [min(column) for column in columns], [max(column) for column in columns]


def _mean_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _inspected(runs: Sequence[RunRecord]) -> list[Any]:
    """The runs with an inspection; one that is not built like the first is left out."""
    seen = [run for run in runs if run.inspection]
    return [run for run in seen if _frame(run.inspection) == _frame(seen[0].inspection)]


def _frame(value: Any) -> Any:
    """The keys and lengths of nested tables and lists."""
    if isinstance(value, dict):
        return {key: _frame(inner) for key, inner in value.items()}
    return [_frame(inner) for inner in value] if isinstance(value, list) else None


def _colour(records: Records, name: str) -> str:
    return theme.colour(list(records).index(name))
