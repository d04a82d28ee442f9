"""Well-known architectures by short name: each is a list of overrides of one aspect of a run, so names combine.

`mgr+exoformer` is Multi-Gate Residuals with exogenous anchors. A name changes its own aspect (topology, anchors,
norm or gate) and leaves the rest of the base configuration alone; `base` changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from residua.model.config import ModelConfig
from residua.model.settings import ConfigError


@dataclass(frozen=True)
class Variant:
    """A name's meaning: one line for people, and its overrides, which may depend on the base model's depth."""

    summary: str
    overrides: Callable[[ModelConfig], Sequence[str]]


def sublayers_per_block(layers: int) -> int:
    """About eight blocks, as the paper recommends, and never one sublayer each (that would be Full)."""
    return max(2, -(-2 * layers // 8))


def _topology(summary: str, kind: str, *keys: str) -> Variant:
    changes = (f"model.topology.kind={kind}", *(f"model.topology.{key}" for key in keys))
    return Variant(summary, lambda model: changes)


def _anchors(summary: str, kind: str, *keys: str) -> Variant:
    gate = () if kind == "resformer" else ("model.attention.gate=elementwise",)
    changes = (f"model.anchors.kind={kind}", *(f"model.anchors.{key}" for key in keys), *gate)
    return Variant(summary, lambda model: changes)


def _set(summary: str, *changes: str) -> Variant:
    return Variant(summary, lambda model: changes)


def _block(model: ModelConfig) -> Sequence[str]:
    return (
        "model.topology.kind=block_attnres",
        f"model.topology.sublayers_per_block={sublayers_per_block(model.layers)}",
    )


KNOWN: dict[str, Variant] = {
    "base": _set("the base configuration as it is"),
    "prenorm": _topology("x + f(x)", "additive"),
    "full_attnres": _topology("Full Attention Residuals", "full_attnres"),
    "block_attnres": Variant("Block Attention Residuals, about 8 blocks", _block),
    "mgr": _topology("Multi-Gate Residuals, competitive, 4 streams", "multi_gate"),
    "mgr8": _topology("Multi-Gate Residuals, competitive, 8 streams", "multi_gate", "streams=8"),
    "mgr_independent": _topology("Multi-Gate Residuals, independent gates", "multi_gate", "gate=independent"),
    "highway": _topology("one gated stream", "highway"),
    "hc": _topology("hyper-connections, dynamic, 4 streams", "hyper"),
    "mhc": _topology("manifold-constrained hyper-connections, 4 streams", "mhc"),
    "mhc_lite": _topology("mHC-lite, 4 streams", "mhc_lite"),
    "denseformer": _topology("DenseFormer", "dense"),
    "resformer": _anchors("value residual from the first layer", "resformer"),
    "nuresformer": _anchors("first layer's projections as normalised anchors, with the gate they mix", "nuresformer"),
    "exoformer": _anchors("projections of the embedding as anchors, with the gate they mix", "exoformer"),
    "exoformer_dynamic": _anchors("ExoFormer with dynamic mixing, with the gate", "exoformer", "mixing.kind=dynamic"),
    "gated_attention": _set("sigmoid gate on the attention output", "model.attention.gate=elementwise"),
    "sink": _set("learned attention sink", "model.attention.sink=learned"),
    "gatednorm": _set("RMSNorm with a low-rank gate", "model.norm.kind=gatednorm"),
    "preaffine": _set("gain before the norm", "model.norm.kind=preaffine"),
    "dyt": _set("dynamic tanh instead of a norm", "model.norm.kind=dyt"),
    "gated_dyt": _set("dynamic tanh with a low-rank gate", "model.norm.kind=gated_dyt"),
}


def overrides(entries: Sequence[str], model: ModelConfig) -> list[str]:
    """The override list of a variant: entries with `=` stand for themselves, others are known names or their sum."""
    changes: list[str] = []
    for entry in entries:
        if "=" in entry:
            changes.append(entry)
            continue
        for name in entry.split("+"):
            changes.extend(_known(name.strip()).overrides(model))
    return changes


def _known(name: str) -> Variant:
    if name in KNOWN:
        return KNOWN[name]
    near = get_close_matches(name, KNOWN, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(KNOWN)}."
    raise ConfigError(f"variant {name!r} is not known: {advice}")
