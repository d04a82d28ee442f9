"""A removed layer writes nothing: the loss is that of a literal forward pass without it."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from residua.diagnose.metrics.removal import AblationFacts, measure, perplexity_change, planned
from residua.diagnose.native import NativeSubject
from residua.diagnose.observe import Subject
from residua.model.context import Context
from residua.model.decoder import Decoder
from residua.ops.depth_attention.reference import depth_attention
from tests.diagnose import planted

pytestmark = pytest.mark.slow

TEXT = planted.sample()


def model_of(**topology: Any) -> Decoder:
    return planted.stirred(planted.control(topology=topology).double())


def output(model: Decoder, k: int, h: Tensor) -> Tensor:
    y: Tensor = model.sublayers[k](h, (), Context(model._rotary(TEXT.tokens), None, None))[0]
    return y


def loss_of(model: Decoder, h: Tensor) -> float:
    logits = model.logits(model.norm(h))
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), TEXT.targets.flatten()))


@torch.no_grad()
def gated_without(model: Decoder, removed: Sequence[int]) -> float:
    """Multi-Gate Residuals whose list of layers lacks some: streams and h pass them by."""
    h, state = model.topology.open(model.embed(TEXT.tokens))
    for k in range(len(model.sublayers)):
        if k // 2 not in removed:
            h, state = model.topology.step(k, output(model, k, h), state)
    return loss_of(model, h)


@torch.no_grad()
def attention_without(model: Decoder, removed: Sequence[int], block: int) -> float:
    """Attention Residuals whose sources lack the outputs of some layers; `block` sublayers add up to one source."""
    blocks: dict[int, Tensor] = {-1: model.embed(TEXT.tokens)}
    h = blocks[-1]
    for k in range(len(model.sublayers)):
        if k // 2 not in removed:
            y = output(model, k, h)
            blocks[k // block] = blocks[k // block] + y if k // block in blocks else y
        read = model.topology.reads[k]
        h = depth_attention(list(blocks.values()), read.query, norm_weight=read.gain)
    return loss_of(model, h)


def ablated(model: Decoder, removed: Sequence[int]) -> float:
    with NativeSubject(model, "m").without_layers(removed), torch.no_grad():
        return float(planted.losses(model, TEXT))


@pytest.mark.parametrize("streams", [2, 3])  # the fill phase ends inside a layer, and between two
@pytest.mark.parametrize("gate", ["competitive", "independent"])
def test_a_removed_multi_gate_layer_is_bypassed(streams: int, gate: str) -> None:
    model = model_of(kind="multi_gate", streams=streams, gate=gate)
    whole = float(planted.losses(model, TEXT).detach())
    for removed in ([1], [3], [1, 2]):
        found = ablated(model, removed)
        assert found == pytest.approx(gated_without(model, removed), rel=1e-10) and abs(found - whole) > 1e-6
    assert float(planted.losses(model, TEXT).detach()) == whole


@pytest.mark.parametrize("block", [1, 2, 4])
def test_removed_layer_is_not_a_source_of_attention_residuals(block: int) -> None:
    kind = {"kind": "full_attnres"} if block == 1 else {"kind": "block_attnres", "sublayers_per_block": block}
    model = model_of(**kind)
    for removed in ([0], [2], [3], [2, 3]):
        assert ablated(model, removed) == pytest.approx(attention_without(model, removed, block), rel=1e-10)


def test_layers_of_the_fill_phase_are_marked() -> None:
    for streams, marked in ((2, [0]), (3, [0]), (4, [0, 1])):
        subject = NativeSubject(model_of(kind="multi_gate", streams=streams), "m")
        notes = [a.index for a in subject.ablations(("layer",)) if a.note.startswith("fill phase")]
        assert notes == marked
    assert not any(a.note for a in NativeSubject(model_of(kind="full_attnres"), "m").ablations(("layer",)))


def test_middle_layers_are_removed_together() -> None:
    model = model_of(kind="additive")
    subject = NativeSubject(model, "m")
    (several,) = [a for a in planned(subject, "layers", []) if a.kind == "layers"]
    assert (several.index, several.count, several.label) == (1, 2, "layers 1 to 2")
    (found,) = measure(subject, [several], TEXT, 10**6, lambda: None)
    planted.silence(model, 2, 3, 4, 5)
    assert found.loss == pytest.approx(float(planted.losses(model, TEXT).detach()), rel=1e-12) and found.count == 2
    assert planned(subject, "none", []) == []


def test_layers_of_any_model_can_be_removed_together() -> None:
    """Nested contexts, as for a Hugging Face model."""
    model = model_of(kind="additive")
    subject = NativeSubject(model, "m")
    with Subject.without_layers(subject, [1, 2]), torch.no_grad():
        nested = float(planted.losses(model, TEXT))
    assert nested == pytest.approx(ablated(model, [1, 2]), rel=1e-12)


def test_perplexity_change_matches_definition() -> None:
    facts = AblationFacts(kind="layer", index=0, label="layer 0", loss=3.5, change=0.5)
    assert perplexity_change(facts) == pytest.approx(math.exp(3.5) - math.exp(3.0))
