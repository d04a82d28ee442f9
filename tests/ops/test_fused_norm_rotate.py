"""The fused QK-norm and rotation against the reference in float64, in the Triton interpreter and on a GPU."""

import pytest
import torch

from residua import ops
from residua.ops.norm_rotate import launch as host
from residua.ops.norm_rotate import reference
from tests.ops.harness import assert_close, assert_equal, choose, on_gpu, relative, results

pytestmark = pytest.mark.slow


def inputs(batch=2, length=5, heads=3, width=8, device="cpu", dtype=torch.float32, strided=False):
    torch.manual_seed(0)
    x = torch.randn(batch, length, heads, 2 * width if strided else width, device=device).to(dtype)
    x = x[..., :width] if strided else x
    angles = torch.randn(length, width // 2, device=device)
    return x, torch.randn(width, device=device), angles.cos(), angles.sin()


def run(choice, x, weight, cos, sin):
    return results(choose(choice, ops.norm_rotate, cos=cos, sin=sin), [x, weight])


def assert_exact(*case):
    assert_close(run("triton", *case), run("reference", *(t.double() for t in case)), 1e-6)


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 1, 1, 2), (3, 7, 2, 12), (2, 9, 5, 96)])
@pytest.mark.parametrize("strided", [False, True])
def test_interpreted_kernel_equals_float64_reference_gradients(shape, strided):
    assert_exact(*inputs(*shape, strided=strided))


def test_every_row_can_have_its_own_table():
    x, weight, *_ = inputs(3, 4, 2, 8)
    angles = torch.randn(3, 4, 4)
    case = (x, weight, angles.cos(), angles.sin())
    assert_exact(*case)
    alone = run("reference", x[1:2], weight, angles[1].cos(), angles[1].sin())[0]
    assert relative(run("triton", *case)[0][1:2], alone) < 1e-6


@pytest.mark.parametrize("plan", [(8, 1, 4, 1), (16, 2, 4, 2), (8, 3, 4, 1), (4, 6, 4, 1, 3)], ids=str)
def test_several_tiles_and_head_groups_per_program_are_correct(plan, monkeypatch):
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(host, name, host.HeadsPlan(*plan))
    assert_exact(*inputs(3, 5, 6, 8, strided=True))


def projection(batch=2, length=5, heads=4, kv_heads=2, width=8, device="cpu", dtype=torch.float32, per_row=False):
    """A projection [Q | K | V], gains, a table, and gradients as attention returns them: heads before tokens."""
    torch.manual_seed(0)
    counts = (heads, kv_heads, kv_heads)
    projected = torch.randn(batch, length, sum(counts) * width, device=device).to(dtype)
    angles = torch.randn(*((batch,) if per_row else ()), length, width // 2, device=device)
    gains = torch.randn(2, width, device=device).unbind()
    grads = [torch.randn(batch, n, length, width, device=device).to(dtype).transpose(1, 2) for n in counts]
    return projected, gains, (angles.cos(), angles.sin()), grads


def split(projected, grads):
    return projected.split([g.shape[2] * g.shape[3] for g in grads], -1)


def packed(projected, gains, table, grads):
    q, k, _ = (part.unflatten(-1, g.shape[2:]) for part, g in zip(split(projected, grads), grads, strict=True))
    return host.packed_heads_backward(*grads, q, k, *gains, *table, 1e-6, 1e-6)


def unpacked(projected, gains, table, grads):
    """By autograd, in float64."""
    leaves = [t.double().requires_grad_() for t in (projected, *gains)]
    q, k, v = (part.unflatten(-1, g.shape[2:]) for part, g in zip(split(leaves[0], grads), grads, strict=True))
    turned = [
        reference.norm_rotate(t, w, *(c.double() for c in table)) for t, w in zip((q, k), leaves[1:], strict=True)
    ]
    return torch.autograd.grad([*turned, v], leaves, [g.double() for g in grads])


SHAPES = {
    "as many keys": {"heads": 3, "kv_heads": 3},
    "grouped": {"heads": 8, "kv_heads": 4, "length": 9},
    "one key head": {"heads": 4, "kv_heads": 1, "width": 12},
    "one token": {"length": 1, "batch": 1},
    "a table for each row": {"per_row": True},
    "rows of one token with tables": {"per_row": True, "length": 1, "batch": 7},
}


@pytest.mark.parametrize("plan", [None, (8, 2, 4, 1)], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_gradient_equals_that_of_the_projection(shape, plan, monkeypatch):
    if plan:
        monkeypatch.setattr(host, "PACKED", host.HeadsPlan(*plan))
    case = projection(**SHAPES[shape])
    for ours, exact in zip(packed(*case), unpacked(*case), strict=True):
        assert ours.shape == exact.shape and relative(ours, exact) < 1e-6


def test_packed_gradient_of_an_empty_batch_is_empty():
    gradient, query, key = packed(*projection(batch=0))
    assert gradient.shape == (0, 5, 64) and not query.any() and not key.any()


def test_packed_gradient_accepts_values_in_any_order():
    projected, gains, table, (dq, dk, dv) = projection()
    scattered = dv.transpose(1, 3).contiguous().transpose(1, 3)
    assert scattered.stride(-1) != 1
    assert_equal(packed(projected, gains, table, [dq, dk, scattered]), packed(projected, gains, table, [dq, dk, dv]))


def test_transposed_incoming_gradient_is_read_correctly():
    x, *rest = inputs()
    ours, exact = (
        results(choose(choice, lambda x: ops.norm_rotate(x, *rest).transpose(1, 2)), [x])
        for choice in ("triton", "reference")
    )
    assert_close(ours, exact, 1e-6)


@on_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_gpu_kernel_equals_float64_reference(dtype, tolerance, width):
    case = inputs(2, 300, 6, width, device="cuda", dtype=dtype, strided=True)
    assert_close(run("triton", *case), run("reference", *(t.double() for t in case)), tolerance)


@on_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_gpu_packed_gradient_equals_that_of_the_projection(dtype, tolerance, width):
    case = projection(2, 300, 6, 2, width, device="cuda", dtype=dtype)
    ours, again = packed(*case), packed(*case)
    assert_equal(ours, again)
    assert_close(ours, unpacked(*case), tolerance)
