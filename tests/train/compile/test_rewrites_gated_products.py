"""A gated output is computed again in the backward pass: fewer saved numbers, the same bits."""

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import residua
from residua import ops
from residua.train.compile.rewrites.gated_products import recompute_gated
from residua.train.compile.rewrites.graphs import Rewrite
from tests.golden.compare import randomise
from tests.model.small import small, tokens_and_targets
from tests.ops.harness import assert_equal, interpreter
from tests.train.compile.rewriting import keeping, loss_of

pytestmark = [pytest.mark.slow, interpreter]
LAYERS, WIDTH = 2, 32
EXOFORMER: dict[str, Any] = {"anchors": {"kind": "exoformer"}}


def trained(model: torch.nn.Module, *rewrites: Rewrite) -> tuple[list[torch.Tensor], int]:
    """The loss and the gradients, and how many numbers the forward graph saves."""
    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    value = torch.compile(loss_of(model), backend=keeping(graphs, *rewrites))()
    values = [value, *torch.autograd.grad(value, list(model.parameters()))]
    (output,) = graphs[0].graph.find_nodes(op="output")
    saved = (node.meta.get("val") for node in output.all_input_nodes)
    return values, sum(tensor.numel() for tensor in saved if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize(
    ("tables", "backend", "fewer"),
    [
        pytest.param(EXOFORMER, "triton", 1, id="mixed gate"),
        pytest.param({"gate": "elementwise"}, "auto", 1, id="gate", marks=pytest.mark.nightly),
        pytest.param({"gate": "headwise"}, "auto", 1, id="gate per head", marks=pytest.mark.nightly),
        pytest.param({}, "auto", 0, id="no gate", marks=pytest.mark.nightly),
    ],
)
def test_the_gated_output_is_not_saved(tables: dict[str, Any], backend: str, fewer: int) -> None:
    gate = tables.get("gate", "elementwise" if tables else "none")
    attention = {"kind": "softmax", "heads": 2, "gate": gate}
    rest = {key: value for key, value in tables.items() if key != "gate"}
    config = small(layers=LAYERS, width=WIDTH, ffn={"kind": "relu2", "hidden": 32}, attention=attention, **rest)
    model = randomise(residua.build(config), 0.05).float()
    with ops.backend(backend):
        (plain, before), (ours, after) = trained(model), trained(model, recompute_gated)
    tokens = tokens_and_targets(length=3)[0].numel()
    assert before - after == fewer * LAYERS * tokens * WIDTH
    assert_equal(plain, ours)
