"""Products that train in low precision, against float64 emulations of the same rounding written from the equations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from residua.ops.linear_cross_entropy import launch
from residua.ops.linear_cross_entropy.fp8 import fp8_cross_entropy
from residua.ops.low_precision.fp8 import E4M3, E5M2, EncodedWeight, Scales, encode_weight, scale_of
from residua.ops.low_precision.product import (
    Multiply,
    Operand,
    fp8_linear,
    fp8_squared_relu,
    hadamard,
    nvfp4_linear,
    on_hardware,
    simulated,
)
from tests.ops.harness import assert_close, assert_one_graph, on_gpu
from tests.ops.test_declarations import Shapes

pytestmark = pytest.mark.slow
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def new_scales(x: float = 1.0, g: float = 2.0**-12) -> Scales:
    return Scales(torch.tensor(x), torch.tensor(g), torch.zeros(()), torch.zeros(()))


def operands(tokens: int = 24, inputs: int = 32, outputs: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    x, w, g = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    return (x * torch.randn(tokens, inputs).exp()).requires_grad_(), w.requires_grad_(), g


def in_fp8(x: Tensor, scale: float | None, dtype: torch.dtype, limit: float) -> Tensor:
    """The rounded values in float64; without a scale, under the least power of two that suffices."""
    x = x.detach().double()
    scale = 2.0 ** math.ceil(math.log2(x.abs().max().item() / limit)) if scale is None else scale
    return (x / scale).clamp(-limit, limit).to(dtype).double() * scale


@pytest.mark.parametrize("multiply", [simulated, on_hardware], ids=["simulated", "hardware"])
@pytest.mark.parametrize("scales", [(None, None), (2**-7, 2**-15)], ids=["own ranges", "delayed, some beyond"])
def test_fp8_product_and_gradients_equal_float64(multiply: Multiply, scales: tuple[float | None, float | None]) -> None:
    x, w, g = operands()
    y = fp8_linear(x, w, new_scales(*(s or 1.0 for s in scales)), multiply, delayed=scales[0] is not None)
    y.backward(g)
    low_x, low_w = in_fp8(x, scales[0], E4M3, 448), in_fp8(w, None, E4M3, 448)
    low_g = in_fp8(g, scales[1], E5M2, 57_344)
    torch.testing.assert_close(y.double(), low_x @ low_w.T, rtol=1e-5, atol=1e-5)
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(x.grad.double(), low_g @ low_w, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), g.double().T @ x.detach().double(), rtol=1e-5, atol=1e-5)


def test_fp8_scale_is_the_smallest_sufficient_power_of_two() -> None:
    largest = torch.tensor([448.0, 448.1, 3.0, 2.0**-120, 0.0, float("inf"), float("nan")])
    expected = torch.tensor([1.0, 2.0, 2.0**-7, 2.0**-128, 2.0**-23, float("inf"), float("nan")])
    expected[3] = 2.0**-126  # the smallest normal number
    torch.testing.assert_close(scale_of(largest), expected, rtol=0, atol=0, equal_nan=True)


def test_fp8_weight_encoded_in_advance_is_bit_identical() -> None:
    x, w, g = operands()
    new = encode_weight(w)
    for encoded in (new, with_transpose(w)):
        ours = fp8_linear(x, w, new_scales(), encoded=encoded)
        exact = fp8_linear(x, w, new_scales())
        assert torch.equal(ours, exact)
        pairs = zip(torch.autograd.grad(ours, (x, w), g), torch.autograd.grad(exact, (x, w), g), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_fp8_squared_relu_equals_two_separate_products() -> None:
    x, w_in, _ = operands()
    w_out, g = torch.randn(16, 48).requires_grad_(), torch.randn(24, 16)
    results = []
    for fused in (True, False):
        entry, out = (Operand(w, with_transpose(w), new_scales(x=s)) for w, s in ((w_in, 2**-7), (w_out, 2**-4)))
        if fused:
            y = fp8_squared_relu(x, entry, out)
        else:
            h = fp8_linear(x, w_in, entry.scales, encoded=entry.encoded)
            y = fp8_linear(h.relu().square(), w_out, out.scales, encoded=out.encoded)
        results.append([y, *torch.autograd.grad(y, (x, w_in, w_out), g), *entry.scales, *out.scales])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(operand.scales.seen_x > 0 and operand.scales.seen_g > 0 for operand in (entry, out))


Z = 0.05


def head(tokens: int = 24, width: int = 32, vocabulary: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """Final states, the head's matrix, targets: every fourth is ignored."""
    x, w, _ = operands(tokens, width, vocabulary)
    targets = torch.randint(vocabulary, (tokens,))
    targets[::4] = -100
    return x, w.detach().div(4).requires_grad_(), targets


