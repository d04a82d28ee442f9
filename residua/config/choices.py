"""The tables of a model's configuration, told apart by `kind`. The class built from a choice documents its meaning.

A topology says how sublayers talk along depth (`model/topology/`, docs/topologies.md), anchors say which projections
later layers mix into their own (`model/anchors.py`), an order which layers run, and when: a layer may run several times
(docs/reference/extending.md). Topologies, anchors and norms are open families: plugins add to them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, SerializeAsAny, model_validator

from residua.config.ffns import GELU as GELU
from residua.config.ffns import GLU as GLU
from residua.config.ffns import ClampedSwiGLU as ClampedSwiGLU
from residua.config.ffns import DenseChoice as DenseChoice
from residua.config.ffns import DenseFFN as DenseFFN
from residua.config.ffns import GeGLU as GeGLU
from residua.config.ffns import MoE as MoE
from residua.config.ffns import ReLU2 as ReLU2
from residua.config.ffns import SigmoidRouter as SigmoidRouter
from residua.config.ffns import SoftmaxRouter as SoftmaxRouter
from residua.config.ffns import SwiGLU as SwiGLU
from residua.config.ffns import TanhGELU as TanhGELU
from residua.config.mixers import GatedDeltaNet as GatedDeltaNet
from residua.config.mixers import HybridAttention as HybridAttention
from residua.config.mixers import KimiDelta as KimiDelta
from residua.config.mixers import LatentAttention as LatentAttention
from residua.config.mixers import Mixer as Mixer
from residua.config.mixers import SoftmaxAttention as SoftmaxAttention
from residua.config.norms import Derf as Derf
from residua.config.norms import DyT as DyT
from residua.config.norms import GatedDyT as GatedDyT
from residua.config.norms import GatedNorm as GatedNorm
from residua.config.norms import LayerNorm as LayerNorm
from residua.config.norms import LowRankGate as LowRankGate
from residua.config.norms import Norm as Norm
from residua.config.norms import NormChoice as NormChoice
from residua.config.norms import PreAffine as PreAffine
from residua.config.norms import RMSNorm as RMSNorm
from residua.config.norms import UnitRMSNorm as UnitRMSNorm
from residua.config.plugins import Family
from residua.config.settings import Count, Frozen, Positive
from residua.config.topologies import Additive as Additive
from residua.config.topologies import AttentionResidual as AttentionResidual
from residua.config.topologies import BlockAttnRes as BlockAttnRes
from residua.config.topologies import BoundaryAttnRes as BoundaryAttnRes
from residua.config.topologies import Clipped as Clipped
from residua.config.topologies import DeepCross as DeepCross
from residua.config.topologies import DeepNorm as DeepNorm
from residua.config.topologies import DeltaAttnRes as DeltaAttnRes
from residua.config.topologies import DenseFormer as DenseFormer
from residua.config.topologies import FracConnections as FracConnections
from residua.config.topologies import FullAttnRes as FullAttnRes
from residua.config.topologies import GatedResidual as GatedResidual
from residua.config.topologies import Highway as Highway
from residua.config.topologies import HyperConnections as HyperConnections
from residua.config.topologies import Injection as Injection
from residua.config.topologies import Invert as Invert
from residua.config.topologies import Keel as Keel
from residua.config.topologies import Laurel as Laurel
from residua.config.topologies import LayerFactor as LayerFactor
from residua.config.topologies import LayerNormScaling as LayerNormScaling
from residua.config.topologies import ManifoldHyper as ManifoldHyper
from residua.config.topologies import ManifoldHyperLite as ManifoldHyperLite
from residua.config.topologies import Memory as Memory
from residua.config.topologies import Mudd as Mudd
from residua.config.topologies import MultiGate as MultiGate
from residua.config.topologies import Parallel as Parallel
from residua.config.topologies import Recompute as Recompute
from residua.config.topologies import ResiDual as ResiDual
from residua.config.topologies import ResidualScalars as ResidualScalars
from residua.config.topologies import ScaledSum as ScaledSum
from residua.config.topologies import SinglePassHyper as SinglePassHyper
from residua.config.topologies import Topology as Topology
from residua.config.topologies import TopologyChoice as TopologyChoice
from residua.errors import UserError

MAX_EXECUTIONS = 10_000
Granularity = Literal["elementwise", "headwise", "scalar"]
Pathway = Literal["q", "k", "v", "g"]


Start = tuple[float, float]
"""Initial λ1 and λ2; dynamic mixing multiplies them by γ."""


class AnchorChoice(Family):
    """A choice of anchors. To add your own, subclass it with a `kind` (docs/extend.md)."""

    from_embedding: ClassVar[bool] = False
    """Whether the anchors are projections of the embedding; otherwise the first softmax layer writes them."""

    reads_tokens: ClassVar[bool] = False
    """Whether the source or the layers look up token ids (`Context.tokens`)."""

    counts_layers: ClassVar[bool] = False
    """Whether anchors are identified by the layer that wrote them, so that each layer must run once, in order."""

    rms_kernels: ClassVar[bool] = False
    """Whether layers mix in kernels that also norm queries and keys, by RMS over a head or not at all."""

    @property
    def mixed(self) -> tuple[Pathway, ...]:
        """The pathways that layers mix an anchor into."""
        return ()

    @property
    def joins_heads(self) -> bool:
        """Whether the mixing of one head depends on others, so that heads cannot be divided among ranks."""
        return False

    def check(self, width: int, layers: int) -> None:
        """Refuse settings that do not fit a model with this width and number of softmax layers."""

    def lender(self, layer: int) -> int:
        """The softmax layer whose projections softmax layer `layer` uses instead of its own; both count from 0."""
        return layer

    def taken(self, layer: int) -> tuple[Pathway, ...]:
        """The pathways that softmax layer `layer` shares with its lender; it has no projection or cache for them."""
        return ()

    def carried(self, layers: int) -> tuple[Pathway, ...]:
        """The anchors that exist after this many softmax layers, by the pathway whose shape they have."""
        return self.mixed if self.from_embedding or layers else ()


class NoAnchors(AnchorChoice):
    """Layers mix nothing into their projections."""

    kind: Literal["none"] = "none"


class StaticMixing(Frozen):
    """λ is a parameter."""

    kind: Literal["static"] = "static"


class DynamicMixing(Frozen):
    """λ is multiplied by γ, computed per token by a small MLP."""

    kind: Literal["dynamic"] = "dynamic"
    hidden: Positive = 16
    """Hidden channels of the MLP."""


Mixing = Annotated[StaticMixing | DynamicMixing, Field(discriminator="kind")]


class ResFormer(AnchorChoice):
    """Mix the first layer's values, not normalised, into those of every later layer."""

    rms_kernels: ClassVar[bool] = True
    training_only: ClassVar[tuple[str, ...]] = ("start",)
    mixed: ClassVar[tuple[Pathway, ...]] = ("v",)

    kind: Literal["resformer"] = "resformer"
    granularity: Granularity = "scalar"
    """Shape of λ1 and λ2: per element, per head, or a single number."""
    start: Start = (0.5, 0.5)
    """Initial λ1 of the first layer's values and λ2 of the layer's own."""


