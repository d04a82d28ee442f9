"""Residual scalars with x0 injection and backout, as in modded-nanogpt and nanochat."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.equivalence import InitFidelity
from residua.model.rates import RatedModule
from residua.model.taps import tap
from residua.model.topology.base import Boundary, Initialization, KeptBoundary, State, Topology
from residua.model.topology.facts import ADDED_IN_NORM, Costs, SourceNames, trace_rows
from residua.ops._runtime.numeric import rms, wide


class ResidualScalars(Topology):
    """The stream starts as x0 = RMS(x), x the embedding, and gets x0 again at every layer or sublayer (`scalars`).

    layer (nanochat): before layer i, h ← λ_i h + μ_i x0; its two sublayers then add their outputs. At the start
    λ_i = 1.15 − 0.10 i/(L−1) and μ_i = 0.20 − 0.15 i/(L−1).
    sublayer (modded-nanogpt): after sublayer k, h ← λ_k h + ρ_k y_k + μ_k x0, from λ = √1.1, ρ = 1 and μ = 0.

    Both end with h ← h − b · h_mid, b from `backout`, h_mid the stream after layer ⌊L/2⌋, counted from 0. The state is
    h, x0 and, from that layer on, h_mid. With `embedding = "raw"`, x0 is the embedding itself.
    """

    def __init__(self, config: choices.ResidualScalars, sublayers: int, width: int) -> None:
        super().__init__()
        self.norms_embedding, self.start = config.embedding == "normed", config.backout
        self.last = sublayers - 1
        self.middle = min(2 * (-(-sublayers // 2) // 2) + 1, self.last)
        scalars: dict[str, type[LayerScalars | SublayerScalars]]
        scalars = {"layer": LayerScalars, "sublayer": SublayerScalars}
        self.scalars = scalars[config.scalars](sublayers)
        self.backout = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.backout, self.start)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        x0 = rms(x) if self.norms_embedding else x
        h = self.scalars.open(x0)
        return h, (h, x0)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h, x0, *middle = state
        h, kept = self.scalars.add(k, h, y, x0)
        middle = [kept] if k == self.middle else middle
        if k == self.last:
            _publish(k, y, torch.ones_like(self.backout), -self.backout)
            h = _mixed(h, torch.ones_like(self.backout), middle[0], -self.backout)
        return h, (h, x0, *middle)

    def initialization(self) -> Initialization:
        return Initialization(init_as_additive=self._init_as_additive)

    def _init_as_additive(self) -> InitFidelity:
        """λ = ρ = 1, μ = b = 0 gives the sum, if the stream starts from the embedding itself."""
        self.scalars.init_as_additive()
        nn.init.zeros_(self.backout)
        return InitFidelity.NOT if self.norms_embedding else InitFidelity.EXACTLY

    def boundary(self) -> Boundary:
        return KeptBoundary(self, embedding=None if self.norms_embedding else 0)

    def costs(self, sublayers: int, width: int) -> Costs:
        """Elementwise, so fused into the next norm: additions, x0 read forward, its gradient read and written."""
        step = ADDED_IN_NORM * sublayers + 3 * self.scalars.injections
        return Costs(lambda: trace_rows(self, sublayers, width), step, kept_widths=self.scalars.injections / sublayers)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        middle = f"after {sublayers[self.middle]}"

        def source(reader: int, source: int) -> str:
            return "stream" if source == 0 else middle if reader > self.last else "embedding"

        return SourceNames(source=source, initial=lambda reader: 0)


class LayerScalars(RatedModule):
    """λ and μ of every layer, [L]. λ trains at a hundredth of the learning rate, as in nanochat."""

    def __init__(self, sublayers: int) -> None:
        super().__init__()
        self.injections, self.last = -(-sublayers // 2), sublayers - 1
        self.stream = nn.Parameter(torch.empty(self.injections))
        self.embedding = nn.Parameter(torch.empty(self.injections))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        falling = torch.arange(self.injections, dtype=torch.float64) / max(self.injections - 1, 1)
        self.stream.copy_(1.15 - 0.10 * falling)
        self.embedding.copy_(0.20 - 0.15 * falling)

    def rate_factors(self) -> dict[str, float]:
        return {"stream": 0.01}

    def init_as_additive(self) -> None:
        nn.init.ones_(self.stream)
        nn.init.zeros_(self.embedding)

    def open(self, x0: Tensor) -> Tensor:
        return _mixed(x0, self.stream[0] + self.embedding[0])

    def add(self, k: int, h: Tensor, y: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
        """The next sublayer's input, and the stream after this one."""
        h = h + y
        if k % 2 == 0 or k == self.last:
            return h, h
        scalars = self.stream[(k + 1) // 2], self.embedding[(k + 1) // 2]
        _publish(k, y, *scalars)
        return _mixed(h, scalars[0], x0, scalars[1]), h


class SublayerScalars(nn.Module):
    """λ, ρ and μ of every sublayer, [K]."""

    def __init__(self, sublayers: int) -> None:
        super().__init__()
        self.injections = sublayers
        self.stream = nn.Parameter(torch.empty(sublayers))
        self.output = nn.Parameter(torch.empty(sublayers))
        self.embedding = nn.Parameter(torch.empty(sublayers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.init_as_additive()
        nn.init.constant_(self.stream, math.sqrt(1.1))

    def init_as_additive(self) -> None:
        nn.init.ones_(self.stream)
        nn.init.ones_(self.output)
        nn.init.zeros_(self.embedding)

    def open(self, x0: Tensor) -> Tensor:
        return x0

    def add(self, k: int, h: Tensor, y: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
        """The next sublayer's input, twice: it is also the stream after this one."""
        _publish(k, y, self.stream[k], self.embedding[k])
        h = _mixed(h, self.stream[k], y, self.output[k], x0, self.embedding[k])
        return h, h


def _mixed(*pairs: Tensor) -> Tensor:
    """The sum of tensors, each multiplied by the scalar that follows it."""
    total = wide(pairs[1]) * wide(pairs[0])
    for tensor, scalar in zip(pairs[2::2], pairs[3::2], strict=True):
        total = total + wide(scalar) * wide(tensor)
    return total.to(pairs[0].dtype)


def _publish(k: int, y: Tensor, *weights: Tensor) -> None:
    """Publish the weights of the stream and of a second vector in the input after sublayer k."""
    tap(f"depth.{k}.weights", lambda: torch.stack(weights).expand(*y.shape[:-1], len(weights)))
