"""A whole model on the fused paths gives the loss and the gradients of the references."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import residua
from residua import ops
from residua.model.decoder import Decoder
from residua.ops._runtime import triton_support
from residua.train.step import recompute_sublayers
from tests.nightly import only_nightly

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]


GATED = ["attention.gate=elementwise"]
MODELS = {
    "full": ["topology=full_attnres"],
    "block": ["topology=block_attnres", "topology.sublayers_per_block=3"],
    "multi_gate": ["topology=multi_gate", "topology.streams=3"],
    "gatednorm": ["norm=gatednorm"],
    "exoformer": [*GATED, "anchors=exoformer"],
    "nuresformer, dynamic": [
        *GATED, "anchors=nuresformer", "anchors.mixing.kind=dynamic", "anchors.granularity=headwise",
    ],
    "hyper": ["topology=hyper", "topology.streams=2"],
    "hyper, static": ["topology=hyper", "topology.streams=2", "topology.weights=static"],
    "mhc": ["topology=mhc", "topology.streams=3", "topology.iterations=4"],
    "mhc_lite": ["topology=mhc_lite", "topology.streams=2"],
    "kimi_delta": ["attention={kind='kimi_delta', heads=2, head_dim=16}"],
    "resformer": ["anchors=resformer", "attention.gate=headwise"],
}  # fmt: skip


def model_of(changes: list[str], moved: float = 0.1, hidden: int = 16, **sizes: int) -> Decoder:
    """A small model with every parameter moved away from its initial value."""
    shape = {"vocab_size": 24, "context": 4, "layers": 2, "width": 12, **sizes}
    ffn = {"kind": "relu2", "hidden": hidden}
    config = residua.ModelConfig(**shape, attention={"kind": "softmax", "heads": 2}, ffn=ffn)
    model = residua.build(config.override(changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(moved * torch.randn_like(parameter))
    return model


def loss_and_gradients(model: Decoder, tokens: Tensor, backend: str) -> list[Tensor]:
    with ops.backend(backend):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:], z_loss=0.01)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def assert_close(ours: list[Tensor], exact: list[Tensor]) -> None:
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", MODELS.values(), ids=list(MODELS))
def test_loss_and_every_gradient_equal_the_reference(changes):
    model, tokens = model_of(changes), torch.randint(24, (1, 5))
    assert_close(loss_and_gradients(model, tokens, "triton"), loss_and_gradients(model, tokens, "reference"))


@pytest.mark.parametrize("name", only_nightly(["full", "multi_gate"], but=["multi_gate"]))
def test_recomputed_sublayers_are_bit_identical(name):
    """`train.recompute = "sublayers"`: tensors of the depth state outside of autograd are not computed twice."""
    model, tokens = model_of(MODELS[name]), torch.randint(24, (1, 5))
    reference = loss_and_gradients(model, tokens, "reference")
    kept = loss_and_gradients(model, tokens, "triton")
    runs = [0] * len(model.sublayers)
    for k, sublayer in enumerate(model.sublayers):
        sublayer.forward = counted(sublayer.forward, runs, k)
    recompute_sublayers(model)
    again = loss_and_gradients(model, tokens, "triton")
    assert runs == [2] * len(runs)
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))
    assert_close(again, reference)


def counted(forward: Callable, runs: list[int], k: int) -> Callable:
    def run(*args: object, **settings: object) -> object:
        runs[k] += 1
        return forward(*args, **settings)

    return run
