"""Feed-forward sublayers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, sigmoid, silu

from residua import ops
from residua.config import choices
from residua.model.body import Body
from residua.model.context import Anchors, Context
from residua.model.equivalence import Edge, divide_rows, divide_square
from residua.model.projection import BiasedProjection, Projection, is_plain, projection
from residua.ops.expert_ffn.reference import clamped_gate, clamped_swiglu
from residua.ops.inference.reference import ACTIVATIONS

Activation = Callable[[Tensor], Tensor]


def relu2(x: Tensor) -> Tensor:
    """relu(x)² (arXiv 2109.08668)."""
    return relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu by its tanh approximation (arXiv 1606.08415)."""
    return gelu(x, approximate="tanh")


class FeedForward(Body):
    """A dense feed-forward: y = W_out act(W x), gated or not. All methods but `forward` inform tools."""

    act: Activation
    out: Projection

    @property
    def entry(self) -> Projection:
        """The map that reads the input."""
        raise NotImplementedError

    @property
    def activation(self) -> str | None:
        """The kind of activation, if decoding kernels may compute it between `entry` and `out`."""
        return next((kind for kind in ACTIVATIONS if FFNS[kind] == (type(self), self.act)), None)

    def readers(self) -> tuple[Tensor, ...]:
        return (self.entry.weight,)


class GatedFFN(FeedForward):
    """y = W_out (act(W_gate x) ⊙ W_up x) (arXiv 2002.05202): SwiGLU with silu, GLU with sigmoid, GeGLU with gelu."""

    def __init__(
        self, act: Activation, width: int, hidden: int, *, std: float, output_std: float, bias: bool = False
    ) -> None:
        super().__init__()
        self.act = act
        self.gate_up = projection(width, 2 * hidden, std=std, bias=bias, parts=(hidden, hidden))
        self.out = projection(hidden, width, std=output_std, bias=bias)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.out(self.act(gate) * up), anchors

    @property
    def entry(self) -> Projection:
        return self.gate_up

    def inner_edges(self, name: str) -> list[Edge]:
        """From the linear branch to the output."""
        hidden = self.out.weight.shape[1]
        divide = partial(divide_rows, self.gate_up, hidden, hidden)
        return [Edge(f"{name}.up", (self.out.weight,), torch.arange(hidden), divide, self.out)]


class ClampedFFN(GatedFFN):
    """y = W_out ((clip(W_up x, ±7) + 1) ⊙ act(W_gate x)), act(g) = g σ(1.702 g) of min(g, 7) (gpt-oss)."""

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        return self.out(clamped_swiglu(*self.gate_up(x).chunk(2, -1))), anchors

    def inner_edges(self, name: str) -> list[Edge]:
        """Empty: a factor cannot pass through a clipped branch."""
        return []


class PlainFFN(FeedForward):
    """y = W_out act(W_in x)."""

    def __init__(
        self, act: Activation, width: int, hidden: int, *, std: float, output_std: float, bias: bool = False
    ) -> None:
        super().__init__()
        self.act = act
        self.up = projection(width, hidden, std=std, bias=bias)
        self.out = projection(hidden, width, std=output_std, bias=bias)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        return self.out(self.act(self.up(x))), anchors

    @property
    def entry(self) -> Projection:
        return self.up

    def inner_edges(self, name: str) -> list[Edge]:
        """relu(x/√s)² = relu(x)²/s; a factor passes through no other activation."""
        if self.act is not relu2:
            return []
        hidden = self.out.weight.shape[1]
        return [Edge(f"{name}.up", (self.out.weight,), torch.arange(hidden), self._divide_states, self.out)]

    @torch.no_grad()
    def _divide_states(self, by: Tensor) -> None:
        divide_square(self.up.weight, by)
        if isinstance(self.up, BiasedProjection):
            divide_square(self.up.bias[:, None], by)


class SquaredReluFFN(PlainFFN):
    """y = W_out relu(W_in x)² (arXiv 2109.08668), as one operator if both maps are plain projections."""

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        if self.act is relu2 and is_plain(self.up) and is_plain(self.out):
            return ops.squared_relu_ffn(x, self.up.weight, self.out.weight), anchors
        return super().forward(x, anchors, context)

    def squared_relu_maps(self) -> tuple[Projection, Projection] | None:
        return (self.up, self.out) if self.act is relu2 else None


FFNS: dict[str, tuple[type[GatedFFN] | type[PlainFFN], Activation]] = {
    "swiglu": (GatedFFN, silu),
    "glu": (GatedFFN, sigmoid),
    "geglu": (GatedFFN, gelu_tanh),
    "clamped_swiglu": (ClampedFFN, clamped_gate),
    "relu2": (SquaredReluFFN, relu2),
    "gelu": (PlainFFN, gelu),
    "gelu_tanh": (PlainFFN, gelu_tanh),
}


def build_ffn(config: choices.DenseFFN, width: int, *, std: float, output_std: float) -> FeedForward:
    """Build the dense feed-forward sublayer that a configuration describes."""
    shape, act = FFNS[config.kind]
    return shape(act, width, config.hidden, std=std, output_std=output_std, bias=config.bias)
