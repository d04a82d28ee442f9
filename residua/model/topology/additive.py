"""The residual stream as a sum."""

from __future__ import annotations

from torch import Tensor

from residua.config import choices
from residua.model.topology.base import State, Topology


class Additive(Topology):
    """h_{k+1} = h_k + y_k, the pre-norm baseline."""

    def __init__(self, config: choices.Additive, sublayers: int, width: int) -> None:
        super().__init__()

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0] + y
        return h, (h,)


class Clipped(Topology):
    """h_{k+1} = clip(h_k + y_k, ±limit): outliers cut off by force (arXiv 2601.22966, rows 10–14)."""

    def __init__(self, config: choices.Clipped, sublayers: int, width: int) -> None:
        super().__init__()
        self.limit = config.limit

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = (state[0] + y).clamp(-self.limit, self.limit)
        return h, (h,)
