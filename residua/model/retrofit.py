"""Retrofit: a model that starts with the weights of another and, where the mathematics allows it, as its function.

Every part states its own way to start as another (`begin_as` of norms, attention and anchors, `begin_as_sum` of
topologies) and how well that keeps the function. Nothing here knows which kinds there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from residua.config.model import ModelConfig
from residua.errors import UserError
from residua.model.decoder import Decoder, Sublayer
from residua.model.kept import Kept

STATED = ("topology", "norm", "anchors", "init", "head", "context", "reader_eps")
"""Tables that may change: parts answer for them, or they change nothing that is computed."""
OF_PARAMETERS = ("gate", "sink", "bias", "qk_norm", "qk_alpha")
"""Keys of attention that its parameters answer for."""
SHAPES = ("vocab_size", "layers", "width", "ffn")


@torch.no_grad()
def retrofit(model: Decoder, old: Decoder) -> dict[str, Kept]:
    """Start `model` as `old`, in place; returns what each changed part keeps, and `model` for the whole."""
    before, after = old.config, model.config
    _check_shapes(before, after)
    kept = {
        "norm": max(_begin(new, theirs) for new, theirs in zip(_norms(model), _norms(old), strict=True)),
        "norm.eps": Kept.EXACTLY if _eps(before) == _eps(after) else Kept.UP_TO_EPS,
        "attention and feed-forward": max(
            _begin(cast(Sublayer, new).body, cast(Sublayer, theirs).body)
            for new, theirs in zip(model.sublayers, old.sublayers, strict=True)
        ),
        "topology": _begin_topology(model, old),
        "keys without parameters": Kept.NOT if _other_changes(before, after) else Kept.EXACTLY,
    }
    _take(model.embed, old.embed)
    if model.unembed is not None:
        model.unembed.weight.copy_(old.head_weight)
    if _projected(before) == _projected(after):
        _take(model.anchors, old.anchors)
    untied = old.unembed is not None and model.unembed is None
    kept["head"] = Kept.NOT if untied else Kept.EXACTLY
    return {part: how for part, how in kept.items() if how} | {"model": max(kept.values())}


def _norms(model: Decoder) -> list[nn.Module]:
    outputs = (cast(Sublayer, sublayer).after for sublayer in model.sublayers)
    return [*_reader_norms(model), *(norm for norm in outputs if norm is not None)]


def _reader_norms(model: Decoder) -> list[nn.Module]:
    """What is in front of each reader of the topology: the sublayers, and the head."""
    return [*(cast(Sublayer, sublayer).norm for sublayer in model.sublayers), model.norm]


def _begin(part: nn.Module, old: nn.Module) -> Kept:
    """Start a part as another: by its own method, or with the same parameters."""
    own: Any = getattr(part, "begin_as", None)
    if own is not None:
        return cast(Kept, own(old))
    _take(part, old)
    return Kept.EXACTLY


def _take(part: nn.Module, old: nn.Module) -> None:
    part.load_state_dict(old.state_dict())


def _begin_topology(model: Decoder, old: Decoder) -> Kept:
    before, after = old.config, model.config
    if before.topology == after.topology:
        _take(model.topology, old.topology)
        sum_itself = set(model.topology.sum_factors(after.sublayers)) == {1.0}
        return Kept.EXACTLY if before.reader_eps == after.reader_eps or sum_itself else Kept.UP_TO_EPS
    if not old.topology.adds:
        raise UserError(
            f"the model to start from has topology.kind = '{before.topology.kind}', and only one that adds up its "
            "outputs ('additive') can be given another topology: keep it, or start from another run."
        )
    kept = model.topology.begin_as_sum()
    if kept is not Kept.UP_TO_EPS:
        return kept
    factors = model.topology.sum_factors(after.sublayers)
    takes_out = (getattr(norm, "scale_invariant", False) for norm in _reader_norms(model))
    if not all(factor == 1 or taken for factor, taken in zip(factors, takes_out, strict=True)):
        return Kept.NOT
    return Kept.EXACTLY if after.reader_eps == "sum" else Kept.UP_TO_EPS


def _projected(config: ModelConfig) -> dict[str, Any]:
    """What decides the anchors themselves; where λ starts does not."""
    return config.anchors.model_dump(exclude={"start"})


def _eps(config: ModelConfig) -> float | None:
    return getattr(config.norm, "eps", None)


def _check_shapes(before: ModelConfig, after: ModelConfig) -> None:
    changed = [key for key in SHAPES if getattr(before, key) != getattr(after, key)]
    if before.placement != after.placement:
        changed.append("placement")
    if type(before.attention) is not type(after.attention):
        changed.append("attention.kind")
    if changed:
        raise UserError(
            f"model.{changed[0]} differs from the model to start from, and its weights do not fit: leave it as it is."
        )


def _other_changes(before: ModelConfig, after: ModelConfig) -> list[str]:
    """Keys that change the function and that no part answers for: positions, windows, scales."""
    ours, theirs = (_flat(config.model_dump(exclude=set(STATED))) for config in (after, before))
    return [
        key
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key) and key.rpartition(".")[2] not in OF_PARAMETERS
    ]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in table.items():
        made |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return made
