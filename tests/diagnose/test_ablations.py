"""An ablation removes exactly what it names, and afterwards the model is unchanged."""

from typing import Any

import pytest
import torch

from residua.diagnose.native import NativeSubject
from residua.diagnose.observe import Ablation, AblationKind
from residua.model import taps
from residua.model.decoder import Decoder
from tests.diagnose import planted
from tests.diagnose.planted import TOPOLOGIES

pytestmark = pytest.mark.slow

TEXT = planted.sample()
KINDS: tuple[AblationKind, ...] = ("layer", "sublayer", "head", "source", "stream", "uniform")


def model_of(topology: str, **changes: Any) -> Decoder:
    return planted.stirred(planted.control(topology=TOPOLOGIES[topology] | changes))


def loss(model: Decoder, ablation: Ablation | None = None) -> float:
    with torch.no_grad():
        if ablation is None:
            return float(planted.losses(model, TEXT))
        with ablation.applied():
            return float(planted.losses(model, TEXT))


def ablation(model: Decoder, kind: AblationKind, index: int, head: int | None = None) -> Ablation:
    (found,) = [a for a in NativeSubject(model, "m").ablations((kind,)) if a.index == index and head in (None, a.head)]
    return found


def ablated(model: Decoder, what: Ablation) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The tap records while something is removed, and the results of each step of the topology."""
    steps: list[Any] = []

    def noted(k: int, y: torch.Tensor, state: Any) -> Any:
        steps.append(step(k, y, state))
        return steps[-1]

    with what.applied(), taps.record() as seen, torch.no_grad():
        step = model.topology.step  # as the removal leaves it
        object.__setattr__(model.topology, "step", noted)
        model(TEXT.tokens)
        object.__setattr__(model.topology, "step", step)
    return seen, steps


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_ablation_has_an_effect_and_restores_the_model(topology: str) -> None:
    model = model_of(topology)
    before, weights = loss(model), {name: p.clone() for name, p in model.named_parameters()}
    ablations = NativeSubject(model, "m").ablations(KINDS)
    assert all(loss(model, ablation) != before for ablation in ablations)
    assert loss(model) == before
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_removed_layer_equals_model_without_its_outputs() -> None:
    model = model_of("additive")
    removed = loss(model, ablation(model, "layer", 2))
    planted.silence(model, 4, 5)
    assert removed == pytest.approx(loss(model), rel=1e-6)


def test_removed_head_equals_zeroed_output_columns() -> None:
    model = model_of("additive")
    removed = loss(model, ablation(model, "head", 1, 3))
    with torch.no_grad():
        model.sublayers[2].body.out.weight[:, 3 * planted.HEAD :] = 0
    assert removed == pytest.approx(loss(model), rel=1e-6)


def test_uniform_depth_weights_are_uniform() -> None:
    model = model_of("full_attnres")
    seen, _ = ablated(model, NativeSubject(model, "m").ablations(("uniform",))[-1])
    for k in range(8):
        torch.testing.assert_close(seen[f"depth.{k}.weights"], torch.full((8, 32, k + 2), 1 / (k + 2)))


@pytest.mark.parametrize("weights", ["static", "dynamic"])
def test_uniform_hyper_connections_read_all_streams_equally(weights: str) -> None:
    model = model_of("hyper", streams=3, weights=weights)
    uniform = NativeSubject(model, "m").ablations(("uniform",))
    assert [a.index for a in uniform] == [*range(1, 8), -1]
    seen, steps = ablated(model, uniform[2])
    after, pre = steps[2][1][0], model.topology.junctions[3].read()
    if weights == "static":
        torch.testing.assert_close(seen["sublayer.3.input"], after.sum(-2) * pre.bias.mean(), rtol=1e-5, atol=1e-5)
    share = seen["sublayer.3.input"] / after.sum(-2)
    torch.testing.assert_close(share, share[..., :1].expand_as(share), rtol=1e-2, atol=1e-3)


def test_removed_source_leaves_weights_that_sum_to_one() -> None:
    model = model_of("full_attnres")
    (removed,) = [a for a in NativeSubject(model, "m").ablations(("source",)) if a.label == "layer 1 attention"]
    seen, _ = ablated(model, removed)
    assert [seen[f"depth.{k}.weights"].shape[-1] for k in range(8)] == [2, 3, 3, 4, 5, 6, 7, 8]
    torch.testing.assert_close(seen["depth.7.weights"].sum(-1), torch.ones(8, 32))
    sources = [seen["sublayer.0.input"], *(seen[f"sublayer.{k}.output"] for k in range(8) if k != 2)]
    mixed = (torch.stack(sources, -2) * seen["depth.7.weights"][..., None]).sum(-2)
    torch.testing.assert_close(mixed, seen["final.input"], rtol=1e-4, atol=1e-5)


def test_a_removed_stream_is_never_read() -> None:
    model = model_of("multi_gate")
    _, steps = ablated(model, ablation(model, "stream", 1))
    (final, (streams, *_)), pool = steps[-1], model.topology.pools[-1].query
    kept = streams[..., [0, 2], :]
    rms = kept * (kept.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    weights = (rms @ pool * planted.WIDTH**-0.5).softmax(-1)
    torch.testing.assert_close((weights[..., None] * kept).sum(-2), final, rtol=1e-4, atol=1e-5)
