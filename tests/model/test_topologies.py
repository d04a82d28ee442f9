"""Every topology against its equations, driven by random outputs with parameters away from their start."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from residua.config import choices
from residua.model.topology import Topology, build_topology
from residua.ops import sinkhorn
from tests.golden import attnres, dense, hyper, multigate
from tests.golden.compare import agree, close, each_token, leaves_of, random
from tests.model.depth import drive, embedding_and_outputs, named, random_topology

pytestmark = pytest.mark.slow


def check(topology: Topology, equation, sublayers: int, width: int) -> None:
    """Compare all inputs and the gradients of the embedding, every output and every parameter."""
    x, y = embedding_and_outputs(sublayers, width, length=2 if sublayers < 30 else 1)
    leaves = leaves_of(topology, **named(x, y))
    agree(drive(topology, x, y), each_token(equation, x, y), leaves)


def test_additive_is_its_equation() -> None:
    check(random_topology(choices.Additive(), 4, 7), dense.additive, 4, 7)


def test_clipped_is_its_equation_and_clips() -> None:
    topology = random_topology(choices.Clipped(limit=1.5), 6, 33)
    check(topology, partial(dense.clipped, c=1.5), 6, 33)
    x, y = embedding_and_outputs(6, 33)
    last = drive(topology, x, y)[-1]
    assert last.abs().max() == 1.5 and (last.abs() == 1.5).float().mean() > 0.1


def readers_of(topology: Topology, config: choices.FullAttnRes | choices.BlockAttnRes) -> list[attnres.Reader]:
    return [attnres.Reader(r.query, r.gain, config.scale, config.key_norm, config.activation) for r in topology.reads]


FULL = {
    "plain": choices.FullAttnRes(),
    "scaled": choices.FullAttnRes(scale=0.25),
    "raw keys": choices.FullAttnRes(key_norm="none"),
    "sigmoid": choices.FullAttnRes(activation="sigmoid"),
    "window of 1": choices.FullAttnRes(window=1),
    "window of 3": choices.FullAttnRes(window=3),
    "window as wide as the model": choices.FullAttnRes(window=6),
    "all at once": choices.FullAttnRes(window=2, activation="sigmoid", key_norm="none", scale=0.5),
}


@pytest.mark.parametrize("width", [7, 33])
@pytest.mark.parametrize("name", FULL)
def test_full_attention_residuals_are_their_equation(name: str, width: int) -> None:
    config = FULL[name]
    topology = random_topology(config, 6, width)
    equation = partial(attnres.full, readers=readers_of(topology, config), window=config.window)
    check(topology, equation, 6, width)


def test_full_attention_residuals_over_33_sources_are_their_equation() -> None:
    config = choices.FullAttnRes()
    topology = random_topology(config, 32, 7)
    check(topology, partial(attnres.full, readers=readers_of(topology, config)), 32, 7)


BLOCK = [(6, 1), (6, 2), (6, 3), (6, 6), (8, 3), (8, 5), (64, 2)]


@pytest.mark.parametrize(("sublayers", "per_block"), BLOCK)
def test_block_attention_residuals_are_their_equation(sublayers: int, per_block: int) -> None:
    """Whole and unfinished last blocks, one block, blocks of one, 33 sources."""
    config = choices.BlockAttnRes(sublayers_per_block=per_block)
    topology = random_topology(config, sublayers, 7)
    equation = partial(attnres.block, readers=readers_of(topology, config), sublayers_per_block=per_block)
    check(topology, equation, sublayers, 7)


@pytest.mark.parametrize("options", [{"activation": "sigmoid"}, {"key_norm": "none"}, {"scale": 0.2}], ids=str)
def test_block_attention_residuals_take_the_ablations(options: dict) -> None:
    config = choices.BlockAttnRes(sublayers_per_block=2, **options)
    topology = random_topology(config, 6, 33)
    check(topology, partial(attnres.block, readers=readers_of(topology, config), sublayers_per_block=2), 6, 33)


@pytest.mark.parametrize("gate", ["competitive", "independent"])
@pytest.mark.parametrize(("n", "sublayers", "width"), [(2, 6, 7), (2, 2, 33), (4, 8, 33), (4, 4, 7), (8, 14, 7)])
def test_multi_gate_residuals_are_their_equation(n: int, sublayers: int, width: int, gate: str) -> None:
    topology = random_topology(choices.MultiGate(streams=n, gate=gate), sublayers, width)
    equation = partial(
        multigate.multi_gate_residuals,
        n=n,
        gate_queries=[g.query for g in topology.gates],
        biases=[g.bias for g in topology.gates],
        pool_queries=[p.query for p in topology.pools],
        competitive=gate == "competitive",
    )
    check(topology, equation, sublayers, width)


@pytest.mark.parametrize("memory", [choices.Recompute(segment=5), choices.Invert(), choices.Invert(share=0)], ids=repr)
def test_what_multi_gate_residuals_keep_changes_nothing(memory: choices.Memory) -> None:
    outcomes = []
    for config in (choices.MultiGate(streams=3), choices.MultiGate(streams=3, memory=memory)):
        topology = random_topology(config, 10, 7)
        x, y = embedding_and_outputs(10, 7)
        leaves = [t.requires_grad_() for t in (x, *y, *topology.parameters())]
        inputs = drive(topology, x, y)
        outcomes.append(torch.autograd.grad(sum(h.square().sum() for h in inputs), leaves))
    for kept, found in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, kept, rtol=1e-9, atol=1e-10)


def test_a_chain_of_inverted_junctions_may_end_where_a_pipeline_cuts_it() -> None:
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


@pytest.mark.parametrize("width", [7, 33])
def test_the_scalar_highway_is_its_equation(width: int) -> None:
    topology = random_topology(choices.Highway(gate="scalar"), 6, width)
    gates = [g.gates for g in topology.gates]
    check(topology, partial(multigate.highway_scalar, w=[g.query for g in gates], b=[g.bias for g in gates]), 6, width)


@pytest.mark.parametrize("width", [7, 33])
def test_the_elementwise_highway_is_its_equation(width: int) -> None:
    topology = random_topology(choices.Highway(gate="elementwise"), 6, width)
    W, b = [g.weight for g in topology.gates], [g.bias for g in topology.gates]
    check(topology, partial(multigate.highway_elementwise, W=W, b=b), 6, width)


def hyper_junction(junction) -> hyper.HyperJunction:
    """The product keeps mix[out, in]; the paper's A_r is [in, out] and acts transposed."""
    static = (junction.pre, junction.post, junction.mix.T)
    if not hasattr(junction, "maps"):
        return hyper.HyperJunction(*static)
    maps = junction.maps
    return hyper.HyperJunction(*static, maps.pre, maps.post, maps.mix, maps.alpha, maps.beta)


