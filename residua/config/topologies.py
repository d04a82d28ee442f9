"""The choices of topology: how sublayers talk along depth (docs/topologies.md). Plugins add to them."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, SerializeAsAny, model_validator

from residua.config.plugins import Family
from residua.config.settings import Count, Frozen, Positive
from residua.errors import UserError

BASE_DEPTH = 21  # gated sublayers of the paper's reference model: 12 layers, 4 streams
BASE_BIAS = -3.0  # the gate bias of that model


class TopologyChoice(Family):
    """A choice of topology: subclass it, with a `kind`, for a topology of your own (docs/extend.md)."""

    norms_inputs: ClassVar[bool] = False
    """Whether readers get their inputs normed: sublayers and head then have no norm of their own in front."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs of a sublayer: one, r, or several of q, k, v and r (`model/context.py`)."""
        return ("r",)

    @property
    def turned_layers(self) -> tuple[int, int, int] | None:
        """Layers before a loop, layers in it, and its turns, if the topology needs such an order."""
        return None

    def check(self, layers: int) -> None:
        """Raise ValueError, in a sentence, if a model of so many layers cannot have this topology."""

    def check_width(self, width: int) -> None:
        """Raise ValueError, in a sentence, if a model of this width cannot have this topology."""


class Additive(TopologyChoice):
    """h ← h + y."""

    kind: Literal["additive"] = "additive"


class Parallel(TopologyChoice):
    """h ← h + attention(h) + feed-forward(h), as in GPT-J."""

    kind: Literal["parallel"] = "parallel"


class Clipped(TopologyChoice):
    """h ← clip(h + y, ±limit)."""

    kind: Literal["clipped"] = "clipped"
    limit: float = Field(1000.0, gt=0)
    """The largest absolute value that stays."""


class LayerFactor(TopologyChoice):
    """h ← s · (h + y) after every layer, h ← h + y inside it, with a learned number s for each layer (Gemma 4)."""

    kind: Literal["layer_factor"] = "layer_factor"


class ScaledSum(TopologyChoice):
    """h ← h + g ⊙ y: LayerScale with `gain = "elementwise"`, ReZero with `gain = "scalar"` and `start = 0`."""

    training_only: ClassVar[tuple[str, ...]] = ("start",)

    kind: Literal["scaled"] = "scaled"
    gain: Literal["elementwise", "scalar"] = "elementwise"
    """One g per channel, or one for all."""
    start: float = 0.1
    """g at the start."""


class Laurel(TopologyChoice):
    """LAuReL: h ← α y + β (h + B A h), with a map of rank `rank` for each sublayer."""

    kind: Literal["laurel"] = "laurel"
    rank: Positive = 16
    """The rank of each map."""


class LayerNormScaling(TopologyChoice):
    """LNS: sublayers of layer ℓ read N(h)/√ℓ."""

    norms_inputs: ClassVar[bool] = True

    kind: Literal["lns"] = "lns"


class Keel(TopologyChoice):
    """KEEL: h ← N(α h + y) and a pre-norm; α is the number of sublayers unless given."""

    kind: Literal["keel"] = "keel"
    alpha: float | None = Field(None, gt=0)
    """The weight of the stream."""


class DeepNorm(TopologyChoice):
    """DeepNorm: h ← N(α h + y) without a pre-norm; α is (2 · layers)^¼ unless given."""

    norms_inputs: ClassVar[bool] = True

    kind: Literal["deepnorm"] = "deepnorm"
    alpha: float | None = Field(None, gt=0)
    """The weight of the stream."""


class ResiDual(TopologyChoice):
    """ResiDual: a normed stream that sublayers read, and a sum that the head reads as well."""

    norms_inputs: ClassVar[bool] = True

    kind: Literal["resi_dual"] = "resi_dual"


class ResidualScalars(TopologyChoice):
    """h ← λ h + μ x0 in every layer or sublayer, h − b·h_mid at the end. `backout` is b at the start."""

    training_only: ClassVar[tuple[str, ...]] = ("backout",)

    kind: Literal["x0"] = "x0"
    scalars: Literal["layer", "sublayer"] = "layer"
    """Whether λ and μ belong to layers or to sublayers."""
    embedding: Literal["normed", "raw"] = "normed"
    """Whether x0 is normed."""
    backout: float = 0.2


class AttentionResidual(TopologyChoice):
    """The keys that Full and Block Attention Residuals share: the switches of the paper's ablations."""

    scale: float = Field(1.0, gt=0)
    """Multiplies the logits."""
    key_norm: Literal["rms", "none"] = "rms"
    """How keys are normed."""
    activation: Literal["softmax", "sigmoid"] = "softmax"
    """Turns logits into weights."""


class FullAttnRes(AttentionResidual):
    """Every sublayer attends to every earlier output; `window` keeps the embedding and the last few only."""

    kind: Literal["full_attnres"] = "full_attnres"
    window: Positive | None = None


