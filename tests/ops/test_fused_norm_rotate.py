"""The fused QK-norm and rotation against the reference in float64, in the Triton interpreter and on a GPU."""

import pytest
import torch

from residua import ops

pytest.importorskip("triton")


def inputs(batch=2, length=5, heads=3, width=8, device="cpu", dtype=torch.float32, strided=False):
    torch.manual_seed(0)
    x = torch.randn(batch, length, heads, 2 * width if strided else width, device=device).to(dtype)
    x = x[..., :width] if strided else x
    angles = torch.randn(length, width // 2, device=device)
    return x, torch.randn(width, device=device), angles.cos(), angles.sin()


def run(choice, x, weight, cos, sin, seed=1):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    with ops.backend(choice):
        y = ops.norm_rotate(x, weight, cos, sin)
    torch.manual_seed(seed)
    dy = torch.randn(y.shape).to(y)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def relative(a, b):
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm().clamp(min=1e-30))


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 1, 1, 2), (3, 7, 2, 12), (2, 9, 5, 96)])
@pytest.mark.parametrize("strided", [False, True])
def test_interpreted_kernel_equals_float64_reference_with_every_gradient(shape, strided):
    case = inputs(*shape, strided=strided)
    truth = run("reference", *(t.double() for t in case))
    for fused, exact in zip(run("triton", *case), truth, strict=True):
        assert relative(fused, exact) < 1e-6


def test_every_row_may_have_a_table_of_its_own():
    x, weight, *_ = inputs(3, 4, 2, 8)
    angles = torch.randn(3, 4, 4)
    case = (x, weight, angles.cos(), angles.sin())
    truth = run("reference", *(t.double() for t in case))
    for fused, exact in zip(run("triton", *case), truth, strict=True):
        assert relative(fused, exact) < 1e-6
    alone = run("reference", x[1:2], weight, angles[1].cos(), angles[1].sin())[0]
    assert relative(run("triton", *case)[0][1:2], alone) < 1e-6


def test_nothing_in_gives_nothing_out():
    y, dx, dweight = run("triton", *inputs(batch=0))
    assert y.shape == dx.shape == (0, 5, 3, 8) and not dweight.any()


def test_gradients_come_through_a_transposed_incoming_gradient():
    case = inputs()
    results = []
    for choice in ("reference", "triton"):
        x = case[0].detach().requires_grad_()
        with ops.backend(choice):
            y = ops.norm_rotate(x, *case[1:]).transpose(1, 2)
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        results.append(x.grad)
    assert relative(*results) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_gpu_kernel_equals_float64_reference(dtype, tolerance, width):
    case = inputs(2, 300, 6, width, device="cuda", dtype=dtype, strided=True)
    truth = run("reference", *(t.double() for t in case))
    for fused, exact in zip(run("triton", *case), truth, strict=True):
        assert relative(fused, exact) < tolerance
