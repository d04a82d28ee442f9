"""The tables of a model's configuration, told apart by `kind`. The class that a choice builds explains what it means.

A topology says how sublayers talk along depth (`model/topology/`, docs/topologies.md), anchors say which projections
later layers mix into their own (`model/anchors.py`). Topologies and norms are open families: plugins add to them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, SerializeAsAny, model_validator
from pydantic_core import PydanticCustomError

from residua.config.depth import gate_bias, lerping_sublayers
from residua.config.family import Family
from residua.config.settings import Frozen


def _number(value: object) -> object:
    """Refuse True, which Python counts as 1: `layers = true` does not mean one layer."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "a truth value is not a number")
    return value


Positive = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Granularity = Literal["elementwise", "headwise", "scalar"]
Pathway = Literal["q", "k", "v", "g"]


class TopologyChoice(Family):
    """A choice of topology: subclass it, with a `kind`, for a topology of your own (docs/extend.md)."""

    def check(self, layers: int) -> None:
        """Raise ValueError, in a sentence, if a model of so many layers cannot have this topology."""


class Additive(TopologyChoice):
    """h ← h + y."""

    kind: Literal["additive"] = "additive"


class Clipped(TopologyChoice):
    """h ← clip(h + y, ±limit)."""

    kind: Literal["clipped"] = "clipped"
    limit: float = Field(1000.0, gt=0)


class AttentionResidual(TopologyChoice):
    """The keys that Full and Block Attention Residuals share: the switches of the paper's ablations."""

    scale: float = Field(1.0, gt=0)
    key_norm: Literal["rms", "none"] = "rms"
    activation: Literal["softmax", "sigmoid"] = "softmax"


class FullAttnRes(AttentionResidual):
    """Every sublayer attends to every earlier output; `window` keeps the embedding and the last few only."""

    kind: Literal["full_attnres"] = "full_attnres"
    window: Positive | None = None


class BlockAttnRes(AttentionResidual):
    """Every sublayer attends to the finished blocks and the running sum of its own."""

    kind: Literal["block_attnres"] = "block_attnres"
    sublayers_per_block: Positive

    def check(self, layers: int) -> None:
        if self.sublayers_per_block > 2 * layers:
            raise ValueError(
                f"topology.sublayers_per_block = {self.sublayers_per_block} is more than the model's "
                f"{2 * layers} sublayers (layers = {layers}): use at most {2 * layers}."
            )


class Recompute(Frozen):
    """Keep the streams once per `segment` junctions; the backward pass recomputes the others, exactly."""

    kind: Literal["recompute"] = "recompute"
    segment: Positive = 2


class Invert(Frozen):
    """Compute streams backwards from later ones, approximately; only the last junction keeps its streams.

    For the `share` of (token, stream) pairs with the largest β the true values are kept.
    """

    kind: Literal["invert"] = "invert"
    share: float = Field(0.01, ge=0, le=1)


Memory = Annotated[Recompute | Invert, Field(discriminator="kind")]


class MultiGate(TopologyChoice):
    """Multi-Gate Residuals. `memory` says how training avoids storing most of the streams.

    `bias_init` chooses the corrected or the printed formula for independent gates.
    """

    kind: Literal["multi_gate"] = "multi_gate"
    streams: int = Field(4, ge=2, le=64)
    gate: Literal["competitive", "independent"] = "competitive"
    bias_init: Literal["corrected", "printed"] = "corrected"
    memory: Memory = Recompute()

    def check(self, layers: int) -> None:
        lerping = lerping_sublayers(2 * layers, self.streams)
        if lerping < 1:
            raise ValueError(
                f"topology.streams = {self.streams} leaves no gated sublayer in layers = {layers}: the first "
                f"{self.streams - 1} sublayers fill the streams; use at most {2 * layers} streams."
            )
        gate_bias(self, lerping)


class Highway(TopologyChoice):
    """One gated stream; the gate is one number per token or one per channel."""

    kind: Literal["highway"] = "highway"
    gate: Literal["scalar", "elementwise"] = "scalar"


