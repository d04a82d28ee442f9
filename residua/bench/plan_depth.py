"""What the topology's junctions add to a training step, estimated: bytes over the bandwidth they reach.

A topology states the rows of C two-byte elements that its junctions move (`Topology.costs`) and the share of the
bandwidth they reach. The rate that an additive model's step reaches was measured with its additions, so their rows are
subtracted.
"""

from __future__ import annotations

import torch

from residua.config.model import ModelConfig
from residua.model.topology import build_topology
from residua.model.topology.facts import ADDED_IN_NORM, Costs


def depth_bytes(model: ModelConfig, *, pipelined: bool = False) -> float:
    """Bytes per token of all junctions, forward and backward, beyond an additive model's, at the full bandwidth.

    Junctions that reach less of the bandwidth count for more. `pipelined`: as in the stages of a pipeline.
    """
    costs = _costs(model)
    rows = sum(costs.in_stages(model.sublayers)) if pipelined else costs.step
    beyond = max(0.0, rows - ADDED_IN_NORM * model.sublayers)
    return 2 * model.width * beyond / costs.bandwidth_share


def kept_widths(model: ModelConfig) -> float:
    """Widths that a junction keeps for the backward pass, besides the next sublayer's input."""
    return _costs(model).kept_widths


def _costs(model: ModelConfig) -> Costs:
    with torch.device("meta"):
        topology = build_topology(model.topology, model.sublayers, model.width)
    return topology.costs(model.sublayers, model.width)
