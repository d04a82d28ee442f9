"""A model's configuration: immutable, validated once when built, and unchanged by a round trip through TOML.

This file imports no torch, so reading or listing configurations is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from residua.config.choices import (
    Additive,
    Anchors,
    GatedDeltaNet,
    Head,
    Init,
    KimiDelta,
    LatentAttention,
    NoAnchors,
    Norm,
    Order,
    RMSNorm,
    Sequential,
    SoftmaxAttention,
    TiedHead,
    Topology,
)
from residua.config.ffns import FFN
from residua.config.mixers import Attention, LinearMixer, SoftmaxMixer, divisors
from residua.config.positions import LongRope, RopeScaling
from residua.config.settings import ConfigError, Positive, WholeConfig, apply_overrides, of_file, read_toml
from residua.errors import UserError

Layers = Annotated[Positive, Field(le=10_000)]


class ModelConfig(WholeConfig):
    """A decoder-only language model.

    `vocab_size` defaults to GPT-2's 50,257 padded to a multiple of 128; `context` is the training length. `placement`
    chooses what sublayers normalize: their input (pre-norm), their output (OLMo 2), or both (Gemma). Embedded tokens
    are multiplied by `embed_scale`. `learned_positions` adds a learned vector for each position in a document, as in
    GPT-2; for a model without rotary positions, list all layers in `attention.unturned_layers`. With `reader_eps =
    "sum"`, the norm of reader k has eps · c_k²; this makes the start of a pre-norm model exact for a topology that
    gives reader k a multiple c_k of the sum (docs/retrofit.md).
    """

    training_only: ClassVar[tuple[str, ...]] = ("context", "init")

    vocab_size: Positive = 50_304
    context: Positive = 1024
    layers: Layers
    """Number of layers; each has two sublayers, a sequence mixer and a feed-forward."""
    width: Positive
    """Channels of the residual stream."""
    attention: Attention
    ffn: FFN
    norm: Norm = RMSNorm()
    placement: Literal["input", "output", "both"] = "input"
    reader_eps: Literal["norm", "sum"] = "norm"
    topology: Topology = Additive()
    anchors: Anchors = NoAnchors()
    order: Order = Sequential()
    head: Head = TiedHead()
    embed_scale: float = Field(1.0, gt=0)
    logit_softcap: Annotated[float, Field(gt=0)] | None = None
    """Bound of the logits, enforced by a tanh (Gemma 2)."""
    learned_positions: Positive | None = None
    init: Init = Init()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Build from plain tables."""
        return cls(**data)

    @classmethod
    def from_toml(cls, path: str | Path) -> ModelConfig:
        """Read a TOML file with the model's keys at the top level or under `[model]`."""
        data = read_toml(path)
        model = data.get("model", data)
        with of_file(path):
            if not isinstance(model, dict):
                raise ConfigError(f"model = {model!r} should be a table of keys.")
            return cls(**model)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """A model that comes with Residua; `residua presets` lists them."""
        from residua.config import presets

        return cls(**presets.load(name)["model"])

    def override(self, changes: list[str]) -> ModelConfig:
        """Apply `section.key=value` changes. A new `kind` drops the old kind's keys."""
        return ModelConfig(**apply_overrides(self.model_dump(exclude_none=True), changes))

    @property
    def executed(self) -> tuple[int, ...]:
        """The layers in execution order; a layer may run several times."""
        return self.order.executed(self.layers)

    @property
    def repeats(self) -> bool:
        """Whether a layer runs several times."""
        return len(self.executed) > self.layers

    @property
    def sublayers(self) -> int:
        """The number of sublayer executions, which the topology counts."""
        return 2 * len(self.executed)

    @property
    def mixers(self) -> tuple[SoftmaxMixer | LinearMixer, ...]:
        """The sequence mixer of each layer."""
        return tuple(self.attention.at(layer) for layer in range(self.layers))

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """The layers with softmax attention; the first one writes the anchors of ResFormer and NuResFormer."""
        return tuple(layer for layer, mixer in enumerate(self.mixers) if mixer.attends)

    @property
    def softmax(self) -> SoftmaxAttention | None:
        """The softmax attention of the model's softmax layers; None if they use another kind or none exist.

        If layers with and without a window have different heads, these are the heads of layers with one.
        """
        parts = (self.attention, *(getattr(self.attention, part) for part in self.attention.parts))
        return next((mixer for mixer in parts if isinstance(mixer, SoftmaxAttention)), None)

    @property
    def latent(self) -> LatentAttention | None:
        """The latent attention of the model's softmax layers; None if they use another kind or none exist."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, LatentAttention)), None)

    @property
    def linear(self) -> LinearMixer | None:
        """The linear attention of the model's linear layers; None if it has no such layer."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, GatedDeltaNet | KimiDelta)), None)

    @property
    def borrowed(self) -> dict[int, tuple[int, tuple[str, ...]]]:
        """For each layer that uses keys or values of an earlier layer: that layer, and the shared pathways."""
        layers, anchors = self.softmax_layers, self.anchors
        takers = ((i, taken) for i in range(len(layers)) if (taken := anchors.taken(i)))
        return {layers[i]: (layers[anchors.lender(i)], taken) for i, taken in takers}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        self.attention.check(self.layers)
        self.ffn.check(self.layers)
        if self.learned_positions is not None and self.context > self.learned_positions:
            raise UserError(
                f"context = {self.context} is more than learned_positions = {self.learned_positions}: lower "
                "context, or raise learned_positions."
            )
        _check_softmax(self)
        _check_anchors(self)
        _check_norms(self)
        self.topology.check(len(self.executed))
        self.topology.check_width(self.width)
        _check_reads(self)
        _check_order(self)
        return self


