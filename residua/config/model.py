"""A whole model as data: frozen, checked once when built, equal after a round trip through TOML.

This file imports no torch, so that reading or listing configurations is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from residua.config.choices import (
    FFN,
    Additive,
    Anchors,
    Attention,
    BlockAttnRes,
    GatedDeltaNet,
    Head,
    HybridAttention,
    Init,
    MultiGate,
    NoAnchors,
    Norm,
    Positive,
    ProjectionAnchors,
    RMSNorm,
    SoftmaxAttention,
    TiedHead,
    Topology,
    divisors,
)
from residua.config.depth import gate_bias, lerping_sublayers
from residua.config.settings import ConfigError, Frozen, apply_overrides, explain, read_toml, to_toml


class ModelConfig(Frozen):
    """A decoder-only language model.

    `vocab_size` defaults to GPT-2's 50,257 padded to a multiple of 128; `context` is the length it is trained at.
    """

    vocab_size: Positive = 50_304
    context: Positive = 1024
    layers: Positive
    width: Positive
    attention: Attention
    ffn: FFN
    norm: Norm = RMSNorm()
    topology: Topology = Additive()
    anchors: Anchors = NoAnchors()
    head: Head = TiedHead()
    init: Init = Init()

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(explain(error, ModelConfig)) from None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Build from plain tables."""
        return cls(**data)

    @classmethod
    def from_toml(cls, path: str | Path) -> ModelConfig:
        """Read a TOML file: the model's keys at its top, or under `[model]`."""
        data = read_toml(path)
        return cls(**data.get("model", data))

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """One of the models that come with Residua: `residua presets` lists them."""
        from residua.config import presets

        return cls(**presets.load(name)["model"])

    def to_toml(self) -> str:
        """The whole configuration as TOML; reading it back gives an equal one."""
        return to_toml(self.model_dump(exclude_none=True))

    def override(self, changes: list[str]) -> ModelConfig:
        """Apply `section.key=value` changes. A new `kind` drops the old kind's keys."""
        return ModelConfig(**apply_overrides(self.model_dump(exclude_none=True), changes))

    @property
    def sublayers(self) -> int:
        return 2 * self.layers

    @property
    def mixers(self) -> tuple[SoftmaxAttention | GatedDeltaNet, ...]:
        """The sequence mixer of each layer."""
        return tuple(self.attention.at(layer) for layer in range(self.layers))

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """The layers with softmax attention; the first of them writes ResFormer's and NuResFormer's anchors."""
        return tuple(layer for layer, mixer in enumerate(self.mixers) if isinstance(mixer, SoftmaxAttention))

    @property
    def softmax(self) -> SoftmaxAttention | None:
        """The softmax attention that the model's softmax layers share, None if it has no such layer."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, SoftmaxAttention)), None)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for check in _CHECKS:
            check(self)
        return self


def head_dim(config: ModelConfig) -> int:
    """The width of one softmax head."""
    softmax = config.softmax
    assert softmax is not None
    return softmax.head_dim or config.width // softmax.heads


def _softmax_table(config: ModelConfig) -> str:
    """Where a person finds the keys of softmax attention."""
    return "attention.softmax" if isinstance(config.attention, HybridAttention) else "attention"


def _check_hybrid(config: ModelConfig) -> None:
    attention = config.attention
    if isinstance(attention, HybridAttention) and attention.softmax_every > config.layers:
        raise ValueError(
            f"attention.softmax_every = {attention.softmax_every} leaves layers = {config.layers} without softmax "
            f"attention: use at most {config.layers}, or attention.kind = 'gated_deltanet'."
        )


def _check_heads(config: ModelConfig) -> None:
    softmax, table = config.softmax, _softmax_table(config)
    if softmax is None:
        return
    if softmax.head_dim is None and config.width % softmax.heads:
        raise ValueError(
            f"{table}.heads = {softmax.heads} does not divide width = {config.width}: choose one of "
            f"{divisors(config.width)} or set {table}.head_dim."
        )
    if head_dim(config) % 2:
        raise ValueError(
            f"{table}.head_dim = {head_dim(config)} is odd, and rotary positions need pairs: use an even one."
        )


def _check_anchor_attention(config: ModelConfig) -> None:
    if not isinstance(config.anchors, NoAnchors) and config.softmax is None:
        raise ValueError(
            f"anchors.kind = '{config.anchors.kind}' mixes softmax projections and attention.kind = "
            f"'{config.attention.kind}' has none: use anchors.kind = 'none' or attention.kind = 'softmax'."
        )


def _check_gate_pathway(config: ModelConfig) -> None:
    anchors, softmax, table = config.anchors, config.softmax, _softmax_table(config)
    if not isinstance(anchors, ProjectionAnchors) or softmax is None:
        return
    if "g" in anchors.pathways and softmax.gate != "elementwise":
        raise ValueError(
            f"anchors.pathways contains 'g' but {table}.gate = '{softmax.gate}': "
            f"use {table}.gate = 'elementwise' or leave 'g' out of anchors.pathways."
        )


def _check_multi_gate(config: ModelConfig) -> None:
    if not isinstance(config.topology, MultiGate):
        return
    lerping = lerping_sublayers(config.sublayers, config.topology.streams)
    if lerping < 1:
        raise ValueError(
            f"topology.streams = {config.topology.streams} leaves no gated sublayer in layers = {config.layers}: the "
            f"first {config.topology.streams - 1} sublayers fill the streams; use at most {config.sublayers} streams."
        )
    gate_bias(config.topology, lerping)


def _check_block(config: ModelConfig) -> None:
    topology = config.topology
    if isinstance(topology, BlockAttnRes) and topology.sublayers_per_block > config.sublayers:
        raise ValueError(
            f"topology.sublayers_per_block = {topology.sublayers_per_block} is more than the model's "
            f"{config.sublayers} sublayers (layers = {config.layers}): use at most {config.sublayers}."
        )


_CHECKS = (
    _check_hybrid,
    _check_heads,
    _check_anchor_attention,
    _check_gate_pathway,
    _check_multi_gate,
    _check_block,
)