def exact_head(x: Tensor, w: Tensor, targets: Tensor, scale: float | None) -> list[Tensor]:
    """Loss, z-term, and the gradients of their sum, token by token in float64."""
    low_x, low_w = in_fp8(x, scale, E4M3, 448), in_fp8(w, None, E4M3, 448)
    dx, dw, total, z = (torch.zeros_like(low_x), torch.zeros_like(low_w), *torch.zeros(2).double())
    count = int((targets >= 0).sum())
    for i, target in enumerate(targets.tolist()):
        if target < 0:
            continue
        logits = low_w @ low_x[i]
        lse = logits.logsumexp(0)
        p, slope = (logits - lse).exp(), (1 + 2 * Z * lse) / count
        total += (lse - logits[target]) / count
        z += Z * lse.square() / count
        own = slope * p[target] - 1 / count
        g, low_p = slope * p, slope * in_fp8(p, 2**-15, E5M2, 57_344)
        g[target], low_p[target] = own, own
        dx[i] = low_p @ low_w
        dw += g[:, None] * x.detach().double()[i]
    return [total, z, dx, dw]


@pytest.mark.parametrize("multiply", [simulated, on_hardware], ids=["simulated", "hardware"])
@pytest.mark.parametrize("scale", [None, 2**-7], ids=["own range", "delayed, some beyond"])
@pytest.mark.parametrize("rows", [24, 5], ids=["whole", "in chunks"])
def test_fp8_head_losses_and_gradients_equal_float64(
    multiply: Multiply, scale: float | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, targets = head()
    monkeypatch.setattr(launch, "TRAINED_BYTES", 5 * 48 * rows)
    monkeypatch.setattr(launch, "TILE", 1)
    scales, exact = new_scales(scale or 1.0), exact_head(x, w, targets, scale)
    settings = {"z_loss": Z, "delayed": scale is not None}
    for encoded in (None, with_transpose(w)):
        loss, z = fp8_cross_entropy(x, w, targets, scales, multiply, encoded=encoded, **settings)  # type: ignore[arg-type]
        results = [loss, z, *torch.autograd.grad(loss + z, (x, w))]
        # probabilities that differ in their last bit may have neighbouring codes
        for ours, expected, near in zip(results, exact, (1e-5, 1e-5, 1e-3, 1e-5), strict=True):
            assert (ours.double() - expected).norm() <= near * expected.norm()
    with torch.no_grad():
        assert fp8_cross_entropy(x, w, targets, scales, multiply, **settings) == (loss, z)  # type: ignore[arg-type]
    assert scales.seen_x == x.detach().abs().max() and scales.seen_g == 0


def test_fp8_head_gives_a_certain_token_no_gradient() -> None:
    """The rounded rows of the target and of all others cancel; those of W itself would not."""
    x, w, targets = torch.full((1, 16), 3.0).requires_grad_(), torch.randn(16, 16), torch.tensor([3])
    w[3] = 2.1  # is rounded
    loss, _ = fp8_cross_entropy(x, w, targets, new_scales(2**-6))
    (dx,) = torch.autograd.grad(loss, x)
    assert with_transpose(w).codes[3, 0].float() * with_transpose(w).scale != 2.1 and dx.abs().max() < 1e-6


def test_fp8_head_compiles_into_one_graph_of_known_shapes() -> None:
    x, w, targets = head()
    for leaf in (x, x.detach()):
        with Shapes() as shapes:
            fp8_cross_entropy(leaf, w.detach(), targets, new_scales())
        assert shapes.called == {"fp8_cross_entropy"}
    scales, encoded = new_scales(2**-6), with_transpose(w)

    def losses(x: Tensor, w: Tensor) -> Tensor:
        return sum(fp8_cross_entropy(x * 2, w, targets, scales, z_loss=Z, encoded=encoded))  # type: ignore[return-value]

    assert_one_graph(losses, (x, w))
    assert scales.seen_x == 2 * x.detach().abs().max()


@on_gpu
def test_gpu_fp8_head_is_close_to_its_simulation() -> None:
    drawn = (torch.randn(2048, 256), torch.randn(50_304, 256) / 16)
    x, w = (t.cuda().bfloat16().requires_grad_() for t in drawn)
    targets, scales = torch.randint(50_304, (2048,)).cuda(), Scales(*(t.cuda() for t in new_scales(2**-6)))
    results = []
    for multiply in (on_hardware, simulated):
        loss, z = fp8_cross_entropy(x, w, targets, scales, multiply, z_loss=Z, encoded=with_transpose(w))
        results.append([loss, z, *torch.autograd.grad(loss + z, (x, w))])
    assert_close(results[0], results[1], 2e-2)


@on_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gpu_fp8_products_are_close_to_float64(compiled: bool) -> None:
    x, w_in, w_out, g = (
        torch.randn(shape, device="cuda") for shape in ((2048, 256), (512, 256), (128, 512), (2048, 128))
    )
    results = []
    for multiply in (on_hardware, simulated):
        leaves = [t.bfloat16().requires_grad_() for t in (x, w_in / 16, w_out / 16)]
        scales = [Scales(*(t.cuda() for t in new_scales(2**-6, 2**-13))) for _ in range(2)]
        entry, out = (Operand(w, with_transpose(w), s) for w, s in zip(leaves[1:], scales, strict=True))

        def product(x: Tensor, entry: Operand = entry, out: Operand = out, multiply: Multiply = multiply) -> Tensor:
            y = fp8_squared_relu(x, entry, out, multiply)
            return y + fp8_linear(x, entry.weight, entry.scales, multiply, encoded=entry.encoded)[:, :128]

        y = (torch.compile(product, fullgraph=True) if compiled else product)(leaves[0])
        results.append([y, *torch.autograd.grad(y, leaves, g.bfloat16()), *entry.scales, *out.scales])
    assert_close(results[0], results[1], 1e-2)


def with_transpose(weight: Tensor) -> EncodedWeight:
    new = encode_weight(weight)
    return new._replace(turned=new.codes.t().contiguous())


def test_fp8_product_can_run_twice_before_its_gradients() -> None:
    x, w, g = operands()
    scales = new_scales()
    first, second = fp8_linear(x, w, scales), fp8_linear(x.detach() * 2, w, scales)
    (first * 3 + second).backward(g)
    assert scales.seen_x == 2 * x.detach().abs().max() and scales.seen_g == 3 * g.abs().max()


def test_fp8_records_magnitudes_only_while_training() -> None:
    x, w, g = operands()
    scales = new_scales()
    with torch.no_grad():
        fp8_linear(x, w, scales)
    assert scales.seen_x == 0
    fp8_linear(x, w, scales).backward(g)
    fp8_linear(x.detach() / 2, w, scales).backward(g / 2)
    assert scales.seen_x == x.detach().abs().max() and scales.seen_g == g.abs().max()


def test_fp8_product_accepts_empty_and_leading_axes() -> None:
    x, w, _ = operands()
    assert fp8_linear(x[:0], w, new_scales()).shape == (0, 48)
    both = fp8_linear(x.view(2, 3, 4, 32), w, new_scales())
    torch.testing.assert_close(both.flatten(0, 2), fp8_linear(x, w, new_scales()), rtol=0, atol=0)


def in_nvfp4(x: Tensor, height: int, noise: Tensor | None = None) -> Tensor:
    """Block by block in float64; scales are rounded to E4M3 and to fp32 where the format stores them so."""
    x = x.detach().double()
    second = (x.abs().max().float() / (448 * 6)).clamp(min=2.0**-119)
    inverse = (1 / second).double()
    out = torch.zeros_like(x)
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], 16):
            part = (slice(top, top + height), slice(left, left + 16))
            peak = (x[part].abs().max().float() / 6 / second).clamp(2.0**-6, 448).to(E4M3).double()
            scaled = (x[part] * (inverse / peak).float().double()).clamp(-6, 6)
            out[part] = (nearest(scaled) if noise is None else one_of_two(scaled, noise[part])) * (peak / inverse)
    return out


