"""What follows from a model's depth alone, without tensors: how many outputs fill streams, and the gates' biases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from residua.errors import UserError

if TYPE_CHECKING:
    from residua.config.topologies import MultiGate

BASE_DEPTH = 21  # gated sublayers of the paper's reference model: 12 layers, 4 streams
BASE_BIAS = -3.0  # the gate bias of that model


def lerping_sublayers(sublayers: int, streams: int) -> int:
    """Sublayers whose output is gated into the streams; the first `streams − 1` outputs become streams."""
    return sublayers - (streams - 1)


def depth_bias(lerping: int, streams: int, base_depth: int = BASE_DEPTH, base_bias: float = BASE_BIAS) -> float:
    """b = ln( sqrt(L_lerp/L_base)·(e^−b_base + 1) − n ), which starts β near sqrt(L_base/L_lerp)·sigmoid(b_base)."""
    opened = math.exp(-base_bias) + 1
    margin = math.sqrt(lerping / base_depth) * opened - streams
    if margin <= 0:
        needed = math.floor(base_depth * (streams / opened) ** 2) + 1
        raise UserError(
            f"topology.streams = {streams} is too many for {lerping} gated sublayers: the gates' initial bias "
            f"ln(sqrt(L/{base_depth})(e^{-base_bias:g}+1) - n) has no solution; use fewer streams, or layers for at "
            f"least {needed} of them."
        )
    return math.log(margin)


def gate_bias(config: MultiGate, lerping: int) -> tuple[float, ...]:
    """The initial biases of one junction: [forget, 0 … 0] for competitive gates, n equal ones for independent gates.

    For independent gates the paper's formula, with its n, misses its own target, sqrt(21/L)·sigmoid(−3); with n = 1 it
    meets it. `corrected` uses n = 1, `printed` the paper's n.
    """
    n, base = config.streams, (config.base_depth, config.base_bias)
    if config.gate == "competitive":
        return (depth_bias(lerping, n, *base),) + (0.0,) * n
    return (-depth_bias(lerping, 1 if config.bias_init == "corrected" else n, *base),) * n