@pytest.mark.parametrize("weights", ["static", "dynamic"])
@pytest.mark.parametrize(("n", "width"), [(1, 7), (2, 33), (4, 7), (8, 7)])
def test_hyper_connections_are_their_equation(n: int, width: int, weights: str) -> None:
    topology = random_topology(choices.HyperConnections(streams=n, weights=weights), 4, width)
    junctions = [hyper_junction(j) for j in topology.junctions]
    check(topology, partial(hyper.streams, n=n, junctions=junctions), 4, width)


def manifold_junctions(topology: Topology, mixing) -> list[hyper.ManifoldJunction]:
    return [hyper.ManifoldJunction(j.phi.T, j.alpha, j.bias, mixing) for j in topology.junctions]


@pytest.mark.parametrize(
    ("n", "width", "iterations"),
    [(2, 33, 20), (4, 7, 20), pytest.param(8, 7, 3, marks=pytest.mark.nightly), (3, 7, 1)],
)
def test_manifold_hyper_connections_are_their_equation(n: int, width: int, iterations: int) -> None:
    topology = random_topology(choices.ManifoldHyper(streams=n, iterations=iterations), 4, width)
    mixing = lambda res: hyper.sinkhorn(res.reshape(n, n), iterations)  # noqa: E731
    equation = partial(hyper.streams, n=n, junctions=manifold_junctions(topology, mixing))
    check(topology, equation, 4, width)