def nearest(x: Tensor) -> Tensor:
    distance = (x.abs()[..., None] - GRID).abs()
    return GRID[distance.argmin(-1)] * x.sign()


def one_of_two(x: Tensor, noise: Tensor) -> Tensor:
    """The upper neighbour with the probability by which x is nearer to it than one step."""
    size = x.abs()
    upper = torch.searchsorted(GRID, size).clamp(min=1)
    low, high = GRID[upper - 1], GRID[upper]
    share = (size - low) / (high - low)
    return torch.where(share + noise.double() >= 1, high, low) * x.sign()


def test_nvfp4_product_and_gradients_equal_float64() -> None:
    x, w, g = operands()
    torch.manual_seed(7)
    y = nvfp4_linear(x, w)
    y.backward(g)
    torch.manual_seed(7)
    noise_g, noise_turned = torch.rand_like(g), torch.rand(48, 32)
    low_w = in_nvfp4(w, 16)
    torch.testing.assert_close(y.double(), in_nvfp4(x, 1) @ low_w.T, rtol=1e-4, atol=1e-4)
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(x.grad.double(), in_nvfp4(g, 1, noise_g) @ low_w, rtol=1e-4, atol=1e-4)
    h = hadamard(torch.empty(0))
    turned_g, turned_x = (
        torch.cat([h @ torch.cat([t.detach(), torch.zeros(8, t.shape[1])])[at : at + 16] for at in (0, 16)]).T
        for t in (g, x)
    )
    expected = in_nvfp4(turned_g, 1, noise_turned) @ in_nvfp4(turned_x, 1).T
    torch.testing.assert_close(w.grad.double(), expected, rtol=1e-4, atol=1e-4)


