"""How sublayers communicate along depth: one file per family, all called through `open` and `step`."""

from __future__ import annotations

from collections.abc import Callable

from residua.config import choices
from residua.model.context import Reads
from residua.model.topology.additive import Additive, Clipped, LayerFactor, Parallel
from residua.model.topology.attnres import BlockAttnRes, BoundaryAttnRes, FullAttnRes
from residua.model.topology.base import Boundary, Initialization, State, Topology, refuse_moved
from residua.model.topology.delta_attnres import DeltaAttnRes
from residua.model.topology.dense import DenseFormer
from residua.model.topology.facts import Ablations, Costs, SourceNames
from residua.model.topology.frac import FracConnections
from residua.model.topology.gated_residual import GatedResidual
from residua.model.topology.hyper import HyperConnections, ManifoldHyper, ManifoldHyperLite, SinglePassHyper
from residua.model.topology.laurel import Laurel
from residua.model.topology.multigate import Highway, MultiGate
from residua.model.topology.multiway import DeepCross, Mudd
from residua.model.topology.norm_placement import DeepNorm, Keel, LayerNormScaling, ResiDual, ScaledSum
from residua.model.topology.residual_scalars import ResidualScalars
from residua.model.topology.turn_injection import Injection

TOPOLOGIES: dict[type[choices.TopologyChoice], Callable[..., Topology]] = {
    choices.Additive: Additive,
    choices.Parallel: Parallel,
    choices.Clipped: Clipped,
    choices.LayerFactor: LayerFactor,
    choices.ScaledSum: ScaledSum,
    choices.Laurel: Laurel,
    choices.LayerNormScaling: LayerNormScaling,
    choices.Keel: Keel,
    choices.DeepNorm: DeepNorm,
    choices.ResiDual: ResiDual,
    choices.ResidualScalars: ResidualScalars,
    choices.FullAttnRes: FullAttnRes,
    choices.BlockAttnRes: BlockAttnRes,
    choices.BoundaryAttnRes: BoundaryAttnRes,
    choices.DeltaAttnRes: DeltaAttnRes,
    choices.MultiGate: MultiGate,
    choices.Highway: Highway,
    choices.GatedResidual: GatedResidual,
    choices.HyperConnections: HyperConnections,
    choices.FracConnections: FracConnections,
    choices.SinglePassHyper: SinglePassHyper,
    choices.ManifoldHyper: ManifoldHyper,
    choices.ManifoldHyperLite: ManifoldHyperLite,
    choices.DenseFormer: DenseFormer,
    choices.Mudd: Mudd,
    choices.DeepCross: DeepCross,
    choices.Injection: Injection,
}


def register_topology(choice: type[choices.TopologyChoice], topology: Callable[..., Topology]) -> None:
    """Register the class that a choice with `topology.kind = …` builds, as `topology(config, sublayers, width)`; see
    docs/extend.md.
    """
    choices.TopologyChoice.join(choice)
    TOPOLOGIES[choice] = topology


def build_topology(config: choices.TopologyChoice, sublayers: int, width: int) -> Topology:
    """Build the topology that a configuration describes, for a model with `sublayers` sublayers."""
    topology = TOPOLOGIES[type(config)](config, sublayers, width)
    refuse_moved(type(topology).__name__, vars(topology))
    return topology


__all__ = [
    "TOPOLOGIES", "Ablations", "Boundary", "Costs", "Initialization", "Reads", "SourceNames", "State", "Topology",
    "build_topology", "register_topology",
]  # fmt: skip
