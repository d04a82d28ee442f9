"""Driving a topology by itself: random sublayer outputs in, sublayer inputs out."""

from torch import Tensor

from residua.config import choices
from residua.model.context import Input, Reads
from residua.model.topology import Topology, build_topology
from tests.golden.compare import random, randomise


def drive(topology: Topology, x: Tensor, y: list[Tensor]) -> list[Tensor]:
    """The inputs of all sublayers and of the final norm, for given outputs."""
    h, state = topology.open(x)
    inputs = reads_of(h)
    for k, output in enumerate(y):
        h, state = topology.step(k, output, state)
        inputs += reads_of(h)
    return inputs


def reads_of(h: Input) -> list[Tensor]:
    """One input, or q, k, v and r."""
    return [*h] if isinstance(h, Reads) else [h]


def embedding_and_outputs(sublayers: int, width: int, *, length: int = 2) -> tuple[Tensor, list[Tensor]]:
    return random(2, length, width, seed=7), [random(2, length, width, seed=100 + k) for k in range(sublayers)]


def random_topology(config: choices.Topology, sublayers: int, width: int) -> Topology:
    """Built and moved away from its initial values, in float64."""
    topology = randomise(build_topology(config, sublayers, width))
    assert isinstance(topology, Topology)
    return topology


def named(x: Tensor, y: list[Tensor]) -> dict[str, Tensor]:
    return {"embedding": x} | {f"output {k}": output for k, output in enumerate(y)}


SMALL: dict[str, choices.Topology] = {
    "additive": choices.Additive(),
    "parallel": choices.Parallel(),
    "clipped": choices.Clipped(limit=1.0),
    "layer_factor": choices.LayerFactor(),
    "scaled": choices.ScaledSum(),
    "scaled scalar": choices.ScaledSum(gain="scalar", start=0.0),
    "laurel": choices.Laurel(rank=2),
    "lns": choices.LayerNormScaling(),
    "keel": choices.Keel(),
    "deepnorm": choices.DeepNorm(),
    "resi_dual": choices.ResiDual(),
    "x0": choices.ResidualScalars(),
    "x0 sublayer": choices.ResidualScalars(scalars="sublayer", embedding="raw"),
    "full_attnres": choices.FullAttnRes(),
    "full_attnres window": choices.FullAttnRes(window=2),
    "full_attnres sigmoid": choices.FullAttnRes(activation="sigmoid"),
    "full_attnres raw keys": choices.FullAttnRes(key_norm="none", scale=0.5),
    "block_attnres": choices.BlockAttnRes(sublayers_per_block=3),
    "delta_attnres": choices.DeltaAttnRes(),
    "delta_attnres block": choices.DeltaAttnRes(sublayers_per_block=3),
    "multi_gate": choices.MultiGate(streams=4),
    "multi_gate independent": choices.MultiGate(streams=3, gate="independent"),
    "multi_gate inverted": choices.MultiGate(streams=3, memory=choices.Invert(share=0.1)),
    "highway": choices.Highway(),
    "highway elementwise": choices.Highway(gate="elementwise"),
    "gated_residual": choices.GatedResidual(streams=3, rank=2),
    "hyper": choices.HyperConnections(),
    "hyper static": choices.HyperConnections(weights="static", streams=2),
    "hyper identity": choices.HyperConnections(mix="identity", streams=2),
    "hyper cyclic": choices.HyperConnections(mix="cyclic", streams=3),
    "hyper_single_pass": choices.SinglePassHyper(streams=2),
    "frac": choices.FracConnections(fractions=2),
    "frac static": choices.FracConnections(fractions=2, weights="static"),
    "mhc": choices.ManifoldHyper(iterations=5),
    "mhc_lite": choices.ManifoldHyperLite(streams=3),
    "dense": choices.DenseFormer(),
    "dense dilated": choices.DenseFormer(dilation=2, period=2),
    "mudd": choices.Mudd(),
    "mudd few": choices.Mudd(ways=("v", "r"), layers=(1, 2), sources=1),
    "mudd stream": choices.Mudd(ways=("r",)),
    "dca": choices.DeepCross(),
    "dca recent": choices.DeepCross(recent=1),
    "injection": choices.Injection(prelude=1, loop=1, turns=2),
}
"""One of each, for tests of properties that all share."""
