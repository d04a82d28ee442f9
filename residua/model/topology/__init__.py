"""How sublayers talk to each other along depth: one file per family, all used through `open` and `step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from residua.config import choices
from residua.config.settings import ConfigError, explain
from residua.model.topology.additive import Additive, Clipped
from residua.model.topology.attnres import BlockAttnRes, FullAttnRes
from residua.model.topology.base import State, Topology
from residua.model.topology.dense import DenseFormer
from residua.model.topology.hyper import HyperConnections, ManifoldHyper, ManifoldHyperLite
from residua.model.topology.multigate import Highway, MultiGate

TOPOLOGIES: dict[type[choices.TopologyChoice], Callable[..., Topology]] = {
    choices.Additive: Additive,
    choices.Clipped: Clipped,
    choices.FullAttnRes: FullAttnRes,
    choices.BlockAttnRes: BlockAttnRes,
    choices.MultiGate: MultiGate,
    choices.Highway: Highway,
    choices.HyperConnections: HyperConnections,
    choices.ManifoldHyper: ManifoldHyper,
    choices.ManifoldHyperLite: ManifoldHyperLite,
    choices.DenseFormer: DenseFormer,
}


def register_topology(choice: type[choices.TopologyChoice], topology: Callable[..., Topology]) -> None:
    """Make `topology.kind = …` of a configuration build `topology(config, sublayers, width)`; see docs/extend.md."""
    choices.TopologyChoice.join(choice)
    TOPOLOGIES[choice] = topology


def build_topology(config: choices.TopologyChoice | Mapping[str, Any], sublayers: int, width: int) -> Topology:
    """The topology a configuration describes, for a model of `sublayers` sublayers.

    A table is a configuration too: {"kind": "multi_gate", "streams": 4} is choices.MultiGate(streams=4).
    """
    choice = config if isinstance(config, choices.TopologyChoice) else _chosen(dict(config))
    return TOPOLOGIES[type(choice)](choice, sublayers, width)


def _chosen(table: dict[str, Any]) -> choices.TopologyChoice:
    try:
        return choices.TopologyChoice.choose(table)
    except ValidationError as error:
        raise ConfigError(explain(error, choices.TopologyChoice)) from None


__all__ = ["TOPOLOGIES", "State", "Topology", "build_topology", "register_topology"]
