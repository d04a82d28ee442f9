"""The cost of removal: the loss on the same tokens with one part of the model switched off.

This is the only metric that is an experiment, not a sum: `residua/diagnose/api.py` calls `measure` after the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch

from residua.config.settings import Frozen
from residua.diagnose.metric import LayerTrack, Metric, Model, Models, Sentence
from residua.diagnose.observe import Ablation, AblationKind, Subject
from residua.diagnose.plots import NONE, Part, Topic, by_layer, colours, label_step, line, numbers, on_log, tab_each
from residua.diagnose.sentences import listed, short
from residua.diagnose.text import Sample
from residua.report import Bar, Cell, Column, Value, theme
from residua.report.figures import Figure, curves, grouped_bars, heatmap

NO_CHANGE = 1e-3
"""A part's removal counts as changing nothing if the loss changes by less than this, in nats."""
Budget = Literal["none", "layers", "all"]
KINDS: dict[Budget, tuple[AblationKind, ...]] = {
    "none": (),
    "layers": ("layer", "source", "stream", "uniform"),
    "all": ("layer", "sublayer", "source", "stream", "uniform", "head"),
}
MOST_LAYERS = 8
"""At most this many middle layers are removed at once, and at most half of all layers."""


class AblationFacts(Frozen):
    """The loss with one part switched off, and its change on the same tokens. `head` counts within layer `index`; for
    `layers`, `index` is the first of `count`. `note` says where the part could not be removed entirely."""

    kind: AblationKind
    index: int
    head: int | None = None
    label: str
    loss: float
    change: float
    count: int = 1
    note: str = ""


def planned(subject: Subject, budget: Budget, suspects: Iterable[int]) -> list[Ablation]:
    """Plan the ablations that the budget allows. Suspects are removed individually unless the budget is "none"."""
    kinds = KINDS[budget]
    chosen = subject.ablations(kinds)
    chosen += _several(subject, {a.index for a in chosen if a.kind == "layer"})
    if kinds and "sublayer" not in kinds:
        chosen += [a for a in subject.ablations(("sublayer",)) if a.index in set(suspects)]
    return chosen


