"""On a GPU, whole models on the fused paths: the references' loss and gradients."""

from collections.abc import Callable

import pytest
import torch

from residua import ops
from residua.ops._runtime import triton_support
from tests.ops.test_fused_model import GATED, model_of
from tests.ops.test_fused_model import MODELS as interpreted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=0"),
]
MODELS = {
    **{name: ["topology=" + name] for name in ("hyper", "mhc", "mhc_lite")},
    **{name: interpreted[name] for name in ("full", "multi_gate", "gatednorm", "exoformer")},
    "block": ["topology=block_attnres", "topology.sublayers_per_block=2"],
    "exoformer, dynamic": [*GATED, "anchors=exoformer", "anchors.mixing.kind=dynamic"],
    "nuresformer, headwise": [*GATED, "anchors=nuresformer", "anchors.granularity=headwise"],
    "resformer": ["anchors=resformer"],
}


def losses_and_gradients(
    changes: list[str], device: str, wrap: Callable[[Callable], Callable], autocast: bool
) -> list[list[torch.Tensor]]:
    model = model_of(changes, moved=0.02, hidden=96, vocab_size=96, context=64, layers=3, width=64).to(device)
    tokens = torch.randint(96, (2, 65), device=device)
    outcomes = []
    for choice in ("reference", "triton"):
        torch.compiler.reset()
        with ops.backend(choice), torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = wrap(model.loss)(tokens[:, :-1], tokens[:, 1:])
            outcomes.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    return outcomes


def assert_alike(outcomes: list[list[torch.Tensor]], tolerance: float) -> None:
    """All gradients as one vector: single ones may be all noise."""
    exact, ours = (torch.cat([t.flatten().double() for t in outcome[1:]]) for outcome in outcomes)
    assert abs(outcomes[0][0] - outcomes[1][0]) <= tolerance * outcomes[0][0]
    assert (ours - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpu_model_has_the_reference_loss_and_gradients(name, precision):
    outcomes = losses_and_gradients(MODELS[name], "cuda", lambda f: f, precision == "bf16")
    assert_alike(outcomes, {"fp32": 1e-3, "bf16": 5e-2}[precision])


@pytest.mark.parametrize("name", ["block", "multi_gate", "exoformer", "mhc"])
def test_compiled_gpu_model_equals_reference_with_gradients(name):
    outcomes = losses_and_gradients(MODELS[name], "cuda", lambda f: torch.compile(f, fullgraph=True), True)
    assert_alike(outcomes, 5e-2)
