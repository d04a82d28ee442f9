"""Loops with injection (Parcae, arXiv 2604.12946): at every turn the state decays and the input is added again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.model.taps import tap
from residua.model.topology.base import Boundary, KeptBoundary, State, Topology
from residua.model.topology.facts import ADDED_IN_NORM, Costs, SourceNames, trace_rows
from residua.ops._runtime.numeric import wide


class Injection(Topology):
    """Layers before the loop add to h. Their output is e = N(h), N being RMSNorm without a gain, and h_0 = e. Turn t is

        h_{t+1} = Ā ⊙ h_t + B̄ ⊙ e + R(Ā ⊙ h_t + B̄ ⊙ e)

    where R is the sum of all updates by the layers of the loop. Ā = exp(−Δ exp(a)) is in (0, 1), B̄ = Δ b, Δ = exp(d);
    a, b and d are vectors [C], the same in all turns. Layers after the loop add to h. In the authors' code b is a
    matrix, and h_0 and the number of turns are random (docs/reference/topology-notes.md).

    State: h, and e from the start of the loop until its last turn has started.
    """

    def __init__(self, config: choices.Injection, sublayers: int, width: int) -> None:
        super().__init__()
        self.decay = config.decay
        self.starts = [2 * (config.prelude + turn * config.loop) for turn in range(config.turns)]
        """The sublayers, counted by executions, that start a turn."""
        self.rate, self.step_size, self.input = (nn.Parameter(torch.empty(width)) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """exp(−Δ) = `decay` and Δ b = 1 − `decay`, with a = 0."""
        size = -math.log(self.decay)
        nn.init.zeros_(self.rate)
        nn.init.constant_(self.step_size, math.log(size))
        nn.init.constant_(self.input, (1 - self.decay) / size)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return self._turn(0, x, ())

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        return self._turn(k + 1, state[0] + y, state[1:])

    def _turn(self, reader: int, h: Tensor, held: State) -> tuple[Tensor, State]:
        """The input of a reader, which may start a turn; `held` is e, if the loop has started."""
        if reader not in self.starts:
            return h, (h, *held)
        e = held[0] if held else ops.rms(h)
        size = wide(self.step_size).exp()
        kept, share = torch.exp(-size * wide(self.rate).exp()), size * wide(self.input)
        if reader > 0:
            tap(f"depth.{reader - 1}.weights", lambda: _means(kept, share).expand(*e.shape[:-1], 2))
        h = (kept * wide(h if held else e) + share * wide(e)).to(h.dtype)
        return h, (h,) if reader == self.starts[-1] else (h, e)

    def boundary(self) -> Boundary:
        return KeptBoundary(self, embedding=None)

    def costs(self, sublayers: int, width: int) -> Costs:
        """Additions, and at each turn h, e → h; h, e, dh → dh, de."""
        step = ADDED_IN_NORM * sublayers + 8 * len(self.starts)
        return Costs(lambda: trace_rows(self, sublayers, width), step, kept_widths=2 * len(self.starts) / sublayers)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return SourceNames(source=lambda reader, source: ("state", "prelude")[source])


def _means(kept: Tensor, share: Tensor) -> Tensor:
    return torch.stack((kept.mean(), share.mean()))
