"""Telemetry figures by name, and their curves over tokens for study and diagnosis pages; does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from residua.report import theme
from residua.report.figures import Curve, curves, evenly, heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Place = Literal["reader", "sublayer", "layer"]
"""The owner of a figure: a reader of the depth state (a sublayer's input, or last the final norm's), the write after a
sublayer, or a layer."""


@dataclass(frozen=True)
class Family:
    """A figure with a value at every place: its readable name, its kind of owner, and how to combine places."""

    title: str
    place: Place
    over: Literal["max", "mean"]
    logarithmic: bool = False


FAMILIES = {
    "peak": Family("peak |h|", "reader", "max", logarithmic=True),
    "stream": Family("peak |s| of a stream", "reader", "max", logarithmic=True),
    "sink_ratio": Family("residual-sink ratio", "reader", "max", logarithmic=True),
    "entropy": Family("entropy of depth weights (nats)", "reader", "mean"),
    "beta_mean": Family("β, mean", "sublayer", "mean"),
    "beta_max": Family("β, largest", "sublayer", "max"),
    "beta_q1": Family("β, first quartile", "sublayer", "mean"),
    "beta_median": Family("β, median", "sublayer", "mean"),
    "beta_q3": Family("β, third quartile", "sublayer", "mean"),
    "recovery": Family("amplification of rounding by inversion", "sublayer", "max", logarithmic=True),
    "anchor": Family("scale of the anchor, λ1γ1", "layer", "mean"),
    "current": Family("scale of the layer's own projection, λ2γ2", "layer", "mean"),
    "gate_mean": Family("attention gate, mean", "layer", "mean"),
    "gate_closed": Family("attention gate, share below 0.2", "layer", "mean"),
    "kurtosis": Family("kurtosis of a product's input", "sublayer", "max", logarithmic=True),
    "block_share": Family("largest of 16 values, share of their sum", "sublayer", "max"),
    "saturated": Family("share of values clamped to the range", "sublayer", "max"),
    "underflow": Family("share of values rounded to zero", "sublayer", "max"),
    "reach": Family("largest value, as a multiple of what its scale admits", "sublayer", "max", logarithmic=True),
    "gain": Family("norm gain, mean |g|", "reader", "mean"),
    "sink_gain": Family("norm gain of the largest dimension", "reader", "mean", logarithmic=True),
}
"""Families by name. `stream`, `anchor` and `current` exist per stream or pathway, as in `stream.0`, `anchor.q`. Those
from `kurtosis` to `reach` exist per low-precision product, as in `kurtosis.project`."""

KIND = "telemetry"
"""The `kind` of telemetry records in metrics.jsonl."""
HEAD = "head"
"""The name of the head's product, whose number follows that of the last sublayer."""
Records = Sequence[Mapping[str, Any]]
"""The telemetry records of one run, ordered by step."""

POINTS = 200
"""Maximum points of a curve."""
STEPS = 60
"""Maximum columns of a map over steps."""
RAN_OUT = "which input ran out of range"
PLACES = 8
"""Maximum places with their own curves; they are evenly spaced."""
_PLACES: dict[Place, str] = {"reader": "read by sublayer", "sublayer": "written after sublayer", "layer": "layer"}


