"""Junctions of Multi-Gate Residuals norm what they hand on, where nothing else reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from residua import ops
from residua.ops._runtime import fused
from residua.train.compile import rewrites
from residua.train.compile.rewrites.graphs import Rewrites
from residua.train.compile.rewrites.normed_junctions import norm_in_junctions
from tests.nightly import only_nightly
from tests.train.compile.rewriting import Differentiated, calls, graphs_backend, model_loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fused.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]


def compiled(function: Callable[[], Tensor], leaves: list[Tensor], rewritten: bool) -> Differentiated:
    """A value and its gradients, from the graphs that are divided after the rewrite, or without it."""
    torch._dynamo.reset()
    found = Differentiated([], [])

    def divide(joint: GraphModule, *args: Any, **settings: Any) -> Any:
        if rewritten:
            Rewrites(norm_in_junctions)(joint.graph)
            joint.recompile()
        return min_cut_rematerialization_partition(joint, *args, **settings)

    def keep(module: GraphModule) -> Callable[..., Any]:
        found.graphs.append(module)
        return module.forward

    with ops.backend("triton"):
        out = torch.compile(function, backend=graphs_backend(keep, divide), fullgraph=True)()
        found.values = [out, *torch.autograd.grad(out, leaves)]
    return found


def chain(read: Callable[[int, Tensor, Tensor], Tensor]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Three junctions, each followed by a norm and a product; `read` may use h besides."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, 2, 2, 8), (1, 2, 8), *[(8,), (3,), (8,), (8,), (8, 8)] * 3]
    leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]

    def function() -> Tensor:
        streams, y, *weights = leaves
        state: Any = (streams,)
        total = torch.zeros(())
        for k in range(3):
            w1, bias, w2, gain, product = weights[5 * k : 5 * k + 5]
            h, state = ops.multi_gate_chain(state, y, w1, bias, w2)
            x = ops.rms_norm(h, gain)
            y = x @ product
            total = total + read(k, h, x)
        return total + y.square().sum() + state[0].sin().sum()

    return function, leaves


READS = {
    "by the norm alone": (lambda k, h, x: 0.0, 3),
    "one h read besides": (lambda k, h, x: h.square().sum() if k == 1 else 0.0, 2),
    "one h read without a gradient": (lambda k, h, x: (h.detach() * x).sum() if k == 1 else 0.0, 2),
}


@pytest.mark.parametrize(("read", "taken"), READS.values(), ids=READS)
def test_a_junction_takes_the_norm_if_nothing_else_reads_h(read, taken):
    function, leaves = chain(read)
    plain, ours = (compiled(function, leaves, rewritten) for rewritten in (False, True))
    for a, b in zip(ours.values, plain.values, strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()
    forward, backward = map(calls, ours.graphs)
    assert forward["residua.multi_gate_normed_forward.default"] == taken
    assert backward["residua.multi_gate_normed_backward.default"] == taken
    left = 3 - taken
    assert forward["residua.multi_gate_forward.default"] == forward["residua.rms_norm.default"] == left
    assert backward["residua.multi_gate_backward.default"] == backward["residua.rms_norm_backward.default"] == left


def kept(run: Differentiated) -> int:
    """Numbers that the forward pass hands to the backward pass."""
    (output,) = run.graphs[0].graph.find_nodes(op="output")
    return sum(node.meta["val"].numel() for node in output.args[0][1:])


@pytest.mark.parametrize("layers", only_nightly([2, 4], but=[2]))
def test_a_model_keeps_its_loss_and_gradients_and_no_input_of_a_norm(layers):
    loss, parameters = model_loss(layers=layers, topology={"kind": "multi_gate", "streams": 2})
    plain, ours = (compiled(loss, parameters, rewritten) for rewritten in (False, True))
    for a, b in zip(ours.values, plain.values, strict=True):
        assert (a - b).norm() <= 5e-6 * b.norm()
    gated = 2 * layers - 1
    assert calls(ours.graphs[0])["residua.multi_gate_normed_forward.default"] == gated
    assert calls(ours.graphs[1])["residua.multi_gate_normed_backward.default"] == gated
    assert kept(ours) < kept(plain)


def test_it_is_off_until_it_is_timed(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: asked.append(settings["options"].keys()))
    for on in (False, True):
        monkeypatch.setattr(rewrites, "NORMED_JUNCTIONS", on)
        rewrites.compile_rewritten(lambda: None)
    assert ["joint_custom_pre_pass" in options for options in asked] == [False, True]