@pytest.mark.parametrize(("n", "width"), [(1, 7), (2, 33), (3, 7), (4, 7)])
def test_lite_manifold_hyper_connections_are_their_equation(n: int, width: int) -> None:
    topology = random_topology(choices.ManifoldHyperLite(streams=n), 4, width)
    mixing = partial(hyper.permutation_mixture, n=n)
    equation = partial(hyper.streams, n=n, junctions=manifold_junctions(topology, mixing))
    check(topology, equation, 4, width)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_normalises_columns_then_rows(iterations: int) -> None:
    logits = random(3, 5, 5)
    golden = torch.stack([hyper.sinkhorn(m, iterations) for m in logits])
    agree([sinkhorn(logits, iterations)], [golden], {"logits": logits})


def test_sinkhorn_rows_are_exact_and_columns_follow() -> None:
    logits = random(50, 4, 4, scale=2.0)
    one = torch.ones(50, 4, dtype=torch.float64)
    first = sinkhorn(logits, 1)
    close("rows", first.sum(-1), one, 1e-15 * 4)
    assert (first.sum(-2) - one).abs().max() > 1e-2
    close("rows", sinkhorn(logits, 20).sum(-1), one, 1e-15 * 4)
    assert (sinkhorn(logits, 20).sum(-2) - one).abs().max() < 1e-2
    close("columns", sinkhorn(logits, 2000).sum(-2), one, 1e-9)


@pytest.mark.parametrize("axis", [0, 1], ids=["row", "column"])
def test_sinkhorn_survives_a_stream_far_below_the_others(axis: int) -> None:
    """Only ratios inside rows and columns matter: a row or column shifted by any constant is the same matrix."""
    logits = random(4, 4, grad=False).float()
    shifted = logits.clone()
    shifted.select(axis, 2).sub_(120.0)
    torch.testing.assert_close(sinkhorn(shifted, 20), sinkhorn(logits, 20), atol=1e-3, rtol=0)


DENSE = [(1, 1), (2, 1), (1, 2), (3, 2), (4, 5), (1, 20)]


@pytest.mark.parametrize(("dilation", "period"), DENSE)
@pytest.mark.parametrize("width", [7, 33])
def test_denseformer_is_its_equation(dilation: int, period: int, width: int) -> None:
    topology = random_topology(choices.DenseFormer(dilation=dilation, period=period), 20, width)
    alpha = {int(i): a for i, a in topology.alphas.items()}
    assert sorted(alpha) == [i for i in range(1, 11) if i % period == 0]
    equation = partial(dense.denseformer, alpha=alpha, dilation=dilation, period=period)
    check(topology, equation, 20, width)


def test_denseformer_has_one_weight_for_every_earlier_layer() -> None:
    topology = random_topology(choices.DenseFormer(), 20, 7)
    assert sum(a.numel() for a in topology.parameters()) == 10 * 13 // 2


def test_a_finished_model_of_32_blocks_keeps_33_sources() -> None:
    topology = random_topology(choices.BlockAttnRes(sublayers_per_block=2), 64, 7)
    x, y = embedding_and_outputs(64, 7)
    _, state = topology.open(x)
    for k, output in enumerate(y):
        _, state = topology.step(k, output, state)
    assert len(state) == 33


def test_a_topology_that_states_no_cost_is_counted_by_running_it() -> None:
    """By default a topology is run on tensors without memory; the counts are those that were made by hand."""
    streams, highway = (
        build_topology(c, 6, 32) for c in (choices.HyperConnections(weights="static"), choices.Highway())
    )
    assert Topology.costs(streams, 6, 32).floor() == streams.costs(6, 32).floor() == (10 * 6, 15 * 6)
    costs = highway.costs(6, 32)
    assert costs.floor() == (3 * 6, 5 * 6) and costs.kept_widths == 2
    with torch.device("meta"):
        shapes = build_topology(choices.ManifoldHyper(), 6, 32)
    traced, stated = Topology.costs(shapes, 6, 32).floor(), shapes.costs(6, 32).floor()
    assert traced.forward > stated.forward  # it also carries logits
