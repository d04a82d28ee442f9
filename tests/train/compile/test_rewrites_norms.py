"""Additions next to a norm and the δ of a read before it move into its kernels, and nothing else changes."""

from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from residua import ops
from residua.train.compile.rewrites.norms import VIEWS, fuse_additions, take_dots
from tests.nightly import only_nightly
from tests.ops.harness import assert_close, interpreter
from tests.train.compile.rewriting import calls, differentiated, model_loss, rewritten

pytestmark = [pytest.mark.slow, interpreter]


@pytest.fixture(autouse=True)
def _registered():
    import residua.ops.rms_norm.launch  # noqa: F401  (its operators)


aten = torch.ops.aten
NORMS = {
    "gatednorm": ({"kind": "gatednorm", "rank": 4}, "gated_norm", 5, 8),
    "rmsnorm": ({"kind": "rmsnorm"}, "rms_norm", 3, 4),
    "preaffine": ({"kind": "preaffine"}, "rms_norm", 3, 4),
}
"""Norm, operator, and the places of the update and of the residual among the arguments forward and backward."""


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("gatednorm", 1),
        ("rmsnorm", 1),
        pytest.param("preaffine", 1, marks=pytest.mark.nightly),
        pytest.param("rmsnorm", 2, marks=pytest.mark.nightly),
    ],
)
def test_every_sum_is_fused_and_gradients_are_kept(kind, layers):
    norm, name, update, residual = NORMS[kind]
    loss, parameters = model_loss(layers=layers, norm=norm)
    plain, ours = differentiated(loss, parameters, rewrite=fuse_additions)
    assert torch.equal(ours.values[0], plain.values[0])
    assert_close(ours.values[1:], plain.values[1:], 1e-6)
    forward, backward = ours.graphs

    assert given(forward, name, update) == [False] + 2 * layers * [True], "the embedding's norm reads no sum"
    residuals = given(backward, f"{name}_backward", residual)
    assert residuals == [False] + 2 * layers * [True], "the last has no residual path next to it"
    assert not any(additions_next_to(name, module) for module in (forward, backward))


def given(module: GraphModule, name: str, index: int) -> list[bool]:
    """For each call of an operator, whether it has this argument; sorted."""
    nodes = [n for n in module.graph.nodes if str(n.target) == f"residua.{name}.default"]
    return sorted(len(n.args) > index and n.args[index] is not None for n in nodes)


def additions_next_to(name: str, module: GraphModule) -> list[Node]:
    """Sums that a norm reads, and sums that read a norm's gradient."""

    def source(n: Any) -> Any:
        while isinstance(n, Node) and (n.target in VIEWS or n.target is getitem):
            n = n.args[0]
        return n

    sums = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    norms = [n for n in module.graph.nodes if str(n.target).startswith(f"residua.{name}")]
    return [s for s in sums if any(source(n.args[0]) is s for n in norms) or any(source(a) in norms for a in s.args)]


@pytest.mark.nightly  # in `make test`, sums that are not fused leave a graph unchanged
@pytest.mark.parametrize(("rewrite", "norm"), [(fuse_additions, "dyt"), (take_dots, "rmsnorm")])
def test_model_without_fusible_norms_or_reads_is_unchanged(rewrite, norm):
    loss, parameters = model_loss(layers=1, norm={"kind": norm})
    plain, ours = differentiated(loss, parameters, rewrite=rewrite)
    assert [str(m.graph) for m in ours.graphs] == [str(m.graph) for m in plain.graphs]


def traced(function: Any, *inputs: Tensor, **settings: Any) -> GraphModule:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True, **settings)(*inputs)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    ("sum_of", "taken"),
    [
        (lambda x, y: x + x @ y, 1),
        (lambda x, y: (x + x @ y).reshape(3, 2, 8), 1),
        (lambda x, y: x @ y, 0),
        (lambda x, y: x @ y + 3.0, 0),
        (lambda x, y: torch.add(x, x @ y, alpha=2), 0),
        (lambda x, y: x + (x @ y)[:1], 0),
        (lambda x, y: x + (x @ y).sin(), 0),
    ],
    ids=["plain", "seen in another shape", "none", "with a number", "scaled", "broadcast", "of elementwise work"],
)
def test_a_norm_fuses_only_matching_sums(sum_of, taken):
    x, y, *weights = leaves = drawn((6, 8), (8, 8), (8,), (2, 8), (8, 2))

    def function() -> Tensor:
        h = sum_of(x, y)
        return (ops.gated_norm(h, *weights) + h).square().sum()

    plain, ours = differentiated(function, leaves, rewrite=fuse_additions)
    assert given(ours.graphs[0], "gated_norm", 5) == [bool(taken)]
    torch.testing.assert_close(ours.values, plain.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("read", "taken"),
    [
        (lambda g_x, g_weight, y: (y @ y.T @ g_x.detach() + g_x, g_weight), False),
        (lambda g_x, g_weight, y: (g_x.view(3, 2, 8) + (y @ y.T @ y).view(3, 2, 8), g_weight), True),
        (lambda g_x, g_weight, y: (g_x + y @ torch.outer(g_weight, g_weight), g_weight), False),
        (lambda g_x, g_weight, y: (g_x + g_x, g_weight), False),
        (lambda g_x, g_weight, y: (g_x + y @ y.T @ y, g_x), False),
    ],
    ids=["of itself", "computed later", "of another gradient", "doubled", "read elsewhere"],
)
def test_a_norm_gradient_fuses_only_matching_sums(read, taken):
    x, *weights, y = (t.detach() for t in drawn((6, 8), (8,), (2, 8), (8, 2), (6, 8)))
    operators = torch.ops.residua
    _, *saved = operators.gated_norm(x, *weights, 1e-6)

    def function(y: Tensor) -> tuple[Tensor, ...]:
        g_x, g_weight, *_ = operators.gated_norm_backward(y, x, *weights, *saved)
        return read(g_x, g_weight, y)

    module = traced(function, y)
    rewritten(module, fuse_additions)
    (node,) = module.graph.find_nodes(op="call_function", target=operators.gated_norm_backward.default)
    assert (len(node.args) == 9) == taken
    torch.testing.assert_close(module(y), function(y), rtol=1e-5, atol=1e-5)


