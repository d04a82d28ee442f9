"""Choices of sequence mixer: the same in every layer, or a hybrid of two."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from residua.config.positions import QueryGrowth, RopeScaling
from residua.config.settings import Count, Frozen, Positive
from residua.errors import UserError


class Mixer(Frozen):
    """A sequence mixer, the same in every layer."""

    softmax_path: ClassVar[str] = "attention"
    """The table with the keys of softmax attention."""
    parts: ClassVar[tuple[str, ...]] = ()
    """Keys of the mixers that it consists of."""
    takes_reads: ClassVar[bool] = False
    """Whether queries, keys and values can read different inputs."""
    attends: ClassVar[bool] = False
    """Whether a token attends to all earlier tokens by softmax; otherwise it reads a state of fixed size."""

    @property
    def everywhere(self) -> SoftmaxAttention | None:
        """The softmax attention of every layer; None if some layer has another mixer."""
        return None

    def check(self, layers: int) -> None:
        """Raise a ValueError if a model with this many layers cannot have this attention."""

    def at(self, layer: int) -> Self:
        """The mixer of layer `layer`."""
        return self

    def head_counts(self) -> dict[str, int]:
        """The number of heads that can be divided among ranks, by key; empty if heads are not independent."""
        return {}

    def score_width(self, width: int) -> float:
        """Half the multiply-adds per visible earlier token: a product with its key and one with its value.

        `width` is the model's. A state of fixed size costs no more than its projections.
        """
        return 0.0

    def turned(self, width: int) -> int:
        """The elements of a head that rotary positions rotate; 0 without rotary positions."""
        return 0


class FullHeads(Frozen):
    """`head_dim`, `kv_heads` and `values` of layers without a window, where they differ from other layers."""

    head_dim: Positive | None = None
    kv_heads: Positive | None = None
    values: Literal["projected", "keys"] | None = None


class SoftmaxAttention(Mixer):
    """Causal softmax attention; `kv_heads` below `heads` is grouped-query attention.

    `qk_norm` normalizes each head, all heads together ("rms_all", OLMo 2), or applies a dynamic tanh ("dyt"), whose α
    starts at `qk_alpha`; "rms_qkv" also normalizes values, without a gain. With `values = "keys"`, the projection of
    keys, before norm and rotation, also serves as values. `full` changes the heads of layers without a window (Gemma
    4). With `window`, a token sees itself and the `window` − 1 tokens before it, in all layers or in `window_layers`;
    `local_rope_theta` is the base of rotary positions in those layers, without `rope_scaling` (Gemma 3). Layers in
    `unturned_layers` have no positions (SmolLM 3). `bias` adds biases to queries, keys and values ("qkv"), or also to
    the output projection ("all"). `own_value = "removed"` removes the direction of the token's own value from a head's
    output (XSA).
    """

    attends: ClassVar[bool] = True
    takes_reads: ClassVar[bool] = True
    training_only: ClassVar[tuple[str, ...]] = ("qk_alpha",)

    kind: Literal["softmax"] = "softmax"
    heads: Positive
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    """Elements of a head; `width` / `heads` by default."""
    values: Literal["projected", "keys"] = "projected"
    full: FullHeads | None = None
    qk_norm: Literal["rms", "rms_all", "rms_qkv", "dyt", "none"] = "rms"
    qk_eps: float = Field(1e-6, gt=0)
    """The eps of `qk_norm`."""
    qk_alpha: float = Field(0.5, gt=0)
    bias: Literal["none", "qkv", "all"] = "none"
    rope_theta: float = Field(10_000.0, gt=0)
    """The base of rotary positions."""
    rope_scaling: RopeScaling | None = None
    local_rope_theta: Annotated[float, Field(gt=0)] | None = None
    unturned_layers: tuple[int, ...] | None = None
    query_growth: QueryGrowth | None = None
    """A factor on queries late in a long document (Ministral 3)."""
    window: Positive | None = None
    window_layers: tuple[int, ...] | None = None
    softcap: Annotated[float, Field(gt=0)] | None = None
    """Bound of the scores, enforced by a tanh (Gemma 2)."""
    gate: Literal["none", "elementwise", "headwise"] = "none"
    """A sigmoid gate on the output, per element or per head (arXiv 2505.06708)."""
    sink: Literal["none", "learned"] = "none"
    """A learned logit per head in the softmax, which lets a head attend to nothing."""
    own_value: Literal["kept", "removed"] = "kept"

    @property
    def everywhere(self) -> SoftmaxAttention:
        return self

    def at(self, layer: int) -> SoftmaxAttention:
        return self if self.window_at(layer) is not None else self.in_full

    @property
    def in_full(self) -> SoftmaxAttention:
        """The mixer of a layer without a window."""
        if self.full is None:
            return self
        return SoftmaxAttention(**vars(self) | {key: of for key, of in vars(self.full).items() if of is not None})

    def head_counts(self) -> dict[str, int]:
        return {"heads": self.heads, "kv_heads": self.kv_heads or self.heads}

    def score_width(self, width: int) -> float:
        return self.heads * self.turned(width)

    def turned(self, width: int) -> int:
        return self.head_dim or width // self.heads

    def window_at(self, layer: int) -> int | None:
        """The window of layer `layer`; None if its tokens see all earlier tokens."""
        return self.window if self.window_layers is None or layer in self.window_layers else None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for key in ("window_layers", "local_rope_theta", "full"):
            if getattr(self, key) is not None and self.window is None:
                raise UserError(
                    f"attention.{key} needs attention.window: set it to the number of tokens that those layers see."
                )
        _check_divides("kv_heads", self.kv_heads or 1, "heads", self.heads)
        if self.full is not None:
            _check_divides("full.kv_heads", self.full.kv_heads or 1, "heads", self.heads)
            if self.full.head_dim is not None and (self.local_rope_theta is None or self.unturned_layers is not None):
                raise UserError(
                    f"attention.full.head_dim = {self.full.head_dim} needs rotary positions of two widths: set "
                    "attention.local_rope_theta and remove attention.unturned_layers."
                )
        return self


class GatedDeltaNet(Mixer):
    """Linear attention by the gated delta rule."""

    kind: Literal["gated_deltanet"] = "gated_deltanet"
    key_heads: Positive
    """Heads of queries and keys; each serves one or more heads of values."""
    value_heads: Positive
    """Heads of values."""
    head_dim: Positive = 128
    """Elements of a head."""
    convolution: Positive = 4
    """Tokens that the short convolution sees."""

    def head_counts(self) -> dict[str, int]:
        return {"key_heads": self.key_heads, "value_heads": self.value_heads}

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        _check_divides("key_heads", self.key_heads, "value_heads", self.value_heads)
        return self


class KimiDelta(Mixer):
    """Linear attention by the delta rule with a decay per channel; `eps` is that of the norm on its output."""

    kind: Literal["kimi_delta"] = "kimi_delta"
    heads: Positive
    """Heads of queries, keys and values."""
    head_dim: Positive = 128
    """Elements of a head."""
    convolution: Positive = 4
    """Tokens that the short convolution sees."""
    eps: float = Field(1e-5, gt=0)

    @property
    def key_heads(self) -> int:
        return self.heads

    @property
    def value_heads(self) -> int:
        return self.heads


class LatentAttention(Mixer):
    """Softmax attention whose keys and values are computed from one cached vector of `rank` elements per token.

    Each head has `head_dim` elements, and `shared_dim` more key elements are shared by all heads; values have
    `value_dim` (default: `head_dim`). `positions = "rotary"` rotates only the shared part. If `query_rank` is given,
    queries are computed from a vector of so many elements.
    """

    attends: ClassVar[bool] = True
    local_rope_theta: ClassVar[None] = None
    query_growth: ClassVar[None] = None
    unturned_layers: ClassVar[None] = None
    full: ClassVar[None] = None

    kind: Literal["mla"] = "mla"
    heads: Positive
    """Heads of queries, keys and values."""
    head_dim: Positive = 128
    value_dim: Positive | None = None
    shared_dim: Count = 64
    rank: Positive = 512
    query_rank: Positive | None = None
    positions: Literal["rotary", "none"] = "rotary"
    rope_theta: float = Field(10_000.0, gt=0)
    """The base of rotary positions."""
    rope_scaling: RopeScaling | None = None

    @property
    def value_width(self) -> int:
        """The elements of one head's values."""
        return self.value_dim or self.head_dim

    def score_width(self, width: int) -> float:
        return self.heads * (self.head_dim + self.shared_dim + self.value_width) / 2

    def turned(self, width: int) -> int:
        return self.shared_dim if self.positions == "rotary" else 0

    @model_validator(mode="after")
    def _shared_part_turns(self) -> Self:
        if self.positions == "rotary" and (self.shared_dim == 0 or self.shared_dim % 2):
            raise UserError(
                f"attention.positions = 'rotary' rotates pairs of the shared part, but attention.shared_dim = "
                f"{self.shared_dim}: use an even number above 0, or attention.positions = 'none'."
            )
        return self


