"""LAuReL (arXiv 2411.07501): a weighted residual stream, to which a low-rank map of itself is added."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua.config import choices
from residua.model.topology.base import FromEmbedding, Initialization, State
from residua.model.topology.facts import ADDED_IN_NORM, Costs, trace_rows
from residua.ops._runtime.numeric import wide


class Laurel(FromEmbedding):
    """LAuReL-RW+LR: h ← α_k y_k + β_k (h + B_k A_k h), A_k [r, C], B_k [C, r]. The state is h.

    At the start α = β = 1 and B = 0, which is the pre-norm model, and A is normal with std 1/√C; the paper gives no
    initialisation. It advises bounding α and β if they grow; here they are unbounded.
    """

    def __init__(self, config: choices.Laurel, sublayers: int, width: int) -> None:
        super().__init__()
        self.junctions = nn.ModuleList(LowRankStream(config.rank, width) for _ in range(sublayers))

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = self.junctions[k](state[0], y)
        return h, (h,)

    def initialization(self) -> Initialization:
        return Initialization.additive_when_new(self)

    def costs(self, sublayers: int, width: int) -> Costs:
        """An addition; h → A h, B A h → the sum; dh → its product with B, h → dA, the gradient of A h → dh, added."""
        step = (ADDED_IN_NORM + 7) * sublayers
        return Costs(lambda: trace_rows(self, sublayers, width), step, kept_widths=1.0)


class LowRankStream(nn.Module):
    """α y + β (h + B A h) after one sublayer."""

    rounded = ("down", "up")

    def __init__(self, rank: int, width: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width))
        self.up = nn.Parameter(torch.empty(width, rank))
        self.output, self.stream = (nn.Parameter(torch.empty(())) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)
        nn.init.ones_(self.output)
        nn.init.ones_(self.stream)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        mapped = linear(linear(h, self.down.to(h.dtype)), self.up.to(h.dtype))
        return (wide(self.output) * wide(y) + wide(self.stream) * (wide(h) + wide(mapped))).to(y.dtype)
