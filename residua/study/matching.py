"""Parameter matching: a variant that adds parameters elsewhere gets a narrower feed-forward network, and the reverse.

The papers compare at equal parameters (ExoFormer drops layers; Attention Residuals change nothing, since they add
almost no parameters). Here every variant is brought within a tolerance of the baseline, and the change is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.model.size import measure
from residua.study.config import Match, MatchDepth, NoMatch


@dataclass(frozen=True)
class Matched:
    """A model, its parameter count, and what matching changed in it (empty if nothing)."""

    model: ModelConfig
    parameters: int
    change: str


def match(name: str, model: ModelConfig, target: int, rule: Match) -> Matched:
    """Change `model` by `rule` until its parameters are within tolerance of `target`; ConfigError if it cannot be."""
    parameters = measure(model).parameters
    if isinstance(rule, NoMatch) or _off(parameters, target) <= rule.tolerance:
        return Matched(model, parameters, "")
    candidate = _nearest_depth(model, target) if isinstance(rule, MatchDepth) else model
    if _off(measure(candidate).parameters, target) > rule.tolerance:
        candidate = _nearest_width(name, candidate, target, rule.tolerance)
    return Matched(candidate, measure(candidate).parameters, _change(model, candidate))


def _off(parameters: int, target: int) -> float:
    return abs(parameters / target - 1.0)


def _nearest_depth(model: ModelConfig, target: int) -> ModelConfig:
    """The number of layers with the nearest parameter count: add or remove layers while that brings it closer."""
    step = 1 if measure(model).parameters < target else -1
    best = model
    while best.layers + step >= 1:
        candidate = _layers(best, best.layers + step)
        if _off(measure(candidate).parameters, target) >= _off(measure(best).parameters, target):
            break
        best = candidate
    return best


def _nearest_width(name: str, model: ModelConfig, target: int, tolerance: float) -> ModelConfig:
    """Parameters are affine in the feed-forward width: solve, round to a multiple of 8, or of 1 if 8 is too coarse."""
    hidden = model.ffn.hidden
    parameters = measure(model).parameters
    per_unit = measure(_hidden(model, hidden + 1)).parameters - parameters
    exact = hidden + (target - parameters) / per_unit
    for multiple in (8, 1):
        rounded = multiple * round(exact / multiple)
        if rounded < 1:
            continue
        candidate = _hidden(model, rounded)
        if _off(measure(candidate).parameters, target) <= tolerance:
            return candidate
    raise ConfigError(
        f"variant {name!r} has {parameters:,} parameters and cannot be brought within {100 * tolerance:.3g} % of the "
        f"baseline's {target:,} by changing ffn.hidden = {hidden}: widen the base's ffn.hidden, or set match.kind "
        "to 'none'."
    )


def _hidden(model: ModelConfig, hidden: int) -> ModelConfig:
    return model.override([f"ffn.hidden={hidden}"])


def _layers(model: ModelConfig, layers: int) -> ModelConfig:
    return model.override([f"layers={layers}"])


def _change(before: ModelConfig, after: ModelConfig) -> str:
    changes = []
    if after.layers != before.layers:
        changes.append(f"layers {before.layers} → {after.layers}")
    if after.ffn.hidden != before.ffn.hidden:
        changes.append(f"FFN width {before.ffn.hidden} → {after.ffn.hidden}")
    return ", ".join(changes)
