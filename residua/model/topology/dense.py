"""DenseFormer (arXiv 2402.02622): static weighted sums of all earlier layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.equivalence import InitFidelity
from residua.model.taps import tap
from residua.model.topology.base import Boundary, Initialization, KeptBoundary, State, Topology
from residua.model.topology.facts import ADDED_IN_NORM, Ablations, Costs, SourceNames, parameters_set, trace_rows
from residua.ops._runtime.numeric import wide


class DenseFormer(Topology):
    """X_i is the output of transformer layer i (X_0 the embedding), its two sublayers added as usual. After it,

        Y_i = Σ_{j ≤ i, j ≡ i mod dilation} α_ij X_j  if period divides i, else X_i

    and Y_i enters layer i+1. At the start α_ii = 1 and the others are 0. The state is the running sum and X_0 … X_i.
    """

    def __init__(self, config: choices.DenseFormer, sublayers: int, width: int) -> None:
        super().__init__()
        self.dilation, self.period = config.dilation, config.period
        layers = range(1, sublayers // 2 + 1)
        self.alphas = nn.ParameterDict(
            {str(i): nn.Parameter(torch.empty(len(self._sources(i)))) for i in layers if i % self.period == 0}
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for alpha in self.alphas.values():
            nn.init.zeros_(alpha)
            with torch.no_grad():
                alpha[-1] = 1.0

    def _sources(self, layer: int) -> range:
        return range(layer % self.dilation, layer + 1, self.dilation)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x, x)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h, outputs = state[0] + y, state[1:]
        if k % 2 == 0:
            return h, (h, *outputs)
        layer = (k + 1) // 2
        outputs = (*outputs, h)
        mixed = self._mix(layer, outputs) if str(layer) in self.alphas else h
        return mixed, (mixed, *outputs)

    def _mix(self, layer: int, outputs: State) -> Tensor:
        alpha = self.alphas[str(layer)]
        tap(f"depth.{2 * layer - 1}.weights", lambda: alpha.expand(*outputs[0].shape[:-1], -1))
        weights = wide(alpha).unbind()
        mixed = weights[-1] * wide(outputs[-1])
        for a, j in zip(weights[:-1], self._sources(layer)[:-1], strict=True):
            mixed = mixed + a * wide(outputs[j])
        return mixed.to(outputs[-1].dtype)

    def initialization(self) -> Initialization:
        """As in a new model, α_ii = 1 and the others are 0."""
        return Initialization.additive_when_new(self, begin_as=self._begin_as)

    @torch.no_grad()
    def _begin_as(self, old: DenseFormer) -> InitFidelity:
        """Copy the weights that both have; new ones are 0, or 1 for a layer's own output. Exact if none is dropped."""
        self.reset_parameters()
        lost = False
        for layer, theirs in old.alphas.items():
            ours = list(self._sources(int(layer))) if layer in self.alphas else []
            for alpha, source in zip(theirs, old._sources(int(layer)), strict=True):
                if source in ours:
                    self.alphas[layer][ours.index(source)] = alpha
                else:
                    lost = True
        return InitFidelity.NOT if lost else InitFidelity.EXACTLY

    def boundary(self) -> Boundary:
        return KeptBoundary(self, embedding=0)

    def costs(self, sublayers: int, width: int) -> Costs:
        """Additions, and after some layers a sum over earlier outputs: X → Y; X, dY, dX → dX."""
        step = ADDED_IN_NORM * sublayers + sum(4 * len(alpha) + 2 for alpha in self.alphas.values())
        products = (width - 1) * sum(len(alpha) for alpha in self.alphas.values())  # every weight multiplies C channels
        return Costs(lambda: trace_rows(self, sublayers, width), step, kept_widths=0.5, products=products)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        def source(reader: int, source: int) -> str:
            layer = self._sources(reader // 2)[source]
            return "embedding" if layer == 0 else f"layer {layer - 1}"

        return SourceNames(source=source, initial=lambda reader: len(self._sources(reader // 2)) - 1)

    def ablations(self) -> Ablations:
        def equal(readers: Sequence[int]) -> AbstractContextManager[None]:
            alphas = [self.alphas[str(reader // 2)] for reader in readers]
            return parameters_set(alphas, lambda weights: weights.mean().expand_as(weights))

        return Ablations(weighing_readers=[2 * int(layer) for layer in self.alphas], with_equal_weights=equal)
