"""Gated attention: how far each layer's gate is open."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from pydantic import Field

from residua.config.settings import Frozen
from residua.diagnose.metric import Mean, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import NONE, by_layer
from residua.diagnose.sentences import percent
from residua.diagnose.text import Sample
from residua.model import gauges
from residua.ops._runtime.numeric import wide
from residua.report import Column, Page


class GateFacts(Frozen):
    """The attention gate of one layer: its mean, and the share of it below 0.2."""

    layer: int
    mean: float
    closed: float


class GateKeys(Frozen):
    """Every layer with gated attention."""

    gates: list[GateFacts] = Field(default_factory=list)


class Gates(Metric):
    """Means over tokens, heads and channels."""

    keys = GateKeys
    columns = (Column("gate", "of attention, its mean"),)
    file_place, page_place = 80, 100

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.layers: dict[int, Mean] = defaultdict(Mean)

    def add(self, seen: Observation) -> None:
        for layer, gate in seen.gates.items():
            sums = torch.stack([wide(gate).double().sum(), gauges.closed(gate).double().sum()])
            self.layers[layer].add(sums, gate.numel())

    def facts(self) -> GateKeys:
        means = {layer: mean.value().tolist() for layer, mean in sorted(self.layers.items())}
        return GateKeys(gates=[GateFacts(layer=layer, mean=m, closed=c) for layer, (m, c) in means.items()])

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        if model.gates:
            mean = sum(gate.mean for gate in model.gates) / len(model.gates)
            closed = sum(gate.closed for gate in model.gates) / len(model.gates)
            yield Sentence(50, f"Attention gates are {mean:.2f} on average, {percent(closed)} of them below 0.2.")

    @classmethod
    def cells(cls, model: Model) -> Sequence[str]:
        return [f"{sum(gate.mean for gate in model.gates) / len(model.gates):.2f}" if model.gates else NONE]

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        mean = by_layer(models, lambda m: [(g.layer, g.mean) for g in m.gates], "mean gate", bounds=(0.0, 1.0))
        closed = by_layer(
            models, lambda m: [(g.layer, g.closed) for g in m.gates], "share below 0.2", bounds=(0.0, 1.0)
        )
        if mean is not None and closed is not None:
            page.section(
                "Attention gates",
                "Healthy: sparse but open somewhere. A gate mostly below 0.2 has switched its layer's attention off.",
            ).tabs({"mean gate": mean, "share below 0.2": closed})
