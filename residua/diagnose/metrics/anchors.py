"""Anchor mixing: how much each channel of a projection takes from the anchor and how much from the layer itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Mean, Metric, Model, Models, Sentence
from residua.diagnose.observe import NEAR_ZERO, AnchorFacts, Observation, Subject
from residua.diagnose.plots import LABELS, Part, Points, Topic, by_layer, label_step, tabs_each
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report.figures import Figure, heatmap

COLUMNS = 256
"""A map has at most this many columns per pathway; with more channels, neighbours are averaged."""
INSIDE = 0.02
"""The share of channels at either end of a ratio's range that the colour scale ignores."""


class AnchorKeys(Frozen):
    """Every layer and pathway (q, k, v, g) that mixes in an anchor."""

    anchors: list[AnchorFacts] = Field(default_factory=list)


class Anchors(Metric):
    """λ are parameters; γ of dynamic mixing is averaged over all tokens."""

    keys = AnchorKeys
    file_place, page_place = 100, 110

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.value_gates: dict[int, Mean] = defaultdict(Mean)

    def add(self, observation: Observation) -> None:
        for place, gamma in observation.gammas.items():
            self.means[place].add(wide(gamma).double().flatten(0, 1).sum(0), observation.tokens.numel())
        for layer, gate in observation.value_gates.items():
            both = torch.stack([wide(gate).double(), (gate.abs() < NEAR_ZERO).double()])
            self.value_gates[layer].add(both.flatten(1, 2).sum(1), observation.tokens.numel())

    def facts(self) -> AnchorKeys:
        gated = [_gated_scales(layer, mean.value()) for layer, mean in sorted(self.value_gates.items())]
        return AnchorKeys(anchors=[self._facts(scales) for scales in [*self.subject.anchor_scales(), *gated]])

    def _facts(self, scales: AnchorFacts) -> AnchorFacts:
        """The scales with γ, and with their ratio."""
        known = self.means.get((scales.layer, scales.pathway))
        gamma: list[float] | None = None if known is None else known.value().tolist()
        first, second = gamma or (1.0, 1.0)
        channels = {
            "anchor_channels": [_short(first * x) for x in scales.anchor_channels],
            "current_channels": [_short(second * x) for x in scales.current_channels],
        }
        facts = scales.model_copy(update=channels | {"gamma": gamma})
        ratios = [ratio for ratio in _ratios(facts) if ratio is not None]
        return facts.model_copy(update={"ratio": median(ratios) if ratios else None})

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        known = [a for a in model.anchors if a.ratio is not None]
        if known:
            most, least = max(known, key=lambda a: abs(a.ratio)), min(known, key=lambda a: abs(a.ratio))
            parts = "heads" if len(most.anchor_channels) == len(most.anchor) else "channels"
            yield Sentence(
                67,
                f"The anchor weighs most on {most.pathway.upper()} of layer {most.layer} (λ1/λ2 = {most.ratio:.3g}, "
                f"median over {parts}) and least on {least.pathway.upper()} of layer {least.layer} "
                f"({least.ratio:.3g}).",
            )

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        pathways = sorted({a.pathway for m in models for a in m.anchors}, key="qkvg".find)
        yield Topic(
            "Anchor mixing",
            "λ1 weighs the anchor, λ2 the layer's own projection; of dynamic mixing, λ times the mean of its γ; of a "
            "gate, λ1 is its mean and λ2 is 1. "
            "Healthy: their ratio differs between pathways and layers; λ1 near zero everywhere is an anchor the model "
            "does not use.",
            Part(
                {pathway.upper(): _ratio_curve(models, pathway) for pathway in pathways},
                "Median over channels, or heads, of λ1/λ2 by layer. Above 1 the anchor weighs more than the layer's "
                "own projection.",
            ),
            Part(
                tabs_each(models, _maps),
                "Stripes are channels, or whole heads, that differ from the rest. The colour scale of the "
                "ratio excludes 2 % of the channels at either end.",
                "Channel by channel",
            ),
        )


def _gated_scales(layer: int, means: Tensor) -> AnchorFacts:
    """Scales for a gate on added values: `means` [2, H] of the gate and of where it is near zero. The layer's own
    values have scale 1."""
    gate, ones = means[0].tolist(), [1.0] * means.shape[1]
    return AnchorFacts(
        layer=layer, pathway="v", anchor=gate, current=ones, near_zero=float(means[1].mean()), anchor_channels=gate,
        current_channels=ones,
    )  # fmt: skip


def _short(value: float) -> float:
    """Round to six digits, which are enough for one of many thousand channels."""
    return float(f"{value:.6g}")


def _ratio_curve(models: Models, pathway: str) -> Figure | None:
    def points(m: Model) -> Points:
        return [(a.layer, a.ratio) for a in m.anchors if a.pathway == pathway and a.ratio is not None]

    def ones(m: Model) -> Points:
        return [(layer, 1.0) for layer in sorted({float(a.layer) for a in m.anchors})]

    return by_layer(models, points, "λ1/λ2", floor=ones, floor_name="equal shares")


def _ratios(facts: AnchorFacts) -> list[float | None]:
    pairs = zip(facts.anchor_channels, facts.current_channels, strict=True)
    return [first / second if second else None for first, second in pairs]


def _maps(model: Model) -> dict[str, Figure | None]:
    """Draw λ1/λ2, λ1 and λ2, layer × pathway and channel; and where λ1 is near zero."""
    values: dict[str, Callable[[AnchorFacts], Sequence[float | None]]] = {
        "λ1/λ2": _ratios,
        "λ1 (anchor)": lambda a: a.anchor_channels or a.anchor,
        "λ2 (current)": lambda a: a.current_channels or a.current,
        "share |λ1| < 1e-3": lambda a: [a.near_zero],
    }
    return {title: _map(model.anchors, of, title) for title, of in values.items()}


def _map(
    facts: Sequence[AnchorFacts], of: Callable[[AnchorFacts], Sequence[float | None]], title: str
) -> Figure | None:
    layers = sorted({a.layer for a in facts})
    columns: dict[str, dict[int, float | None]] = {}
    for a in facts:
        for name, value in _columns(a, of(a)):
            columns.setdefault(name, {})[a.layer] = value
    rows = [[column.get(layer) for column in columns.values()] for layer in layers]
    known = sorted(value for row in rows for value in row if value is not None)
    if not known:
        return None
    cut = int(INSIDE * len(known)) if "/" in title else 0
    return heatmap(
        rows, list(columns), [str(layer) for layer in layers], "pathway, head and channel", "layer", title,
        bounds=(known[cut], known[-1 - cut]), height=min(300 + 16 * len(layers), 760),
        step=(label_step(len(columns)), label_step(len(layers), 2 * LABELS)),
    )  # fmt: skip


def _columns(facts: AnchorFacts, values: Sequence[float | None]) -> Iterable[tuple[str, float | None]]:
    """Yield names and values of a layer's columns; neighbours are averaged down to at most COLUMNS."""
    heads, count = len(facts.anchor), len(values)
    together, wide_head = -(-count // COLUMNS), max(1, count // heads)
    for start in range(0, count, together):
        known = [value for value in values[start : start + together] if value is not None]
        name = facts.pathway.upper()
        if count > 1:
            name += f" head {start // wide_head}"
        if count > heads:
            name += f" channel {start % wide_head}"
        yield name, _short(sum(known) / len(known)) if known else None
