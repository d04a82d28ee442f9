"""The tables a configuration is made of, each union tagged by `kind`. What a choice means is written where it is built.

Topologies say how sublayers talk along depth (`topology/`, docs/topologies.md), anchors which projections later layers
mix into their own (`anchors.py`); attention, feed-forward and norms are what they are called.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from residua.config.settings import Frozen


def _number(value: object) -> object:
    """Python counts True as 1; a person who writes `layers = true` did not mean one layer."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "a truth value is not a number")
    return value


Positive = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Granularity = Literal["elementwise", "headwise", "scalar"]
Pathway = Literal["q", "k", "v", "g"]


class Additive(Frozen):
    """h ← h + y."""

    kind: Literal["additive"] = "additive"


class Clipped(Frozen):
    """h ← clip(h + y, ±limit)."""

    kind: Literal["clipped"] = "clipped"
    limit: float = Field(1000.0, gt=0)


class AttentionResidual(Frozen):
    """What Full and Block Attention Residuals share: the ablation switches of the paper."""

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


class Recompute(Frozen):
    """Streams are kept once per `segment` junctions; the backward pass makes the others again, exactly."""

    kind: Literal["recompute"] = "recompute"
    segment: Positive = 2


class Invert(Frozen):
    """Streams are found again from later ones, approximately; the true ones are kept for this share with the largest β.

    Only the last junction keeps its streams.
    """

    kind: Literal["invert"] = "invert"
    share: float = Field(0.01, ge=0, le=1)


Memory = Annotated[Recompute | Invert, Field(discriminator="kind")]


class MultiGate(Frozen):
    """Multi-Gate Residuals. `bias_init` chooses, for independent gates, the corrected or the printed formula; `memory`
    is how training does without most of the streams."""

    kind: Literal["multi_gate"] = "multi_gate"
    streams: int = Field(4, ge=2, le=64)
    gate: Literal["competitive", "independent"] = "competitive"
    bias_init: Literal["corrected", "printed"] = "corrected"
    memory: Memory = Recompute()


class Highway(Frozen):
    """One gated stream; the gate is one number per token or one per channel."""

    kind: Literal["highway"] = "highway"
    gate: Literal["scalar", "elementwise"] = "scalar"


class HyperConnections(Frozen):
    """HC: n streams with free read, write and mixing weights, static or computed from the streams."""

    kind: Literal["hyper"] = "hyper"
    streams: Positive = 4
    weights: Literal["static", "dynamic"] = "dynamic"


class ManifoldHyper(Frozen):
    """mHC: the mixing matrix is made doubly stochastic by Sinkhorn iterations."""

    kind: Literal["mhc"] = "mhc"
    streams: Positive = 4
    iterations: Positive = 20


class ManifoldHyperLite(Frozen):
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


class DenseFormer(Frozen):
    """After every `period`-th layer, a static weighted sum of every `dilation`-th earlier layer's output."""

    kind: Literal["dense"] = "dense"
    dilation: Positive = 1
    period: Positive = 1


Topology = Annotated[
    Additive
    | Clipped
    | FullAttnRes
    | BlockAttnRes
    | MultiGate
    | Highway
    | HyperConnections
    | ManifoldHyper
    | ManifoldHyperLite
    | DenseFormer,
    Field(discriminator="kind"),
]


class NoAnchors(Frozen):
    kind: Literal["none"] = "none"


class StaticMixing(Frozen):
    """λ is a parameter."""

    kind: Literal["static"] = "static"


class DynamicMixing(Frozen):
    """λ is multiplied by γ, computed per token by a small MLP."""

    kind: Literal["dynamic"] = "dynamic"
    hidden: Positive = 16


Mixing = Annotated[StaticMixing | DynamicMixing, Field(discriminator="kind")]


class ResFormer(Frozen):
    """The first layer's values, raw, in every later layer."""

    kind: Literal["resformer"] = "resformer"
    granularity: Granularity = "scalar"


class ProjectionAnchors(Frozen):
    """What NuResFormer and ExoFormer share."""

    pathways: tuple[Pathway, ...] = ("q", "k", "v", "g")
    granularity: Granularity = "elementwise"
    norm: Literal["none", "qk", "all"] = "all"
    mixing: Mixing = StaticMixing()

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

    kind: Literal["exoformer"] = "exoformer"


Anchors = Annotated[NoAnchors | ResFormer | NuResFormer | ExoFormer, Field(discriminator="kind")]


class Mixer(Frozen):
    """A sequence mixer that every layer has."""

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

    kind: Literal["hybrid"] = "hybrid"
    softmax_every: int = Field(4, ge=2)
    softmax: SoftmaxAttention
    linear: GatedDeltaNet

    def at(self, layer: int) -> SoftmaxAttention | GatedDeltaNet:
        """The mixer of layer `layer`."""
        return self.linear if (layer + 1) % self.softmax_every else self.softmax


Attention = Annotated[SoftmaxAttention | GatedDeltaNet | HybridAttention, Field(discriminator="kind")]


class SwiGLU(Frozen):
    kind: Literal["swiglu"] = "swiglu"
    hidden: Positive


class GLU(Frozen):
    kind: Literal["glu"] = "glu"
    hidden: Positive


class ReLU2(Frozen):
    kind: Literal["relu2"] = "relu2"
    hidden: Positive


class GELU(Frozen):
    kind: Literal["gelu"] = "gelu"
    hidden: Positive


DenseFFN = SwiGLU | GLU | ReLU2 | GELU


class MoE(Frozen):
    """A mixture of `experts` feed-forwards of width `hidden`; a token visits `top_k` of them and the `shared` ones.

    `top_k` is at least 2: the weights of the chosen sum to one, so that of a single one would teach the router nothing.
    """

    kind: Literal["moe"] = "moe"
    hidden: Positive
    experts: Positive
    top_k: int = Field(ge=2)
    shared: Annotated[int, BeforeValidator(_number), Field(ge=0)] = 1
    shared_gate: Literal["none", "sigmoid"] = "none"
    activation: Literal["swiglu", "glu", "relu2", "gelu"] = "swiglu"

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


class RMSNorm(Frozen):
    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-6, gt=0)


class PreAffine(Frozen):
    kind: Literal["preaffine"] = "preaffine"
    eps: float = Field(1e-6, gt=0)


class LowRankGate(Frozen):
    """What GatedNorm and GatedDyT share: the gate on the normalised vector."""

    rank: Positive = 16
    granularity: Literal["elementwise", "tensorwise"] = "elementwise"
    activation: Literal["sigmoid", "tanh", "silu", "identity"] = "sigmoid"


class GatedNorm(LowRankGate):
    kind: Literal["gatednorm"] = "gatednorm"
    eps: float = Field(1e-6, gt=0)


class DyT(Frozen):
    kind: Literal["dyt"] = "dyt"
    alpha: float = Field(0.5, gt=0)


class GatedDyT(LowRankGate):
    kind: Literal["gated_dyt"] = "gated_dyt"
    alpha: float = Field(0.5, gt=0)


Norm = Annotated[RMSNorm | PreAffine | GatedNorm | DyT | GatedDyT, Field(discriminator="kind")]


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