class HyperConnections(TopologyChoice):
    """HC: n streams with free read, write and mixing weights, static or computed from the streams."""

    kind: Literal["hyper"] = "hyper"
    streams: Positive = 4
    weights: Literal["static", "dynamic"] = "dynamic"


class ManifoldHyper(TopologyChoice):
    """mHC: the mixing matrix is made doubly stochastic by Sinkhorn iterations."""

    kind: Literal["mhc"] = "mhc"
    streams: Positive = 4
    iterations: Positive = 20


class ManifoldHyperLite(TopologyChoice):
    """mHC-lite: the mixing matrix is a convex sum of the n! permutation matrices."""

    kind: Literal["mhc_lite"] = "mhc_lite"
    streams: Positive = 4

    @model_validator(mode="after")
    def _few_streams(self) -> Self:
        if self.streams > 4:
            raise ValueError(
                f"topology.kind = 'mhc_lite' sums over streams! permutations and topology.streams = {self.streams} "
                "makes too many of them: use at most 4 streams, or topology.kind = 'mhc'."
            )
        return self


class DenseFormer(TopologyChoice):
    """After every `period`-th layer, a static weighted sum of every `dilation`-th earlier layer's output."""

    kind: Literal["dense"] = "dense"
    dilation: Positive = 1
    period: Positive = 1


TopologyChoice.join(
    Additive,
    Clipped,
    FullAttnRes,
    BlockAttnRes,
    MultiGate,
    Highway,
    HyperConnections,
    ManifoldHyper,
    ManifoldHyperLite,
    DenseFormer,
)
Topology = Annotated[SerializeAsAny[TopologyChoice], PlainValidator(TopologyChoice.choose)]


class AnchorChoice(Frozen):
    """What every choice of anchors states."""

    from_embedding: ClassVar[bool] = False
    """Whether the anchors are projections of the embedding; otherwise the first softmax layer writes them."""

    @property
    def mixed(self) -> tuple[Pathway, ...]:
        """The pathways that layers mix an anchor into."""
        return ()


class NoAnchors(AnchorChoice):
    kind: Literal["none"] = "none"


class StaticMixing(Frozen):
    """λ is a parameter."""

    kind: Literal["static"] = "static"


class DynamicMixing(Frozen):
    """λ is multiplied by γ, computed per token by a small MLP."""

    kind: Literal["dynamic"] = "dynamic"
    hidden: Positive = 16


Mixing = Annotated[StaticMixing | DynamicMixing, Field(discriminator="kind")]


class ResFormer(AnchorChoice):
    """The first layer's values, raw, in every later layer."""

    kind: Literal["resformer"] = "resformer"
    granularity: Granularity = "scalar"

    @property
    def mixed(self) -> tuple[Pathway, ...]:
        return ("v",)


class ProjectionAnchors(AnchorChoice):
    """The keys that NuResFormer and ExoFormer share."""

    pathways: tuple[Pathway, ...] = ("q", "k", "v", "g")
    granularity: Granularity = "elementwise"
    norm: Literal["none", "qk", "all"] = "all"
    mixing: Mixing = StaticMixing()

    @property
    def mixed(self) -> tuple[Pathway, ...]:
        return self.pathways

    @model_validator(mode="after")
    def _pathways_once(self) -> Self:
        if not self.pathways or len(set(self.pathways)) != len(self.pathways):
            raise ValueError(
                f"anchors.pathways = {list(self.pathways)} must name one or more of 'q', 'k', 'v', 'g', each once."
            )
        return self


class NuResFormer(ProjectionAnchors):
    """The first layer's projections, normalised, in every later layer."""

    kind: Literal["nuresformer"] = "nuresformer"


class ExoFormer(ProjectionAnchors):
    """Dedicated projections of the embedding, in every layer."""

    from_embedding: ClassVar[bool] = True

    kind: Literal["exoformer"] = "exoformer"


