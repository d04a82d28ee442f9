"""Gated Residual, the streams of Qwen4-Exp (in transformers; no paper)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.model.norm import GATE_STD
from residua.model.taps import tap
from residua.model.topology.base import State, Topology
from residua.model.topology.facts import Ablations, Costs, SourceNames, reads_changed, trace_rows
from residua.ops._runtime.numeric import wide
from residua.ops.gated_residual import reference


class GatedResidual(Topology):
    """n streams X, initially copies of the embedding; readers gate them per channel, outputs are injected per stream.

        X̂_i = g_i ⊙ RMS(X_i),   h = mean_i( σ(W_up silu(W_down vec(X̂)/n))_i ⊙ X̂_i )
        inj = 2σ(W_inj vec(X̂)/n),   X'_i = X_i + inj_i y

    Every reader has its own gains g, W_down [r, nC] and W_up [nC, r]; all but the head have W_inj [n, nC]. h is already
    normed, so sublayers and head have no norm in front. The state is X and the next inj.

    The matrices start normal. With W_inj = W_up = 0, inj is 1 and h half the mean, so streams would stay equal forever.
    """

    def __init__(self, config: choices.GatedResidual, sublayers: int, width: int) -> None:
        super().__init__()
        self.streams = config.streams
        rank = config.rank or max(1, width // 8)
        self.reads = nn.ModuleList(StreamRead(config.streams, width, rank) for _ in range(sublayers))
        self.last_read = StreamRead(config.streams, width, rank, injects=False)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        X = x[..., None, :].expand(*x.shape[:-1], self.streams, -1)
        h, *injection = self._reader(0)(X)
        return h, (X, *injection)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h, X, *injection = self._reader(k + 1)(*state, y)
        tap(f"depth.{k}.streams", X)
        tap(f"depth.{k}.weights", lambda: wide(self._gates(k, X)[1]).mean(-1) / self.streams)
        return h, (X, *injection)

    def _reader(self, reader: int) -> StreamRead:
        return cast(StreamRead, self.reads[reader] if reader < len(self.reads) else self.last_read)

    def _gates(self, k: int, X: Tensor) -> tuple[Tensor, Tensor]:
        """X̂ and the scores of the read after sublayer k, both [B, T, n, C]."""
        read = self._reader(k + 1)
        return reference.gates(X, read.gain, read.down, read.up)

    def costs(self, sublayers: int, width: int) -> Costs:
        """Counted in the kernels, without tensors of rank r, such as the maps' outputs for each stream.

        Forward: X, y → X'; X' → h. Backward: X', dh → the gradient through the maps, which gives dX with X', dh and
        dX'; dX, y → dy.
        """
        floor, n = trace_rows(self, sublayers, width), self.streams
        return Costs(lambda: floor, (3 * n + 2 + 5 * n + 4) * sublayers, kept_widths=n)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return SourceNames(False, lambda reader, source: f"stream {source}")

    def ablations(self) -> Ablations:
        return Ablations(
            streams=self.streams, without_stream=lambda stream: reads_changed(self, partial(self._unread, stream))
        )

    def _unread(self, index: int, k: int, h: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """The read after sublayer k without one stream."""
        normed, scores = self._gates(k, tensors[f"depth.{k}.streams"])
        return h - (normed * scores / self.streams)[..., index, :]


class StreamRead(nn.Module):
    """The gains and matrices of one reader."""

    def __init__(self, streams: int, width: int, rank: int, *, injects: bool = True) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(streams, width))
        self.down = nn.Parameter(torch.empty(rank, streams * width))
        self.up = nn.Parameter(torch.empty(streams * width, rank))
        self.inject = nn.Parameter(torch.empty(streams, streams * width)) if injects else None
        self.hidden_matrices: dict[str, tuple[int, ...]] = {"down": (rank,), "up": (streams * width,)}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        for matrix in (self.down, self.up, self.inject):
            if matrix is not None:
                nn.init.normal_(matrix, std=GATE_STD)

    def forward(self, X: Tensor, injection: Tensor | None = None, y: Tensor | None = None) -> tuple[Tensor, ...]:
        """h, with an output y also X' with y written into it, and inj [B, T, n] if it injects."""
        maps = (self.gain, self.down, self.up, self.inject)
        if injection is None or y is None:
            return reference.read(X, *maps)
        return ops.gated_residual(X, injection, y, *maps)