SoftmaxMixer = SoftmaxAttention | LatentAttention
LinearMixer = GatedDeltaNet | KimiDelta


def _of_kind(kind: str) -> BeforeValidator:
    """Give a table without a `kind` this kind."""

    def fill(value: object) -> object:
        return {"kind": kind, **value} if isinstance(value, dict) and "kind" not in value else value

    return BeforeValidator(fill)


class HybridAttention(Frozen):
    """Linear attention, with softmax attention in every `softmax_every`-th layer or in `softmax_layers`."""

    softmax_path: ClassVar[str] = "attention.softmax"
    parts: ClassVar[tuple[str, ...]] = ("softmax", "linear")

    kind: Literal["hybrid"] = "hybrid"
    softmax_every: int = Field(4, ge=2, le=2**31 - 1)
    softmax_layers: tuple[int, ...] | None = None
    softmax: Annotated[Annotated[SoftmaxMixer, Field(discriminator="kind")], _of_kind("softmax")]
    linear: Annotated[Annotated[LinearMixer, Field(discriminator="kind")], _of_kind("gated_deltanet")]

    @property
    def everywhere(self) -> SoftmaxAttention | None:
        """The softmax attention of every layer; None if some layer has another mixer."""
        return None

    def check(self, layers: int) -> None:
        """Raise a ValueError if a model with this many layers cannot have this attention."""
        if self.softmax_layers is None:
            if self.softmax_every > layers:
                raise UserError(
                    f"attention.softmax_every = {self.softmax_every} leaves none of layers = {layers} with "
                    f"softmax attention: use at most {layers}, or attention.kind = '{self.linear.kind}'."
                )
        elif not self.softmax_layers or not all(0 <= layer < layers for layer in self.softmax_layers):
            raise UserError(
                f"attention.softmax_layers = {list(self.softmax_layers)} must contain one or more of the layers "
                f"0 to {layers - 1}."
            )

    def at(self, layer: int) -> SoftmaxMixer | LinearMixer:
        """The mixer of layer `layer`."""
        if self.softmax_layers is not None:
            return self.softmax.at(layer) if layer in self.softmax_layers else self.linear
        return self.linear if (layer + 1) % self.softmax_every else self.softmax.at(layer)


Attention = Annotated[SoftmaxMixer | LinearMixer | HybridAttention, Field(discriminator="kind")]


def _check_divides(key: str, few: int, other: str, many: int) -> None:
    if many % few:
        raise UserError(
            f"attention.{key} = {few} does not divide attention.{other} = {many}: choose one of {divisors(many)}."
        )


def divisors(n: int) -> str:
    """The divisors of n, as a list for an error message."""
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
