"""A model of two matrices for the optimizer: one fused of three parts, one whole, and a gain that nobody declares."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Declared(nn.Module):
    def __init__(self, rows: int, columns: int, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.hidden_matrices = {"weight": parts}


class StandIn(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fused = Declared(3 * width, width, (width, width, width))
        self.out = Declared(width, 2 * width, (width,))
        self.gain = nn.Parameter(torch.ones(width))

    def set_gradients(self, seed: int) -> None:
        """Random gradients, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
