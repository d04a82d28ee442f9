"""The residual stream as a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.equivalence import InitFidelity
from residua.model.topology.base import FromEmbedding, Initialization, State
from residua.model.topology.facts import ADDED_IN_NORM, ADDITION, Ablations, Costs, add_rows, junctions_skipped

if TYPE_CHECKING:
    from residua.model.norm import RMSNorm
    from residua.model.topology.inference import InferenceTopology


class Additive(FromEmbedding):
    """h_{k+1} = h_k + y_k, the pre-norm baseline."""

    def __init__(self, config: choices.TopologyChoice, sublayers: int, width: int) -> None:
        super().__init__()

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0] + y
        return h, (h,)

    def inference(self, norms: Sequence[RMSNorm]) -> InferenceTopology | None:
        from residua.model.topology.inference import AdditiveInference  # training does not need it

        return AdditiveInference(norms) if type(self) is Additive else None

    def initialization(self) -> Initialization:
        return Initialization(is_additive=True)

    def costs(self, sublayers: int, width: int) -> Costs:
        return Costs(lambda: add_rows([ADDITION] * sublayers), step=ADDED_IN_NORM * sublayers, kept_widths=0.0)


class Parallel(Additive):
    """h_{l+1} = h_l + A(h_l) + F(h_l): both sublayers of a layer read the output of the previous layer (GPT-J;
    arXiv 2204.06745). Each has its own norm; to represent one shared norm, both have the same gain.

    The state is h_l and, inside a layer, also h_l + A(h_l).
    """

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        total = state[-1] + y
        return (total, (total,)) if k % 2 else (state[0], (state[0], total))

    def initialization(self) -> Initialization:
        return Initialization()


class LayerFactor(Additive):
    """h_{l+1} = s_l · (h_l + A + F) with a learned factor per layer, 1 at the start (Gemma 4).

    The readers' norms cancel the common factor of the stream, but s weights earlier layers against later ones.
    """

    def __init__(self, config: choices.LayerFactor, sublayers: int, width: int) -> None:
        super().__init__(config, sublayers, width)
        self.factor = nn.Parameter(torch.empty(sublayers // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.factor)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0] + y
        if k % 2:
            h = h * self.factor[k // 2].to(h.dtype)
        return h, (h,)

    def initialization(self) -> Initialization:
        return Initialization.additive_when_new(self, output_factors=self._output_factors)

    def _output_factors(self) -> Tensor:
        """h_l is s_1 … s_{l−1} times the sum of all outputs so far, each divided by the product of the s before it."""
        before = torch.cat([self.factor.new_ones(1), self.factor[:-1]]).cumprod(0)
        return before.reciprocal().repeat_interleave(2)

    def ablations(self) -> Ablations:
        """A layer whose sublayers are both removed has no factor, as if it did not exist."""
        return Ablations(without_writes=lambda ks: junctions_skipped(self, [k for k in ks if k ^ 1 in ks]))


class Clipped(Additive):
    """h_{k+1} = clip(h_k + y_k, ±limit): outliers are clipped (arXiv 2601.22966, rows 10–14)."""

    def __init__(self, config: choices.Clipped, sublayers: int, width: int) -> None:
        super().__init__(config, sublayers, width)
        self.limit = config.limit

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = (state[0] + y).clamp(-self.limit, self.limit)
        return h, (h,)

    def initialization(self) -> Initialization:
        """Equal to a sum as long as no element of it exceeds the limit."""
        return Initialization(init_as_additive=lambda: InitFidelity.NEARLY)
