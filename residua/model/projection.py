"""Linear maps and tables of vectors, with their initialisation and the declarations that Muon needs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import embedding, linear

STEERING = ("*.gates", "*.decay", "*.gamma.down", "*.gamma.up")
"""Names of small maps that control others (decay, mixing): cheap in high precision, and rounding them is costly."""


class Projection(nn.Linear):
    """y = W x. Starts normal with `std` (zero if 0).

    `parts` are the row counts of the independent maps fused in W (Q, K, V, G …); Muon orthogonalises them one by one.
    Any module declares such parameters in `hidden_matrices`; AdamW takes the parameters that no module declares.
    """

    has_bias = False
    rounded = ("weight",)
    """Parameters that autocast rounds before every product; any module may declare some in the same way."""

    def __init__(self, inputs: int, outputs: int, *, std: float, parts: tuple[int, ...] | None = None) -> None:
        self.std = std  # set first: nn.Linear's constructor initialises the weight
        super().__init__(inputs, outputs, bias=self.has_bias)
        self.hidden_matrices: dict[str, tuple[int, ...]] = {"weight": parts or (outputs,)}

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std) if self.std else nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} → {self.weight.shape[0]}, std={self.std:g}"


class BiasedProjection(Projection):
    """y = W x + b; b starts at zero. Not a plain projection: code that folds or fuses projections leaves it alone."""

    has_bias = True

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias.to(self.weight.dtype))


class Embedding(nn.Embedding):
    """Token vectors [V, C], initialised normal with `std`, or zero if 0; `scale` multiplies the output."""

    def __init__(self, vocabulary: int, width: int, *, std: float, scale: float = 1.0) -> None:
        # set first: nn.Embedding's constructor initialises the weight; serving engines look for `embed_scale`
        self.std, self.embed_scale = std, scale
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std) if self.std else nn.init.zeros_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = embedding(tokens, self.weight)
        return x if self.embed_scale == 1 else x * self.embed_scale


def projection(
    inputs: int, outputs: int, *, std: float, bias: bool, parts: tuple[int, ...] | None = None
) -> Projection:
    """Build a projection with or without bias."""
    return (BiasedProjection if bias else Projection)(inputs, outputs, std=std, parts=parts)


def declared_matrices(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The `hidden_matrices` that a module declares; any module may, including a plugin's (docs/extend.md)."""
    declared: dict[str, tuple[int, ...]] = getattr(module, "hidden_matrices", {})
    return declared


def is_plain(module: nn.Module) -> bool:
    """Whether it is a `Projection`, neither replaced nor wrapped nor hooked."""
    return type(module) is Projection and not is_watched(module)


def is_watched(module: nn.Module) -> bool:
    """Whether the module has hooks, or its `forward` has been replaced."""
    forward = module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)
