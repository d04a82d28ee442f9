"""Linear maps without bias, with their initialisation and what Muon needs to know of them."""

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