def emulated(kind: str, x: Tensor, w: Tensor) -> Tensor:
    return fp8_linear(x, w, new_scales(2**-4, 2**-12)) if kind == "fp8" else nvfp4_linear(x, w)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_emulation_under_autocast_only_rounds_its_result(kind: str) -> None:
    x, w, _ = operands()
    with torch.autocast("cpu", torch.float16):
        y = emulated(kind, x, w)
    assert y.dtype is torch.float16 and torch.equal(y, emulated(kind, x, w).half())


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_emulation_in_bf16_only_rounds_its_results(kind: str) -> None:
    """Its factors are exact there, so that a GPU multiplies them on matrix units. NVFP4 rounds a result twice."""
    x, w, g = (t.detach().bfloat16() for t in operands(512, 128, 64))
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(7)
        leaves = [t.to(dtype).requires_grad_() for t in (x, w)]
        y = emulated(kind, *leaves)
        results.append([y, *torch.autograd.grad(y, leaves, g.to(dtype))])
    for low, exact in zip(*results, strict=True):
        torch.testing.assert_close(low.float(), exact, rtol=2.0**-8 if kind == "fp8" else 2.0**-7, atol=1e-5)


def test_hadamard_matrix_is_orthogonal_with_signs() -> None:
    h = hadamard(torch.empty(0, dtype=torch.float64))
    torch.testing.assert_close(h @ h.T, torch.eye(16, dtype=torch.float64))
    assert (h[0] < 0).nonzero().flatten().tolist() == [1, 4, 5, 7, 11, 12, 14, 15], "as in every run so far"
    even = h @ torch.ones(16, dtype=torch.float64)
    assert (h.abs() == 0.25).all() and even.abs().max() < 4  # without signs, equal tokens would become an outlier


@pytest.mark.parametrize("kind", ["fp8", pytest.param("nvfp4", marks=pytest.mark.nightly)])
def test_low_precision_product_compiles_into_one_graph(kind: str) -> None:
    x, w, g = operands()
    scales = new_scales()

    def product(x: Tensor, w: Tensor) -> Tensor:
        return fp8_linear(x, w, scales) if kind == "fp8" else nvfp4_linear(x, w)

    expected = product(x, w)
    actual = torch.compile(product, backend="aot_eager", fullgraph=True)(x, w)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    actual.backward(g)
    if kind == "fp8":
        assert scales.seen_x == x.detach().abs().max()
        assert scales.seen_g == g.abs().max()