def _several(subject: Subject, removable: set[int]) -> list[Ablation]:
    """Plan to remove two, three or more middle layers at once, if each of them can be removed."""
    ablations = []
    for count in range(2, min(subject.layers // 2, MOST_LAYERS) + 1):
        first = (subject.layers - count) // 2
        layers = range(first, first + count)
        if removable.issuperset(layers):
            removed = partial(subject.without_layers, layers)
            ablations.append(Ablation("layers", first, f"layers {first} to {layers[-1]}", removed, count=count))
    return ablations


def measure(
    subject: Subject, ablations: Sequence[Ablation], sample: Sample, tokens_at_once: int, tick: Callable[[], None]
) -> list[AblationFacts]:
    """Measure the loss and its change for each ablation, over the whole sample."""
    if not ablations:
        return []
    whole = _loss(subject, sample, tokens_at_once)
    results = []
    for ablation in ablations:
        with ablation.applied():
            loss = _loss(subject, sample, tokens_at_once)
        about = {name: value for name, value in vars(ablation).items() if name != "applied"}
        results.append(AblationFacts(**about, loss=loss, change=loss - whole))
        tick()
    return results


@torch.no_grad()
def _loss(subject: Subject, sample: Sample, tokens_at_once: int) -> float:
    """Mean cross-entropy in nats per target."""
    device = next(subject.model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tokens, targets in sample.batches(tokens_at_once):
        total += subject.loss(tokens.to(device), targets.to(device)).double() * tokens.numel()
    return float(total) / sample.tokens.numel()


class Removal(Metric):
    """Presents the costs. They are stored as `ablations` in diagnosis.json, which every metric may read."""

    columns = (
        Column("costs most", "the layer whose removal costs most, and its loss change in nats"),
        Column("costs least", "the layer whose removal costs least"),
    )
    page_place = 10

    @classmethod
    def tracks(cls, models: Models) -> Iterable[LayerTrack]:
        removed = [a for m in models for a in m.ablations if a.kind == "layer"]
        high, falls = max([1.0, *(abs(a.change) for a in removed)]), any(map(_lowers, removed))
        sides = (
            " Bars to the right mean that the loss rises without the layer, to the left that it falls." if falls else ""
        )
        yield LayerTrack(
            "removal",
            f"log, {'±' if falls else ''}{NO_CHANGE:g} to {short(high)} nats",
            f"How much the loss changes without the layer; an empty bar is a layer without effect on the loss.{sides}",
            [_removed(model, high, 0.5 if falls else None) for model in models],
        )

    @classmethod
    def cells(cls, model: Model) -> Sequence[Cell]:
        layers = sorted((a for a in model.ablations if a.kind == "layer"), key=lambda a: -a.change)
        return [Value(f"{a.change:+.4f}", a.label) for a in (layers[0], layers[-1])] if layers else [NONE, NONE]

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        layers = [a for a in model.ablations if a.kind == "layer"]
        if layers:
            yield Sentence(20, _costs(layers))
        several = [a for a in model.ablations if a.kind == "layers"]
        if several:
            last = several[-1]
            yield Sentence(25, f"Without {last.label} together the loss changes by {last.change:+.4f} nats.")

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        layers, heads = _layer_costs(models), tab_each(models, _head_costs)
        if layers is None and not any(heads.values()):
            return
        filling = {model.name: [a.index for a in model.ablations if a.kind == "layer" and a.note] for model in models}
        remarks = [
            f"{name}: {listed('layer', indices)} cannot be removed (fill phase: their outputs become the "
            "streams). They write zeros instead, and the perplexity figure omits them."
            for name, indices in filling.items()
            if indices
        ]
        yield Topic(
            "Cost of removal",
            "Loss change on the same tokens when a part is removed. Healthy: every layer costs something, the "
            "first ones most; a bar at zero is a layer that the model does not use, one below zero a layer that hurts.",
            Part(
                {"loss": layers, "perplexity": _perplexities(models)},
                f"Measured on {max(m.ablation_tokens for m in models):,} tokens.",
            ),
            *map(Part, remarks),
            Part(
                _several_costs(models),
                "Layers in the middle of the model, removed together. Healthy: the cost grows with every "
                "layer; a flat line is a range of layers that the model hardly uses.",
                "Several layers at once",
            ),
            Part(
                _sublayer_costs(models),
                "Healthy: attention and feed-forward both matter at every depth.",
                "Sublayer by sublayer",
            ),
            Part(
                heads,
                "Healthy: many small costs. One head that costs far more than all others is a bottleneck.",
                "Head by head",
            ),
        )


def _costs(layers: Sequence[AblationFacts]) -> str:
    """Say which layer's removal costs most, and which least."""
    most, least = max(layers, key=lambda a: a.change), min(layers, key=lambda a: a.change)
    if len(layers) == 1:
        return f"Without {most.label} the loss changes by {most.change:+.4f} nats."
    if round(most.change, 4) <= 0:
        return (
            f"Removing no layer raises the loss: it changes by {least.change:+.4f} nats without {least.label}, by "
            f"{most.change:+.4f} without {most.label}."
        )
    return (
        f"Removing {most.label} costs most ({most.change:+.4f} nats), removing {least.label} least "
        f"({least.change:+.4f})."
    )


def _layer_costs(models: Models) -> Figure | None:
    """Loss change without each layer."""
    changes = {m.name: {a.index: a.change for a in m.ablations if a.kind == "layer"} for m in models}
    count = max((m.layers for m in models if changes[m.name]), default=0)
    if not count:
        return None
    parts = {name: [by_index.get(n) for n in range(count)] for name, by_index in changes.items() if by_index}
    shown = [colour for m, colour in zip(models, colours(models), strict=True) if changes[m.name]]
    names = [f"layer {n}" for n in range(count)]
    return grouped_bars(names, parts, shown, "loss change (nats)", line_at=0.0, step=label_step(count))


def _perplexities(models: Models) -> Figure | None:
    """Draw the change in perplexity without each layer; layers of a fill phase are omitted.

    The axis is logarithmic; if removing some layer lowers the loss, it is linear with a line at zero.
    """
    falls = any(_lowers(a) for m in models for a in m.ablations if a.kind == "layer" and not a.note)

    def points(m: Model) -> list[tuple[float, float]]:
        removals = [a for a in m.ablations if a.kind == "layer" and not a.note]
        return [(float(a.index), change) for a in removals if (change := perplexity_change(a)) > 0 or falls]

    return _with_zero(by_layer(models, points, "perplexity change", log=not falls))


def _lowers(ablation: AblationFacts) -> bool:
    """Return whether removing the part lowers the loss by `NO_CHANGE` or more."""
    return ablation.change <= -NO_CHANGE


def _with_zero(figure: Figure | None) -> Figure | None:
    """Add a line at zero to the figure if some values are negative."""
    if figure is not None and any(y is not None and y < 0 for trace in figure.data for y in trace.y):
        figure.add_hline(y=0.0, line={"color": theme.SERIES[0], "width": 1.5, "dash": "dot"})
    return figure


def perplexity_change(ablation: AblationFacts) -> float:
    """exp(loss without) − exp(loss with); losses above 50 count as 50."""
    return math.exp(min(ablation.loss, 50.0)) - math.exp(min(ablation.loss - ablation.change, 50.0))


def _several_costs(models: Models) -> Figure | None:
    """Loss change by the number of middle layers that are removed together, starting at one."""
    series = []
    for m, colour in zip(models, colours(models), strict=True):
        removals = [(float(a.count), a.change) for a in m.ablations if a.kind == "layers"]
        if removals:
            single = [(1.0, a.change) for a in m.ablations if a.kind == "layer" and a.index == (m.layers - 1) // 2]
            series.append(line(m.name, single + removals, colour))
    if not series:
        return None
    return _with_zero(curves(series, "layers removed", "loss change (nats)", whole_x=True, height=340))


def _removed(model: Model, high: float, zero: float | None) -> dict[int, Bar]:
    """By layer, the loss change without it; with `zero`, bars begin there and decreases in loss extend to the left."""
    dead = {f.where["layer"] for f in model.findings if f.kind == "dead_layer"}
    return {
        a.index: Bar(
            (math.copysign(on_log(abs(a.change), NO_CHANGE, high), a.change) * (zero or 1.0),),
            zero=zero,
            text="0" if abs(a.change) < NO_CHANGE else f"{'+' if a.change > 0 else '−'}{short(abs(a.change))}",
            flag="bad" if a.index in dead else "",
            words=f"without {a.label} the loss changes by {a.change:+.4f} nats"
            + (": the layer is dead" if a.index in dead else "")
            + (f" ({a.note})" if a.note else ""),
        )
        for a in model.ablations
        if a.kind == "layer"
    }


def _sublayer_costs(models: Models) -> Figure | None:
    def points(m: Model) -> list[tuple[float, float]]:
        changes = [(float(a.index), a.change) for a in m.ablations if a.kind == "sublayer"]
        return changes if len(changes) == len(m.sites) else []  # a small budget only removes the suspects

    return _with_zero(by_layer(models, points, "loss change (nats)", x="sublayer"))


def _head_costs(model: Model) -> Figure | None:
    """Loss change without each head, layer × head."""
    changes = {(a.index, a.head): a.change for a in model.ablations if a.kind == "head" and a.head is not None}
    if not changes:
        return None
    layers, count = sorted({layer for layer, _ in changes}), 1 + max(head for _, head in changes)
    rows = [[changes.get((layer, head)) for head in range(count)] for layer in layers]
    names = [str(layer) for layer in layers]
    return heatmap(rows, numbers(count), names, "head", "layer", "loss change", diverging=True)