def telemetry_of(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The telemetry records among a run's records."""
    return [record for record in records if record["kind"] == KIND]


def said(records: Records) -> list[str]:
    """The sentences that the run printed about its telemetry."""
    return [sentence for record in records for sentence in record.get("said", ())]


def over_places(record: Mapping[str, Any], name: str) -> float | None:
    """A family's value for the whole model: the maximum or mean over places, and over streams or pathways."""
    tables = [values for figure, values in record["figures"].items() if figure.partition(".")[0] == name]
    known: list[float] = [value for values in tables for value in values if value is not None]
    if not known:
        return None
    return max(known) if FAMILIES[name].over == "max" else sum(known) / len(known)


def measured(runs: Sequence[Records]) -> list[str]:
    """The families for which these runs have figures, in the order of `FAMILIES`."""
    families = {figure.partition(".")[0] for records in runs for record in records[-1:] for figure in record["figures"]}
    return [name for name in FAMILIES if name in families]


def whole_model(records: Records, name: str) -> list[tuple[float, float]]:
    """A family's curve over tokens, combined over places."""
    values = ((float(record["tokens"]), over_places(record, name)) for record in evenly(records, POINTS))
    return [(x, y) for x, y in values if y is not None]


def by_place(records: Records) -> dict[str, Figure]:
    """Curves over tokens of a few places, for every figure of one run: title → figure."""
    shown = evenly(records, POINTS)
    figures = records[-1]["figures"] if records else {}
    ran_out = range_map(records)
    plots = {} if ran_out is None else {RAN_OUT: ran_out}
    for name, kind in FAMILIES.items():
        for figure in (figure for figure in figures if figure.partition(".")[0] == name):
            part = figure.partition(".")[2]
            title = f"{kind.title}: {part.upper()}" if part else kind.title
            series = _series(shown, figure, kind.place, len(figures.get("peak", ())) - 1)
            plots[title] = curves(series, "tokens", kind.title, log_y=kind.logarithmic)
    return plots


def _series(shown: Records, figure: str, kind: Place, final: int) -> list[Curve]:
    """A curve for each of a few places; `final` is the number of the reader that is the final norm."""
    tables = [(float(record["tokens"]), record["figures"].get(figure, [])) for record in shown]
    known = sorted({i for _, values in tables for i, value in enumerate(values) if value is not None})
    series = []
    for index, place in enumerate(evenly(known, PLACES)):
        points = [(x, values[place]) for x, values in tables if place < len(values) and values[place] is not None]
        name = "read by the final norm" if kind == "reader" and place == final else f"{_PLACES[kind]} {place}"
        series.append(Curve(name, [x for x, _ in points], [y for _, y in points], theme.colour(index + 1)))
    return series


def range_map(records: Records) -> Figure | None:
    """A map over steps: the largest value of every FP8 product's input, as a multiple of the limit of its scale.

    Values in a cell above 1 were clamped. None for NVFP4, whose scales are computed from the values themselves.
    """
    shown = evenly(records, STEPS)
    tables = {figure: [record["figures"].get(figure, []) for record in shown] for figure in _figures(shown, "reach")}
    places = sorted({(k, figure) for figure, steps in tables.items() for values in steps for k, _ in _known(values)})
    rows = [[dict(_known(values)).get(k) for values in tables[figure]] for k, figure in places]
    if all(cell in (None, 1.0) for row in rows for cell in row):
        return None
    matrices = [figure.partition(".")[2] for _, figure in places]
    names = [m if m == HEAD else f"{sublayer_name(k)}, {m}" for (k, _), m in zip(places, matrices, strict=True)]
    steps = [f"{record['step']:,}" for record in shown]
    return heatmap(
        rows, steps, names, "step", "input of", "largest / limit", bounds=(0.0, 2.0), step=(10, 1 + len(rows) // 24)
    )


def _figures(records: Records, family: str) -> list[str]:
    """All figures of a family that any record has."""
    return sorted({name for record in records for name in record["figures"] if name.partition(".")[0] == family})


def _known(values: Sequence[float | None]) -> list[tuple[int, float]]:
    return [(k, value) for k, value in enumerate(values) if value is not None]


def product_name(k: int, matrix: str) -> str:
    """A readable name for the product with a matrix of sublayer k, or with the head's."""
    return "the head" if matrix == HEAD else f"{matrix} in {sublayer_name(k)}"


def sublayer_name(k: int) -> str:
    """A readable name for sublayer k."""
    return f"layer {k // 2} {('attention', 'feed-forward')[k % 2]}"
