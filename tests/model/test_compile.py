"""Models compile into one graph and compute the same.

Code generation takes most of a minute a model: one topology goes through it, the others through the same capture and
the same gradient graph without it.
"""

from __future__ import annotations

import pytest
import torch

import residua
from tests.golden.compare import randomise
from tests.model.small import small, tokens_and_targets

TOPOLOGIES = {
    "additive": {"kind": "additive"},
    "full_attnres": {"kind": "full_attnres"},
    "block_attnres": {"kind": "block_attnres", "sublayers_per_block": 3},
    "multi_gate": {"kind": "multi_gate", "streams": 3},
}


def loss_and_gradients(model: torch.nn.Module, run) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens, targets = tokens_and_targets()
    model.zero_grad()
    logits = run(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def check(topology: str, backend: str) -> None:
    torch._dynamo.reset()
    config = small(layers=2, width=32, ffn={"kind": "relu2", "hidden": 32}, topology=TOPOLOGIES[topology])
    model = randomise(residua.build(config), 0.05).float()
    loss, gradients = loss_and_gradients(model, model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    again, compiled_gradients = loss_and_gradients(model, compiled)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("topology", ["additive", "full_attnres", "block_attnres"])
def test_a_model_is_one_graph_with_the_same_loss_and_gradients(topology: str) -> None:
    check(topology, "aot_eager")


@pytest.mark.slow
def test_a_model_compiled_by_inductor_has_the_same_loss_and_gradients() -> None:
    check("multi_gate", "inductor")
