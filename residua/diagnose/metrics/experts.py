"""Mixtures of experts: how evenly tokens are spread over the experts of each layer."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from residua.config.settings import Frozen
from residua.diagnose.metric import Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation
from residua.diagnose.plots import Part, Topic, numbers, padded, tab_each
from residua.report.figures import Figure, heatmap


class ExpertFacts(Frozen):
    """The mixture of experts of one layer: the share of the tokens' choices that each expert received."""

    layer: int
    load: list[float]


class ExpertKeys(Frozen):
    """Every layer with experts."""

    experts: list[ExpertFacts] = Field(default_factory=list)


class Experts(Metric):
    """Means over all tokens, by layer."""

    keys = ExpertKeys
    file_place, page_place = 90, 90

    def add(self, observation: Observation) -> None:
        tokens = observation.tokens.numel()
        for layer, load in observation.loads.items():
            self.means[layer].add(load.double() * tokens, tokens)

    def facts(self) -> ExpertKeys:
        layers = sorted(self.means.items())
        return ExpertKeys(experts=[ExpertFacts(layer=layer, load=mean.value().tolist()) for layer, mean in layers])

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        if model.experts:
            loads = [share * len(e.load) for e in model.experts for share in e.load]
            unused = sum(load == 0 for load in loads)
            beside = f"; {unused} of {len(loads)} are never chosen" if unused else ""
            yield Sentence(
                40, f"Experts carry {min(loads):.2f} to {max(loads):.2f} times an equal share of the tokens{beside}."
            )

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        yield Topic(
            "Expert load",
            "How often each expert is chosen; 1 is an equal share. Healthy: all near 1 over enough text. An "
            "expert near 0 is unused; one far above 1 does the work of several.",
            Part(tab_each(models, lambda m: _map(m.experts) if m.experts else None)),
        )


def _map(experts: list[ExpertFacts]) -> Figure:
    """Layer × expert: the load, 1 being an expert's fair share."""
    loads = [[share * len(e.load) for share in e.load] for e in experts]
    layers = [str(e.layer) for e in experts]
    bounds, count = (0.0, max(max(row) for row in loads)), max(map(len, loads))
    rows = [padded(row, count) for row in loads]
    return heatmap(rows, numbers(count), layers, "expert", "layer", "load, 1 is equal", bounds=bounds)
