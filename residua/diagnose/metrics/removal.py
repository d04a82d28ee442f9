"""What removal costs: the loss, on the same tokens, with one part of the model switched off.

The one metric that is an experiment and not a sum: `residua/diagnose/run.py` calls `measure` after the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from residua.config.settings import Frozen
from residua.diagnose.metric import Metric, Model, Models, Sentence
from residua.diagnose.observe import Ablation, AblationKind, Subject
from residua.diagnose.plots import by_layer, numbers, place
from residua.diagnose.text import Sample
from residua.report import Page, theme
from residua.report.figures import grouped_bars, heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Budget = Literal["none", "layers", "all"]
KINDS: dict[Budget, tuple[AblationKind, ...]] = {
    "none": (),
    "layers": ("layer", "source", "stream", "uniform"),
    "all": ("layer", "sublayer", "source", "stream", "uniform", "head"),
}


class AblationFacts(Frozen):
    """The loss with one part switched off, and its change on the same tokens. `head` within layer `index`."""

    kind: AblationKind
    index: int
    head: int | None = None
    label: str
    loss: float
    change: float


def planned(subject: Subject, budget: Budget, suspects: Iterable[int]) -> list[Ablation]:
    """What the budget allows. Sublayers that may be dead are removed one by one unless the budget is "none"."""
    kinds = KINDS[budget]
    chosen = subject.ablations(kinds)
    if kinds and "sublayer" not in kinds:
        chosen += [a for a in subject.ablations(("sublayer",)) if a.index in set(suspects)]
    return chosen


def measure(
    subject: Subject, ablations: Sequence[Ablation], sample: Sample, tokens_at_once: int, tick: Callable[[], None]
) -> list[AblationFacts]:
    """Loss and change of loss for each ablation, over the whole sample."""
    if not ablations:
        return []
    whole = _loss(subject, sample, tokens_at_once)
    found = []
    for ablation in ablations:
        with ablation.applied():
            loss = _loss(subject, sample, tokens_at_once)
        found.append(
            AblationFacts(
                kind=ablation.kind,
                index=ablation.index,
                head=ablation.second,
                label=ablation.label,
                loss=loss,
                change=loss - whole,
            )
        )
        tick()
    return found


@torch.no_grad()
def _loss(subject: Subject, sample: Sample, tokens_at_once: int) -> float:
    """Mean cross-entropy in nats per target."""
    device = next(subject.model.parameters()).device
    total = 0.0
    for tokens, targets in sample.batches(tokens_at_once):
        total += float(subject.loss(tokens.to(device), targets.to(device))) * tokens.numel()
    return total / sample.tokens.numel()


class Removal(Metric):
    """How the costs are shown. The costs themselves are `ablations` in diagnosis.json, which every metric may read."""

    page_place = 10

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        layers = [a for a in model.ablations if a.kind == "layer"]
        if layers:
            most, least = max(layers, key=lambda a: a.change), min(layers, key=lambda a: a.change)
            yield Sentence(
                20,
                f"Removing {most.label} costs most ({most.change:+.4f} nats), removing {least.label} least "
                f"({least.change:+.4f}).",
            )

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        layers, sublayers, heads = _layer_costs(models), _sublayer_costs(models), _head_costs(models)
        if layers is None and not heads:
            return
        section = page.section(
            "What removal costs",
            "Loss change on the same tokens when a part is silenced. Healthy: every layer costs something, the first "
            "ones most; a bar at zero is a layer the model does not use, one below zero a layer it would be better "
            "without.",
        )
        if layers is not None:
            section.figure(layers, f"Measured on {max(m.ablation_tokens for m in models):,} tokens.")
        if sublayers is not None:
            section.subheading("Sublayer by sublayer")
            section.figure(sublayers, "Healthy: attention and feed-forward both matter at every depth.")
        if heads:
            section.subheading("Head by head")
            section.tabs(
                heads, "Healthy: many small costs. One head that costs far more than all others is a bottleneck."
            )


def _layer_costs(models: Models) -> Figure | None:
    """Loss change without each layer."""
    shown = [m for m in models if any(a.kind == "layer" for a in m.ablations)]
    if not shown:
        return None
    count = max(m.layers for m in shown)
    colours = [theme.colour(place(models, index)) for index, m in enumerate(models) if m in shown]
    parts = {}
    for m in shown:
        changes = {a.index: a.change for a in m.ablations if a.kind == "layer"}
        parts[m.name] = [changes.get(n) for n in range(count)]
    return grouped_bars([f"layer {n}" for n in range(count)], parts, colours, "loss change (nats)", line_at=0.0)


def _sublayer_costs(models: Models) -> Figure | None:
    return by_layer(
        [m for m in models if sum(a.kind == "sublayer" for a in m.ablations) > 1],
        lambda m: [(a.index, a.change) for a in m.ablations if a.kind == "sublayer"],
        "loss change (nats)",
        x="sublayer",
    )


def _head_costs(models: Models) -> dict[str, Figure]:
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