class ProjectionAnchors(AnchorChoice):
    """The keys shared by NuResFormer and ExoFormer."""

    rms_kernels: ClassVar[bool] = True
    training_only: ClassVar[tuple[str, ...]] = ("start",)

    pathways: tuple[Pathway, ...] = ("q", "k", "v", "g")
    """Projections to mix: queries, keys, values, gate."""
    granularity: Granularity = "elementwise"
    """Shape of λ1 and λ2: per element, per head, or a single number."""
    norm: Literal["none", "qk", "all"] = "all"
    """Which anchors are normalised by RMS: none, those of queries and keys, or all."""
    start: Start = (0.5, 0.5)
    """Initial λ1 of the anchor and λ2 of the layer's own projection."""
    mixing: Mixing = StaticMixing()

    @property
    def mixed(self) -> tuple[Pathway, ...]:
        return self.pathways

    @model_validator(mode="after")
    def _pathways_once(self) -> Self:
        if not self.pathways or len(set(self.pathways)) != len(self.pathways):
            raise UserError(
                f"anchors.pathways = {list(self.pathways)} must contain one or more of 'q', 'k', 'v', 'g', "
                "without repetition."
            )
        return self


class NuResFormer(ProjectionAnchors):
    """Mix the first layer's projections, normalised, into those of every later layer."""

    kind: Literal["nuresformer"] = "nuresformer"


