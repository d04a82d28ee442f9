"""Gated Residual, the streams of Qwen4-Exp (in transformers; no paper)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu
from torch.utils.checkpoint import checkpoint

from residua.config import choices
from residua.model.norm import GATE_STD
from residua.model.taps import tap
from residua.model.topology.base import State, Topology
from residua.model.topology.facts import Ablations, Costs, SourceNames, reads_changed, trace_rows
from residua.ops._runtime.numeric import ALIGNED, wide

EPS = 1e-6


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
        return self._read(0, x[..., None, :].expand(*x.shape[:-1], self.streams, -1))

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        X, injection = state
        X = (wide(X) + injection[..., None] * wide(y)[..., None, :]).to(X.dtype)
        tap(f"depth.{k}.streams", X)
        tap(f"depth.{k}.weights", lambda: wide(self._reader(k + 1).gates(X)[1]).mean(-1) / self.streams)
        return self._read(k + 1, X)

    def _read(self, reader: int, X: Tensor) -> tuple[Tensor, State]:
        h, *injection = self._reader(reader)(X)
        return h, (X, *injection)

    def _reader(self, reader: int) -> StreamRead:
        return cast(StreamRead, self.reads[reader] if reader < len(self.reads) else self.last_read)

    def costs(self, sublayers: int, width: int) -> Costs:
        """Counted in a compiled step at n = 4: the passes between the gate's matrix products exceed the floor.

        Forward 27 rows. X, y → X'; W_down and W_inj read X'; scores are written, then read with X' → h. Backward 65:
        scores, X', dh → the scores' gradient, which two products read; one more reads X'; the gradient through the maps
        is written; with scores, X', y, dh, dX' it gives dX, dy; with scores, X', dh, the gains' gradient. X is stored,
        and the scores are written again: 4 rows.
        """
        n, step = self.streams, (6 * self.streams + 3 + 16 * self.streams + 5) * sublayers
        products = n * width * (2 * len(self.reads) + 1)  # readers weight n streams; all but the head write to them
        return Costs(lambda: trace_rows(self, sublayers, width), step, kept_widths=n, products=products)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return SourceNames(False, lambda reader, source: f"stream {source}")

    def ablations(self) -> Ablations:
        return Ablations(
            streams=self.streams, without_stream=lambda stream: reads_changed(self, partial(self._unread, stream))
        )

    def _unread(self, index: int, k: int, h: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """The read after sublayer k without one stream."""
        normed, scores = self._reader(k + 1).gates(tensors[f"depth.{k}.streams"])
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

    def forward(self, X: Tensor) -> tuple[Tensor, ...]:
        """h and, if it injects, inj [B, T, n]."""
        normed, projected = self._project(X)
        h = wide(normed * self._scores(projected, X)).mean(-2).to(X.dtype)
        n, rank = len(self.gain), len(self.down)
        return (h,) if self.inject is None else (h, 2 * torch.sigmoid(projected[..., rank : rank + n]))

    def gates(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """X̂ and the scores σ(W_up silu(…)), both [B, T, n, C]."""
        normed, projected = self._project(X)
        return normed, self._scores(projected, X)

    def _project(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """X̂ [B, T, n, C], and vec(X̂)/n times W_down and W_inj [B, T, r + n, zero-padded], the latter in float32.

        One product computes both from X: the maps absorb the gains, and a stream's 1/rms multiplies its part of the
        result. A compiled step then neither writes X̂ nor stores it for the backward pass.
        """
        x = wide(X)
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        maps = self.down if self.inject is None else torch.cat([self.down, self.inject])
        maps = wide(pad(maps, (0, 0, 0, -len(maps) % ALIGNED))).unflatten(1, self.gain.shape)
        weight = (maps * wide(self.gain) / len(self.gain)).permute(1, 2, 0).to(X.dtype)  # [n, C, r + n, zero-padded]
        parts = wide(torch.bmm(X.flatten(0, -3).transpose(0, 1), weight))  # [n, B T, r + n, zero-padded]
        projected = (parts * rstd.flatten(0, -3).transpose(0, 1)).sum(0)
        return (x * rstd * wide(self.gain)).to(X.dtype), projected.view(*X.shape[:-2], projected.shape[-1])

    def _scores(self, projected: Tensor, X: Tensor) -> Tensor:
        """σ(W_up silu(…)), in the shape of X.

        Compiled code computes it again in the backward pass: the scores would take as much memory as the streams.
        """
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            again: Tensor = checkpoint(self._gate, projected, X, use_reentrant=False)
            return again
        return self._gate(projected, X)

    def _gate(self, projected: Tensor, X: Tensor) -> Tensor:
        hidden = silu(projected[..., : len(self.down)]).to(X.dtype)
        return torch.sigmoid(linear(hidden, self.up.to(X.dtype))).to(X.dtype).view_as(X)
