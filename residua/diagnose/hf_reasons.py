"""What cannot be measured of a Hugging Face model, in sentences: `skipped` in diagnosis.json and on the page."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from residua.diagnose.hf_structure import Layer
from residua.diagnose.observe import Observation, Site


def not_measured(
    decoder: Sequence[Layer],
    sites: Sequence[Site],
    seen: Observation,
    blind: Collection[int],
    before: Sequence[str],
    carrying: bool,
) -> list[str]:
    """What the structure of a model leaves out. `blind` are the layers without attention weights, `before` the reasons
    known already; `carrying`: some sublayers add the residual themselves."""
    reasons = []
    hidden, linear = (
        [s.layer for s in sites if s.kind == kind and s.layer in blind] for kind in ("attention", "linear attention")
    )
    again = {n: layer.runs for n, layer in enumerate(decoder) if layer.runs > 1}
    uncounted = [s.layer for s in sites if s.kind == "mixture of experts" and s.layer not in seen.loads]
    if hidden and not any(reason.startswith("Attention") for reason in before):
        reasons.append(
            f"Attention metrics of layers {_listed(hidden)}: they compute attention outside transformers' attention "
            "interface, where it cannot be seen."
        )
    if linear:
        reasons.append(
            f"Attention metrics of layers {_listed(linear)}: they are linear attention and have no softmax weights."
        )
    if any(site.kind == "layer" and not decoder[site.layer].bodies for site in sites):
        reasons.append(
            "Sublayers: some layers have no part that returns the hidden width; each counts as one sublayer."
        )
    if again:
        reasons.append(
            f"Earlier runs of layers {_listed(again)}: they run up to {max(again.values())} times in each pass; all "
            "but removal is measured in the last run."
        )
    if carrying:
        reasons.append(
            "Removal of single sublayers: they add the residual themselves, so only whole layers are removed."
        )
    if seen.streams:
        reasons.append(
            "Comparison of sublayers with their layer: layers carry several streams, so what sublayers write is not "
            "what a layer changes."
        )
    if uncounted:
        reasons.append(
            f"Expert load of layers {_listed(uncounted)}: their experts are not given the numbers of the chosen ones, "
            "so the choices cannot be counted."
        )
    return [*reasons, "Depth weights, gates and anchors: published by Residua models only."]


def do_not_fit(wrong: Collection[int], unread: Collection[int]) -> str:
    """Layers whose sublayers were not found as they are; `unread`, where what the first one reads is not known."""
    place = f" (of layers {_listed(unread)}, what the first one reads)" if unread else ""
    return (
        f"Sublayers of layers {_listed(wrong)}: what was found of them does not make up the states of their "
        f"layer{place}; each of these layers counts as one sublayer."
    )


def do_not_add_up(partial: Collection[int]) -> str:
    """Layers that change more than their sublayers write."""
    return (
        f"Part of layers {_listed(partial)}: their sublayers' outputs do not add up to what the layer changes, so part "
        "of it happens outside them; only removing whole layers measures that part."
    )


def see_more_than_tokens(layers: Collection[int]) -> str:
    """Layers that attend to compressed keys."""
    return (
        f"Attention metrics of layers {_listed(layers)}: they also attend to keys that stand for several tokens each."
    )


def are_not_used(model: str, unused: Sequence[str]) -> str:
    """Tensors of a folder that its model does not have."""
    return f"The folder's {tensors(unused, 8)}: {model} has nothing of that name and runs without."


def tensors(names: Sequence[str], most: int) -> str:
    """`tensor 'a'`, `tensors 'a', 'b'`; of more than `most`, `tensors 'a', 'b' and 5 more`."""
    shown = ", ".join(map(repr, names[:most]))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"tensor{'' if len(names) == 1 else 's'} {shown}{more}"


def _listed(layers: Collection[int]) -> str:
    """`0, 1, 2, 4`; of more than twelve the first, the last and how many."""
    unique = sorted(set(layers))
    return ", ".join(map(str, unique)) if len(unique) <= 12 else f"{unique[0]} to {unique[-1]} ({len(unique)} of them)"
