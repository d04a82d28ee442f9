"""A whole model on the fused paths gives the loss and the gradients of the references."""

from __future__ import annotations

import pytest
import torch

import residua
from residua import ops
from residua.ops import fused

pytestmark = pytest.mark.skipif(not fused.INTERPRETED, reason="needs TRITON_INTERPRET=1")


GATED = ["attention.gate=elementwise"]
MODELS = {
    "multi_gate": ["topology=multi_gate", "topology.streams=3"],
    "gatednorm": ["norm=gatednorm"],
    "exoformer": [*GATED, "anchors=exoformer"],
    "nuresformer, dynamic": [
        *GATED,
        "anchors=nuresformer",
        "anchors.mixing.kind=dynamic",
        "anchors.granularity=headwise",
    ],
    "hyper": ["topology=hyper", "topology.streams=2"],
    "hyper, static": ["topology=hyper", "topology.streams=2", "topology.weights=static"],
    "mhc": ["topology=mhc", "topology.streams=3", "topology.iterations=4"],
    "mhc_lite": ["topology=mhc_lite", "topology.streams=2"],
    "resformer": ["anchors=resformer", "attention.gate=headwise"],
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=list(MODELS))
def test_loss_and_every_gradient_are_the_references(changes):
    config = residua.ModelConfig(
        vocab_size=24,
        context=4,
        layers=2,
        width=12,
        attention={"kind": "softmax", "heads": 2},
        ffn={"kind": "relu2", "hidden": 16},
    ).override(changes)
    model = residua.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(24, (1, 5))
    outcomes = []
    for choice in ("reference", "triton"):
        with ops.backend(choice):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:], z_loss=0.01)
            outcomes.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*outcomes, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
