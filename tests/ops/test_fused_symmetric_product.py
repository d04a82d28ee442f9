"""Half of a symmetric product, mirrored, against the reference in float64: in the Triton interpreter and on a GPU."""

import pytest
import torch

from residua.ops import symmetric_product
from residua.ops._runtime.backend import backend
from residua.train.optimizer import polar_express

triton = pytest.importorskip("triton")

from residua.ops.symmetric_product import SMALLEST, kernels  # noqa: E402
from residua.ops.symmetric_product import launch as host  # noqa: E402

pytestmark = pytest.mark.slow

SHAPES = [(1, 1, 1), (2, 3, 5), (3, 16, 16), (1, 17, 40), (2, 33, 70), (1, 64, 8), (2, 100, 17)]
LARGE = pytest.param((1, 300, 33), marks=pytest.mark.nightly)
MIX = {"alpha": 0.7, "beta": -1.3, "gamma": 2.5}


def matrices(b, m, k, device="cpu", dtype=torch.float32):
    x, c = torch.randn(b, m, k), torch.randn(b, m, m)
    return x.to(device, dtype), (c + c.mT).to(device, dtype)


def fused(x, c=None, **factors):
    """The fused result, over memory that held NaN before."""
    poison = torch.full((len(x), x.shape[1], x.shape[1] + 8), float("nan"), dtype=x.dtype, device=x.device)
    del poison
    with backend("triton"):
        return symmetric_product(x, c, **factors)


def exact(x, c=None, **factors):
    return symmetric_product.reference(x.double(), None if c is None else c.double(), **factors)


def near(s, truth, tolerance):
    assert s.shape == truth.shape
    assert torch.equal(s, s.mT), "not exactly symmetric"
    assert (s.double() - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("shape", [*SHAPES, LARGE], ids=str)
def test_mirroring_half_a_product_gives_the_whole(shape):
    x, c = matrices(*shape)
    near(fused(x), exact(x), 2e-6)
    near(fused(x, alpha=-2.0, gamma=0.5), exact(x, alpha=-2.0, gamma=0.5), 2e-6)
    near(fused(x, c, **MIX), exact(x, c, **MIX), 2e-6)


@pytest.mark.parametrize("shape", SHAPES[1:6], ids=str)
def test_tall_matrices_are_read_without_a_copy(shape):
    b, m, k = shape
    tall, c = matrices(b, k, m)[0], matrices(b, m, k)[1]
    near(fused(tall.mT, c, **MIX), exact(tall.mT, c, **MIX), 2e-6)


def test_any_strides_are_accepted():
    apart = torch.randn(4, 40, 96)
    _, c = matrices(2, 20, 1)
    for x in (
        apart[::2, ::2, ::3],
        apart[1:3, :20, 1:33],
        apart[:1, :20, :32].expand(2, -1, -1),
        apart.permute(1, 2, 0)[:2, :20],
    ):
        near(fused(x, c, **MIX), exact(x, c, **MIX), 2e-6)
        near(fused(x, c.mT[:, :, :], **MIX), exact(x, c, **MIX), 2e-6)


def test_inputs_and_memory_around_the_result_are_unchanged():
    """Tiles reach over the edge of an odd matrix."""
    for m in (16, 37, 48):
        x, c = matrices(3, m, 24)
        around = torch.full((5, m + 8, 64), 7.0)
        inside = around[1:4, :m, :m]
        kept = x.clone(), c.clone()
        host.launch(host.TilePlan(16, 16, 4, 2, False), x, c, inside, *MIX.values())
        near(inside, exact(x, c, **MIX), 2e-6)
        assert torch.equal(x, kept[0]) and torch.equal(c, kept[1])
        around[1:4, :m, :m] = 7.0
        assert (around == 7.0).all()


def test_only_the_lower_half_of_the_addend_is_read():
    """Both halves of the result come from one computation, so they are equal on any hardware."""
    x, c = matrices(2, 50, 24)
    half = torch.full_like(c, float("nan")).triu(1) + c.tril()
    near(fused(x, half, **MIX), exact(x, c, **MIX), 2e-6)


def test_empty_batch_gives_empty_result():
    assert fused(torch.empty(0, 5, 7)).shape == (0, 5, 5)
    assert fused(torch.empty(0, 5, 7), torch.empty(0, 5, 5), **MIX).shape == (0, 5, 5)


@triton.jit
def _list_kernel(out):
    t = triton.language.program_id(0)
    row, column = kernels._triangle(t)
    triton.language.store(out + 2 * t, row)
    triton.language.store(out + 2 * t + 1, column)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 31])
def test_every_tile_on_and_below_the_diagonal_is_computed_once(rows):
    listed = torch.empty(host.TilePlan(1, 16, 4, 2, False).triangle(rows), 2, dtype=torch.int32)
    _list_kernel[(len(listed),)](listed)
    wanted = [[row, column] for row in range(rows) for column in range(rows) if column <= row]
    assert listed.tolist() == wanted


def test_small_matrices_and_other_dtypes_use_torch():
    small, wide = torch.empty(1, SMALLEST - 1, 8, dtype=torch.bfloat16), torch.empty(1, SMALLEST, 8)
    with backend("auto"):
        assert not symmetric_product.fuses(small) and not symmetric_product.fuses(wide)
    with backend("triton"), pytest.raises(ValueError, match="no fused kernel of symmetric_product"):
        symmetric_product(torch.empty(1, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(2, 24, 24), (2, 20, 52), (2, 52, 20)], ids=["square", "wide", "tall"])
def test_polar_express_from_halves_matches_full_products(shape):
    gradients = torch.randn(shape)
    with backend("triton"):
        halves = polar_express(gradients)
    whole = polar_express(gradients.double())
    assert (halves.double() - whole).norm() <= 2e-5 * whole.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 1280, 320), (2, 520, 1000), (1, 776, 768), (2, 40, 24), (1, 130, 33)], ids=str)
@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
def test_gpu_product_equals_the_reference(shape, tall):
    b, m, k = shape
    x, c = matrices(b, m, k, "cuda", torch.bfloat16)
    x = x.mT.contiguous().mT if tall else x
    near(fused(x), exact(x), 3e-3)
    near(fused(x, c, **MIX), exact(x, c, **MIX), 3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 768, 768), (2, 640, 1280), (2, 1280, 640)], ids=["square", "wide", "tall"])
def test_gpu_polar_express_from_halves_is_as_accurate(shape):
    gradients = torch.randn(shape)
    whole = polar_express(gradients.double())
    for choice in ("auto", "reference"):
        with backend(choice):
            fast = polar_express(gradients.to("cuda", torch.bfloat16))
        assert (fast.double().cpu() - whole).norm() <= 0.02 * whole.norm()
