"""Every topology against its equations, driven by random outputs with parameters away from their start."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from residua.config import choices
from residua.model.topology import TOPOLOGIES, Topology, build_topology
from residua.ops import sinkhorn
from tests.golden import attnres, dense, gated_residual, hyper, multigate, multiway, norm_placement, residual_scalars
from tests.golden.compare import agree, each_token, leaves_of, random
from tests.model.depth import drive, embedding_and_outputs, named, random_topology

pytestmark = pytest.mark.slow

Equation = Callable[..., Any]
"""The embedding and the outputs of one token in; the inputs of all readers out."""


def attention_residuals(topology: Any) -> Equation:
    config = topology.config
    reads = [attnres.Reader(r.query, r.gain, config.scale, config.key_norm, config.activation) for r in topology.reads]
    if isinstance(config, choices.DeltaAttnRes):
        return partial(attnres.delta, readers=reads, sublayers_per_block=config.sublayers_per_block)
    if isinstance(config, choices.FullAttnRes):
        return partial(attnres.full, readers=reads, window=config.window)
    return partial(attnres.block, readers=reads, sublayers_per_block=config.sublayers_per_block)


def multi_gate(topology: Any) -> Equation:
    return partial(
        multigate.multi_gate_residuals,
        n=topology.fill + 1,
        gate_queries=[g.query for g in topology.gates],
        biases=[g.bias for g in topology.gates],
        pool_queries=[p.query for p in topology.pools],
        competitive=topology.competitive,
    )


def highway(topology: Any) -> Equation:
    if hasattr(topology.gates[0], "weight"):
        W, b = [g.weight for g in topology.gates], [g.bias for g in topology.gates]
        return partial(multigate.highway_elementwise, W=W, b=b)
    gates = [g.gates for g in topology.gates]
    return partial(multigate.highway_scalar, w=[g.query for g in gates], b=[g.bias for g in gates])


def hyper_connections(topology: Any) -> Equation:
    """The product keeps mix[out, in]; the paper's A_r is [in, out] and acts transposed."""
    junctions = []
    for j in topology.junctions:
        maps = () if not hasattr(j, "maps") else (j.maps.pre, j.maps.post, j.maps.mix, j.maps.alpha, j.maps.beta)
        mix = torch.eye(topology.streams).double() if j.mix is None else j.mix
        mix = mix.T if mix.dim() == 2 else hyper.shifts(mix)
        junctions.append(hyper.HyperJunction(j.pre, j.post, mix, *maps))
    single = TOPOLOGIES[choices.SinglePassHyper] is type(topology)
    return partial(hyper.single_pass if single else hyper.streams, n=topology.streams, junctions=junctions)


def fractions(topology: Any) -> Equation:
    junctions, m = [], topology.fractions
    for j in topology.junctions:
        if not hasattr(j, "maps"):
            junctions.append(hyper.FracJunction(j.post, j.pre.T, j.mix.T))
            continue
        W = j.maps.weight.T
        dynamic = (W[:, -1], W[:, :m], W[:, m : 2 * m], j.maps.alpha, j.maps.beta)
        junctions.append(hyper.FracJunction(j.post, j.pre.T, j.mix.T, *dynamic))
    return partial(hyper.frac, m=m, junctions=junctions)


def laurel(topology: Any) -> Equation:
    names = {"A": "down", "B": "up", "alpha": "output", "beta": "stream"}
    keys = {key: [getattr(j, name) for j in topology.junctions] for key, name in names.items()}
    return partial(norm_placement.laurel, **keys)


def manifold(topology: Any) -> Equation:
    n, mixing = topology.streams, topology.junctions[0].mixing
    mix: Any = partial(hyper.permutation_mixture, n=n)
    if hasattr(mixing, "iterations"):
        mix = lambda res: hyper.sinkhorn(res.reshape(n, n), mixing.iterations)  # noqa: E731
    junctions = [hyper.ManifoldJunction(j.phi.T, j.alpha, j.bias, mix) for j in topology.junctions]
    return partial(hyper.streams, n=n, junctions=junctions)


def denseformer(topology: Any) -> Equation:
    alpha = {int(i): a for i, a in topology.alphas.items()}
    assert sorted(alpha) == [i for i in range(1, 11) if i % topology.period == 0]
    return partial(dense.denseformer, alpha=alpha, dilation=topology.dilation, period=topology.period)


