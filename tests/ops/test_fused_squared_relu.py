"""The feed-forward with a squared ReLU: the fused products against float64, in the interpreter and on a GPU."""

import importlib

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from residua import ops
from residua.config import choices
from residua.model.context import Context
from residua.model.ffn import SquaredReluFFN, build_ffn
from residua.ops import squared_relu
from residua.ops._runtime import triton_support
from tests.ops.harness import assert_close, assert_equal, interpreter, on_gpu, relative

pytestmark = pytest.mark.slow

GPU = [pytest.mark.gpu, pytest.mark.skipif(triton_support.INTERPRETED, reason="needs TRITON_INTERPRET=0")]
host = importlib.import_module("residua.ops.squared_relu.launch")


@pytest.fixture(autouse=True)
def few_tokens_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squared_relu, "FEWEST_TOKENS", 1)


def inputs(*shape: int, hidden: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x [..., C], w_in [H, C], w_out [C, H] and the gradient of y."""
    torch.manual_seed(0)
    width = shape[-1]
    sizes = (shape, (hidden, width), (width, hidden), shape)
    scales = (1.0, width**-0.5, hidden**-0.5, 1.0)
    return [(scale * torch.randn(size, device=device)).to(dtype) for size, scale in zip(sizes, scales, strict=True)]


def run(choice: str, x: Tensor, w_in: Tensor, w_out: Tensor, g: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, w_in, w_out)]
    with ops.backend(choice):
        y = ops.squared_relu_ffn(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def assert_exact(case: list[Tensor], tolerance: float = 1e-6) -> None:
    assert_close(run("triton", *case), run("reference", *(t.double() for t in case)), tolerance)


@interpreter
@pytest.mark.parametrize("shape", [(48, 32), (1, 8), (3, 7, 40), (2, 33, 72)], ids=str)
@pytest.mark.parametrize("hidden", [64, 24, 136])
def test_interpreted_products_and_gradients_equal_float64(shape, hidden):
    assert_exact(inputs(*shape, hidden=hidden))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [pytest.param("cpu", torch.float32, marks=interpreter), pytest.param("cuda", torch.bfloat16, marks=GPU)],
)
def test_nan_and_infinity_propagate_as_in_the_reference(device: str, dtype: torch.dtype) -> None:
    """NaN passes the ReLU: a run that has diverged must not look healthy after it."""
    x, w_in, w_out, g = inputs(48, 64, hidden=64, device=device, dtype=dtype)
    x[5], x[17, 3] = float("nan"), float("inf")
    for ours, exact in zip(run("triton", x, w_in, w_out, g), run("reference", x, w_in, w_out, g), strict=True):
        assert torch.equal(ours.isnan(), exact.isnan())


@interpreter
@pytest.mark.parametrize(
    "plan", [(16, 16, 16, 1, 1, 4, 1), (32, 64, 32, 8, 4, 4, 1), (64, 16, 16, 3, 2, 4, 1)], ids=str
)
def test_every_tile_plan_is_correct(plan, monkeypatch):
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(host, name, host.FlatPlan(*plan))
    assert_exact(inputs(150, 48, hidden=104))


@interpreter
def test_a_non_contiguous_gradient_is_read_correctly():
    x, w_in, w_out, g = inputs(40, 32, hidden=64)
    strided = g.t().contiguous().t()
    assert all(map(torch.equal, run("triton", x, w_in, w_out, g), run("triton", x, w_in, w_out, strided)))


@interpreter
@pytest.mark.parametrize("width, hidden, fewest", [(9, 16, 1), (16, 12, 1), (8, 16, 6)])
def test_unsupported_rows_fall_back_to_the_reference(width, hidden, fewest, monkeypatch):
    monkeypatch.setattr(squared_relu, "FEWEST_TOKENS", fewest)
    monkeypatch.setattr(host, "_squared_relu_ffn", None)
    case = inputs(5, width, hidden=hidden)
    assert torch.equal(run("triton", *case)[0], run("reference", *case)[0])


def fake_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused path without a GPU: plain products stand in for its kernels, which no compiler sees anyway."""

    def launch(x: Tensor, w: Tensor, a: Tensor | None, y: Tensor) -> None:
        y.copy_((x @ w.t()).relu().square() if a is None else (x @ w) * 2 * a.sqrt())

    plan = type("Plan", (), {"launch": staticmethod(launch)})
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(host, name, plan)
    monkeypatch.setattr("residua.ops.squared_relu.supports", lambda *tensors: True)
    monkeypatch.setattr("residua.ops.squared_relu.INTERPRETED", False)


def test_autocast_uses_bf16_products_and_float32_gradients(monkeypatch):
    fake_products(monkeypatch)
    x, w_in, w_out, g = inputs(64, 32, hidden=64)
    outcomes = []
    for choice in ("reference", "triton"):
        with torch.autocast("cpu", torch.bfloat16):
            outcomes.append(run(choice, x, w_in, w_out, g.bfloat16()))
    for ours, plain in zip(*reversed(outcomes), strict=True):
        assert ours.dtype is plain.dtype
        assert relative(ours, plain) < 1e-2
    assert [t.dtype for t in outcomes[1]] == [torch.bfloat16, *[torch.float32] * 3]


def test_compiled_weight_gradients_have_a_transposed_operand(monkeypatch):
    """In the form that `rewrites.weight_gradients` matches: permute(dY) @ X."""
    fake_products(monkeypatch)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    x, w_in, w_out, g = inputs(2, 32, 32, hidden=64)
    leaves = [t.requires_grad_() for t in (x, w_in, w_out)]
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
    compiled = torch.compile(ops.squared_relu_ffn, backend=backend, fullgraph=True)
    with ops.backend("triton"), torch.autocast("cpu", torch.bfloat16):
        y = compiled(*leaves)
    gradients = torch.autograd.grad(y, leaves, g.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        plain = run("reference", *leaves, g.bfloat16())
    assert all(relative(a, b) < 1e-2 for a, b in zip((y, *gradients), plain, strict=True))

    forward, backward = ([node for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs)
    names = [[str(node.target) for node in nodes] for nodes in (forward, backward)]
    assert names[0].count("residua.squared_relu_linear.default") == 1 and names[0].count("aten.mm.default") == 1
    assert names[1].count("residua.squared_relu_linear_backward.default") == 1
    products = [node for node in backward if str(node.target) == "aten.mm.default"]
    turned = [node for node in products if str(node.args[0].target) == "aten.permute.default"]
    assert len(products) == 3 and len(turned) == 2


def feed_forward() -> tuple[SquaredReluFFN, Tensor]:
    torch.manual_seed(0)
    body = build_ffn(choices.ReLU2(hidden=24), 16, std=0.2, output_std=0.2)
    assert isinstance(body, SquaredReluFFN)
    return body, torch.randn(2, 3, 16)


def seen(body: SquaredReluFFN, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, int]:
    """The output of the sublayer, and the number of its operator calls."""
    calls, operator = [], ops.squared_relu_ffn

    def counted(*tensors: Tensor) -> Tensor:
        calls.append(tensors)
        return operator(*tensors)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "squared_relu_ffn", counted)
        y, _ = body(x, {}, Context(None, None))
    return y, len(calls)


def test_plain_projections_run_as_one_operator(monkeypatch):
    body, x = feed_forward()
    y, calls = seen(body, x, monkeypatch)
    assert calls == 1
    assert torch.equal(y, body.out(body.act(body.up(x))))


@pytest.mark.parametrize("which", ["up", "out"])
@pytest.mark.parametrize("change", ["hook", "pre-hook", "stand-in", "wrapper"])
def test_hooked_or_replaced_projections_are_called(which, change, monkeypatch):
    body, x = feed_forward()
    before, _ = seen(body, x, monkeypatch)
    projection, notes = getattr(body, which), []
    if change == "hook":
        projection.register_forward_hook(lambda *_: notes.append(1))
    elif change == "pre-hook":
        projection.register_forward_pre_hook(lambda *_: notes.append(1))
    elif change == "stand-in":
        linear = nn.Linear(*reversed(projection.weight.shape), bias=False)
        linear.weight = projection.weight
        linear.register_forward_hook(lambda *_: notes.append(1))
        setattr(body, which, linear)
    else:
        plain = projection.forward
        projection.forward = lambda v: notes.append(1) or plain(v)
    after, calls = seen(body, x, monkeypatch)
    assert calls == 0 and notes == [1]
    assert torch.equal(before, after)


@on_gpu
@pytest.mark.parametrize("plan", ["chosen", "flat"])
@pytest.mark.parametrize(
    "tokens, width, hidden", [(4096, 768, 3072), (2048, 1280, 5120), (2500, 136, 1000), (40, 72, 264)]
)
def test_gpu_bfloat16_is_close_to_float64_and_repeatable(plan, tokens, width, hidden, monkeypatch):
    if plan == "flat":
        monkeypatch.setattr(host, "FORWARD", host.FLAT_FORWARD)
        monkeypatch.setattr(host, "BACKWARD", host.FLAT_BACKWARD)
    case = inputs(tokens, width, hidden=hidden, device="cuda", dtype=torch.bfloat16)
    assert_exact(case, 1e-2)
    first = run("triton", *case)
    for _ in range(5):
        assert_equal(first, run("triton", *case))
