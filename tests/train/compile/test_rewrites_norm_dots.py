"""A read's δ is computed by the norm after it, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from residua.train.compile.rewrites.norm_dots import take_dots
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from residua.ops._runtime import fused
from tests.nightly import only_nightly
from tests.train.compile.rewriting import calls, differentiated, model_loss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fused.INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]
TAKEN = "residua.rms_norm_backward_dotted.default"


@pytest.fixture(autouse=True)
def _registered():
    import residua.ops.rms_norm.launch  # noqa: F401  (its operators)


FULL, BLOCK = {"kind": "full_attnres"}, {"kind": "block_attnres", "sublayers_per_block": 2}


@pytest.mark.parametrize("topology", only_nightly([FULL, BLOCK], but=[BLOCK]), ids=["full", "block"])
def test_a_model_keeps_its_loss_and_gradients_and_every_read_has_its_dots_from_a_norm(topology):
    loss, parameters = model_loss(layers=2, topology=topology)
    plain, ours = differentiated(loss, parameters, rewrite=take_dots)
    assert torch.equal(ours.values[0], plain.values[0])
    for a, b in zip(ours.values[1:], plain.values[1:], strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()
    before, found = (calls(run.graphs[1]) for run in (plain, ours))
    assert found[TAKEN] == 4 and found["residua.rms_norm_backward.default"] == 1, "the embedding's norm follows no read"
    sums = "aten.sum.dim_IntList"
    assert found[sums] == before[sums] - 4


def test_other_models_are_left_alone():
    loss, parameters = model_loss(layers=1)
    plain, ours = differentiated(loss, parameters, rewrite=take_dots)
    assert [str(m.graph) for m in ours.graphs] == [str(m.graph) for m in plain.graphs]


@pytest.mark.parametrize(
    ("read", "taken"),
    [
        (lambda g_x, x, y: (g_x * x).sum(-1), True),
        (lambda g_x, x, y: (x.float() * g_x.float()).sum(1), True),
        (lambda g_x, x, y: (g_x.view(3, 2, 8) * x.view(3, 2, 8)).sum(-1), True),
        (lambda g_x, x, y: (g_x * x).sum(-1, keepdim=True), False),
        (lambda g_x, x, y: (g_x * x).sum(0), False),
        (lambda g_x, x, y: (g_x * y).sum(-1), False),
        (lambda g_x, x, y: (g_x * g_x).sum(-1), False),
        (lambda g_x, x, y: (x * x).sum(-1), False),
        (lambda g_x, x, y: (g_x.sin() * x).sum(-1), False),
        (lambda g_x, x, y: (g_x.view(6, 2, 4) * x.view(6, 2, 4)).sum(-1), False),
    ],
    ids=[
        "plain",
        "turned",
        "in another shape",
        "kept axis",
        "other axis",
        "other input",
        "norm",
        "input",
        "more",
        "cut",
    ],
)
@pytest.mark.parametrize("residual", [False, True])
def test_which_sums_are_taken(read, taken, residual):
    generator = torch.Generator().manual_seed(3)
    g, x, y, weight = (torch.randn(shape, generator=generator) for shape in ((6, 8), (6, 8), (6, 8), (8,)))
    operators = torch.ops.residua
    _, rstd = operators.rms_norm(x, weight, 1e-6)
    more = (y,) if residual else ()

    def function(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        g_x, g_weight = operators.rms_norm_backward(g, x, weight, rstd, *(y,) * residual)
        return g_x, g_weight, read(g_x, x, y)

    module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(g, x, y)
    take_dots(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    assert (calls(module)[TAKEN] == 1) == (taken and not more)
    for a, b in zip(module(g, x, y), function(g, x, y), strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("widened", [True, False])
@pytest.mark.parametrize("asked", [{}, {"dtype": torch.float32}], ids=["plain", "autocast on a GPU"])
def test_in_half_precision_a_sum_is_taken_if_it_is_of_widened_factors(widened, asked):
    """As reads take it. A sum that is rounded at every product is another number; the interpreter cannot run either."""
    g, x = (torch.randn(6, 8, dtype=torch.bfloat16) for _ in range(2))
    operators, weight, rstd = torch.ops.residua, torch.ones(8), torch.ones(6)

    def function(g: Tensor, x: Tensor) -> Tensor:
        g_x, _ = operators.rms_norm_backward(g, x, weight, rstd)
        return ((g_x.float() * x.float()) if widened else g_x * x).sum(-1, **asked)

    module = make_fx(
        function, tracing_mode="fake", _allow_non_fake_inputs=True, decomposition_table=select_decomp_table()
    )
    graph = module(g, x).graph
    take_dots(graph)
    graph.eliminate_dead_code()
    graph.lint()
    found = [n for n in graph.nodes if str(n.target) == TAKEN]
    assert len(found) == widened