class InBlocks(AttentionResidual):
    """The key that both ways to divide sublayers into blocks share."""

    sublayers_per_block: Positive
    """Sublayers whose outputs are summed into one source."""

    def check(self, layers: int) -> None:
        if self.sublayers_per_block > 2 * layers:
            raise UserError(
                f"topology.sublayers_per_block = {self.sublayers_per_block} is more than the model's "
                f"{2 * layers} sublayers (layers = {layers}): use at most {2 * layers}."
            )


class BlockAttnRes(InBlocks):
    """Every sublayer attends to the finished blocks and the running sum of its own."""

    kind: Literal["block_attnres"] = "block_attnres"


class BoundaryAttnRes(InBlocks):
    """Attention over depth between blocks only, x + f(x) inside them: Block as an article describes it."""

    kind: Literal["boundary_attnres"] = "boundary_attnres"


class DeltaAttnRes(InBlocks):
    """The residual sum, and added to every sublayer's input attention over depth; one sublayer per block is Full."""

    kind: Literal["delta_attnres"] = "delta_attnres"
    sublayers_per_block: Positive = 1
    """Sublayers whose outputs are summed into one source."""


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

    The gates start as open as a model of `base_depth` gated sublayers needs them, with a bias of `base_bias`, scaled
    to the depth of this one. `bias_init` chooses the corrected or the printed formula for independent gates.
    """

    training_only: ClassVar[tuple[str, ...]] = ("bias_init", "base_depth", "base_bias", "memory")

    kind: Literal["multi_gate"] = "multi_gate"
    streams: int = Field(4, ge=2, le=64)
    """Copies of the residual stream."""
    gate: Literal["competitive", "independent"] = "competitive"
    """Whether streams compete for an output in a softmax, or each has a gate of its own."""
    bias_init: Literal["corrected", "printed"] = "corrected"
    base_depth: Positive = BASE_DEPTH
    base_bias: float = Field(BASE_BIAS, ge=-20, le=20)
    memory: Memory = Recompute()

    def check(self, layers: int) -> None:
        lerping = lerping_sublayers(2 * layers, self.streams)
        if lerping < 1:
            raise UserError(
                f"topology.streams = {self.streams} leaves no gated sublayer in layers = {layers}: the first "
                f"{self.streams - 1} sublayers fill the streams; use at most {2 * layers} streams."
            )
        gate_bias(self, lerping)


def lerping_sublayers(sublayers: int, streams: int) -> int:
    """Sublayers whose output is gated into the streams; the first `streams − 1` outputs become streams."""
    return sublayers - (streams - 1)


def depth_bias(lerping: int, streams: int, base_depth: int = BASE_DEPTH, base_bias: float = BASE_BIAS) -> float:
    """b = ln( sqrt(L_lerp/L_base)·(e^−b_base + 1) − n ), which starts β near sqrt(L_base/L_lerp)·sigmoid(b_base)."""
    opened = math.exp(-base_bias) + 1
    margin = math.sqrt(lerping / base_depth) * opened - streams
    if margin <= 0:
        needed = math.floor(base_depth * (streams / opened) ** 2) + 1
        raise UserError(
            f"topology.streams = {streams} is too many for {lerping} gated sublayers: the gates' initial bias "
            f"ln(sqrt(L/{base_depth})(e^{-base_bias:g}+1) - n) has no solution; use fewer streams, or layers for at "
            f"least {needed} of them."
        )
    return math.log(margin)


def gate_bias(config: MultiGate, lerping: int) -> tuple[float, ...]:
    """The initial biases of one junction: [forget, 0 … 0] for competitive gates, n equal ones for independent gates.

    For independent gates the paper's formula, with its n, misses its own target, sqrt(21/L)·sigmoid(−3); with n = 1 it
    meets it. `corrected` uses n = 1, `printed` the paper's n.
    """
    n, base = config.streams, (config.base_depth, config.base_bias)
    if config.gate == "competitive":
        return (depth_bias(lerping, n, *base),) + (0.0,) * n
    return (-depth_bias(lerping, 1 if config.bias_init == "corrected" else n, *base),) * n


class Highway(TopologyChoice):
    """One gated stream; the gate is one number per token or one per channel."""

    kind: Literal["highway"] = "highway"
    gate: Literal["scalar", "elementwise"] = "scalar"
    """The shape of the gate."""


class GatedResidual(TopologyChoice):
    """n streams that readers gate by channel. `rank` is that of the gate, by default an eighth of the width."""

    norms_inputs: ClassVar[bool] = True

    kind: Literal["gated_residual"] = "gated_residual"
    streams: int = Field(4, ge=2, le=64)
    """Copies of the residual stream."""
    rank: Positive | None = None


class HyperConnections(TopologyChoice):
    """HC: n streams with free read and write weights, static or computed from the streams; `mix` says how they mix."""

    kind: Literal["hyper"] = "hyper"
    streams: Positive = 4
    """Copies of the residual stream."""
    weights: Literal["static", "dynamic"] = "dynamic"
    """Whether read and write weights depend on the streams."""
    mix: Literal["free", "identity", "cyclic"] = "free"
    """How streams mix: a free matrix, not at all, or cyclic shifts."""


class FracConnections(TopologyChoice):
    """HC of the stream's slices: it is divided into `fractions`, and a sublayer reads, writes and mixes them."""

    kind: Literal["frac"] = "frac"
    fractions: Positive = 4
    """Slices of the stream."""
    weights: Literal["static", "dynamic"] = "dynamic"
    """Parameters alone, or computed from the slices too."""

    def check_width(self, width: int) -> None:
        if width % self.fractions:
            raise UserError(
                f"topology.fractions = {self.fractions} does not divide width = {width}: use a number that does."
            )


