"""Feed-forward sublayers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import gelu, relu, sigmoid, silu

from residua import ops
from residua.config import choices
from residua.model.context import Anchors, Context
from residua.model.projection import Projection


def relu2(x: Tensor) -> Tensor:
    """relu(x)² (arXiv 2109.08668)."""
    return relu(x).square()


class GatedFFN(nn.Module):
    """y = W_out (act(W_gate x) ⊙ W_up x) (arXiv 2002.05202): SwiGLU with silu, GLU with sigmoid."""

    def __init__(
        self, act: Callable[[Tensor], Tensor], width: int, hidden: int, *, std: float, output_std: float
    ) -> None:
        super().__init__()
        self.act = act
        self.gate_up = Projection(width, 2 * hidden, std=std, parts=(hidden, hidden))
        self.out = Projection(hidden, width, std=output_std)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.out(self.act(gate) * up), anchors


class PlainFFN(nn.Module):
    """y = W_out act(W_in x)."""

    def __init__(
        self, act: Callable[[Tensor], Tensor], width: int, hidden: int, *, std: float, output_std: float
    ) -> None:
        super().__init__()
        self.act = act
        self.up = Projection(width, hidden, std=std)
        self.out = Projection(hidden, width, std=output_std)

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        return self.out(self.act(self.up(x))), anchors


class SquaredReluFFN(PlainFFN):
    """y = W_out relu(W_in x)² (arXiv 2109.08668), as one operator where the matrices are all there is to the maps."""

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        if self.act is relu2 and is_plain(self.up) and is_plain(self.out):
            return ops.squared_relu_ffn(x, self.up.weight, self.out.weight), anchors
        return super().forward(x, anchors, context)


def is_plain(module: nn.Module) -> bool:
    """A `Projection` that nothing stands in for or wraps, and no hook looks into."""
    return type(module) is Projection and not is_watched(module)


def is_watched(module: nn.Module) -> bool:
    """Whether a hook looks into calls of the module, or its `forward` has been replaced."""
    forward = module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


FFNS: dict[str, tuple[type[GatedFFN] | type[PlainFFN], Callable[[Tensor], Tensor]]] = {
    "swiglu": (GatedFFN, silu),
    "glu": (GatedFFN, sigmoid),
    "relu2": (SquaredReluFFN, relu2),
    "gelu": (PlainFFN, gelu),
}


def build_ffn(config: choices.DenseFFN, width: int, *, std: float, output_std: float) -> nn.Module:
    """The dense feed-forward sublayer a configuration describes."""
    shape, act = FFNS[config.kind]
    return shape(act, width, config.hidden, std=std, output_std=output_std)
