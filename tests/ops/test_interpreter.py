"""The faster interpreter of `tests/interpreter.py` reduces like Triton's own."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ["TRITON_INTERPRET"] != "1":
    pytest.skip("kernels are compiled", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def _then(a, b, c, d):
    """First x -> a x + b, then x -> c x + d: the order matters."""
    return a * c, b * c + d


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _reduce(a_ptr, b_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    a, b = tl.reduce((tl.load(a_ptr + at), tl.load(b_ptr + at)), AXIS, _then, keep_dims=KEEP)
    to = tl.arange(0, C if AXIS == 0 else R)
    if KEEP:
        to = to[None, :] if AXIS == 0 else to[:, None]
    tl.store(out_ptr + to, a)
    tl.store(out_ptr + 16 + to, b)


@triton.jit
def _largest(a_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out_ptr, tl.reduce(tl.load(a_ptr + at), None, _larger))
    line = tl.reduce(tl.load(a_ptr + tl.arange(0, C)), 0, _larger)
    tl.store(out_ptr + 1, line)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_pairs_are_reduced_in_order(axis, keep):
    a, b = torch.randn(2, 4, 8, dtype=torch.float64)
    out = torch.zeros(2, 16, dtype=torch.float64)
    _reduce[(1,)](a, b, out, 4, 8, axis, keep)
    first, second = a.select(axis, 0), b.select(axis, 0)
    for i in range(1, a.shape[axis]):
        first, second = first * a.select(axis, i), second * a.select(axis, i) + b.select(axis, i)
    torch.testing.assert_close(out[:, : first.numel()], torch.stack([first, second]))


def test_reducing_all_axes_or_the_only_axis_gives_a_scalar():
    a, out = torch.randn(4, 8), torch.zeros(2)
    _largest[(1,)](a, out, 4, 8)
    assert out.tolist() == [a.max().item(), a[0].max().item()]


def test_a_shape_that_triton_refuses_is_refused():
    with pytest.raises(Exception, match="must be a power of 2"):
        _largest[(1,)](torch.randn(4, 6), torch.zeros(2), 4, 6)
    for shape, message in (([3], "power of 2"), ([tl.constexpr(2.0)], "constexpr"), ([], "0d"), ([2**30], "maximum")):
        with pytest.raises((TypeError, ValueError), match=message):
            tl.block_type(tl.float32, shape)
