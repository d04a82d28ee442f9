"""Identities that hold for any parameters."""

import math
from typing import Any

import pytest
import torch

import residua
from residua.config import choices
from residua.config.settings import ConfigError
from residua.errors import UserError
from residua.model import taps
from residua.model.norm import DyT, NoNorm
from residua.model.topology import build_topology
from residua.model.topology.gated_residual import EPS
from tests.golden.compare import close
from tests.model.depth import SMALL, drive, embedding_and_outputs, random_topology, reads_of
from tests.model.small import small, tokens_and_targets


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


@pytest.mark.parametrize("streams", [2, 4])
def test_gated_residual_without_its_matrices_equals_pre_norm(streams: int) -> None:
    """Without matrices inj is 1, and gains of 2 undo gates of a half: h is the mean of equal streams, normed."""
    plain = residua.build(small(norm={"kind": "rmsnorm", "eps": EPS})).double()
    gated = residua.build(small(topology={"kind": "gated_residual", "streams": streams})).double()
    loaded = gated.load_state_dict(plain.state_dict(), strict=False)
    assert all(name.startswith("topology.") for name in loaded.missing_keys)
    with torch.no_grad():
        for name, parameter in gated.topology.named_parameters():
            parameter.fill_(2 if name.endswith("gain") else 0)
    tokens, targets = tokens_and_targets()
    losses = []
    for model in (gated, plain):
        losses.append(model(tokens, targets).mean())
        losses[-1].backward()
    close("loss", *losses, 1e-14)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in gated.named_parameters():
        if not name.startswith("topology."):
            close(name, parameter.grad, expected[name], 1e-12)


@pytest.mark.parametrize("dilation", [1, 3])
def test_denseformer_starts_as_the_additive_model(dilation: int) -> None:
    topology = build_topology(choices.DenseFormer(dilation=dilation), 8, 7).double()
    x, y = embedding_and_outputs(8, 7)
    additive = drive(build_topology(choices.Additive(), 8, 7), x, y)
    for ours, theirs in zip(drive(topology, x, y), additive, strict=True):
        close("input", ours, theirs, 1e-14)


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


def test_slices_that_do_not_divide_the_width_are_refused() -> None:
    words = r"topology.fractions = 3 does not divide width = 16: use a divisor\.$"
    with pytest.raises(ConfigError, match=words):
        small(topology={"kind": "frac", "fractions": 3})
    with pytest.raises(UserError, match=words):
        residua.build_topology({"kind": "frac", "fractions": 3}, 4, 16)


def test_a_topology_that_norms_inputs_leaves_norms_of_outputs() -> None:
    model = residua.build(small(topology={"kind": "gated_residual"}, norm={"kind": "dyt"}, placement="both"))
    assert type(model.norm) is NoNorm and type(model.sublayers[0].after) is DyT