class SinglePassHyper(TopologyChoice):
    """HC whose reads have weights from the streams before the last write."""

    kind: Literal["hyper_single_pass"] = "hyper_single_pass"
    streams: Positive = 4
    """Copies of the residual stream."""
    mix: Literal["free", "identity", "cyclic"] = "free"
    """How streams mix: a free matrix, not at all, or cyclic shifts."""

    @property
    def weights(self) -> Literal["dynamic"]:
        return "dynamic"


class ManifoldHyper(TopologyChoice):
    """mHC: the mixing matrix is made doubly stochastic by Sinkhorn iterations."""

    kind: Literal["mhc"] = "mhc"
    streams: Positive = 4
    """Copies of the residual stream."""
    iterations: Positive = 20
    """Sinkhorn iterations."""


class ManifoldHyperLite(TopologyChoice):
    """mHC-lite: the mixing matrix is a convex sum of the n! permutation matrices."""

    kind: Literal["mhc_lite"] = "mhc_lite"
    streams: Positive = 4
    """Copies of the residual stream."""

    @model_validator(mode="after")
    def _few_streams(self) -> Self:
        if self.streams > 4:
            raise UserError(
                f"topology.kind = 'mhc_lite' sums over streams! permutations and topology.streams = {self.streams} "
                "makes too many of them: use at most 4 streams, or topology.kind = 'mhc'."
            )
        return self


class DenseFormer(TopologyChoice):
    """After every `period`-th layer, a static weighted sum of every `dilation`-th earlier layer's output."""

    kind: Literal["dense"] = "dense"
    dilation: Positive = 1
    period: Positive = 1


class Mudd(TopologyChoice):
    """MUDD: queries, keys, values and the residual stream read mixtures of earlier layers, weighted for each token.

    `ways` are the reads that are mixed. `layers` are those that mix, counted from 0, the final norm being layer L: all
    but the first by default. `sources` keeps the embedding and so many of the newest outputs; all by default.
    """

    kind: Literal["mudd"] = "mudd"
    ways: tuple[Literal["q", "k", "v", "r"], ...] = ("q", "k", "v", "r")
    layers: tuple[Positive, ...] | None = None
    sources: Positive | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return self.ways if self.ways == ("r",) else tuple("qkvr")

    def check(self, layers: int) -> None:
        if not self.ways or len(set(self.ways)) != len(self.ways):
            raise UserError(
                f"topology.ways = {list(self.ways)} must name one or more of 'q', 'k', 'v', 'r', each once."
            )
        if beyond := [layer for layer in self.layers or () if layer > layers]:
            raise UserError(
                f"topology.layers names layer {beyond[0]} and the model has layers = {layers}: use numbers up to "
                f"{layers}, which is the final norm."
            )


class DeepCross(TopologyChoice):
    """DeepCrossAttention: queries, keys and values weigh what earlier layers added, channel by channel.

    `recent` keeps the embedding, so many of the newest layers, and the sum of those between them; all by default.
    """

    kind: Literal["dca"] = "dca"
    recent: Positive | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple("qkvr")


class Injection(TopologyChoice):
    """Loops with injection: each turn begins with a decayed state and the prelude's output (Parcae).

    `prelude`, `loop` and `turns` are those of `order.kind = "loop"`: layers before the loop, layers in it, its turns.
    The decay starts at `decay`, the injected share at 1 − `decay`.
    """

    training_only: ClassVar[tuple[str, ...]] = ("decay",)

    kind: Literal["injection"] = "injection"
    prelude: Count
    loop: Positive
    turns: Positive
    decay: float = Field(0.5, gt=0, lt=1)

    @property
    def turned_layers(self) -> tuple[int, int, int]:
        return self.prelude, self.loop, self.turns


TopologyChoice.join(
    Additive, Parallel, Clipped, LayerFactor, ScaledSum, Laurel, LayerNormScaling, Keel, DeepNorm, ResiDual,
    ResidualScalars, FullAttnRes, BlockAttnRes, BoundaryAttnRes, DeltaAttnRes, MultiGate, Highway, GatedResidual,
    HyperConnections, FracConnections, SinglePassHyper, ManifoldHyper, ManifoldHyperLite, DenseFormer, Mudd,
    DeepCross, Injection,
)  # fmt: skip
Topology = Annotated[SerializeAsAny[TopologyChoice], PlainValidator(TopologyChoice.choose)]
