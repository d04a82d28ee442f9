"""Attention Residuals (arXiv 2603.15031): every sublayer attends over depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from residua import ops
from residua.model import choices
from residua.model.taps import tap
from residua.model.topology.base import State, Topology


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
        def weights() -> Tensor:
            seen: Tensor = ops.depth_attention(
                sources, self.query, norm_weight=self.gain, return_weights=True, **self.options
            )[1]
            return seen

        tap(f"depth.{self.index}.weights", weights)
        h: Tensor = ops.depth_attention(sources, self.query, norm_weight=self.gain, **self.options)
        return h


class BlockAttnRes(Topology):
    """Sublayers in blocks of S; sources are the embedding b_0, the finished blocks, and the running sum of this one.

    b_n = Σ of block n's outputs, from zero. The first sublayer of a block reads [b_0 … b_{n−1}], each later one also
    the partial sum so far; the last read, before the head, sees every block. A finished block and a partial sum are
    both just the newest source, so the state is the list of sources and a new block appends to it.

    The first sublayer has one source, whose weight is 1 whatever the query: it reads the embedding and has no query.
    """

    def __init__(self, config: choices.AttentionResidual, sublayers: int, width: int) -> None:
        super().__init__()
        assert isinstance(config, choices.BlockAttnRes | choices.FullAttnRes)
        self.sublayers_per_block = config.sublayers_per_block if isinstance(config, choices.BlockAttnRes) else 1
        self.reads = nn.ModuleList(Read(config, k, width) for k in range(sublayers))

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        starts_block = k % self.sublayers_per_block == 0
        sources = (*state, y) if starts_block else (*state[:-1], state[-1] + y)
        return self.reads[k](sources), sources


class FullAttnRes(BlockAttnRes):
    """Every output is a source of its own: blocks of one sublayer.

    With a window, a read sees the embedding and the last `window` outputs.
    """

    def __init__(self, config: choices.FullAttnRes, sublayers: int, width: int) -> None:
        super().__init__(config, sublayers, width)
        self.window = config.window or sublayers

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        sources = (state[0], *(*state[1:], y)[-self.window :])
        return self.reads[k](sources), sources
