"""Gated Residual, the streams of Qwen4-Exp (in transformers; no paper)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua import ops
from residua.config import choices
from residua.model.norm import GATE_STD
from residua.model.taps import tap
from residua.model.topology.base import State, Topology
from residua.model.topology.facts import Ablations, SourceNames, reads_changed
from residua.ops._runtime.numeric import rms, wide


class GatedResidual(Topology):
    """n streams X, copies of the embedding at first; readers gate them by channel, outputs are injected by stream.

        X̂_i = g_i ⊙ RMS(X_i),   h = mean_i( σ(W_up silu(W_down vec(X̂)/n))_i ⊙ X̂_i )
        inj = 2σ(W_inj vec(X̂)/n),   X'_i = X_i + inj_i y

    Every reader has its own gains g, W_down [r, nC], W_up [nC, r] and, but for the head, W_inj [n, nC]. h is normed
    already: sublayers and head have no norm of their own in front. The state is X and the coming inj.

    The matrices start normal. With W_inj = W_up = 0, inj is 1 and h half the mean: streams would stay equal for ever.
    """

    def __init__(self, config: choices.GatedResidual, sublayers: int, width: int) -> None:
        super().__init__()
        self.streams = config.streams
        rank = config.rank or max(1, width // 8)
        self.reads = nn.ModuleList(StreamRead(k, config.streams, width, rank) for k in range(sublayers))
        self.last_read = StreamRead(sublayers, config.streams, width, rank, injects=False)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return self._read(0, x[..., None, :].expand(*x.shape[:-1], self.streams, -1))

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        X, inject = state
        X = (wide(X) + inject[..., None] * wide(y)[..., None, :]).to(X.dtype)
        tap(f"depth.{k}.streams", X)
        return self._read(k + 1, X)

    def _read(self, reader: int, X: Tensor) -> tuple[Tensor, State]:
        read = self.reads[reader] if reader < len(self.reads) else self.last_read
        h, *inject = cast(StreamRead, read)(X)
        return h, (X, *inject)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return SourceNames(False, lambda reader, source: f"stream {source}")

    def ablations(self) -> Ablations:
        return Ablations(
            streams=self.streams, without_stream=lambda stream: reads_changed(self, partial(self._unread, stream))
        )

    def _unread(self, index: int, k: int, h: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """The read after sublayer k without one stream."""
        read = cast(StreamRead, self.reads[k + 1] if k + 1 < len(self.reads) else self.last_read)
        normed = read.normed(tensors[f"depth.{k}.streams"])
        return h - (read.gated(normed) / self.streams)[..., index, :]


class StreamRead(nn.Module):
    """The gains and matrices of one reader."""

    def __init__(self, reader: int, streams: int, width: int, rank: int, *, injects: bool = True) -> None:
        super().__init__()
        self.reader, self.streams, wide_row = reader, streams, streams * width
        self.gain = nn.Parameter(torch.empty(streams, width))
        self.down = nn.Parameter(torch.empty(rank, wide_row))
        self.up = nn.Parameter(torch.empty(wide_row, rank))
        self.inject = nn.Parameter(torch.empty(streams, wide_row)) if injects else None
        self.hidden_matrices: dict[str, tuple[int, ...]] = {"down": (rank,), "up": (wide_row,)}
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        for matrix in (self.down, self.up, self.inject):
            if matrix is not None:
                nn.init.normal_(matrix, std=GATE_STD)

    def forward(self, X: Tensor) -> tuple[Tensor, ...]:
        """h and, if it injects, inj [B, T, n]."""
        normed = self.normed(X)
        gated = self.gated(normed)
        if self.reader:
            tap(f"depth.{self.reader - 1}.weights", lambda: self._weights(normed))
        h = wide(gated).mean(-2).to(X.dtype)
        if self.inject is None:
            return (h,)
        row = normed.flatten(-2)
        return h, 2 * torch.sigmoid(wide(linear(row, self.inject.to(row.dtype))) / self.streams)

    def normed(self, X: Tensor) -> Tensor:
        """X̂ [B, T, n, C]."""
        return rms(X, weight=self.gain)

    def gated(self, normed: Tensor) -> Tensor:
        """The gated streams [B, T, n, C], before their mean."""
        gated: Tensor = ops.low_rank_gate(normed.flatten(-2), self.down / self.streams, self.up)
        return gated.view_as(normed)

    def _weights(self, normed: Tensor) -> Tensor:
        """The part of each stream in h, as a mean over channels."""
        scores = ops.gate_scores(normed.flatten(-2), self.down / self.streams, self.up, activation="sigmoid")
        return wide(scores).view_as(normed).mean(-1) / self.streams
