"""The fused GatedNorm against the reference in float64."""

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops.gated_norm import launch, reference
from tests.ops.harness import assert_close, assert_equal, choose, interpreter, on_gpu, results

pytestmark = pytest.mark.slow
NAMES = ("out", "g x", "g weight", "g down", "g up")
triton = choose("triton", ops.gated_norm)


def drawn(tokens: int, width: int, rank: int, device: str = "cpu") -> list[Tensor]:
    """x, weight, down, up: gates well away from ½, and rows of different size."""
    x = torch.randn(tokens, width, device=device) * (1 + torch.arange(tokens, device=device)[:, None] % 5)
    down = torch.randn(rank, width, device=device) / width**0.5
    return [x, torch.randn(width, device=device), down, torch.randn(width, rank, device=device)]


def assert_exact(inputs: list[Tensor]) -> None:
    exact = results(reference.gated_norm, inputs, torch.float64)
    assert_close(results(triton, inputs), exact, 3e-6, NAMES)


@interpreter
@pytest.mark.parametrize("size", [(5, 33, 4), (70, 100, 16), (1, 16, 1), (3, 130, 20)], ids=str)
def test_the_kernels_equal_the_reference_in_every_gradient(size):
    assert_exact(drawn(*size))


@interpreter
def test_several_row_tiles_per_program_are_correct(monkeypatch):
    rows, tokens = launch.TilePlan(16, 16, 4), launch.TilePlan(16, 16, 4, 1, 1)
    monkeypatch.setattr(launch, "forward_plan", lambda *_: (rows, tokens))
    monkeypatch.setattr(launch, "backward_plan", lambda *_: (rows, tokens))
    assert_exact(drawn(100, 20, 3))


def with_additions(x: Tensor, update: Tensor, residual: Tensor, g: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The operators that a compiled step is given: the sum, the gated rows, g_x + residual, the weights' gradients."""
    out, *kept, total = launch.forward(x, *weights, 1e-6, update)
    return [total, out, *launch.backward(g, total, *weights, *kept, residual)]


def assert_additions(x: Tensor, others: list[Tensor], weights: list[Tensor], tolerance: float) -> list[Tensor]:
    """`others`: the update, the gradient of the residual path and that of the gated rows."""
    update, residual, g = others
    total, *ours = with_additions(x, update, residual, g, weights)
    assert torch.equal(total, x + update)
    leaves = [t.detach().double().requires_grad_() for t in (total, *weights)]
    out = reference.gated_norm(*leaves)
    g_x, *g_weights = torch.autograd.grad(out, leaves, g.double())
    assert_close(ours, [out, g_x + residual.double(), *g_weights], tolerance, NAMES)
    return [total, *ours]


@interpreter
@pytest.mark.parametrize("size", [(5, 33, 4), (70, 100, 16), (0, 16, 2)], ids=str)
def test_fused_additions_equal_separate_additions(size):
    x, *weights = drawn(*size)
    assert_additions(x.t().contiguous().t(), [torch.randn(x.shape) for _ in range(3)], weights, 3e-6)


@interpreter
def test_non_contiguous_inputs_are_accepted():
    x, weight, down, up = drawn(6, 20, 4)
    batch = x.t().contiguous().t().reshape(2, 3, 20).transpose(0, 1)
    want = reference.gated_norm(batch.double(), weight.double(), down.double(), up.double())
    assert torch.allclose(triton(batch, weight, down.t().contiguous().t(), up).double(), want, atol=1e-5)


@interpreter
@pytest.mark.parametrize("change", ["tensorwise", "tanh"])
def test_other_gates_fall_back_to_the_reference(change):
    x, weight, down, up = drawn(2, 8, 2)
    up, settings = (up[:1], {}) if change == "tensorwise" else (up, {"activation": "tanh"})
    with ops.backend("triton"), pytest.raises(ValueError, match="has no fused kernel of gated_norm"):
        ops.gated_norm(x, weight, down, up, **settings)


@on_gpu
@pytest.mark.parametrize("width", [768, 1000, 1280, 4096])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_gpu_gradients_are_correct(dtype, tolerance, width):
    x, *weights = drawn(9000, width, 16, "cuda")
    inputs = [x.to(dtype), *weights]
    ours = results(triton, inputs)
    assert_close(ours, results(reference.gated_norm, inputs, torch.float64), tolerance, NAMES)
    assert_equal(ours, results(triton, inputs))


@on_gpu
@pytest.mark.parametrize("width", [768, 1000, 1280])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_gpu_additions_are_correct(dtype, tolerance, width):
    x, *weights = drawn(9000, width, 16, "cuda")
    x, *others = (t.to(dtype) for t in (x, *(torch.randn_like(x) for _ in range(3))))
    ours = assert_additions(x, others, weights, tolerance)
    assert_equal(ours, with_additions(x, *others, weights))
