"""PreAffine in the norm's own pass: kernels and reference against the equation in float64, and one rounding in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residua import ops
from residua.ops._runtime import fused
from tests.golden import parts
from tests.golden.compare import agree, each_token, random

interpreter = [
    pytest.mark.slow,
    pytest.mark.skipif(not (fused.INSTALLED and fused.INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1"),
]
NAMES = ("y", "g x", "g weight", "g affine")


def drawn(tokens: int, width: int, device: str = "cpu") -> list[Tensor]:
    """Rows of different size; a weight, and an affine with one large channel, as training makes it."""
    size = 1 + torch.arange(tokens, device=device)[:, None] % 5
    x, weight, affine = torch.randn(tokens, width), torch.randn(width), 1 + 0.5 * torch.randn(width)
    affine[width // 2] = 7.19
    return [x.to(device) * size, weight.to(device), affine.to(device)]


def results(choice: str, inputs: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm and all gradients."""
    x, weight, affine = leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    with ops.backend(choice):
        y = ops.rms_norm(x, weight, affine=affine, eps=1e-3)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, leaves, probe)]


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


def test_the_reference_is_the_equation_in_every_gradient() -> None:
    leaves = {"x": random(2, 3, 7), "weight": random(7, seed=1), "affine": random(7, seed=2)}
    x, weight, affine = leaves.values()
    golden = each_token(lambda v, _: [parts.preaffine(v, affine, weight, 0.1)], x)
    agree([ops.rms_norm(x, weight, affine=affine, eps=0.1)], golden, leaves)


def bfloat16_errors(choice: str, device: str = "cpu") -> tuple[float, float]:
    """Relative errors of PreAffine and of RMSNorm on the same bfloat16 input, against float64."""
    x, weight, affine = drawn(24, 512, device)
    x = x.bfloat16()
    with ops.backend(choice):
        found = [ops.rms_norm(x, weight, affine=affine), ops.rms_norm(x, weight)]
    wide = [t.double() for t in (x, weight, affine)]
    exact = [ops.rms_norm.reference(wide[0], wide[1], affine=a) for a in (wide[2], None)]
    ours, plain = (float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
    return ours, plain


def test_bfloat16_rounds_once_and_no_worse_than_rmsnorm() -> None:
    """A product rounded before the norm gives 2.95e-3; RMSNorm's one rounding gives 1.66e-3."""
    ours, rmsnorm = bfloat16_errors("reference")
    assert ours <= 1.7e-3 and ours <= 1.05 * rmsnorm


class TestKernels:
    pytestmark = interpreter

    @pytest.mark.parametrize("size", [(1, 7), (9, 300), (2, 1280)], ids=str)
    def test_they_equal_the_reference_in_every_gradient(self, size: tuple[int, int]) -> None:
        inputs = drawn(*size)
        assert_close(results("triton", inputs), results("reference", inputs, torch.float64), 2e-6)

    def test_bfloat16_is_rounded_once(self) -> None:
        """As often as RMSNorm's output, which the interpreter cuts off instead of rounding."""
        ours, rmsnorm = bfloat16_errors("triton")
        assert ours <= 1.05 * rmsnorm

    def test_rows_share_programs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from residua.ops.rms_norm import launch as host

        monkeypatch.setattr(host, "backward_plan", lambda width: host.RowPlan(1, 1))
        inputs = drawn(30, 20)
        assert_close(results("triton", inputs), results("reference", inputs, torch.float64), 2e-6)

    def test_additions_next_to_it_are_part_of_it(self) -> None:
        import residua.ops.rms_norm.launch  # noqa: F401  (its operators)

        x, weight, affine = drawn(5, 20)
        update, g, residual = (torch.randn(5, 20) for _ in range(3))
        operators = torch.ops.residua
        normed, rstd, added = operators.scaled_rms_norm_added(x, update, weight, affine, 1e-3)
        assert torch.equal(added, x + update)
        assert torch.equal(normed, operators.scaled_rms_norm(added, weight, affine, 1e-3)[0])
        alone = operators.scaled_rms_norm_backward(g, added, weight, affine, rstd)
        both = operators.scaled_rms_norm_backward(g, added, weight, affine, rstd, residual)
        torch.testing.assert_close(both[0], alone[0] + residual)
        assert torch.equal(both[1], alone[1]) and torch.equal(both[2], alone[2])

    def test_no_tokens_and_strided_inputs_are_taken(self) -> None:
        empty = results("triton", drawn(0, 20))
        assert empty[0].shape == (0, 20) and not empty[2].any() and not empty[3].any()
        x, weight, affine = drawn(6, 20)
        strided = [x.t().contiguous().t().reshape(2, 3, 20).transpose(0, 1), weight, affine.repeat(2)[::2]]
        assert_close(results("triton", strided), results("reference", strided, torch.float64), 2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(fused.INTERPRETED, reason="needs TRITON_INTERPRET=0")
@pytest.mark.parametrize("width", [768, 1000, 2048])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
def test_on_a_gpu_every_gradient_is_right(dtype: torch.dtype, tolerance: float, width: int) -> None:
    x, weight, affine = drawn(9000, width, "cuda")
    inputs = [x.to(dtype), weight, affine]
    ours = results("auto", inputs)
    assert_close(ours, results("reference", inputs, torch.float64), tolerance)
    assert all(torch.equal(a, b) for a, b in zip(ours, results("triton", inputs), strict=True))
    assert bfloat16_errors("auto", "cuda")[0] <= 1.7e-3