Anchors = Annotated[NoAnchors | ResFormer | NuResFormer | ExoFormer, Field(discriminator="kind")]


class Mixer(Frozen):
    """A sequence mixer, the same in every layer."""

    softmax_path: ClassVar[str] = "attention"
    """The table with the keys of softmax attention."""

    @property
    def everywhere(self) -> SoftmaxAttention | None:
        """The softmax attention of every layer; None if some layer has another mixer."""
        return None

    def check(self, layers: int) -> None:
        """Raise ValueError, in a sentence, if a model of so many layers cannot have this attention."""

    def at(self, layer: int) -> Self:
        """The mixer of layer `layer`."""
        return self


class SoftmaxAttention(Mixer):
    """Causal softmax attention; `kv_heads` below `heads` is grouped-query attention."""

    kind: Literal["softmax"] = "softmax"
    heads: Positive
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    qk_norm: Literal["rms", "none"] = "rms"
    rope_theta: float = Field(10_000.0, gt=0)
    gate: Literal["none", "elementwise", "headwise"] = "none"
    sink: Literal["none", "learned"] = "none"

    @property
    def everywhere(self) -> SoftmaxAttention:
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"attention.kv_heads = {self.kv_heads} does not divide attention.heads = {self.heads}: "
                f"choose one of {divisors(self.heads)}."
            )
        return self


class GatedDeltaNet(Mixer):
    """Linear attention by the gated delta rule."""

    kind: Literal["gated_deltanet"] = "gated_deltanet"
    key_heads: Positive
    value_heads: Positive
    head_dim: Positive = 128
    convolution: Positive = 4

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"attention.key_heads = {self.key_heads} does not divide attention.value_heads = {self.value_heads}: "
                f"choose one of {divisors(self.value_heads)}."
            )
        return self


class HybridAttention(Frozen):
    """Linear attention, with softmax attention in the last of every `softmax_every` layers."""

    softmax_path: ClassVar[str] = "attention.softmax"

    kind: Literal["hybrid"] = "hybrid"
    softmax_every: int = Field(4, ge=2)
    softmax: SoftmaxAttention
    linear: GatedDeltaNet

    @property
    def everywhere(self) -> SoftmaxAttention | None:
        """The softmax attention of every layer; None if some layer has another mixer."""
        return None

    def check(self, layers: int) -> None:
        """Raise ValueError, in a sentence, if a model of so many layers cannot have this attention."""
        if self.softmax_every > layers:
            raise ValueError(
                f"attention.softmax_every = {self.softmax_every} leaves layers = {layers} without softmax attention: "
                f"use at most {layers}, or attention.kind = 'gated_deltanet'."
            )

    def at(self, layer: int) -> SoftmaxAttention | GatedDeltaNet:
        """The mixer of layer `layer`."""
        return self.linear if (layer + 1) % self.softmax_every else self.softmax


Attention = Annotated[SoftmaxAttention | GatedDeltaNet | HybridAttention, Field(discriminator="kind")]


class DenseChoice(Frozen):
    """What every feed-forward that is no mixture states."""

    mixture: ClassVar[bool] = False
    """Whether it has experts."""
    kept_hidden: ClassVar[int]
    """Hidden tensors kept for the backward pass."""

    kind: str
    hidden: Positive

    def kept(self, width: int) -> float:
        """Elements per token kept for the backward pass."""
        return 2 * width + self.kept_hidden * self.hidden


class SwiGLU(DenseChoice):
    kept_hidden: ClassVar[int] = 3

    kind: Literal["swiglu"] = "swiglu"


class GLU(DenseChoice):
    kept_hidden: ClassVar[int] = 3

    kind: Literal["glu"] = "glu"


class ReLU2(DenseChoice):
    kept_hidden: ClassVar[int] = 1  # relu² and its slope are computed within the products next to them

    kind: Literal["relu2"] = "relu2"


class GELU(DenseChoice):
    kept_hidden: ClassVar[int] = 2

    kind: Literal["gelu"] = "gelu"


