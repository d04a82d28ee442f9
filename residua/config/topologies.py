"""Choices of topology: how sublayers communicate along depth (docs/topologies.md). Plugins can add more."""

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
    """A choice of topology. To add your own, subclass it with a `kind` (docs/extend.md)."""

    norms_inputs: ClassVar[bool] = False
    """Whether the topology normalizes the inputs of readers; sublayers and head then have no input norm."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs of a sublayer: one, r, or several of q, k, v and r (`model/context.py`)."""
        return ("r",)

    @property
    def turned_layers(self) -> tuple[int, int, int] | None:
        """The layers before a loop, in the loop, and its turns, if the topology needs a loop."""
        return None

    def check(self, layers: int) -> None:
        """Raise a ValueError if a model with this many layers cannot have this topology."""

    def check_width(self, width: int) -> None:
        """Raise a ValueError if a model of this width cannot have this topology."""


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
    """Values beyond ± this are clipped."""


class LayerFactor(TopologyChoice):
    """h ← s · (h + y) after every layer, h ← h + y inside it, with a learned number s per layer (Gemma 4)."""

    kind: Literal["layer_factor"] = "layer_factor"


class ScaledSum(TopologyChoice):
    """h ← h + g ⊙ y: LayerScale with `gain = "elementwise"`, ReZero with `gain = "scalar"` and `start = 0`."""

    training_only: ClassVar[tuple[str, ...]] = ("start",)

    kind: Literal["scaled"] = "scaled"
    gain: Literal["elementwise", "scalar"] = "elementwise"
    """One g per channel, or a single one."""
    start: float = 0.1
    """Initial g."""


class Laurel(TopologyChoice):
    """LAuReL: h ← α y + β (h + B A h), with a map of rank `rank` per sublayer."""

    kind: Literal["laurel"] = "laurel"
    rank: Positive = 16
    """The rank of each map."""


class LayerNormScaling(TopologyChoice):
    """LNS: sublayers of layer ℓ read N(h)/√ℓ."""

    norms_inputs: ClassVar[bool] = True

    kind: Literal["lns"] = "lns"


class Keel(TopologyChoice):
    """KEEL: h ← N(α h + y) and a pre-norm; α defaults to the number of sublayers."""

    kind: Literal["keel"] = "keel"
    alpha: float | None = Field(None, gt=0)
    """The weight of the stream."""


class DeepNorm(TopologyChoice):
    """DeepNorm: h ← N(α h + y) without a pre-norm; α defaults to (2 · layers)^¼."""

    norms_inputs: ClassVar[bool] = True

    kind: Literal["deepnorm"] = "deepnorm"
    alpha: float | None = Field(None, gt=0)
    """The weight of the stream."""


class ResiDual(TopologyChoice):
    """ResiDual: a normalised stream that sublayers read, and a sum that the head also reads."""

    norms_inputs: ClassVar[bool] = True

    kind: Literal["resi_dual"] = "resi_dual"


class ResidualScalars(TopologyChoice):
    """h ← λ h + μ x0 in every layer or sublayer, h − b·h_mid at the end. `backout` is the initial b."""

    training_only: ClassVar[tuple[str, ...]] = ("backout",)

    kind: Literal["x0"] = "x0"
    scalars: Literal["layer", "sublayer"] = "layer"
    """Whether λ and μ are per layer or per sublayer."""
    embedding: Literal["normed", "raw"] = "normed"
    """Whether x0 is normalised."""
    backout: float = 0.2


class AttentionResidual(TopologyChoice):
    """The keys shared by Full and Block Attention Residuals: switches for the paper's ablations."""

    scale: float = Field(1.0, gt=0)
    """Factor on the logits."""
    key_norm: Literal["rms", "none"] = "rms"
    """Norm of the keys."""
    activation: Literal["softmax", "sigmoid"] = "softmax"
    """Function from logits to weights."""


class FullAttnRes(AttentionResidual):
    """Every sublayer attends to all earlier outputs; `window` keeps only the embedding and the last few."""

    kind: Literal["full_attnres"] = "full_attnres"
    window: Positive | None = None


