"""The summary in words: ten lines that say what stands out, and then what is normal."""

from __future__ import annotations

import math

from residua.diagnose.findings import percent
from residua.diagnose.schema import AblationFacts, ModelDiagnosis

LINES = 10
_PER_KIND = 3


def summary(made: ModelDiagnosis) -> list[str]:
    """At most ten sentences: what was looked at, what stands out, and what the rest is like."""
    lines = [_what(made), *_findings(made)][:LINES]
    rest = (
        _attention,
        _removal,
        _routing,
        _experts,
        _gates,
        _magnitude,
        _dimensionality,
        _outliers,
        _similarity,
        _gradients,
    )
    for line in (part(made) for part in rest):
        if line and len(lines) < LINES - bool(made.skipped):
            lines.append(line)
    if made.skipped:
        lines.append(
            f"Not measured: {len(made.skipped)} {'things' if len(made.skipped) > 1 else 'thing'}, see the report."
        )
    return lines


def _what(made: ModelDiagnosis) -> str:
    text = made.text
    return (
        f"{made.name}: {made.description}. Loss {made.loss:.4f} nats per token (perplexity "
        f"{math.exp(min(made.loss, 50)):,.1f}) on {text.tokens:,} tokens of {text.source}, "
        f"{text.sequences} sequences of {text.length}."
    )


def _findings(made: ModelDiagnosis) -> list[str]:
    """The first of each kind; how many more there are."""
    defects = any(finding.kind != "depth_routing" for finding in made.findings)
    lines = [] if defects else ["No attention sink, residual sink, massive activation or dead layer was found."]
    for kind in dict.fromkeys(finding.kind for finding in made.findings):
        own = [finding for finding in made.findings if finding.kind == kind]
        shown = own[: _PER_KIND if len({f.kind for f in made.findings}) <= 2 else 1]
        lines += [_sentence(finding.words) for finding in shown]
        if len(own) > len(shown):
            lines[-1] = f"{lines[-1][:-1]}; {len(own) - len(shown)} more like it."
    return lines


def _attention(made: ModelDiagnosis) -> str:
    if not made.attention:
        return ""
    count = len(made.attention)
    first = sum(a.first_token for a in made.attention) / count
    floor = sum(a.uniform_first_token for a in made.attention) / count
    entropy = sum(a.entropy for a in made.attention) / count
    ceiling = sum(a.uniform_entropy for a in made.attention) / count
    learned = sum(a.learned_sink for a in made.attention) / count
    beside = f", {percent(learned)} on the learned sink" if learned > 0 else ""
    return (
        f"The first token gets {percent(first)} of attention on average (uniform {percent(floor)}){beside}; entropy is "
        f"{entropy:.2f} nats of {ceiling:.2f} possible."
    )


def _removal(made: ModelDiagnosis) -> str:
    layers = [a for a in made.ablations if a.kind == "layer"]
    if not layers:
        return ""
    most, least = max(layers, key=lambda a: a.change), min(layers, key=lambda a: a.change)
    return f"Removing {most.label} costs most ({_change(most)} nats), removing {least.label} least ({_change(least)})."


def _change(ablation: AblationFacts) -> str:
    return f"{ablation.change:+.4f}"


def _magnitude(made: ModelDiagnosis) -> str:
    known = [s for s in made.sites if s.output_rms]
    if not known:
        return ""
    first, last = known[0], max(known, key=lambda s: s.output_rms or 0)
    growth = made.states[-1].rms / made.states[0].rms if made.states[0].rms else float("inf")
    return (
        f"Outputs are largest at {last.name} (RMS {last.output_rms:.3g}, {first.name} {first.output_rms:.3g}); the "
        f"{made.state_name} ends {growth:.3g}× as large as it begins."
    )


def _dimensionality(made: ModelDiagnosis) -> str:
    known = [s for s in made.states if s.core_features is not None]
    if not known:
        return ""
    least = min(known, key=lambda s: s.core_features or 0)
    return (
        f"99 % of the variance needs {least.core_features} of {made.width} dimensions at the narrowest, before "
        f"{least.name}; tokens of a sequence are {made.states[-1].token_similarity:.2f} alike at the end (mean cosine)."
    )


def _routing(made: ModelDiagnosis) -> str:
    everywhere = next((a for a in made.ablations if a.kind == "uniform" and a.index == -1), None)
    return (
        ""
        if everywhere is None
        else f"Uniform depth weights everywhere would change the loss by {_change(everywhere)}."
    )


def _experts(made: ModelDiagnosis) -> str:
    if not made.experts:
        return ""
    loads = [share * len(e.load) for e in made.experts for share in e.load]
    unused = sum(load == 0 for load in loads)
    beside = f"; {unused} of {len(loads)} are never chosen" if unused else ""
    return f"Experts carry {min(loads):.2f} to {max(loads):.2f} times their fair share of the tokens{beside}."


def _gates(made: ModelDiagnosis) -> str:
    if not made.gates:
        return ""
    mean, closed = (
        sum(values) / len(made.gates) for values in zip(*((g.mean, g.closed) for g in made.gates), strict=True)
    )
    return f"Attention gates are {mean:.2f} on average, {percent(closed)} of them below 0.2."


def _outliers(made: ModelDiagnosis) -> str:
    largest = made.dimensions.largest[0]
    state = max(made.states, key=lambda s: s.largest[0].value)
    return (
        f"The largest dimension, {largest.dimension}, is {largest.ratio:.3g}× the median; the largest single value is "
        f"{state.largest[0].value:.4g}, before {state.name}."
    )


def _similarity(made: ModelDiagnosis) -> str:
    steps = {k: made.angular_distance[k][k + 1] for k in range(len(made.states) - 1)}
    if not steps:
        return ""
    most = max(steps, key=lambda k: steps[k])
    return (
        f"The {made.state_name} turns most between {made.states[most].name} and {made.states[most + 1].name}: "
        f"{steps[most]:.2f} of a half turn."
    )


def _gradients(made: ModelDiagnosis) -> str:
    known: dict[str, float] = {s.name: s.gradient_rms for s in made.sites if s.gradient_rms}
    if len(known) < 2:
        return ""
    most, least = max(known, key=lambda n: known[n]), min(known, key=lambda n: known[n])
    return f"Gradients differ by a factor of {known[most] / known[least]:.3g}, largest at {most}, smallest at {least}."


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
