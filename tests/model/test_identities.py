"""Identities that hold for any parameters."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import residua
from residua.config import choices
from residua.config.settings import ConfigError
from residua.errors import UserError
from residua.model import taps
from residua.model.norm import DyT, NoNorm
from residua.model.topology import build_topology
from residua.ops._runtime.numeric import rms
from tests.golden.compare import agree, close, randomise
from tests.model.depth import SMALL, drive, embedding_and_outputs, named, random_topology, reads_of
from tests.model.small import small, tokens_and_targets

EQUAL = [choices.BlockAttnRes(sublayers_per_block=1), choices.FullAttnRes(window=8)]


@pytest.mark.parametrize("config", EQUAL, ids=str)
def test_blocks_of_one_and_a_whole_window_equal_full_attnres(config: choices.Topology) -> None:
    full = random_topology(choices.FullAttnRes(), 8, 33)
    same = build_topology(config, 8, 33).double()
    same.load_state_dict(full.state_dict())
    x, y = embedding_and_outputs(8, 33)
    agree(drive(same, x, y), drive(full, x, y), named(x, y))


def test_one_block_with_zero_queries_averages_embedding_and_sum() -> None:
    topology = build_topology(choices.BlockAttnRes(sublayers_per_block=6), 6, 7).double()
    x, y = embedding_and_outputs(6, 7)
    close("last read", drive(topology, x, y)[-1], (x + sum(y)) / 2, 1e-14)


@pytest.mark.parametrize("gate", ["competitive", "independent"])
def test_closed_gates_keep_the_streams_of_the_fill_phase(gate: str) -> None:
    topology = random_topology(choices.MultiGate(streams=4, gate=gate), 10, 7)
    with torch.no_grad():
        for junction in topology.gates:
            junction.bias.zero_()
            junction.bias[0 if gate == "competitive" else slice(None)] = 800.0 if gate == "competitive" else -800.0
    x, y = embedding_and_outputs(10, 7)
    _, state = topology.open(x)
    for k, output in enumerate(y):
        _, state = topology.step(k, output, state)
        if k >= 3:
            assert torch.equal(state[0], torch.stack([x, *y[:3]], -2))


def test_streams_are_filled_with_outputs_never_copies() -> None:
    topology = random_topology(choices.MultiGate(streams=4), 8, 7)
    x, y = embedding_and_outputs(8, 7)
    _, state = topology.open(x)
    counts = []
    for k, output in enumerate(y):
        _, state = topology.step(k, output, state)
        counts.append(len(state) if state[0].dim() == 3 else state[0].shape[-2])
    assert counts == [2, 3, 4, 4, 4, 4, 4, 4]
    assert torch.linalg.matrix_rank(state[0][0, 0]) == 4


def test_scalar_highway_equals_an_independent_one_stream_gate() -> None:
    highway = random_topology(choices.Highway(), 4, 7)
    x, y = embedding_and_outputs(4, 7)
    h = x
    for k, output in enumerate(y):
        gate = highway.gates[k].gates
        h, streams = residua.ops.multi_gate(
            h[..., None, :], output, gate.query, gate.bias, torch.zeros_like(gate.query), competitive=False
        )
        close("stream", streams[..., 0, :], h, 1e-14)
    close("last", drive(highway, x, y)[-1], h, 1e-13)


@pytest.mark.parametrize("streams", [2, 4])
def test_lite_mixing_is_doubly_stochastic(streams: int) -> None:
    topology = random_topology(choices.ManifoldHyperLite(streams=streams), 4, 7)
    x, y = embedding_and_outputs(4, 7)
    with taps.record() as seen:
        drive(topology, x, y)
    for k in range(4):
        mix = seen[f"depth.{k}.mix"]
        assert mix.shape == (2, 2, streams, streams) and mix.min() >= 0
        one = torch.ones_like(mix[..., 0])
        close("rows", mix.sum(-1), one, 1e-14)
        close("columns", mix.sum(-2), one, 1e-14)


@pytest.mark.parametrize("config", [choices.ManifoldHyper(streams=4), choices.ManifoldHyperLite(streams=4)], ids=str)
def test_doubly_stochastic_mixing_keeps_the_mean_of_the_streams(config: choices.Topology) -> None:
    """With silent sublayers the sum of the streams is n times the embedding at every depth."""
    topology = build_topology(config, 6, 7).double()
    x, y = embedding_and_outputs(6, 7)
    close("exit", drive(topology, x, [torch.zeros_like(o) for o in y])[-1], 4 * x, 1e-12)


def test_first_and_last_mhc_lite_mixing_have_no_effect() -> None:
    """Rows sum to one and the streams enter equal; columns sum to one and the streams leave as their sum."""
    topology = random_topology(choices.ManifoldHyperLite(streams=3), 6, 7)
    x, y = embedding_and_outputs(6, 7)
    sum(h.square().sum() for h in drive(topology, x, y)).backward()
    mixing = [junction.bias.grad[6:].abs().max() for junction in topology.junctions]
    assert max(mixing[0], mixing[-1]) < 1e-11
    assert min(mixing[1:-1]) > 1e-3


@pytest.mark.parametrize(
    ("streams", "keys"),
    [
        *((n, {"kind": "hyper", "weights": weights}) for n in (1, 2, 4, 8) for weights in ("static", "dynamic")),
        *((2, {"kind": "hyper", "mix": mix}) for mix in ("identity", "cyclic")),
        (2, {"kind": "hyper_single_pass"}),
    ],
    ids=str,
)
def test_hyper_connections_start_as_the_pre_norm_model(streams: int, keys: dict[str, Any]) -> None:
    """The same sublayer weights in both; the exit is n times the additive stream, which the final norm takes away."""
    norm = {"kind": "rmsnorm", "eps": 1e-30}
    plain = residua.build(small(norm=norm)).double()
    hyper = residua.build(small(norm=norm, topology=keys | {"streams": streams})).double()
    hyper.load_state_dict(plain.state_dict(), strict=False)
    tokens, _ = tokens_and_targets()
    with taps.record() as ours:
        logits = hyper(tokens)
    with taps.record() as additive:
        expected = plain(tokens)
    for k in range(6):
        close(f"input {k}", ours[f"sublayer.{k}.input"], additive[f"sublayer.{k}.input"], 1e-12)
    close("exit", ours["final.input"], streams * additive["final.input"], 1e-12)
    close("logits", logits, expected, 1e-12)


def test_hyper_connections_scale_up_initial_output_projections() -> None:
    config = small(width=64, ffn={"kind": "gelu", "hidden": 512})
    plain = residua.build(config)
    hyper = residua.build(config.override(["topology.kind=hyper"]))
    ratio = hyper.sublayers[1].body.out.weight.std() / plain.sublayers[1].body.out.weight.std()
    assert abs(ratio.item() - math.sqrt(4)) < 0.05
    ratio = hyper.sublayers[1].body.up.weight.std() / plain.sublayers[1].body.up.weight.std()
    assert abs(ratio.item() - 1) < 0.05


@pytest.mark.parametrize("dilation", [1, 3])
def test_denseformer_starts_as_the_additive_model(dilation: int) -> None:
    topology = build_topology(choices.DenseFormer(dilation=dilation), 8, 7).double()
    x, y = embedding_and_outputs(8, 7)
    additive = drive(build_topology(choices.Additive(), 8, 7), x, y)
    for ours, theirs in zip(drive(topology, x, y), additive, strict=True):
        close("input", ours, theirs, 1e-14)


def test_an_inactive_clip_equals_additive() -> None:
    x, y = embedding_and_outputs(6, 7)
    wide = drive(build_topology(choices.Clipped(limit=1e6), 6, 7), x, y)
    additive = drive(build_topology(choices.Additive(), 6, 7), x, y)
    assert all(torch.equal(a, b) for a, b in zip(wide, additive, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_depth_mixing_is_token_local(name: str) -> None:
    """One token alone gives the same as inside a sequence: decoding needs no depth cache."""
    topology = random_topology(SMALL[name], 8, 34)
    x, y = embedding_and_outputs(8, 34, length=4)
    together = drive(topology, x, y)
    for b, t in ((0, 0), (1, 2), (0, 3)):
        at = (slice(b, b + 1), slice(t, t + 1))
        alone = drive(topology, x[at], [o[at] for o in y])
        for whole, one in zip(together, alone, strict=True):
            close("input", one, whole[at], 1e-13)


@pytest.mark.parametrize("name", [*SMALL, "boundary_attnres"])
def test_a_stage_can_end_after_any_sublayer(name: str) -> None:
    """Two slices of the sublayers, of which the second gets only the crossing tensors, equal one slice."""
    topology = random_topology(SMALL.get(name, choices.BoundaryAttnRes(sublayers_per_block=2)), 6, 8)
    x, y = embedding_and_outputs(6, 8)
    edge, whole, states = topology.boundary(), [], [topology.open(x)]
    for k, output in enumerate(y):
        states.append(topology.step(k, output, states[-1][1]))
        whole.append(states[-1][0])
    for cut in range(5):
        h, state = edge.enter(cut, edge.close(cut, y[cut], states[cut][1]))
        assert all(map(torch.equal, reads_of(h), reads_of(whole[cut])))
        for k in range(cut + 1, 6):
            h, state = topology.step(k, y[k], state)
        for one, other in zip(reads_of(h), reads_of(whole[-1]), strict=True):
            close("last input", one, other, 1e-13)


@pytest.mark.parametrize("name", SMALL)
def test_no_topology_modifies_its_inputs(name: str) -> None:
    """`step` is a pure function: the same state can be stepped twice, as recomputation does."""
    topology = random_topology(SMALL[name], 8, 8)
    x, y = embedding_and_outputs(8, 8)
    _, state = topology.open(x)
    for k, output in enumerate(y):
        kept = [s.clone() for s in (*state, output)]
        h, after = topology.step(k, output, state)
        again, _ = topology.step(k, output, state)
        assert all(map(torch.equal, reads_of(h), reads_of(again)))
        assert all(torch.equal(s, c) for s, c in zip((*state, output), kept, strict=True))
        state = after


def test_exoformer_anchors_project_the_raw_embedding() -> None:
    """ExoFormer's anchors are projections of the embedding itself, not of a normed or mixed one."""
    model = randomise(residua.build(small(anchors={"kind": "exoformer", "pathways": ["v"], "norm": "none"})), 0.1)
    tokens, _ = tokens_and_targets()
    (anchor,) = model.anchors.open(model.embed(tokens))
    expected = model.embed.weight[tokens] @ model.anchors.project.weight.T
    close("anchor", anchor.flatten(-2), expected, 1e-13)