class ExoFormer(ProjectionAnchors):
    """Mix dedicated projections of the embedding into those of every layer."""

    from_embedding: ClassVar[bool] = True

    kind: Literal["exoformer"] = "exoformer"


class GatedValue(AnchorChoice):
    """Mix the first layer's values, not normalised, into those of every later layer, with a gate per token and head."""

    mixed: ClassVar[tuple[Pathway, ...]] = ("v",)

    kind: Literal["gated_value"] = "gated_value"
    gate: Literal["relu", "sigmoid", "tanh", "softmax"] = "relu"
    """The activation of the gate."""

    @property
    def joins_heads(self) -> bool:
        return self.gate == "softmax"


class ValueEmbeddings(AnchorChoice):
    """Add a learned, gated vector of the token to the values of every `every`-th layer, counted from the last."""

    reads_tokens: ClassVar[bool] = True
    mixed: ClassVar[tuple[Pathway, ...]] = ("v",)

    kind: Literal["value_embeddings"] = "value_embeddings"
    every: Positive = 2
    """Distance between softmax layers with a table."""
    gate_channels: Positive = 12
    """Channels of the layer's input from which the gate is computed."""
    gate_scale: float = Field(3.0, gt=0)
    """Upper bound of the gate."""

    def carried(self, layers: int) -> tuple[Pathway, ...]:
        return ()

    def check(self, width: int, layers: int) -> None:
        if self.gate_channels > width:
            raise UserError(f"anchors.gate_channels = {self.gate_channels} is more than width = {width}: lower it.")


class SharedHeads(AnchorChoice):
    """Use keys and values, or only values, of an earlier softmax layer instead of the layer's own."""

    counts_layers: ClassVar[bool] = True

    shared: Literal["kv", "v"] = "kv"
    """What is shared: keys and values, or only values."""

    @property
    def mixed(self) -> tuple[Pathway, ...]:
        return ("k", "v") if self.shared == "kv" else ("v",)

    def taken(self, layer: int) -> tuple[Pathway, ...]:
        return () if self.lender(layer) == layer else self.mixed

    def carried(self, layers: int) -> tuple[Pathway, ...]:
        return self.taken(layers)


class CrossLayer(SharedHeads):
    """Groups of `group` softmax layers share those of the first layer in the group (CLA)."""

    kind: Literal["cla"] = "cla"
    group: Positive = 2

    def lender(self, layer: int) -> int:
        return layer - layer % self.group


class HeadSource(SharedHeads):
    """All softmax layers after `layer`, counted among softmax layers from 0, use those of `layer`."""

    kind: Literal["kv_source"] = "kv_source"
    layer: Count = 0

    def lender(self, layer: int) -> int:
        return min(layer, self.layer)

    def check(self, width: int, layers: int) -> None:
        if self.layer >= layers:
            raise UserError(
                f"anchors.layer = {self.layer} is not one of the {layers} softmax layers: use 0 to {layers - 1}."
            )


