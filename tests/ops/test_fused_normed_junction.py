"""A junction with the norm after it, in one kernel each way, against junction and norm in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from residua.ops.multi_gate import reference
from residua.ops.rms_norm.reference import rms_norm
from tests.ops.harness import assert_close, interpreter, on_gpu
from tests.ops.test_fused_multi_gate import BF16, FP32, TOLERANCE, junction

pytestmark = pytest.mark.slow
NAMES = ("normed", "streams", "g streams", "g update", "g gate_query", "g gate_bias", "g pool_query", "g gain")
EPS, NORM_EPS = 1e-6, 1e-3


@pytest.fixture(autouse=True)
def _registered():
    pytest.importorskip("triton")
    import residua.ops.multi_gate.launch  # noqa: F401  (its operators)


def inputs(tokens: int, n: int, width: int, competitive: bool, dtype: torch.dtype, device: str) -> list[Tensor]:
    """streams, update, gate_query, gate_bias, pool_query, gain, and the gradients of the norm and of the streams."""
    drawn = junction(tokens, n, width, competitive, device)
    drawn += [torch.randn(shape, device=device) for shape in ((width,), (tokens, width), (tokens, n, width))]
    return [t.to(dtype) if t.dim() > 1 else t for t in drawn]


def exact(drawn: list[Tensor], competitive: bool, passes_on: bool = True) -> list[Tensor]:
    """Junction, then norm, and every gradient, by autograd in float64."""
    *leaves, g_normed, g_after = (t.double() for t in drawn)
    *weights, gain = leaves = [t.requires_grad_() for t in leaves]
    h, after = reference.multi_gate(*weights, competitive=competitive, eps=EPS)
    x = rms_norm(h, gain, eps=NORM_EPS)
    total = (x * g_normed).sum() + (after * g_after).sum() * passes_on
    return [x, after, *torch.autograd.grad(total, leaves)]


def ours(drawn: list[Tensor], competitive: bool, passes_on: bool = True, apart: bool = False) -> list[Tensor]:
    """The same from the operators; the streams may be one tensor or n."""
    streams, f, w1, bias, w2, gain, g_normed, g_after = drawn
    operators, width = torch.ops.residua, f.shape[-1]
    given = list(streams.unbind(-2)) if apart else [streams]
    x, after, stats, hidden = operators.multi_gate_normed_forward(
        given, f, w1, bias, w2, gain, competitive, EPS, NORM_EPS
    )
    *g_streams, g_f, row = operators.multi_gate_normed_backward(
        g_normed, [g_after] * passes_on, given, [f], [stats], hidden, w1, w2, gain, apart, competitive, EPS
    )
    g_w1, g_w2, g_bias, g_gain = row.split([width, width, streams.shape[-2] + 1, width])
    g_s = torch.stack(g_streams, -2) if apart else g_streams[0]
    return [x, after, g_s, g_f, g_w1, g_bias[0 if competitive else 1 :], g_w2, g_gain]


SIZES = {
    "odd width, shared programs": (4, 4, 33, True, True),
    "width of several tiles, apart": (2, 2, 300, False, True),
    "padded streams, last junction": (3, 3, 20, True, False),
    "eight streams": (1, 8, 40, True, True),
}


@interpreter
@pytest.mark.parametrize(("tokens", "n", "width", "competitive", "passes_on"), SIZES.values(), ids=SIZES)
def test_the_kernels_equal_junction_and_norm_in_every_gradient(tokens, n, width, competitive, passes_on):
    drawn = inputs(tokens, n, width, competitive, FP32, "cpu")
    made = ours(drawn, competitive, passes_on, apart=n == 2)
    assert_close(made, exact(drawn, competitive, passes_on), 5e-6)


@interpreter
def test_no_tokens_give_no_output_and_zero_gradients():
    made = ours(inputs(0, 3, 8, True, FP32, "cpu"), True)
    assert made[0].shape == (0, 8) and made[1].shape == (0, 3, 8)
    assert all(g.count_nonzero() == 0 for g in made[2:])


def second_of_a_segment(drawn: list[Tensor], first: list[Tensor]) -> list[list[Tensor]]:
    """The gradients of a junction whose streams are made again from those before another one, and from its own."""
    streams, f, w1, bias, w2, gain, g_normed, g_after = drawn
    operators = torch.ops.residua
    _, mine, past, _ = operators.multi_gate_normed_forward([streams], *first[1:6], True, EPS, NORM_EPS)
    _, _, stats, hidden = operators.multi_gate_normed_forward([mine], f, w1, bias, w2, gain, True, EPS, NORM_EPS)
    kept = ([streams], [first[1], f], [past, stats]), ([mine], [f], [stats])
    settings = (hidden, w1, w2, gain, False, True, EPS)
    return [operators.multi_gate_normed_backward(g_normed, [g_after], *what, *settings) for what in kept]


@interpreter
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_streams_made_again_are_bit_for_bit_those_that_were_not_kept(dtype):
    again, kept = second_of_a_segment(*(inputs(2, 3, 10, True, dtype, "cpu") for _ in range(2)))
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))


# every way in which the launcher cuts rows
ON_A_GPU = {
    "2 streams": (2, 768, FP32, False),
    "4 streams, ragged": (4, 1000, FP32, True),
    "4 streams": (4, 768, BF16, True),
    "4 streams, between powers": (4, 1280, BF16, True),
    "8 streams": (8, 768, BF16, True),
    "4 streams, wide": (4, 2048, BF16, False),
}


@on_gpu
@pytest.mark.parametrize(("n", "width", "dtype", "competitive"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu_every_gradient_is_right_and_two_runs_are_bit_identical(n, width, dtype, competitive):
    drawn = inputs(700, n, width, competitive, dtype, "cuda")
    made = ours(drawn, competitive)
    assert_close(made, exact(drawn, competitive), TOLERANCE[dtype])
    assert all(torch.equal(a, b) for a, b in zip(made, ours(drawn, competitive), strict=True))
