"""Norms around the residual sum and scales of its branches: LNS, KEEL, DeepNorm, ResiDual, LayerScale, ReZero.

N is an RMSNorm with a gain, one per place. For Peri-LN and OLMo 2, set `model.placement`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.equivalence import InitFidelity
from residua.model.norm import RMSNorm
from residua.model.topology.base import FromEmbedding, Initialization, State
from residua.model.topology.facts import ADDED_IN_NORM, ADDITION, Costs, add_rows
from residua.ops._runtime.numeric import wide


class ScaledSum(FromEmbedding):
    """h ← h + g_k ⊙ y_k with a learned g_k that starts small.

    LayerScale (arXiv 2103.17239): one number per channel. ReZero (2003.04887): one number, starting at 0.
    """

    def __init__(self, config: choices.ScaledSum, sublayers: int, width: int) -> None:
        super().__init__()
        self.start = config.start
        size = {"elementwise": width, "scalar": 1}[config.gain]
        self.scales = nn.ParameterList(torch.empty(size) for _ in range(sublayers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for scale in self.scales:
            nn.init.constant_(scale, self.start)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = (wide(state[0]) + wide(self.scales[k]) * wide(y)).to(y.dtype)
        return h, (h,)

    def initialization(self) -> Initialization:
        return Initialization(init_as_additive=self._init_as_additive)

    def _init_as_additive(self) -> InitFidelity:
        for scale in self.scales:
            nn.init.ones_(scale)
        return InitFidelity.EXACTLY

    def costs(self, sublayers: int, width: int) -> Costs:
        """An addition that stores y for the gradient of the scale."""
        return Costs(lambda: add_rows([ADDITION] * sublayers), step=ADDED_IN_NORM * sublayers, kept_widths=1.0)


class NormedSum(FromEmbedding):
    """Base of the kinds below: N, one per place."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(choices.RMSNorm(), width) for _ in range(places))


class LayerNormScaling(NormedSum):
    """LNS (arXiv 2502.05795, "the curse of depth"): h ← h + y, and the sublayers of layer ℓ = 1, 2, … read N(h)/√ℓ.

    The final norm is not scaled. The state is h.
    """

    def __init__(self, config: choices.LayerNormScaling, sublayers: int, width: int) -> None:
        super().__init__(sublayers + 1, width)
        self.factors = [*(1 / math.sqrt(k // 2 + 1) for k in range(sublayers)), 1.0]

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return self.norms[0](x), (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0] + y
        return self.norms[k + 1](h) * self.factors[k + 1], (h,)


class Keel(NormedSum):
    """KEEL (arXiv 2601.19895): h ← N(α h + f(N(h))), α = K, the number of sublayers, unless given.

    The inner norm is the sublayer's own. The first layer has α = 1, and its attention no outer norm: h ← h + f(N(h)).
    """

    def __init__(self, config: choices.Keel, sublayers: int, width: int) -> None:
        super().__init__(max(0, sublayers - 1), width)
        self.alpha = float(sublayers) if config.alpha is None else config.alpha

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = state[0] + y if k < 2 else self.alpha * state[0] + y
        h = self.norms[k - 1](h) if k > 0 else h
        return h, (h,)


class DeepNorm(NormedSum):
    """DeepNorm (arXiv 2203.00555): h ← N(α h + f(h)), α = (2L)^¼ unless given, for a decoder of L layers.

    Output projections start (8L)^−¼ times as large. The paper scales V and the feed-forward's input maps too.
    """

    def __init__(self, config: choices.DeepNorm, sublayers: int, width: int) -> None:
        super().__init__(sublayers, width)
        self.alpha = sublayers**0.25 if config.alpha is None else config.alpha

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h = self.norms[k](self.alpha * state[0] + y)
        return h, (h,)

    def initialization(self) -> Initialization:
        return Initialization(output_gain=(4 * len(self.norms)) ** -0.25)


class ResiDual(NormedSum):
    """ResiDual (arXiv 2304.14802): x ← N(x + f(x)), d ← d + f(x), and the head reads x + N(d). The state is x and d."""

    def __init__(self, config: choices.ResiDual, sublayers: int, width: int) -> None:
        super().__init__(sublayers + 1, width)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x, x)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        x, d = self.norms[k](state[0] + y), state[1] + y
        return (x if k < len(self.norms) - 2 else x + self.norms[-1](d)), (x, d)
