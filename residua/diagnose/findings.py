"""From numbers to names: which of what was measured a person should know. A healthy model has none of these."""

from __future__ import annotations

from collections.abc import Sequence

from residua.diagnose.metrics.attention import LayerSums
from residua.diagnose.metrics.hidden import FAR
from residua.diagnose.schema import (
    AblationFacts,
    DimensionProfile,
    Finding,
    ReaderFacts,
    SiteFacts,
    StateFacts,
    TokenSink,
)

MOST_TOKENS = 0.5
SILENT = 1e-3
"""A sublayer is silent when its output is below this share of what it read, in RMS and in the median: outlier
dimensions in what is read would hide any output from the RMS, and an output to few dimensions has no median."""
NO_CHANGE = 1e-3
"""… and dead when removing it changes the loss by less than this, in nats."""
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
"""Sun et al. (arXiv 2402.17762): |h| above 100 and about a thousand times the median."""


def attention_sinks(layers: dict[int, LayerSums]) -> list[Finding]:
    """One finding per position: the layers and heads that park their attention there."""
    found: dict[int, dict[int, list[int]]] = {}
    for layer, sums in sorted(layers.items()):
        for position, heads in sums.sink_heads().items():
            found.setdefault(position, {})[layer] = heads
    return [_attention_sink(position, where, layers) for position, where in sorted(found.items())]


def _attention_sink(position: int, where: dict[int, list[int]], layers: dict[int, LayerSums]) -> Finding:
    strongest = max(where, key=lambda layer: float(layers[layer].alpha[:, position].mean()))
    sums = layers[strongest]
    mass = float(sums.alpha[:, position].mean() / sums.sequences)
    floor = float(sums.floor[position] / sums.sequences)
    heads = sum(len(heads) for heads in where.values())
    total = sum(len(sums.first) for sums in layers.values())
    place = "the first token" if position == 0 else f"position {position}"
    return Finding(
        kind="attention_sink",
        where={"position": position, "layers": list(where)},
        words=f"{place} is an attention sink for {heads} of {total} heads, in {listed('layer', list(where))}: layer "
        f"{strongest} gives it {percent(mass)} of its attention where uniform attention would give {percent(floor)}",
    )


def token_sinks(sinks: Sequence[TokenSink]) -> list[Finding]:
    """One finding per token id."""
    found = []
    for token in dict.fromkeys(sink.token for sink in sinks):
        own = [sink for sink in sinks if sink.token == token]
        strongest = max(own, key=lambda sink: sink.attention)
        found.append(
            Finding(
                kind="sink_token",
                where={"token": token, "layers": [sink.layer for sink in own]},
                words=f"token {strongest.text!r} (id {token}) is an attention sink wherever it stands, in "
                f"{listed('layer', [sink.layer for sink in own])}: {percent(strongest.attention)} of layer "
                f"{strongest.layer}'s attention, uniform {percent(strongest.uniform)}",
            )
        )
    return found


def residual_sinks(profile: DimensionProfile) -> list[Finding]:
    """Dimensions that stand FAR medians above the rest in most tokens."""
    sinks = [d for d in profile.largest if d.share >= MOST_TOKENS and d.ratio >= FAR]
    return [
        Finding(
            kind="residual_sink",
            where={"dimension": d.dimension},
            words=f"dimension {d.dimension} is a residual sink: {d.ratio:.3g}× the median, far above it in "
            f"{percent(d.share)} of tokens"
            + ("" if d.gain is None else f", norm gain {d.gain:.2g} (median {profile.median_gain or 0:.2g})"),
        )
        for d in sinks
    ]


