"""The kinds of anchors. Each builds a module for every softmax layer, and one that reads the embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from residua.config import choices
from residua.model.added_values import build_gated_values, build_value_embedding
from residua.model.anchor_source import AnchorSource, ExoSource, HeadShape
from residua.model.anchors import DynamicMix, LayerPlace, Mix, Unmixed, Write
from residua.model.layer_heads import build_layer_mixture, build_layer_values, build_shared_heads

BuildLayer = Callable[..., Unmixed]
"""Takes (config, place); returns the module with which one softmax layer mixes or writes anchors."""
BuildSource = Callable[..., AnchorSource]
"""Takes (config, shape of the heads, width, std=…); returns the module that makes anchors from the embedding."""


def no_source(config: choices.AnchorChoice, shape: HeadShape | None, width: int, *, std: float) -> AnchorSource:
    """The source of a kind that makes no anchors from the embedding."""
    return AnchorSource()


class Builders(NamedTuple):
    """The two builders of a kind of anchors."""

    layer: BuildLayer
    source: BuildSource = no_source


def _unmixed(config: choices.NoAnchors, place: LayerPlace) -> Unmixed:
    return Unmixed(place.sections)


def _resformer(config: choices.ResFormer, place: LayerPlace) -> Unmixed:
    if place.layer == 0:
        return Write(place.sections, ("v",), "none", place.shape)
    return Mix(place.sections, ("v",), config.granularity, place.shape, config.start)


def _nuresformer(config: choices.NuResFormer, place: LayerPlace) -> Unmixed:
    if place.layer == 0:
        return Write(place.sections, config.pathways, config.norm, place.shape)
    return _mixed(config, place)


def _mixed(config: choices.ProjectionAnchors, place: LayerPlace) -> Unmixed:
    parts = (place.sections, config.pathways, config.granularity, place.shape, config.start)
    if isinstance(config.mixing, choices.DynamicMixing):
        return DynamicMix(*parts, width=place.width, hidden=config.mixing.hidden, std=place.std)
    return Mix(*parts)


ANCHORS: dict[type[choices.AnchorChoice], Builders] = {
    choices.NoAnchors: Builders(_unmixed),
    choices.ResFormer: Builders(_resformer),
    choices.NuResFormer: Builders(_nuresformer),
    choices.ExoFormer: Builders(_mixed, ExoSource),
    choices.GatedValue: Builders(build_gated_values),
    choices.ValueEmbeddings: Builders(build_value_embedding),
    choices.Lime: Builders(build_layer_mixture),
    choices.DepthAttention: Builders(build_layer_values),
    choices.CrossLayer: Builders(build_shared_heads),
    choices.HeadSource: Builders(build_shared_heads),
}


def register_anchors(choice: type[choices.AnchorChoice], layer: BuildLayer, source: BuildSource = no_source) -> None:
    """Make `anchors.kind = …` of a configuration build `layer(config, place)` in softmax layers; see docs/extend.md.

    `source(config, shape, width, std=…)` makes the first anchors from the embedding, if the kind has any.
    """
    choices.AnchorChoice.join(choice)
    ANCHORS[choice] = Builders(layer, source)


def build_mix(config: choices.AnchorChoice, place: LayerPlace) -> Unmixed:
    """Build the module with which a softmax layer mixes or writes anchors, or does neither."""
    return ANCHORS[type(config)].layer(config, place)


def build_source(config: choices.AnchorChoice, shape: HeadShape | None, width: int, *, std: float) -> AnchorSource:
    """Build the module that makes a model's first anchors."""
    return ANCHORS[type(config)].source(config, shape, width, std=std)
