"""Linear maps, with their initialisation and what Muon needs to know of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Projection(nn.Module):
    """y = W x. Starts normal with `std` (zero if 0).

    `parts` are the row counts of the independent maps fused in W (Q, K, V, G …); Muon orthogonalises them one by one.
    Any module declares such parameters in `hidden_matrices`; AdamW takes the parameters that no module declares.
    """

    def __init__(self, inputs: int, outputs: int, *, std: float, parts: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.hidden_matrices: dict[str, tuple[int, ...]] = {"weight": parts or (outputs,)}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std) if self.std else nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} → {self.weight.shape[0]}, std={self.std:g}"


class BiasedProjection(Projection):
    """y = W x + b; b starts at zero. It is no plain projection: what folds or fuses projections leaves it alone."""

    def __init__(self, inputs: int, outputs: int, *, std: float, parts: tuple[int, ...] | None = None) -> None:
        super().__init__(inputs, outputs, std=std, parts=parts)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "bias" in self._parameters:  # not yet while the weight is made
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias.to(self.weight.dtype))


def projection(
    inputs: int, outputs: int, *, std: float, bias: bool, parts: tuple[int, ...] | None = None
) -> Projection:
    """A projection with or without bias."""
    return (BiasedProjection if bias else Projection)(inputs, outputs, std=std, parts=parts)
