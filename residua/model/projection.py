"""The hidden matrices of a model: linear maps without bias that know how they start and how they are optimised."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Projection(nn.Module):
    """y = W x. Starts normal with `std` (zero if 0).

    `parts` are the row counts of the independent maps fused in W (Q, K, V, G …); an optimizer that orthogonalises
    matrices takes them one by one. `hidden_matrices` is how any module declares such a parameter; a parameter that no
    module declares is for AdamW.
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
