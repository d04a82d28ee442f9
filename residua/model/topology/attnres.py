"""Attention Residuals (arXiv 2603.15031): every sublayer attends over depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.model.taps import tap
from residua.model.topology.base import State, Topology
from residua.ops.depth_attention import deferred


class Read(nn.Module):
    """One read over the sources: a_i = softmax_i( scale · w · (g ⊙ RMS(v_i)) ), h = Σ a_i v_i; values are raw.

    w starts at zero, so the read starts as the plain average.
    """

    def __init__(self, config: choices.AttentionResidual, index: int, width: int) -> None:
        super().__init__()
        self.index = index
        self.options: dict[str, Any] = {
            "scale": config.scale,
            "key_norm": config.key_norm,
            "activation": config.activation,
        }
        self.query = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.empty(width)) if config.key_norm == "rms" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def forward(self, sources: State) -> Tensor:
        tap(f"depth.{self.index}.weights", lambda: self.weights(sources))
        h: Tensor = ops.depth_attention(sources, self.query, norm_weight=self.gain, **self.options)
        return h

    def weights(self, sources: Sequence[Tensor]) -> Tensor:
        """a_i [B, T, sources]."""
        _, seen = ops.depth_attention.reference(
            sources, self.query, norm_weight=self.gain, return_weights=True, **self.options
        )
        return cast(Tensor, seen)


class BlockAttnRes(Topology):
    """Sublayers in blocks of S; sources are the embedding b_0, the finished blocks, and the running sum of this one.

    b_n = Σ of block n's outputs, from zero. The first sublayer of a block reads [b_0 … b_{n−1}], each later one also
    the partial sum so far; the last read, before the head, sees every block. A finished block and a partial sum are
    both just the newest source, so the state is the list of sources and a new block appends to it.

    The first sublayer has one source, whose softmax is 1 whatever the query: it reads the embedding and has no query.
    """

    def __init__(self, config: choices.AttentionResidual, sublayers: int, width: int) -> None:
        super().__init__()
        self.config = config
        self.reads = nn.ModuleList(Read(config, k, width) for k in range(sublayers))
        self.plan = self._plan(sublayers)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        if deferred.serves(x, key_norm=self.config.key_norm, activation=self.config.activation):
            return x, deferred.open(self.plan, x, self._queries())
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        if deferred.holds(self.plan, k, state):
            read = cast(Read, self.reads[k])
            tap(f"depth.{k}.weights", lambda: read.weights(deferred.values(self.plan, k, y, state)))
            return deferred.step(self.plan, k, y, state)
        sources = self.sources(k, y, state)
        return self.reads[k](sources), sources

    def sources(self, k: int, y: Tensor, sources: State) -> State:
        """What read k sees: y begins a block, or is added to the sum of its own."""
        return (*sources, y) if self._begins_block(k) else (*sources[:-1], sources[-1] + y)

    def _begins_block(self, k: int) -> bool:
        assert isinstance(self.config, choices.BlockAttnRes)
        return k % self.config.sublayers_per_block == 0

    def _plan(self, sublayers: int) -> deferred.Plan:
        """The same as `sources`, by number: 0 is the embedding, k+1 is y_k or the sum that y_k was added to."""
        finished = [k + 1 for k in range(sublayers) if self._begins_block(k + 1)]
        sees = [[0, *(s for s in finished if s <= k), k + 1] for k in range(sublayers)]
        return deferred.Plan(sees, [False, *(not self._begins_block(k) for k in range(sublayers))])

    def _queries(self) -> Tensor:
        """u_l = scale · w_l ⊙ g_l of every read, [reads, C]."""
        w = torch.stack([cast(Read, read).query for read in self.reads])
        g = torch.stack([cast(Tensor, read.gain) for read in self.reads])
        return self.config.scale * w.float() * g.float()


class FullAttnRes(BlockAttnRes):
    """Every output is a source of its own: blocks of one sublayer.

    With a window, a read sees the embedding and the last `window` outputs.
    """

    def sources(self, k: int, y: Tensor, sources: State) -> State:
        return (sources[0], *(*sources[1:], y)[-self._window(len(self.reads)) :])

    def _plan(self, sublayers: int) -> deferred.Plan:
        window = self._window(sublayers)
        sees = [[0, *range(max(1, k + 2 - window), k + 2)] for k in range(sublayers)]
        return deferred.Plan(sees, [False] * (sublayers + 1))

    def _window(self, sublayers: int) -> int:
        assert isinstance(self.config, choices.FullAttnRes)
        return self.config.window or sublayers