class InBlocks(AttentionResidual):
    """The key that both ways to divide sublayers into blocks share."""

    sublayers_per_block: Positive
    """Sublayers per block; their outputs are summed into one source."""

    def check(self, layers: int) -> None:
        if self.sublayers_per_block > 2 * layers:
            raise UserError(
                f"topology.sublayers_per_block = {self.sublayers_per_block} is more than the model's "
                f"{2 * layers} sublayers (layers = {layers}): use at most {2 * layers}."
            )


class BlockAttnRes(InBlocks):
    """Every sublayer attends to the finished blocks and the running sum of the current block."""

    kind: Literal["block_attnres"] = "block_attnres"


class BoundaryAttnRes(InBlocks):
    """Attention over depth only between blocks, x + f(x) within them: Block as described in the authors' article."""

    kind: Literal["boundary_attnres"] = "boundary_attnres"


class DeltaAttnRes(InBlocks):
    """A residual sum, plus attention over depth in the input of every sublayer; one sublayer per block is Full."""

    kind: Literal["delta_attnres"] = "delta_attnres"
    sublayers_per_block: Positive = 1
    """Sublayers per block; their outputs are summed into one source."""


class Recompute(Frozen):
    """Store the streams once per `segment` junctions; the backward pass recomputes the others exactly."""

    kind: Literal["recompute"] = "recompute"
    segment: Positive = 2


class Invert(Frozen):
    """Recompute streams approximately by inverting junctions in the backward pass; only the last junction stores its
    streams.

    The exact values are stored for the fraction `share` of (token, stream) pairs with the largest β.
    """

    kind: Literal["invert"] = "invert"
    share: float = Field(0.01, ge=0, le=1)


Memory = Annotated[Recompute | Invert, Field(discriminator="kind")]


class MultiGate(TopologyChoice):
    """Multi-Gate Residuals. `memory` chooses how training avoids storing most of the streams.

    The initial gates are those of a model of `base_depth` gated sublayers with a bias of `base_bias`, scaled to the
    depth of this model. `bias_init` chooses the corrected or the printed formula for independent gates.
    """

    training_only: ClassVar[tuple[str, ...]] = ("bias_init", "base_depth", "base_bias", "memory")

    kind: Literal["multi_gate"] = "multi_gate"
    streams: int = Field(4, ge=2, le=64)
    """Number of residual streams."""
    gate: Literal["competitive", "independent"] = "competitive"
    """Whether streams compete for an output by softmax, or each has an independent gate."""
    bias_init: Literal["corrected", "printed"] = "corrected"
    base_depth: Positive = BASE_DEPTH
    base_bias: float = Field(BASE_BIAS, ge=-20, le=20)
    memory: Memory = Recompute()

    def check(self, layers: int) -> None:
        lerping = lerping_sublayers(2 * layers, self.streams)
        if lerping < 1:
            raise UserError(
                f"topology.streams = {self.streams} leaves no gated sublayers in layers = {layers}, since the "
                f"first {self.streams - 1} sublayers fill the streams: use at most {2 * layers} streams."
            )
        gate_bias(self, lerping)


