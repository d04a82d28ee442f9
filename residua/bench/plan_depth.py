"""What the depth's own operators add to a step, on paper: bytes over the bandwidth they reach.

Bytes are rows of C two-byte elements per token: for Attention Residuals those that their plan of grouped reads and
gradients moves, for n streams the floors of `residua.bench.floors`, 2n + 2 forward and 3n + 3 backward. An additive
junction moves 3 of its rows within the norm behind it; the rate that a step reaches was measured with those, so they
are taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from residua.bench import floors
from residua.config.model import ModelConfig
from residua.model.topology import Topology, build_topology
from residua.model.topology.additive import Additive, Clipped
from residua.model.topology.attnres import BlockAttnRes
from residua.model.topology.dense import DenseFormer
from residua.model.topology.hyper import Streams
from residua.model.topology.multigate import Highway, MultiGate

ADDED = 3
"""Rows of an addition inside a norm: the sum read and written forward, one more gradient read backward."""

SHARE = 0.7
"""Of the copy bandwidth, where nothing was measured."""
SHARES: dict[type[Topology], float] = {BlockAttnRes: 0.63, MultiGate: 0.7, Streams: 0.24}
"""What steps on an H200 reached (docs/scale.md); hyper-connections: their junction alone (docs/RESULTS.md)."""


def depth_bytes(model: ModelConfig, *, pipelined: bool = False) -> float:
    """Bytes per token of all junctions, forward and backward, beyond an additive model's, as if none were wasted.

    Those that reach less of the bandwidth than others count for more. `pipelined`: Attention Residuals read by read.
    """
    with torch.device("meta"):
        topology = build_topology(model.topology, model.sublayers, model.width)
    rows = max(0.0, _rows(topology, model.sublayers, pipelined) - ADDED * model.sublayers)
    share = next((share for kind, share in SHARES.items() if isinstance(topology, kind)), SHARE)
    return 2 * model.width * rows / share


def _rows(topology: Any, sublayers: int, pipelined: bool) -> float:
    if isinstance(topology, BlockAttnRes) and pipelined:
        return sum(sum(floors.read(len(seen))) for seen in topology.plan.sees) + 3 * sum(topology.plan.grows)
    kind = next(kind for kind in ROWS if isinstance(topology, kind))
    return ROWS[kind](topology, sublayers)


def _known(topology: Any, sublayers: int) -> float:
    return sum(floors.depth(topology, sublayers))


def _gated(topology: Any, sublayers: int) -> float:
    """h, y → h'; h, y, dh' → dh, dy: the gate is a number, or made again from the input."""
    return (3 + 5) * sublayers


def _sums(topology: Any, sublayers: int) -> float:
    """Additions, and a sum over earlier layers behind some: X → Y; X, dY, dX → dX."""
    return ADDED * sublayers + sum(4 * len(alpha) + 2 for alpha in topology.alphas.values())


ROWS: dict[type[Topology], Callable[[Any, int], float]] = {
    Additive: lambda topology, sublayers: ADDED * sublayers,
    Clipped: lambda topology, sublayers: ADDED * sublayers,
    BlockAttnRes: lambda topology, sublayers: topology.plan.rows,
    MultiGate: _known,
    Streams: _known,
    Highway: _gated,
    DenseFormer: _sums,
}