DOTTED = 6
"""The place of `dotted` among the arguments of the norm's backward operator."""
FULL, BLOCK = {"kind": "full_attnres"}, {"kind": "block_attnres", "sublayers_per_block": 2}


@pytest.mark.parametrize("topology", only_nightly([FULL, BLOCK], but=[BLOCK]), ids=["full", "block"])
def test_every_read_gets_its_dots_and_gradients_are_kept(topology):
    loss, parameters = model_loss(layers=2, topology=topology)
    plain, ours = differentiated(loss, parameters, rewrite=take_dots)
    assert torch.equal(ours.values[0], plain.values[0])
    assert_close(ours.values[1:], plain.values[1:], 1e-6)
    assert given(ours.graphs[1], "rms_norm_backward", DOTTED) == [False] + 4 * [True], "the embedding's follows no read"
    sums, before = (calls(run.graphs[1])["aten.sum.dim_IntList"] for run in (ours, plain))
    assert sums == before - 4


DOTS = {
    "plain": (lambda g_x, x, y: (g_x * x).sum(-1), True),
    "turned": (lambda g_x, x, y: (x.float() * g_x.float()).sum(1), True),
    "in another shape": (lambda g_x, x, y: (g_x.view(3, 2, 8) * x.view(3, 2, 8)).sum(-1), True),
    "kept axis": (lambda g_x, x, y: (g_x * x).sum(-1, keepdim=True), False),
    "other axis": (lambda g_x, x, y: (g_x * x).sum(0), False),
    "other input": (lambda g_x, x, y: (g_x * y).sum(-1), False),
    "norm": (lambda g_x, x, y: (g_x * g_x).sum(-1), False),
    "input": (lambda g_x, x, y: (x * x).sum(-1), False),
    "more": (lambda g_x, x, y: (g_x.sin() * x).sum(-1), False),
    "cut": (lambda g_x, x, y: (g_x.view(6, 2, 4) * x.view(6, 2, 4)).sum(-1), False),
}


@pytest.mark.parametrize(("read", "taken"), DOTS.values(), ids=DOTS)
@pytest.mark.parametrize("residual", [False, True])
def test_dot_products_fuse_only_matching_sums(read, taken, residual):
    generator = torch.Generator().manual_seed(3)
    g, x, y, weight = (torch.randn(shape, generator=generator) for shape in ((6, 8), (6, 8), (6, 8), (8,)))
    operators = torch.ops.residua
    _, rstd = operators.rms_norm(x, weight, 1e-6)
    more = (y,) if residual else ()

    def function(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        g_x, g_weight = operators.rms_norm_backward(g, x, weight, rstd, *(y,) * residual)
        return g_x, g_weight, read(g_x, x, y)

    module = traced(function, g, x, y)
    rewritten(module, take_dots)
    assert given(module, "rms_norm_backward", DOTTED) == [taken and not more]
    torch.testing.assert_close(module(g, x, y), function(g, x, y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("widened", [True, False])
@pytest.mark.parametrize("asked", [{}, {"dtype": torch.float32}], ids=["plain", "autocast on a GPU"])
def test_half_precision_sum_is_fused_only_if_factors_are_widened(widened, asked):
    """As in reads. A sum that is rounded at every product is another number; the interpreter cannot run either."""
    g, x = (torch.randn(6, 8, dtype=torch.bfloat16) for _ in range(2))
    operators, weight, rstd = torch.ops.residua, torch.ones(8), torch.ones(6)

    def function(g: Tensor, x: Tensor) -> Tensor:
        g_x, _ = operators.rms_norm_backward(g, x, weight, rstd)
        return ((g_x.float() * x.float()) if widened else g_x * x).sum(-1, **asked)

    module = traced(function, g, x, decomposition_table=select_decomp_table())
    rewritten(module, take_dots)
    assert given(module, "rms_norm_backward", DOTTED) == [widened]