def scaled_residual(topology: Any) -> Equation:
    s, b = topology.scalars, topology.backout
    if hasattr(s, "output"):
        return partial(residual_scalars.modded, resid=s.stream, post=s.output, x0s=s.embedding, backout=b)
    return partial(residual_scalars.nanochat, resid=s.stream, x0s=s.embedding, backout=b)


def placed_norms(topology: Any) -> Equation:
    if hasattr(topology, "scales"):
        return partial(norm_placement.scaled, scales=list(topology.scales))
    keys = {"alpha": topology.alpha} if hasattr(topology, "alpha") else {}
    equations = {
        choices.LayerNormScaling: norm_placement.lns,
        choices.Keel: norm_placement.keel,
        choices.DeepNorm: norm_placement.deepnorm,
        choices.ResiDual: norm_placement.resi_dual,
    }
    (equation,) = (equations[choice] for choice, kind in TOPOLOGIES.items() if kind is type(topology))
    return partial(equation, gains=[norm.weight for norm in topology.norms], **keys)


def gated_streams(topology: Any) -> Equation:
    reads = [gated_residual.Read(r.gain, r.down, r.up, r.inject) for r in (*topology.reads, topology.last_read)]
    return partial(gated_residual.gated_residual, reads=reads)


def mudd(topology: Any) -> Equation:
    config = topology.config
    aggregates = {int(i): multiway.Aggregate(w.down, w.up, w.static) for i, w in topology.weights.items()}
    return partial(multiway.mudd, ways=config.ways, aggregates=aggregates, sources=config.sources)


def injection(topology: Any) -> Equation:
    return partial(multiway.injection, a=topology.rate, d=topology.step_size, b=topology.input, starts=topology.starts)


def deep_cross(topology: Any) -> Equation:
    selected = [[multiway.Choice(s.query, s.bias) for s in ways.values()] for ways in topology.selectors]
    return partial(multiway.deep_cross, choices=selected, recent=topology.recent)


