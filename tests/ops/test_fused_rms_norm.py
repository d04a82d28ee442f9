"""The fused norm, alone and after an addition, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops._runtime import fused

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
interpreter = pytest.mark.skipif(not fused.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _poison():
    """Fill uninitialised memory with NaN, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(tokens: int, width: int, device: str = "cpu") -> list[Tensor]:
    """Rows of different size."""
    size = 1 + torch.arange(tokens, device=device)[:, None] % 5
    h, y = (torch.randn(tokens, width, device=device) * size for _ in range(2))
    return [h, y, torch.randn(width, device=device)]


def results(choice: str, inputs: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs and gradients: of the norm of an addition, or of the norm alone if there are two inputs."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    with ops.backend(choice):
        made = ops.add_norm(*leaves, eps=1e-3) if len(leaves) == 3 else (ops.rms_norm(*leaves, eps=1e-3),)
    draw = torch.Generator(made[0].device).manual_seed(1)
    probes = [torch.randn(t.shape, generator=draw, device=t.device).to(t) for t in made]
    return [*made, *torch.autograd.grad(made, leaves, probes)]


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    names = ("s", "x", "g h", "g y", "g weight") if len(ours) == 5 else ("x", "g s", "g weight")
    for name, a, b in zip(names, ours, exact, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@interpreter
@pytest.mark.parametrize("size", [(1, 7), (9, 300), (5, 1000), (3, 1280), (2, 4100)], ids=str)
def test_the_kernels_equal_the_reference_in_every_gradient(size):
    inputs = drawn(*size)
    for some in (inputs, inputs[1:]):
        assert_close(results("triton", some), results("reference", some, torch.float64), 2e-6)


@interpreter
def test_rows_share_programs(monkeypatch):
    from residua.ops.rms_norm import launch as host

    monkeypatch.setattr(host, "backward_plan", lambda width: host.RowPlan(1, 1))
    inputs = drawn(30, 20)
    assert_close(results("triton", inputs), results("reference", inputs, torch.float64), 2e-6)


@interpreter
def test_no_tokens_and_strided_inputs_are_taken():
    empty = results("triton", drawn(0, 20))
    assert empty[0].shape == (0, 20) and not empty[-1].any()
    assert not results("triton", drawn(0, 20)[1:])[-1].any()
    h, y, weight = drawn(6, 20)
    strided = [h.t().contiguous().t().reshape(2, 3, 20).transpose(0, 1), y.reshape(3, 2, 20), weight]
    for some in (strided, [strided[0], weight.repeat(2)[::2]]):
        assert_close(results("triton", some), results("reference", some, torch.float64), 2e-6)


def assert_dotted(x: Tensor, g: Tensor, weight: Tensor) -> None:
    """The same gradients, and the dot product of x with its own as it is stored. A small eps would make that 0."""
    import residua.ops.rms_norm.launch  # noqa: F401

    operators = torch.ops.residua
    _, rstd = operators.rms_norm(x, weight, 10.0)
    g_x, g_weight = operators.rms_norm_backward(g, x, weight, rstd)
    *same, dots = operators.rms_norm_backward_dotted(g, x, weight, rstd)
    assert torch.equal(same[0], g_x) and torch.equal(same[1], g_weight)
    exact = (x.double() * g_x.double()).sum(-1)
    size = (x.double() * g_x.double()).square().sum(-1).sqrt()
    assert ((dots - exact).abs() <= 1e-5 * size).all()


@interpreter
@pytest.mark.parametrize("size", [(1, 7), (9, 300), (3, 1280)], ids=str)
def test_a_gradient_comes_with_its_dot_product(size):
    assert_dotted(*drawn(*size))


@interpreter
@pytest.mark.parametrize("used", [0, 1], ids=["the sum", "the norm"])
def test_an_output_that_nobody_uses_has_no_part_in_the_gradients(used):
    inputs, found = drawn(3, 20), []
    for choice in ("reference", "triton"):
        leaves = [t.detach().requires_grad_() for t in inputs]
        with ops.backend(choice):
            out = ops.add_norm(*leaves)[used]
        found.append(torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True, materialize_grads=True))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*found, strict=True))


@interpreter
def test_compiles_into_one_graph():
    inputs = [t.requires_grad_() for t in drawn(4, 16)]

    def run(*tensors: Tensor) -> Tensor:
        with ops.backend("triton"):
            s, x = ops.add_norm(*tensors)
            x = ops.rms_norm(x, tensors[2])
        return (s * x).square().sum()

    eager, compiled = (
        torch.autograd.grad(f(*inputs), inputs) for f in (run, torch.compile(run, backend="aot_eager", fullgraph=True))
    )
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(fused.INTERPRETED, reason="needs TRITON_INTERPRET=0")
@pytest.mark.parametrize("width", [768, 1000, 1280, 4096, 5000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
def test_on_a_gpu_every_gradient_is_right(dtype, tolerance, width):
    h, y, weight = drawn(9000, width, "cuda")
    inputs = [h.to(dtype), y.to(dtype), weight]
    for some in (inputs, inputs[1:]):
        ours = results("auto", some)
        assert_close(ours, results("reference", some, torch.float64), tolerance)
        assert all(torch.equal(a, b) for a, b in zip(ours, results("triton", some), strict=True))
    assert_dotted(*inputs)