def _check_norms(config: ModelConfig) -> None:
    topology = config.topology
    if topology.norms_inputs and config.placement == "input" and type(config.norm) is not RMSNorm:
        raise UserError(
            f"topology.kind = '{topology.kind}' normalizes the inputs of the sublayers and the head itself, so "
            f"norm.kind = '{config.norm.kind}' has no effect: use norm.kind = 'rmsnorm', or placement = 'output' "
            "or 'both'."
        )


def head_dim(config: ModelConfig) -> int:
    """The width of one softmax head."""
    softmax = config.softmax
    assert softmax is not None
    return softmax.head_dim or config.width // softmax.heads


def _check_factors(config: ModelConfig, scaling: RopeScaling | None, pairs: int) -> None:
    if isinstance(scaling, LongRope) and len(scaling.short) != pairs:
        raise UserError(
            f"{config.attention.softmax_path}.rope_scaling.short has {len(scaling.short)} factors and heads of width "
            f"{2 * pairs} have {pairs} pairs: give one factor for each."
        )


def _check_softmax(config: ModelConfig) -> None:
    softmax, table = config.softmax, config.attention.softmax_path
    if config.latent is not None:
        _check_factors(config, config.latent.rope_scaling, config.latent.turned(config.width) // 2)
    if softmax is None:
        return
    if softmax.head_dim is None and config.width % softmax.heads:
        raise UserError(
            f"{table}.heads = {softmax.heads} does not divide width = {config.width}: choose one of "
            f"{divisors(config.width)} or set {table}.head_dim."
        )
    for where, width in ((table, head_dim(config)), (f"{table}.full", softmax.in_full.turned(config.width))):
        if width % 2:
            raise UserError(f"{where}.head_dim = {width} is odd, and rotary positions need pairs: use an even one.")
    _check_factors(config, softmax.rope_scaling, softmax.in_full.turned(config.width) // 2)
    for key, named in (("window_layers", softmax.window_layers), ("unturned_layers", softmax.unturned_layers)):
        if beyond := [layer for layer in named or () if not 0 <= layer < config.layers]:
            raise UserError(f"{table}.{key} contains {beyond[0]}, but layers = {config.layers}: number layers from 0.")


def _check_order(config: ModelConfig) -> None:
    if (wanted := config.topology.turned_layers) is not None:
        prelude, loop, turns = wanted
        before, looped = range(prelude), tuple(range(prelude, prelude + loop))
        after = range(prelude + loop, config.layers)
        if config.executed != (*before, *looped * turns, *after):
            raise UserError(
                f"topology.kind = '{config.topology.kind}' has prelude = {prelude}, loop = {loop} and turns = {turns}, "
                f"which is not order.kind = '{config.order.kind}': set order={{kind='loop', prelude={prelude}, "
                f"coda={max(0, config.layers - prelude - loop)}, turns={turns}}}."
            )
    if not config.repeats:
        return
    if config.ffn.mixture:
        raise UserError(
            f"order.kind = '{config.order.kind}' runs a layer several times, but ffn.kind = 'moe' balances its "
            "experts once per step: use a dense feed-forward."
        )
    if config.reader_eps == "sum":
        raise UserError(
            f"order.kind = '{config.order.kind}' runs a layer several times, but reader_eps = 'sum' needs a "
            "different eps each time: use reader_eps = 'norm'."
        )


def _check_reads(config: ModelConfig) -> None:
    single = next((mixer for mixer in config.mixers if not mixer.takes_reads), None)
    if single is not None and len(config.topology.reads) > 1:
        raise UserError(
            f"topology.kind = '{config.topology.kind}' gives queries, keys and values separate inputs, but "
            f"attention.kind = '{single.kind}' takes a single one: use softmax attention in every layer."
        )


def _check_anchors(config: ModelConfig) -> None:
    anchors, softmax, table = config.anchors, config.softmax, config.attention.softmax_path
    if not anchors.mixed:
        return
    if config.latent is not None:
        raise UserError(
            f"anchors.kind = '{anchors.kind}' mixes keys and values per head, but latent attention ('mla') has "
            "none: use anchors.kind = 'none', or softmax attention of kind = 'softmax'."
        )
    if softmax is None:
        raise UserError(
            f"anchors.kind = '{anchors.kind}' mixes softmax projections, but attention.kind = "
            f"'{config.attention.kind}' has none: use anchors.kind = 'none' or attention.kind = 'softmax'."
        )
    anchors.check(config.width, len(config.softmax_layers))
    if softmax.full is not None or softmax.values == "keys":
        raise UserError(
            f"anchors.kind = '{anchors.kind}' mixes the heads of all softmax layers, but {table}.full or "
            f"{table}.values gives some layers different heads: use anchors.kind = 'none'."
        )
    if anchors.rms_kernels and softmax.qk_norm == "rms_all":
        raise UserError(
            f"anchors.kind = '{anchors.kind}' mixes heads one by one, but {table}."
            "qk_norm = 'rms_all' normalizes them together: use anchors.kind = 'none', or qk_norm = 'rms' (which "
            "changes what a trained model computes)."
        )
    if anchors.rms_kernels and softmax.qk_norm in ("dyt", "rms_qkv"):
        raise UserError(
            f"anchors.kind = '{anchors.kind}' supports only an RMS norm of queries and keys or none, but "
            f"{table}.qk_norm = '{softmax.qk_norm}': use anchors.kind = 'none' or qk_norm = 'rms'."
        )
    if "g" in anchors.mixed and softmax.gate != "elementwise":
        raise UserError(
            f"anchors.pathways contains 'g' but {table}.gate = '{softmax.gate}': "
            f"use {table}.gate = 'elementwise' or remove 'g' from anchors.pathways."
        )
    if anchors.counts_layers and config.executed != tuple(range(config.layers)):
        raise UserError(
            f"anchors.kind = '{anchors.kind}' refers to keys and values by their layer, but order.kind = "
            f"'{config.order.kind}' reorders or repeats layers: use order.kind = 'sequential'."
        )
    if config.borrowed:
        _check_borrowed(config)


def _check_borrowed(config: ModelConfig) -> None:
    kind, softmax, table = config.anchors.kind, config.softmax, config.attention.softmax_path
    assert softmax is not None
    if len(config.topology.reads) > 1:
        raise UserError(
            f"topology.kind = '{config.topology.kind}' gives keys and values separate inputs, which layers that "
            f"share those of others (anchors.kind = '{kind}') ignore: use anchors.kind = 'none' or another topology."
        )
    if "k" in config.anchors.mixed and softmax.local_rope_theta is not None:
        raise UserError(
            f"anchors.kind = '{kind}' shares keys after their rotation, but {table}.local_rope_theta rotates "
            "some layers differently: leave it out, or use anchors.shared = 'v'."
        )