FULL: list[dict[str, Any]] = [
    {}, {"scale": 0.25}, {"key_norm": "none"}, {"activation": "sigmoid"}, {"window": 1}, {"window": 3}, {"window": 6},
    {"window": 2, "activation": "sigmoid", "key_norm": "none", "scale": 0.5},
]  # fmt: skip
BLOCK = [(6, 1), (6, 2), (6, 3), (6, 6), (8, 3), (8, 5)]
"""Whole and unfinished last blocks, one block, blocks of one."""
DEEP_BLOCKS = choices.BlockAttnRes(sublayers_per_block=2), 64, 7, attention_residuals
"""33 sources, which full Attention Residuals have in `make test`."""
DELTA = [(2, 1), (6, 1), (8, 3)]
ABLATED: list[dict[str, Any]] = [{"activation": "sigmoid"}, {"key_norm": "none"}, {"scale": 0.2}]
GATES = [(2, 6, 7), (2, 2, 33), (4, 8, 33), (4, 4, 7), (8, 14, 7)]
DENSE = [(1, 1), (2, 1), (1, 2), (3, 2), (4, 5), (1, 20)]
MUDD: list[dict[str, Any]] = [
    {}, {"ways": ("v", "r"), "layers": (2, 3), "sources": 2}, {"ways": ("r",)}, {"ways": ("k", "q"), "sources": 1},
]  # fmt: skip
EQUATIONS: list[Any] = [
    (choices.Additive(), 4, 7, lambda _: dense.additive),
    (choices.Parallel(), 6, 7, lambda _: dense.parallel),
    (choices.LayerFactor(), 6, 7, lambda t: partial(dense.layer_factor, s=t.factor)),
    *((choices.Clipped(limit=c), 6, 33, lambda _, c=c: partial(dense.clipped, c=c)) for c in (1.5, 9.0)),
    *(
        (choice, n, 7, placed_norms)
        for choice, n in product(
            (choices.LayerNormScaling(), choices.Keel(), choices.DeepNorm(), choices.ResiDual()), (2, 6)
        )
    ),
    *((choices.ScaledSum(gain=gain), 4, 7, placed_norms) for gain in ("elementwise", "scalar")),
    *((choices.Keel(alpha=0.5), 4, 9, placed_norms), (choices.DeepNorm(alpha=3.0), 4, 9, placed_norms)),
    *((choices.GatedResidual(streams=n, rank=3), 4, width, gated_streams) for n, width in [(2, 7), (4, 9)]),
    *((choices.ResidualScalars(), n, width, scaled_residual) for n, width in [(2, 7), (6, 33), (8, 7)]),
    (choices.ResidualScalars(scalars="sublayer", embedding="raw"), 6, 7, scaled_residual),
    *((choices.FullAttnRes(**keys), 6, width, attention_residuals) for keys, width in product(FULL, (7, 33))),
    (choices.FullAttnRes(), 32, 7, attention_residuals),
    *((choices.BlockAttnRes(sublayers_per_block=size), n, 7, attention_residuals) for n, size in BLOCK),
    pytest.param(*DEEP_BLOCKS, marks=pytest.mark.nightly),
    *((choices.BlockAttnRes(sublayers_per_block=2, **keys), 6, 33, attention_residuals) for keys in ABLATED),
    *((choices.DeltaAttnRes(sublayers_per_block=size), n, 7, attention_residuals) for n, size in DELTA),
    (choices.DeltaAttnRes(activation="sigmoid", scale=0.5), 4, 33, attention_residuals),
    *(
        (choices.MultiGate(streams=n, gate=gate), sublayers, width, multi_gate)
        for (n, sublayers, width), gate in product(GATES, ("competitive", "independent"))
    ),
    *((choices.Highway(gate=gate), 6, width, highway) for gate, width in product(("scalar", "elementwise"), (7, 33))),
    *(
        (choices.HyperConnections(streams=n, weights=weights), 4, width, hyper_connections)
        for (n, width), weights in product([(1, 7), (2, 33), (4, 7), (8, 7)], ("static", "dynamic"))
    ),
    *((choices.HyperConnections(streams=3, mix=mix), 4, 7, hyper_connections) for mix in ("identity", "cyclic")),
    (choices.HyperConnections(streams=3, mix="cyclic", weights="static"), 4, 7, hyper_connections),
    *(
        (choices.FracConnections(fractions=m, weights=weights), 4, width, fractions)
        for (m, width), weights in product([(1, 7), (3, 9)], ("static", "dynamic"))
    ),
    (choices.Laurel(rank=3), 4, 7, laurel),
    *((choices.SinglePassHyper(streams=3, mix=mix), 4, 7, hyper_connections) for mix in ("identity", "free")),
    *(
        (choices.ManifoldHyper(streams=n, iterations=iterations), 4, width, manifold)
        for n, width, iterations in [(2, 33, 20), (4, 7, 20), (3, 7, 1)]
    ),
    pytest.param(choices.ManifoldHyper(streams=8, iterations=3), 4, 7, manifold, marks=pytest.mark.nightly),
    *((choices.ManifoldHyperLite(streams=n), 4, width, manifold) for n, width in [(1, 7), (2, 33), (3, 7), (4, 7)]),
    *(
        (choices.DenseFormer(dilation=dilation, period=period), 20, width, denseformer)
        for (dilation, period), width in product(DENSE, (7, 33))
    ),
    *((choices.Mudd(**keys), 8, 7, mudd) for keys in MUDD),
    *((choices.DeepCross(recent=recent), 8, 7, deep_cross) for recent in (None, 1, 2, 9)),
    *((choices.Injection(prelude=p, loop=1, turns=t), 8, 7, injection) for p, t in ((1, 2), (0, 3), (2, 1))),
]


@pytest.mark.parametrize(
    ("config", "sublayers", "width", "equation_of"), EQUATIONS, ids=lambda x: "" if callable(x) else str(x)[:70]
)
def test_every_topology_matches_its_equation(
    config: choices.Topology, sublayers: int, width: int, equation_of: Callable[[Topology], Equation]
) -> None:
    """All inputs and the gradients of the embedding, every output and every parameter."""
    topology = random_topology(config, sublayers, width)
    x, y = embedding_and_outputs(sublayers, width, length=2 if sublayers < 30 else 1)
    leaves = leaves_of(topology, **named(x, y))
    # the first mixes equal copies, and the results of the last are summed
    silent = [f"junctions.{k}.mix" for k in (0, sublayers - 1) if config.model_dump().get("mix") == "cyclic"]
    agree(drive(topology, x, y), each_token(equation_of(topology), x, y), leaves, silent=silent)


