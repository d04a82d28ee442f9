"""Junctions of Multi-Gate Residuals and of hyper-connections norm their outputs, where nothing else reads these."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from residua import ops
from residua.train.compile import rewrites
from residua.train.compile.rewrites.graphs import Rewrite
from residua.train.compile.rewrites.normed_junctions import norm_in_junctions
from tests.ops.harness import assert_close, interpreter
from tests.train.compile.rewriting import Differentiated, calls, keeping, model_loss

pytestmark = [pytest.mark.slow, interpreter]


def compiled(function: Callable[[], Tensor], leaves: list[Tensor], *rewritten: Rewrite) -> Differentiated:
    """A value and its gradients, from graphs that were divided after the rewrite."""
    torch._dynamo.reset()
    found = Differentiated([], [])
    run = torch.compile(function, backend=keeping(found.graphs, *rewritten), fullgraph=True)
    found.values = differentiated(run, leaves)
    return found


def differentiated(function: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    with ops.backend("triton"):
        out = function()
        return [out, *torch.autograd.grad(out, leaves)]


MULTI_GATE, HYPER_STEP = ("multi_gate_forward", "multi_gate_backward"), ("hyper_step", "hyper_step_backward")


def with_gain(module: GraphModule, name: str) -> list[int]:
    """How many calls of an operator have the gain of a norm, and how many have none."""
    operator = getattr(torch.ops.residua, name).default
    place = [argument.name for argument in operator._schema.arguments].index("gain")
    nodes = module.graph.find_nodes(op="call_function", target=operator)
    normed = sum(len(node.args) > place and node.args[place] is not None for node in nodes)
    return [normed, len(nodes) - normed]


READS = [lambda h, x: 0.0, lambda h, x: x.sin().sum(), lambda h, x: (h.detach() * x).sum()]
"""Other reads after each junction of a chain; the first two norms are the only readers of h."""


def test_a_junction_absorbs_the_norm_if_nothing_else_reads_h():
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, 2, 2, 8), (1, 2, 8), *[(8,), (3,), (8,), (8,), (8, 8)] * len(READS)]
    leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]

    def function() -> Tensor:
        streams, y, *weights = leaves
        state: Any = (streams,)
        total = torch.zeros(())
        for k, read in enumerate(READS):
            w1, bias, w2, gain, product = weights[5 * k : 5 * k + 5]
            h, state = ops.multi_gate_chain(state, y, w1, bias, w2)
            x = ops.rms_norm(h, gain)
            y = x @ product
            total = total + read(h, x)
        return total + y.square().sum() + state[0].sin().sum()

    plain, ours = differentiated(function, leaves), compiled(function, leaves, norm_in_junctions)
    assert_close(ours.values, plain, 2e-6)
    forward, backward = map(calls, ours.graphs)
    assert [with_gain(*pair) for pair in zip(ours.graphs, MULTI_GATE, strict=True)] == [[2, 1]] * 2
    assert forward["residua.rms_norm.default"] == backward["residua.rms_norm_backward.default"] == 1


@pytest.mark.parametrize("norm", ["all", pytest.param("each", marks=pytest.mark.nightly)])
def test_hyper_connection_absorbs_the_norm_if_only_it_reads_h(norm):
    generator = torch.Generator().manual_seed(5)
    n, width = 2, 8
    phi = (n * (n + 2), n * width) if norm == "all" else (n + 2, width)
    shapes = [(1, 3, n, width), (1, 3, width), *[(n,), (n, n), (n,), (), phi, (width,), (width, width)] * len(READS)]
    leaves = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]

    def function() -> Tensor:
        X, y, *weights = leaves
        total = torch.zeros(())
        for k, read in enumerate(READS):
            post, mix, bias, scale, phi, gain, product = weights[7 * k : 7 * k + 7]
            h, X, z = ops.hyper_step(X, y, post, mix, bias, scale=scale, phi=phi, norm=norm)
            x = ops.rms_norm(h, gain)
            y = x @ product
            total = total + read(h, x) + (z.sin().sum() if k else 0.0)
        # without a projection: unchanged
        h, X, _ = ops.hyper_step(X, y, post, mix, bias)
        return total + ops.rms_norm(h, gain).square().sum() + X.sin().sum()

    plain, ours = differentiated(function, leaves), compiled(function, leaves, norm_in_junctions)
    assert_close(ours.values, plain, 2e-6)
    forward, backward = map(calls, ours.graphs)
    assert [with_gain(*pair) for pair in zip(ours.graphs, HYPER_STEP, strict=True)] == [[2, 2]] * 2
    assert forward["residua.rms_norm.default"] == backward["residua.rms_norm_backward.default"] == 2


def kept(run: Differentiated) -> int:
    """Numbers that the forward pass hands to the backward pass."""
    (output,) = run.graphs[0].graph.find_nodes(op="output")
    return sum(node.meta["val"].numel() for node in output.args[0][1:])


MODELS = [("multi_gate", 3, MULTI_GATE), ("mhc", 4, HYPER_STEP), ("mhc_lite", 4, HYPER_STEP)]
"""A topology, and how many of the junctions of two layers have a norm inside."""


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "normed", "operators"), MODELS, ids=[model[0] for model in MODELS])
def test_fused_model_keeps_gradients_but_saves_no_norm_input(kind, normed, operators):
    loss, parameters = model_loss(layers=2, topology={"kind": kind, "streams": 2})
    plain, ours = compiled(loss, parameters), compiled(loss, parameters, norm_in_junctions)
    assert_close(ours.values, plain.values, 5e-6)
    assert [with_gain(*pair)[0] for pair in zip(ours.graphs, operators, strict=True)] == [normed] * 2
    assert kept(ours) < kept(plain)


def test_a_compiled_step_applies_this_rewrite(monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "compile", lambda function, **settings: asked.update(settings["options"]))
    rewrites.compile_rewritten(lambda: None)
    assert norm_in_junctions in asked["joint_custom_pre_pass"]._rewrites
