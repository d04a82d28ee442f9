"""What the topology's junctions add to a training step, estimated: bytes over the bandwidth they reach.

A topology states the rows of C two-byte elements that its junctions move (`Topology.step_rows`) and the share of the
bandwidth they reach. The rate that an additive model's step reaches was measured with its additions, so their rows are
subtracted.
"""

from __future__ import annotations

import torch

from residua.config.model import ModelConfig
from residua.model.topology import Topology, build_topology
from residua.model.topology.facts import ADDED_IN_NORM


def depth_bytes(model: ModelConfig, *, pipelined: bool = False) -> float:
    """Bytes per token of all junctions, forward and backward, beyond an additive model's, at the full bandwidth.

    Junctions that reach less of the bandwidth count for more. `pipelined`: as in the stages of a pipeline.
    """
    topology = _shapes(model)
    rows = topology.step_rows(model.sublayers, model.width, pipelined=pipelined)
    beyond = max(0.0, rows - ADDED_IN_NORM * model.sublayers)
    return 2 * model.width * beyond / topology.bandwidth_share


def kept_widths(model: ModelConfig) -> float:
    """Widths that a junction keeps for the backward pass, besides the next sublayer's input."""
    return _shapes(model).kept_widths(model.sublayers, model.width)


def _shapes(model: ModelConfig) -> Topology:
    with torch.device("meta"):
        return build_topology(model.topology, model.sublayers, model.width)