def massive_activations(states: Sequence[StateFacts]) -> list[Finding]:
    """One finding per dimension with single values above 100 and a thousand medians."""
    found: dict[int, tuple[float, StateFacts, int]] = {}
    for state in states:
        for a in state.largest:
            above = a.value > MASSIVE and a.value > MASSIVE_RATIO * state.median
            if above and a.value > found.get(a.dimension, (0.0,))[0]:
                found[a.dimension] = (a.value, state, a.position)
    return [
        Finding(
            kind="massive_activation",
            where={"dimension": dimension},
            words=f"dimension {dimension} carries a massive activation: {value:,.0f} before {state.name} at position "
            f"{position}, {value / max(state.median, 1e-30):,.0f}× that state's median",
        )
        for dimension, (value, state, position) in found.items()
    ]


def silent_sites(sites: Sequence[SiteFacts]) -> list[int]:
    """Sublayers whose output hardly reaches what they read; whether they are dead, removal tells."""
    return [s.index for s in sites if _relative(s) < SILENT]


def _relative(site: SiteFacts) -> float:
    known = [share for share in (site.relative_rms, site.relative_median) if share is not None]
    return max(known, default=float("inf"))


def dead_layers(sites: Sequence[SiteFacts], ablations: Sequence[AblationFacts]) -> list[Finding]:
    """Layers all of whose sublayers are silent and whose removal changes nothing; single sublayers likewise."""
    changes = {(a.kind, a.index): a.change for a in ablations}
    silent = set(silent_sites(sites))
    dead = [k for k in sorted(silent) if abs(changes.get(("sublayer", k), 0.0)) < NO_CHANGE]
    found = []
    for layer in dict.fromkeys(s.layer for s in sites):
        own = [s for s in sites if s.layer == layer]
        if all(s.index in dead for s in own) and abs(changes.get(("layer", layer), 0.0)) < NO_CHANGE:
            change = changes.get(("layer", layer))
            found.append(Finding(kind="dead_layer", where={"layer": layer}, words=_dead(f"layer {layer}", own, change)))
            continue
        found += [
            Finding(
                kind="dead_sublayer",
                where={"sublayer": s.index},
                words=_dead(s.name, [s], changes.get(("sublayer", s.index))),
            )
            for s in own
            if s.index in dead
        ]
    return found


def _dead(name: str, sites: Sequence[SiteFacts], change: float | None) -> str:
    relative = max(map(_relative, sites))
    removed = "" if change is None else f", and removing it changes the loss by {change:+.4f}"
    return f"{name} is dead: its output is {percent(relative)} of what it reads{removed}"


def depth_routing(readers: Sequence[ReaderFacts], ablations: Sequence[AblationFacts]) -> list[Finding]:
    """Readers that learned to take most of their input from one source: more than half-way from uniform to all.

    A source that the topology starts from is no finding.
    """
    uniform = {a.index: a.change for a in ablations if a.kind == "uniform"}
    found = []
    for reader in readers:
        count = len(reader.mean)
        best = max(range(count), key=lambda i: reader.mean[i])
        weight = reader.mean[best]
        if count < 2 or best == reader.initial or weight < 0.5 + 0.5 / count:
            continue
        change = uniform.get(reader.reader)
        cost = "" if change is None else f"; uniform weights there change the loss by {change:+.4f}"
        found.append(
            Finding(
                kind="depth_routing",
                where={"reader": reader.reader, "source": best},
                words=f"{reader.name} reads mostly {reader.sources[best]}: weight {weight:.2f} of {count} sources "
                f"(uniform {1 / count:.2f}){cost}",
            )
        )
    return found


def percent(share: float) -> str:
    """A share as people read it: 41 %, 0.40 %."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """`layer 3`, `layers 3, 4 and 7`, `layers 3 to 9`."""
    unique = sorted(set(numbers))
    if len(unique) == 1:
        return f"{noun} {unique[0]}"
    if len(unique) > 2 and unique[-1] - unique[0] == len(unique) - 1:
        return f"{noun}s {unique[0]} to {unique[-1]}"
    shown = [str(n) for n in unique]
    if len(shown) > 8:
        return f"{len(shown)} {noun}s from {shown[0]} to {shown[-1]}"
    return f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"