def lerping_sublayers(sublayers: int, streams: int) -> int:
    """Number of sublayers whose output is gated into the streams; the first `streams − 1` outputs become streams."""
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

    For independent gates, the paper's formula with its n misses its own target, sqrt(21/L)·sigmoid(−3); with n = 1 it
    meets it. `corrected` uses n = 1, `printed` the paper's n.
    """
    n, base = config.streams, (config.base_depth, config.base_bias)
    if config.gate == "competitive":
        return (depth_bias(lerping, n, *base),) + (0.0,) * n
    return (-depth_bias(lerping, 1 if config.bias_init == "corrected" else n, *base),) * n


class Highway(TopologyChoice):
    """One gated stream, with one gate per token or per channel."""

    kind: Literal["highway"] = "highway"
    gate: Literal["scalar", "elementwise"] = "scalar"
    """The shape of the gate."""


class GatedResidual(TopologyChoice):
    """n streams that readers gate per channel. `rank` is the rank of the gate, by default an eighth of the width."""

    norms_inputs: ClassVar[bool] = True

    kind: Literal["gated_residual"] = "gated_residual"
    streams: int = Field(4, ge=2, le=64)
    """Number of residual streams."""
    rank: Positive | None = None


class HyperConnections(TopologyChoice):
    """HC: n streams with unconstrained read and write weights, static or computed from the streams; `mix` chooses the
    mixing.
    """

    kind: Literal["hyper"] = "hyper"
    streams: Positive = 4
    """Number of residual streams."""
    weights: Literal["static", "dynamic"] = "dynamic"
    """Whether read and write weights depend on the streams."""
    mix: Literal["free", "identity", "cyclic"] = "free"
    """How streams mix: an unconstrained matrix, not at all, or cyclic shifts."""


class FracConnections(TopologyChoice):
    """HC over slices of a single stream, divided into `fractions` that each sublayer reads, writes and mixes."""

    kind: Literal["frac"] = "frac"
    fractions: Positive = 4
    """Number of slices of the stream."""
    weights: Literal["static", "dynamic"] = "dynamic"
    """Whether weights are only parameters, or also computed from the slices."""

    def check_width(self, width: int) -> None:
        if width % self.fractions:
            raise UserError(f"topology.fractions = {self.fractions} does not divide width = {width}: use a divisor.")


class SinglePassHyper(TopologyChoice):
    """HC whose read weights are computed from the streams before the last write."""

    kind: Literal["hyper_single_pass"] = "hyper_single_pass"
    streams: Positive = 4
    """Number of residual streams."""
    mix: Literal["free", "identity", "cyclic"] = "free"
    """How streams mix: an unconstrained matrix, not at all, or cyclic shifts."""

    @property
    def weights(self) -> Literal["dynamic"]:
        return "dynamic"


class ManifoldHyper(TopologyChoice):
    """mHC: Sinkhorn iterations make the mixing matrix doubly stochastic."""

    kind: Literal["mhc"] = "mhc"
    streams: Positive = 4
    """Number of residual streams."""
    iterations: Positive = 20
    """Sinkhorn iterations."""


class ManifoldHyperLite(TopologyChoice):
    """mHC-lite: the mixing matrix is a convex combination of the n! permutation matrices."""

    kind: Literal["mhc_lite"] = "mhc_lite"
    streams: Positive = 4
    """Number of residual streams."""

    @model_validator(mode="after")
    def _few_streams(self) -> Self:
        if self.streams > 4:
            raise UserError(
                f"topology.kind = 'mhc_lite' sums over all permutations of the streams, too many for "
                f"topology.streams = {self.streams}: use at most 4 streams, or topology.kind = 'mhc'."
            )
        return self


class DenseFormer(TopologyChoice):
    """After every `period`-th layer, a static weighted sum of every `dilation`-th earlier layer's output."""

    kind: Literal["dense"] = "dense"
    dilation: Positive = 1
    period: Positive = 1


class Mudd(TopologyChoice):
    """MUDD: queries, keys, values and the residual stream read mixtures of earlier layers, weighted for each token.

    `ways` are the reads to mix. `layers` are the layers that mix, counted from 0, where layer L is the final norm; the
    default is all but the first. `sources` keeps the embedding and this many of the newest outputs; the default is all.
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
                f"topology.ways = {list(self.ways)} must contain one or more of 'q', 'k', 'v', 'r', without repetition."
            )
        if beyond := [layer for layer in self.layers or () if layer > layers]:
            raise UserError(
                f"topology.layers contains layer {beyond[0]}, but the model has layers = {layers}: use numbers "
                f"up to {layers}, which is the final norm."
            )


class DeepCross(TopologyChoice):
    """DeepCrossAttention: queries, keys and values weight the outputs of earlier layers per channel.

    `recent` keeps the embedding, this many of the newest layers, and the sum of those in between; the default is all.
    """

    kind: Literal["dca"] = "dca"
    recent: Positive | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple("qkvr")


class Injection(TopologyChoice):
    """Loops with injection: each turn starts from a decayed state plus the prelude's output (Parcae).

    `prelude`, `loop` and `turns` match those of `order.kind = "loop"`: layers before the loop, layers in it, its turns.
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
