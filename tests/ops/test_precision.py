"""Half precision: operators return the dtype they are given, and reduce in single precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from residua import ops


def depth(x: Tensor, w: Tensor) -> Tensor:
    return ops.depth_attention([*x.unbind(0)], w, norm_weight=w)


def competitive(x: Tensor, w: Tensor) -> Tensor:
    return ops.multi_gate(x.movedim(0, -2), x[0], w, w[: x.shape[0] + 1], w)[0]


def independent(x: Tensor, w: Tensor) -> Tensor:
    return ops.multi_gate(x.movedim(0, -2), x[0], w, w[: x.shape[0]], w, competitive=False)[1]


def gated(x: Tensor, w: Tensor) -> Tensor:
    return ops.gated_norm(x[0], w, w[None, :].expand(4, -1), w[:, None].expand(-1, 4))


def mixed(x: Tensor, w: Tensor) -> Tensor:
    return ops.mix_projection(x[0][..., None, :], x[1][..., None, :], w, w, norm_weight=w)


def normed(x: Tensor, w: Tensor) -> Tensor:
    return ops.rms(x, weight=w)


OPERATORS = [depth, competitive, independent, gated, mixed, normed]
BOUND = {torch.float32: 6 * 2.0**-24, torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11}
"""Relative RMS error: two roundings of a half-precision value, since everything in between is in single precision."""


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_within_a_few_roundings(operator: Callable, dtype: torch.dtype) -> None:
    x, w = torch.randn(6, 2, 5, 65).to(dtype), (0.3 * torch.randn(65)).to(dtype)
    results = []
    for kind in (dtype, torch.float64):
        inputs = [t.detach().clone().to(kind).requires_grad_() for t in (x, w)]
        y = operator(*inputs)
        assert y.dtype == kind
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        y.backward(probe.to(dtype).to(kind))
        results.append([y, *(t.grad for t in inputs)])
    for ours, exact in zip(*results, strict=True):
        error = (ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error < BOUND[dtype]


def test_rms_of_a_large_half_precision_vector_does_not_overflow() -> None:
    x = torch.full((4,), 1e4, dtype=torch.float16)
    torch.testing.assert_close(ops.rms(x), torch.ones(4, dtype=torch.float16))


def test_the_loss_is_single_precision_for_any_input_dtype() -> None:
    hidden, weight = torch.randn(5, 8, dtype=torch.bfloat16), torch.randn(9, 8, dtype=torch.bfloat16)
    loss, z = ops.linear_cross_entropy(hidden, weight, torch.arange(5), z_loss=1e-3)
    assert loss.dtype == z.dtype == torch.float32
