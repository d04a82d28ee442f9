"""The figures of a diagnosis that only models with depth weights, streams, gates, experts or anchors have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from residua.diagnose.plots import Models, by_layer, line, padded
from residua.diagnose.schema import AnchorFacts
from residua.report import theme
from residua.report.figures import curves, grouped_bars, heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def depth_weights(models: Models) -> dict[str, Figure]:
    """Reader × source."""
    found = {}
    for m in models:
        if m.depth_weights:
            count = max(len(r.mean) for r in m.depth_weights)
            rows = [padded(r.mean, count) for r in m.depth_weights]
            names = [r.name for r in m.depth_weights]
            high = max(max(r.mean) for r in m.depth_weights)
            widest = max(m.depth_weights, key=lambda r: len(r.sources))
            found[m.name] = heatmap(
                rows, widest.sources, names, "source", "read by", "mean weight",
                bounds=(0.0, high), height=min(190 + 24 * len(rows), 760),
            )  # fmt: skip
    return found


def depth_costs(models: Models) -> dict[str, Figure]:
    """What the weights are worth: loss change without a source, without a stream, with uniform weights."""
    titles = {"source": "source removed", "stream": "stream removed", "uniform": "weights made uniform"}
    found = {}
    for index, m in enumerate(models):
        for kind, title in titles.items():
            own = [a for a in m.ablations if a.kind == kind]
            if own:
                labels = [a.label.replace("uniform weights at ", "") for a in own]
                key = title if len(models) == 1 else f"{m.name}: {title}"
                found[key] = grouped_bars(
                    labels,
                    {title: [a.change for a in own]},
                    [theme.colour(index + 1)],
                    "loss change (nats)",
                    line_at=0.0,
                )
    return found


def betas(models: Models) -> dict[str, Figure]:
    """Writer × bin of [0, 1]."""
    found = {}
    for m in models:
        if m.betas:
            bins = len(m.betas[0].histogram)
            edges = [f"{i / bins:.2f}" for i in range(bins)]
            names = [m.sites[b.site].name for b in m.betas]
            found[m.name] = heatmap(
                [b.histogram for b in m.betas], edges, names, "β from", "written by", "share of gates"
            )
    return found


def streams(models: Models) -> dict[str, Figure]:
    """Angular distance of each stream to itself one sublayer earlier."""
    found = {}
    for m in models:
        if m.streams:
            count = max(len(s.angular_distance) for s in m.streams)
            series = []
            for i in range(count):
                points = [
                    (s.reader, d)
                    for s in m.streams
                    if i < len(s.angular_distance) and (d := s.angular_distance[i]) is not None
                ]
                series.append(line(f"stream {i}", [(float(x), y) for x, y in points], theme.colour(i + 1)))
            found[m.name] = curves(
                series, "as read by sublayer", "angular distance to one earlier", whole_x=True, height=340
            )
    return found


def stream_similarity(models: Models) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(s.reader, s.similarity) for s in m.streams],
        "mean cosine between streams",
        x="as read by sublayer",
    )


def gates(models: Models) -> dict[str, Figure]:
    mean = by_layer(models, lambda m: [(g.layer, g.mean) for g in m.gates], "mean gate", bounds=(0.0, 1.0))
    closed = by_layer(models, lambda m: [(g.layer, g.closed) for g in m.gates], "share below 0.2", bounds=(0.0, 1.0))
    made = {"mean gate": mean, "share below 0.2": closed}
    return {title: figure for title, figure in made.items() if figure is not None}


def experts(models: Models) -> dict[str, Figure]:
    """Layer × expert: the load, 1 being an expert's fair share."""
    found = {}
    for m in models:
        if m.experts:
            rows = [[share * len(e.load) for share in e.load] for e in m.experts]
            numbers = [str(i) for i in range(len(rows[0]))]
            layers = [str(e.layer) for e in m.experts]
            bounds = (0.0, max(max(row) for row in rows))
            found[m.name] = heatmap(rows, numbers, layers, "expert", "layer", "load, 1 is fair", bounds=bounds)
    return found


def anchors(models: Models) -> dict[str, Figure]:
    """λ1 and λ2, pathway × layer, and by head where λ has heads."""
    found = {}
    for m in models:
        for title, key in (("λ1 (anchor)", "anchor"), ("λ2 (current)", "current"), ("share |λ1| < 1e-3", "near_zero")):
            if m.anchors:
                label = title if len(models) == 1 else f"{m.name}: {title}"
                found[label] = _anchor_map(m.anchors, key, title)
    return found


def _anchor_map(facts: Sequence[AnchorFacts], key: str, title: str) -> Figure:
    layers = sorted({a.layer for a in facts})
    columns: dict[str, dict[int, float]] = {}
    for a in facts:
        value = getattr(a, key)
        values = value if isinstance(value, list) else [value]
        for head, x in enumerate(values):
            column = f"{a.pathway.upper()}" if len(values) == 1 else f"{a.pathway.upper()} {head}"
            columns.setdefault(column, {})[a.layer] = x
    rows = [[column.get(layer) for column in columns.values()] for layer in layers]
    return heatmap(rows, list(columns), [str(layer) for layer in layers], "pathway and head", "layer", title)
