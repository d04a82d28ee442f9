"""Choices of feed-forward: dense, or a mixture of experts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from residua.config.settings import Count, Frozen, Positive
from residua.errors import UserError


class DenseChoice(Frozen):
    """The facts of every dense feed-forward."""

    mixture: ClassVar[bool] = False
    """Whether it has experts."""
    experts: ClassVar[int] = 0
    top_k: ClassVar[int] = 0
    constant_weight: ClassVar[bool] = False
    """Whether it has a router without a gradient from the loss."""
    gated: ClassVar[bool] = False
    """Whether one half of the hidden channels gates the other."""
    kept_hidden: ClassVar[int]
    """Hidden tensors stored for the backward pass."""

    kind: str
    hidden: Positive
    """Hidden channels."""
    bias: bool = False
    """Whether the projections have biases."""

    def kept(self, width: int) -> float:
        """Elements per token stored for the backward pass."""
        return 2 * width + self.kept_hidden * self.hidden

    def at(self, layer: int) -> Self:
        """The feed-forward of layer `layer`."""
        return self

    def check(self, layers: int) -> None:
        """Raise a ValueError if a model with this many layers cannot have this feed-forward."""

    def mixtures(self, layers: int) -> int:
        """How many of this many layers have experts."""
        return 0


class GatedChoice(DenseChoice):
    """One half of the hidden channels gates the other."""

    gated: ClassVar[bool] = True
    kept_hidden: ClassVar[int] = 3


class SwiGLU(GatedChoice):
    """down( silu(gate x) ⊙ up x )."""

    kind: Literal["swiglu"] = "swiglu"


class GLU(GatedChoice):
    """down( sigmoid(gate x) ⊙ up x )."""

    kind: Literal["glu"] = "glu"


class GeGLU(GatedChoice):
    """down( gelu(gate x) ⊙ up x ), gelu by its tanh approximation (Gemma)."""

    kind: Literal["geglu"] = "geglu"


class ClampedSwiGLU(GatedChoice):
    """down( (clip(up x, ±7) + 1) ⊙ g σ(1.702 g) ), g = min(gate x, 7) (gpt-oss)."""

    kept_hidden: ClassVar[int] = 5

    kind: Literal["clamped_swiglu"] = "clamped_swiglu"


class ReLU2(DenseChoice):
    """down( relu(up x)² )."""

    kept_hidden: ClassVar[int] = 1  # relu² and its slope are computed within the products next to them

    kind: Literal["relu2"] = "relu2"


class GELU(DenseChoice):
    """down( gelu(up x) )."""

    kept_hidden: ClassVar[int] = 2

    kind: Literal["gelu"] = "gelu"


class TanhGELU(DenseChoice):
    """down( gelu(up x) ), gelu by its tanh approximation (GPT-2)."""

    kept_hidden: ClassVar[int] = 2

    kind: Literal["gelu_tanh"] = "gelu_tanh"


DenseFFN = SwiGLU | GLU | GeGLU | ClampedSwiGLU | ReLU2 | GELU | TanhGELU


class RouterChoice(Frozen):
    """Weights of the chosen experts are multiplied by `scale`.

    Experts can be divided into `groups`, in order; a token then chooses among those in its `top_groups` best groups.
    """

    best_of_group: ClassVar[int]
    """How many scores of a group are summed to compare groups."""

    scale: float = Field(1.0, gt=0)
    groups: Positive = 1
    top_groups: Positive = 1

    @property
    def choice_of_groups(self) -> tuple[int, int, int] | None:
        """The number of groups, of chosen groups, and of compared scores; None if no group is excluded."""
        return None if self.groups == self.top_groups else (self.groups, self.top_groups, self.best_of_group)


class SoftmaxRouter(RouterChoice):
    """Experts are chosen by the softmax over all of them, groups by their largest value (DeepSeek-V2)."""

    best_of_group: ClassVar[int] = 1

    kind: Literal["softmax_scores"] = "softmax_scores"


class SigmoidRouter(RouterChoice):
    """Experts are chosen by a score plus a bias that `train.balance.bias_rate` adjusts, groups by their two largest
    scores.
    """

    best_of_group: ClassVar[int] = 2

    kind: Literal["sigmoid_scores"] = "sigmoid_scores"


Router = Annotated[SoftmaxRouter | SigmoidRouter, Field(discriminator="kind")]


class MoE(Frozen):
    """A mixture of `experts` feed-forwards of width `hidden`; a token visits `top_k` of them and the `shared` ones.

    The weights of the chosen experts are normalized to sum to one, unless `normalize` is off (OLMoE). The first
    `dense_layers` layers have a single feed-forward of width `dense_hidden` instead, by default as wide as the active
    experts of other layers.
    """

    mixture: ClassVar[bool] = True

    kind: Literal["moe"] = "moe"
    hidden: Positive
    experts: Positive
    top_k: Positive
    normalize: bool = True
    router: Router = SoftmaxRouter()
    shared: Count = 1
    shared_gate: Literal["none", "sigmoid"] = "none"
    """A sigmoid gate per token on the output of the shared experts."""
    activation: Literal["swiglu", "glu", "clamped_swiglu", "relu2", "gelu"] = "swiglu"
    """The activation of every expert."""
    bias: bool = False
    """Whether the router and every map of a feed-forward have biases (gpt-oss)."""
    dense_layers: Count = 0
    dense_hidden: Positive | None = None

    @property
    def gated(self) -> bool:
        """Whether one half of the hidden channels gates the other."""
        return self.activation in ("swiglu", "glu", "clamped_swiglu")

    @property
    def constant_weight(self) -> bool:
        """Whether the weight of a chosen expert is constant, so that the router gets no gradient from the loss."""
        return self.top_k == 1 and self.normalize

    def mixtures(self, layers: int) -> int:
        """How many of this many layers have experts."""
        return layers - self.dense_layers

    def at(self, layer: int) -> DenseFFN | MoE:
        """The feed-forward of layer `layer`."""
        if layer >= self.dense_layers:
            return self
        hidden = self.dense_hidden or (self.top_k + self.shared) * self.hidden
        kinds: dict[str, type[DenseFFN]] = {
            "swiglu": SwiGLU, "glu": GLU, "clamped_swiglu": ClampedSwiGLU, "relu2": ReLU2, "gelu": GELU,
        }  # fmt: skip
        return kinds[self.activation](hidden=hidden, bias=self.bias)

    def kept(self, width: int) -> float:
        """Elements per token stored for the backward pass."""
        visited = {"relu2": 1, "gelu": 1, "swiglu": 2, "glu": 2, "clamped_swiglu": 5}[self.activation]
        shared = {"relu2": 1, "gelu": 2, "swiglu": 3, "glu": 3, "clamped_swiglu": 5}[self.activation]
        return 2 * width + self.hidden * (self.top_k * visited + self.shared * shared)

    @model_validator(mode="after")
    def _experts_suffice(self) -> Self:
        if self.top_k > self.experts:
            raise UserError(f"ffn.top_k = {self.top_k} is more than ffn.experts = {self.experts}: use at most that.")
        if (groups := self.router.choice_of_groups) is not None:
            size, rest = divmod(self.experts, groups[0])
            if rest or size < groups[2]:
                raise UserError(
                    f"ffn.router.groups = {groups[0]} does not divide ffn.experts = {self.experts} into equal "
                    f"groups of at least {groups[2]}: choose another number."
                )
            if not self.top_k / size <= groups[1] < groups[0]:
                raise UserError(
                    f"ffn.router.top_groups = {groups[1]} must be less than ffn.router.groups = {groups[0]}, and "
                    f"its groups must have at least ffn.top_k = {self.top_k} experts: choose another number."
                )
        if self.shared_gate != "none" and not self.shared:
            raise UserError(
                f"ffn.shared_gate = '{self.shared_gate}' has no shared expert to gate (ffn.shared = 0): use "
                "ffn.shared_gate = 'none' or ffn.shared = 1."
            )
        if self.dense_hidden is not None and not self.dense_layers:
            raise UserError(
                f"ffn.dense_hidden = {self.dense_hidden} is the width of dense layers, but ffn.dense_layers = 0: "
                "set ffn.dense_layers to the number of dense layers."
            )
        return self

    def check(self, layers: int) -> None:
        """Raise a ValueError if a model with this many layers cannot have this feed-forward."""
        if self.dense_layers >= layers:
            raise UserError(
                f"ffn.dense_layers = {self.dense_layers} leaves no expert layers among layers = {layers}: use "
                f"fewer, or a dense ffn.kind such as '{self.activation}'."
            )


FFN = Annotated[DenseFFN | MoE, Field(discriminator="kind")]
