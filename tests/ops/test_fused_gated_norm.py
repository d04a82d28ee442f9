"""The fused GatedNorm against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops._runtime import fused
from residua.ops.gated_norm import reference

pytestmark = pytest.mark.slow

interpreter = pytest.mark.skipif(not fused.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _poison():
    """Fill uninitialised memory with NaN, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(tokens: int, width: int, rank: int, device: str = "cpu") -> list[Tensor]:
    """x, weight, down, up: gates well away from ½, and rows of different size."""
    x = torch.randn(tokens, width, device=device) * (1 + torch.arange(tokens, device=device)[:, None] % 5)
    down = torch.randn(rank, width, device=device) / width**0.5
    return [x, torch.randn(width, device=device), down, torch.randn(width, rank, device=device)]


def with_gradients(operator: Callable, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    out = operator(*leaves)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad((probe * out).sum(), leaves)]


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("out", "g x", "g weight", "g down", "g up"), ours, exact, strict=True):
        error = (a.double() - b).norm() / b.norm().clamp(min=1e-12)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def triton(*args: Tensor) -> Tensor:
    with ops.backend("triton"):
        return ops.gated_norm(*args)


@interpreter
@pytest.mark.parametrize("size", [(5, 33, 4), (70, 100, 16), (1, 16, 1), (3, 130, 20)], ids=str)
def test_the_kernels_equal_the_reference_in_every_gradient(size):
    inputs = drawn(*size)
    exact = with_gradients(reference.gated_norm, inputs, torch.float64)
    assert_close(with_gradients(triton, inputs, torch.float32), exact, 3e-6)


@interpreter
def test_tiles_of_rows_share_programs(monkeypatch):
    from residua.ops.gated_norm import launch as host

    rows, tokens = host.TilePlan(16, 16, 4), host.TilePlan(16, 16, 4, 1, 1)
    monkeypatch.setattr(host, "forward_plan", lambda *_: host.Forward(rows, tokens))
    monkeypatch.setattr(host, "backward_plan", lambda *_: host.Backward(rows, tokens))
    inputs = drawn(100, 20, 3)
    exact = with_gradients(reference.gated_norm, inputs, torch.float64)
    assert_close(with_gradients(triton, inputs, torch.float32), exact, 3e-6)


def with_additions(x: Tensor, update: Tensor, residual: Tensor, g: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The operators that a compiled step is given: the sum, the gated rows, g_x + residual, the weights' gradients."""
    from residua.ops.gated_norm import launch as host

    out, small, rstd, bottleneck, total = host.forward_added(x, update, *weights, 1e-6)
    return [total, out, *host.backward(g, total, *weights, small, rstd, bottleneck, residual)]


def exact_with_additions(total: Tensor, residual: Tensor, g: Tensor, weights: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (total, *weights)]
    out = reference.gated_norm(*leaves)
    g_x, *g_weights = torch.autograd.grad(out, leaves, g.double())
    return [out, g_x + residual.double(), *g_weights]


@interpreter
@pytest.mark.parametrize("size", [(5, 33, 4), (70, 100, 16), (0, 16, 2)], ids=str)
def test_additions_are_those_that_would_stand_beside_the_norm(size):
    x, *weights = drawn(*size)
    update, residual, g = (torch.randn(x.shape) for _ in range(3))
    total, *ours = with_additions(x.t().contiguous().t(), update, residual, g, weights)
    assert torch.equal(total, x + update)
    assert_close(ours, exact_with_additions(total, residual, g, weights), 3e-6)


@interpreter
def test_no_tokens_and_non_contiguous_inputs_are_taken():
    x, weight, down, up = drawn(6, 20, 4)
    out = with_gradients(triton, [x[:0], weight, down, up], torch.float32)
    assert out[0].shape == (0, 20) and all(g.count_nonzero() == 0 for g in out[1:])
    batch = x.t().contiguous().t().reshape(2, 3, 20).transpose(0, 1)
    want = reference.gated_norm(batch.double(), weight.double(), down.double(), up.double())
    assert torch.allclose(triton(batch, weight, down.t().contiguous().t(), up).double(), want, atol=1e-5)


@interpreter
def test_compiles_into_one_graph():
    inputs = [t.requires_grad_() for t in drawn(4, 16, 2)]
    eager, compiled = (
        torch.autograd.grad(f(*inputs).square().sum(), inputs)
        for f in (triton, torch.compile(triton, backend="aot_eager", fullgraph=True))
    )
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@interpreter
@pytest.mark.parametrize("change", ["tensorwise", "tanh"])
def test_other_gates_are_left_to_the_reference(change):
    x, weight, down, up = drawn(2, 8, 2)
    up, settings = (up[:1], {}) if change == "tensorwise" else (up, {"activation": "tanh"})
    with ops.backend("triton"), pytest.raises(ValueError, match="has no fused gated_norm"):
        ops.gated_norm(x, weight, down, up, **settings)


@pytest.mark.gpu
@pytest.mark.skipif(fused.INTERPRETED, reason="needs TRITON_INTERPRET=0")
@pytest.mark.parametrize("width", [768, 1000, 1280, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_every_gradient_is_right(dtype, width):
    x, *weights = drawn(9000, width, 16, "cuda")
    inputs = [x.to(dtype), *weights]
    exact = with_gradients(reference.gated_norm, inputs, torch.float64)

    def mixed(x: Tensor, *weights: Tensor) -> Tensor:
        return triton(x.to(dtype), *weights)

    ours = with_gradients(mixed, inputs, torch.float32)
    assert_close(ours, exact, {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype])
    again = with_gradients(mixed, inputs, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(fused.INTERPRETED, reason="needs TRITON_INTERPRET=0")
@pytest.mark.parametrize("width", [768, 1000, 1280])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_additions_are_right(dtype, width):
    x, *weights = drawn(9000, width, 16, "cuda")
    x, update, residual, g = (t.to(dtype) for t in (x, *(torch.randn_like(x) for _ in range(3))))
    total, *ours = with_additions(x, update, residual, g, weights)
    assert torch.equal(total, x + update)
    assert_close(
        ours, exact_with_additions(total, residual, g, weights), {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    )
    again = with_additions(x, update, residual, g, weights)
    assert all(torch.equal(a, b) for a, b in zip([total, *ours], again, strict=True))
