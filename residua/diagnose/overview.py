"""The top of the page: findings as cards, and each model as a picture, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from residua.diagnose.metric import Finding, LayerTrack, Metric, Model, Models, on_page
from residua.diagnose.plots import colours
from residua.diagnose.sentences import absent, sentence
from residua.report import Bar, Card, Owner, Section, Spread, Strip, Track
from residua.report.cards import Tone


def add_findings(section: Section, models: Models) -> None:
    """A green line for the models without a defect, and a card for each kind of finding."""
    clean = [model for model in models if not defects(model)]
    if clean:
        of = "" if len(clean) == len(models) else f"{', '.join(m.name for m in clean)}: "
        section.good(of + absent(clean[0]))
    cards = [card for metric in on_page(models[0]) for kind in metric.kinds if (card := _card(metric, kind, models))]
    section.cards(sorted(cards, key=lambda card: card.tone != "bad"))


def defects(model: Model) -> list[Finding]:
    """The findings that a healthy model does not have."""
    kinds = {kind for metric in model.metrics if metric.defect for kind in metric.kinds}
    return [finding for finding in model.findings if finding.kind in kinds]


def title_of(kind: str) -> str:
    """`dead_layer` for people: Dead layer."""
    return sentence(kind.replace("_", " "))[:-1]


def _card(metric: type[Metric], kind: str, models: Models) -> Card | None:
    """All findings of one kind; None if there are none."""
    found = [
        (model, colour, own)
        for model, colour in zip(models, colours(models), strict=True)
        if (own := [finding for finding in model.findings if finding.kind == kind])
    ]
    if not found:
        return None
    tone: Tone = "bad" if metric.defect else "note"
    if len(models) > 1:
        told = [(model.name, colour, metric.explain(model, own)) for model, colour, own in found]
        owners = [Owner(name, colour, explained.where, explained.sure) for name, colour, explained in told]
        title = f"{title_of(kind)} in {len(found)} of {len(models)} models"
        return Card(title, facts={"What to do": told[0][2].remedy}, tone=tone, owners=owners)
    model, _, own = found[0]
    explained = metric.explain(model, own)
    return Card(
        title_of(kind) if len(own) == 1 else f"{title_of(kind)} × {len(own)}",
        sentence(own[0].words),
        {"Where": explained.where, "How sure": explained.sure, "What to do": explained.remedy},
        tone=tone,
        more=[sentence(finding.words) for finding in own[1:]],
    )


def add_picture(section: Section, models: Models) -> None:
    """Every model's layers from bottom to top, with all tracks that some model has; the scales are shared."""
    tracks = [track for metric in models[0].metrics for track in metric.tracks(models) if any(track.cells)]
    strips = [
        Strip(model.name, colour, _rows(model, index, tracks))
        for index, (model, colour) in enumerate(zip(models, colours(models), strict=True))
    ]
    section.strips(
        [Track(track.title, track.scale, track.meaning) for track in tracks],
        strips,
        "Layers from bottom to top. Red cells are findings, blue ones worth knowing; hatched ones were not measured or "
        "do not exist." + (" All models share the scales." if len(models) > 1 else ""),
    )


def _rows(model: Model, index: int, tracks: Sequence[LayerTrack]) -> dict[str, list[Bar | Spread | None]]:
    """The model's cells from the final norm down to layer 0."""
    last = [model.layers] if any(model.layers in track.cells[index] for track in tracks) else []
    return {
        "final norm" if layer == model.layers else f"layer {layer}": [track.cells[index].get(layer) for track in tracks]
        for layer in (*last, *reversed(range(model.layers)))
    }