class Lime(AnchorChoice):
    """Learned mixtures, per head, of the keys and values of all softmax layers so far (LIMe)."""

    counts_layers: ClassVar[bool] = True
    training_only: ClassVar[tuple[str, ...]] = ("start",)
    mixed: ClassVar[tuple[Pathway, ...]] = ("k", "v")
    joins_heads: ClassVar[bool] = True

    kind: Literal["lime"] = "lime"
    start: Literal["random", "identity"] = "random"
    """Initial weights: random, or only the layer's own keys and values."""

    def carried(self, layers: int) -> tuple[Pathway, ...]:
        return self.mixed * layers


class DepthAttention(AnchorChoice):
    """Values mixed by attention of the query over the keys of all softmax layers so far, at the same token."""

    counts_layers: ClassVar[bool] = True
    mixed: ClassVar[tuple[Pathway, ...]] = ("k", "v")

    kind: Literal["depth_attention"] = "depth_attention"

    def carried(self, layers: int) -> tuple[Pathway, ...]:
        return self.mixed * layers


AnchorChoice.join(NoAnchors, ResFormer, NuResFormer, ExoFormer, GatedValue, ValueEmbeddings)
AnchorChoice.join(CrossLayer, HeadSource, Lime, DepthAttention)
Anchors = Annotated[SerializeAsAny[AnchorChoice], PlainValidator(AnchorChoice.choose)]


class OrderChoice(Frozen):
    """An order of execution. Parameters belong to layers; caches and the state along depth to executions."""

    def executed(self, layers: int) -> tuple[int, ...]:
        """The number of each layer that runs, in order, of a model with so many."""
        return tuple(range(layers))


class Sequential(OrderChoice):
    """Every layer once."""

    kind: Literal["sequential"] = "sequential"


class Loop(OrderChoice):
    """`prelude` layers once, the layers between `turns` times, `coda` layers once."""

    kind: Literal["loop"] = "loop"
    prelude: Count = 0
    coda: Count = 0
    turns: Positive

    def executed(self, layers: int) -> tuple[int, ...]:
        looped = range(self.prelude, layers - self.coda)
        if not looped:
            raise UserError(
                f"order.prelude = {self.prelude} and order.coda = {self.coda} leave no layers to loop in layers "
                f"= {layers}: lower one of them."
            )
        if len(looped) * self.turns > MAX_EXECUTIONS:
            raise UserError(
                f"order.turns = {self.turns} runs {len(looped) * self.turns:,} layers: use fewer, for at most "
                f"{MAX_EXECUTIONS:,}."
            )
        return (*range(self.prelude), *(tuple(looped) * self.turns), *range(layers - self.coda, layers))


class Listed(OrderChoice):
    """The layers by number, counted from 0; each at least once."""

    kind: Literal["listed"] = "listed"
    layers: tuple[Count, ...] = Field(max_length=MAX_EXECUTIONS)
    """The numbers of the layers that run, in order."""

    def executed(self, layers: int) -> tuple[int, ...]:
        if {*self.layers} != {*range(layers)}:
            wrong = sorted({*range(layers)} ^ {*self.layers})[0]
            raise UserError(
                f"order.layers {'leaves out' if wrong < layers else 'names'} layer {wrong} and layers = {layers}: name "
                f"each of 0 to {layers - 1} at least once."
            )
        return self.layers


Order = Annotated[Sequential | Loop | Listed, Field(discriminator="kind")]


class TiedHead(Frozen):
    """The head shares the matrix of the embedding."""

    kind: Literal["tied"] = "tied"


class UntiedHead(Frozen):
    """The head has a matrix of its own."""

    training_only: ClassVar[tuple[str, ...]] = ("init",)

    kind: Literal["untied"] = "untied"
    init: Literal["normal", "zero"] = "normal"
    """Initialization of its weights."""


Head = Annotated[TiedHead | UntiedHead, Field(discriminator="kind")]


class Init(Frozen):
    """Weights start normal with `std`; `output` chooses the start of each sublayer's last projection.

    `scaled` divides its std by sqrt(2·layers) (GPT-2); with `zero`, every sublayer starts with zero output (ExoFormer).
    """

    std: float = Field(0.02, gt=0)
    output: Literal["normal", "scaled", "zero"] = "scaled"
