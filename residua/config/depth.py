"""What follows from a model's depth alone, without tensors: how many outputs fill streams, and the gates' biases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residua.config.topologies import MultiGate

BASE_DEPTH = 21  # gated sublayers of the paper's reference model: 12 layers, 4 streams
BASE_BIAS = 3.0  # minus the gate bias of that model


def lerping_sublayers(sublayers: int, streams: int) -> int:
    """Sublayers whose output is gated into the streams; the first `streams − 1` outputs become streams."""
    return sublayers - (streams - 1)


def depth_bias(lerping: int, streams: int) -> float:
    """b = ln( sqrt(L_lerp/21)·(e³+1) − n ), which starts β near sqrt(21/L_lerp)·sigmoid(−3)."""
    margin = math.sqrt(lerping / BASE_DEPTH) * (math.exp(BASE_BIAS) + 1) - streams
    if margin <= 0:
        needed = math.floor(BASE_DEPTH * (streams / (math.exp(BASE_BIAS) + 1)) ** 2) + 1
        raise ValueError(
            f"topology.streams = {streams} is too many for {lerping} gated sublayers: the gates' initial bias "
            f"ln(sqrt(L/21)(e^3+1) - n) has no solution; use fewer streams, or layers for at least {needed} of them."
        )
    return math.log(margin)


def gate_bias(config: MultiGate, lerping: int) -> tuple[float, ...]:
    """The initial biases of one junction: [forget, 0 … 0] for competitive gates, n equal ones for independent gates.

    For independent gates the paper's formula, with its n, misses its own target, sqrt(21/L)·sigmoid(−3); with n = 1 it
    meets it. `corrected` uses n = 1, `printed` the paper's n.
    """
    n = config.streams
    if config.gate == "competitive":
        return (depth_bias(lerping, n),) + (0.0,) * n
    return (-depth_bias(lerping, 1 if config.bias_init == "corrected" else n),) * n