DenseFFN = SwiGLU | GLU | ReLU2 | GELU


class MoE(Frozen):
    """A mixture of `experts` feed-forwards of width `hidden`; a token visits `top_k` of them and the `shared` ones.

    `top_k` is at least 2: the weights of the chosen sum to one, so a single one would teach the router nothing.
    """

    mixture: ClassVar[bool] = True

    kind: Literal["moe"] = "moe"
    hidden: Positive
    experts: Positive
    top_k: int = Field(ge=2)
    shared: Annotated[int, BeforeValidator(_number), Field(ge=0)] = 1
    shared_gate: Literal["none", "sigmoid"] = "none"
    activation: Literal["swiglu", "glu", "relu2", "gelu"] = "swiglu"

    def kept(self, width: int) -> float:
        """Elements per token kept for the backward pass."""
        hidden = self.hidden * {"relu2": 2, "gelu": 2, "swiglu": 3, "glu": 3}[self.activation]
        return 2 * width + self.top_k * (hidden + 2 * width) + self.shared * hidden

    @model_validator(mode="after")
    def _experts_suffice(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"ffn.top_k = {self.top_k} is more than ffn.experts = {self.experts}: use at most that.")
        if self.shared_gate != "none" and not self.shared:
            raise ValueError(
                f"ffn.shared_gate = '{self.shared_gate}' has nothing to gate with ffn.shared = 0: "
                "use ffn.shared_gate = 'none' or ffn.shared = 1."
            )
        return self


FFN = Annotated[DenseFFN | MoE, Field(discriminator="kind")]


class NormChoice(Family):
    """A choice of norm: subclass it, with a `kind`, for a norm of your own (docs/extend.md)."""

    kept_widths: ClassVar[float] = 2.0
    """Widths that one norm keeps for the backward pass, besides its input."""


class RMSNorm(NormChoice):
    kept_widths: ClassVar[float] = 0.0

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-6, gt=0)


class PreAffine(NormChoice):
    kept_widths: ClassVar[float] = 0.0

    kind: Literal["preaffine"] = "preaffine"
    eps: float = Field(1e-6, gt=0)


class LowRankGate(NormChoice):
    """The keys that GatedNorm and GatedDyT share: the gate on the normalised vector."""

    rank: Positive = 16
    granularity: Literal["elementwise", "tensorwise"] = "elementwise"
    activation: Literal["sigmoid", "tanh", "silu", "identity"] = "sigmoid"


class GatedNorm(LowRankGate):
    kind: Literal["gatednorm"] = "gatednorm"
    eps: float = Field(1e-6, gt=0)


class DyT(NormChoice):
    kept_widths: ClassVar[float] = 0.0

    kind: Literal["dyt"] = "dyt"
    alpha: float = Field(0.5, gt=0)


class GatedDyT(LowRankGate):
    kind: Literal["gated_dyt"] = "gated_dyt"
    alpha: float = Field(0.5, gt=0)


NormChoice.join(RMSNorm, PreAffine, GatedNorm, DyT, GatedDyT)
Norm = Annotated[SerializeAsAny[NormChoice], PlainValidator(NormChoice.choose)]


class TiedHead(Frozen):
    """The head is the embedding."""

    kind: Literal["tied"] = "tied"


class UntiedHead(Frozen):
    kind: Literal["untied"] = "untied"
    init: Literal["normal", "zero"] = "normal"


Head = Annotated[TiedHead | UntiedHead, Field(discriminator="kind")]


class Init(Frozen):
    """Weights are normal with `std`; `output` says how each sublayer's last projection starts.

    `scaled` divides its std by sqrt(2·layers) (GPT-2), `zero` starts every sublayer silent (ExoFormer).
    """

    std: float = Field(0.02, gt=0)
    output: Literal["normal", "scaled", "zero"] = "scaled"


def divisors(n: int) -> str:
    """The divisors of n, as a list for an error message."""
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