def test_gradients_written_for_compiled_code_match_the_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    topology = random_topology(choices.FracConnections(fractions=3), 6, 9)
    x, y = embedding_and_outputs(6, 9)
    agree(drive(topology, x, y), each_token(fractions(topology), x, y), leaves_of(topology, **named(x, y)))


@pytest.mark.parametrize("memory", [choices.Recompute(segment=5), choices.Invert(), choices.Invert(share=0)], ids=repr)
def test_multi_gate_memory_settings_do_not_change_gradients(memory: choices.Memory) -> None:
    outcomes = []
    for config in (choices.MultiGate(streams=3), choices.MultiGate(streams=3, memory=memory)):
        topology = random_topology(config, 10, 7)
        x, y = embedding_and_outputs(10, 7)
        leaves = [t.requires_grad_() for t in (x, *y, *topology.parameters())]
        inputs = drive(topology, x, y)
        outcomes.append(torch.autograd.grad(sum(h.square().sum() for h in inputs), leaves))
    for kept, found in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, kept, rtol=1e-9, atol=1e-10)


def test_inverted_junctions_can_be_cut_by_a_pipeline() -> None:
    outcomes = []
    for cut in (None, 5):
        topology = random_topology(choices.MultiGate(streams=3, memory=choices.Invert()), 8, 7)
        x, y = embedding_and_outputs(8, 7)
        leaves = [t.requires_grad_() for t in (x, *y)]
        h, state = topology.open(x)
        for k, output in enumerate(y):
            h, state = topology.step(k, output, state, ends=k == cut)
            assert len(state) == (1 if k in (cut, 7) else min(k + 2, 3) if k < 2 else 2)
        outcomes.append(torch.autograd.grad(h.square().sum(), leaves))
    for whole, cut_up in zip(*outcomes, strict=True):
        torch.testing.assert_close(cut_up, whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_normalises_columns_then_rows(iterations: int) -> None:
    logits = random(3, 5, 5)
    golden = torch.stack([hyper.sinkhorn(m, iterations) for m in logits])
    agree([sinkhorn(logits, iterations)], [golden], {"logits": logits})


@pytest.mark.parametrize("axis", [0, 1], ids=["row", "column"])
def test_sinkhorn_survives_a_stream_far_below_the_others(axis: int) -> None:
    """Only ratios inside rows and columns matter: a row or column shifted by any constant is the same matrix."""
    logits = random(4, 4, grad=False).float()
    shifted = logits.clone()
    shifted.select(axis, 2).sub_(120.0)
    torch.testing.assert_close(sinkhorn(shifted, 20), sinkhorn(logits, 20), atol=1e-3, rtol=0)


def test_denseformer_has_one_weight_per_earlier_layer() -> None:
    topology = random_topology(choices.DenseFormer(), 20, 7)
    assert sum(a.numel() for a in topology.parameters()) == 10 * 13 // 2


def test_a_finished_model_of_32_blocks_keeps_33_sources() -> None:
    topology = random_topology(choices.BlockAttnRes(sublayers_per_block=2), 64, 7)
    x, y = embedding_and_outputs(64, 7)
    _, state = topology.open(x)
    for k, output in enumerate(y):
        _, state = topology.step(k, output, state)
    assert len(state) == 33


def test_a_topology_without_a_stated_cost_is_measured() -> None:
    """By default a topology is run on tensors without memory; the counts match counts by hand."""
    streams, highway = (
        build_topology(c, 6, 32) for c in (choices.HyperConnections(weights="static"), choices.Highway())
    )
    assert Topology.costs(streams, 6, 32).floor() == streams.costs(6, 32).floor() == (10 * 6, 15 * 6)
    costs = highway.costs(6, 32)
    assert costs.floor() == (3 * 6, 5 * 6) and costs.moved() == 48 and costs.kept(6) == 2
    with torch.device("meta"):
        shapes = build_topology(choices.ManifoldHyper(), 6, 32)
    traced, stated = Topology.costs(shapes, 6, 32).floor(), shapes.costs(6, 32).floor()
    assert traced.forward > stated.forward  # it also carries logits