def test_gated_residual_without_maps_equals_the_normed_sum() -> None:
    """inj = 1 and a read of half the mean, which gains of 2 make up for."""
    topology = random_topology(choices.GatedResidual(streams=3, rank=2), 4, 7)
    for read in (*topology.reads, topology.last_read):
        nn.init.constant_(read.gain, 2.0)
        for matrix in (read.up, read.inject):
            if matrix is not None:
                nn.init.zeros_(matrix)
    x, y = embedding_and_outputs(4, 7)
    for k, h in enumerate(drive(topology, x, y)):
        close(f"input {k}", h, rms(x + sum(y[:k])))


def test_slices_that_do_not_divide_the_width_are_refused() -> None:
    words = r"topology.fractions = 3 does not divide width = 16: use a divisor\.$"
    with pytest.raises(ConfigError, match=words):
        small(topology={"kind": "frac", "fractions": 3})
    with pytest.raises(UserError, match=words):
        residua.build_topology({"kind": "frac", "fractions": 3}, 4, 16)


def test_a_topology_that_norms_inputs_leaves_norms_of_outputs() -> None:
    model = residua.build(small(topology={"kind": "gated_residual"}, norm={"kind": "dyt"}, placement="both"))
    assert type(model.norm) is NoNorm and type(model.sublayers[0].after) is DyT
