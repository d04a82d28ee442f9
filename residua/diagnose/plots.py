"""The figures of a diagnosis: one line per model in every curve, one tab per model in every heat map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from residua.diagnose.schema import ModelDiagnosis
from residua.report import theme
from residua.report.figures import Curve, curves, grouped_bars, heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Models = Sequence[ModelDiagnosis]
Points = list[tuple[float, float]]
Select = Callable[[ModelDiagnosis], Points]


def by_layer(
    models: Models,
    points: Select,
    y: str,
    *,
    floor: Select | None = None,
    floor_name: str = "uniform attention",
    log: bool = False,
    x: str = "layer",
    bounds: tuple[float, float] | None = None,
) -> Figure | None:
    """A quantity over depth, one line per model, and dotted what it is compared with (once, where all share it)."""
    series = []
    floors = [] if floor is None else [found for model in models if (found := floor(model))]
    shared = bool(floors) and all(other == floors[0] for other in floors)
    if shared:
        series.append(line(floor_name, floors[0], theme.colour(0), dash="dot"))
    for index, model in enumerate(models):
        found = points(model)
        if found:
            colour = theme.colour(index + 1)
            series.append(line(model.name, found, colour))
            if floor is not None and not shared:
                series.append(line(f"{model.name}, {floor_name}", floor(model), colour, dash="dot"))
    return curves(series, x, y, log_y=log, whole_x=True, y_range=bounds, height=340) if series else None


def line(name: str, points: Points, colour: str, dash: str = "solid") -> Curve:
    return Curve(name, [x for x, _ in points], [y for _, y in points], colour, dash=dash, markers=dash == "solid")


def first_token(models: Models) -> Figure | None:
    highest = max((a.first_token for m in models for a in m.attention), default=0.0)
    return by_layer(
        models,
        lambda m: [(a.layer, a.first_token) for a in m.attention],
        "attention to the first token",
        floor=lambda m: [(a.layer, a.uniform_first_token) for a in m.attention],
        bounds=(0.0, max(0.1, 1.1 * highest)),
    )


def sink_rate(models: Models) -> Figure | None:
    return by_layer(models, lambda m: [(a.layer, a.sink_rate) for a in m.attention], "share of heads above 0.3")


def learned_sink(models: Models) -> Figure | None:
    shown = [m for m in models if any(a.learned_sink > 0 for a in m.attention)]
    return by_layer(shown, lambda m: [(a.layer, a.learned_sink) for a in m.attention], "attention to the learned sink")


def entropy(models: Models) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(a.layer, a.entropy) for a in m.attention],
        "entropy (nats)",
        floor=lambda m: [(a.layer, a.uniform_entropy) for a in m.attention],
    )


def heads(models: Models) -> dict[str, Figure]:
    """Attention to the first token of every head."""
    found = {}
    for model in models:
        if model.attention:
            count = max(len(a.heads) for a in model.attention)
            rows = [padded([h.first_token for h in a.heads], count) for a in model.attention]
            names = [str(a.layer) for a in model.attention]
            found[model.name] = heatmap(rows, numbers(count), names, "head", "layer", "attention", bounds=(0.0, 1.0))
    return found


def dimensions(models: Models) -> Figure:
    """Mean |h| of the largest dimensions, sorted, in medians."""
    series = [
        line(m.name, [(rank + 1, d.ratio) for rank, d in enumerate(m.dimensions.largest)], theme.colour(i + 1))
        for i, m in enumerate(models)
    ]
    return curves(series, "dimensions, largest first", "mean |h| / median dimension's", log_y=True, height=340)


def gains(models: Models) -> Figure | None:
    """Norm gain against size, a point for each of the largest dimensions."""
    series = []
    for i, m in enumerate(models):
        known = [(d.ratio, d.gain) for d in m.dimensions.largest if d.gain is not None]
        if known:
            points = [(x, max(y, 1e-6)) for x, y in sorted(known)]
            series.append(
                Curve(
                    m.name,
                    [x for x, _ in points],
                    [y for _, y in points],
                    theme.colour(i + 1),
                    markers=True,
                    lines=False,
                )
            )
    if not series:
        return None
    return curves(series, "mean |h| / median dimension's", "mean |norm gain|", log_x=True, log_y=True, height=340)


def largest(models: Models) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(s.index, s.largest[0].value) for s in m.states],
        "largest |h|",
        floor=lambda m: [(s.index, max(s.median, 1e-12)) for s in m.states],
        floor_name="median |h|",
        log=True,
        x="read by sublayer",
    )


def output_rms(models: Models) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(s.index, s.output_rms) for s in m.sites if s.output_rms],
        "output RMS",
        log=True,
        x="sublayer",
    )


def relative_rms(models: Models) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(s.index, s.relative_rms) for s in m.sites if s.relative_rms],
        "output RMS / input RMS",
        log=True,
        x="sublayer",
    )


def gradient_rms(models: Models) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(s.index, s.gradient_rms) for s in m.sites if s.gradient_rms],
        "gradient RMS",
        log=True,
        x="sublayer",
    )


def state_curve(models: Models, key: str, title: str) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(s.index, getattr(s, key)) for s in m.states if getattr(s, key) is not None],
        title,
        x="read by sublayer",
    )


def pairs(models: Models, key: str, title: str, high: float) -> dict[str, Figure]:
    """State × state, coloured from zero unless something is below."""
    found = {}
    for m in models:
        values, names = getattr(m, key), numbers(len(m.states))
        low = -high if min(map(min, values)) < 0 else 0.0
        found[m.name] = heatmap(values, names, names, "state", "state", title, bounds=(low, high), height=520)
    return found


def layer_costs(models: Models) -> Figure | None:
    """Loss change without each layer."""
    shown = [m for m in models if any(a.kind == "layer" for a in m.ablations)]
    if not shown:
        return None
    count = max(m.layers for m in shown)
    colours = [theme.colour(index + 1) for index, m in enumerate(models) if m in shown]
    parts = {}
    for m in shown:
        changes = {a.index: a.change for a in m.ablations if a.kind == "layer"}
        parts[m.name] = [changes.get(n) for n in range(count)]
    return grouped_bars([f"layer {n}" for n in range(count)], parts, colours, "loss change (nats)", line_at=0.0)


def sublayer_costs(models: Models) -> Figure | None:
    return by_layer(
        [m for m in models if sum(a.kind == "sublayer" for a in m.ablations) > 1],
        lambda m: [(a.index, a.change) for a in m.ablations if a.kind == "sublayer"],
        "loss change (nats)",
        x="sublayer",
    )


def head_costs(models: Models) -> dict[str, Figure]:
    """Loss change without each head, layer × head."""
    found = {}
    for m in models:
        own = [a for a in m.ablations if a.kind == "head" and a.head is not None]
        if own:
            changes = {(a.index, a.head): a.change for a in own}
            layers, count = sorted({a.index for a in own}), 1 + max(a.head or 0 for a in own)
            rows = [[changes.get((layer, head)) for head in range(count)] for layer in layers]
            names = [str(layer) for layer in layers]
            found[m.name] = heatmap(rows, numbers(count), names, "head", "layer", "loss change", diverging=True)
    return found


def padded(row: Sequence[float], count: int) -> list[float | None]:
    return [*row, *[None] * (count - len(row))]


def numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]
