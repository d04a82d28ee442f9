"""The fused optimizer passes against the reference in float64, in the Triton interpreter and on a GPU."""

import pytest
import torch

from residua.ops import optimizer_update
from residua.ops._runtime.backend import backend
from residua.ops.optimizer_update import adam_directions, cautious_descent, momentum_directions, plain_descent

pytestmark = pytest.mark.slow


SHAPES = [(3, 5), (8, 16), (3, 5), (7,), (0, 4), (2, 3, 8)]


def tensors(seed, device="cpu", dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def near(ours, truth, tolerance):
    for fused, exact in zip(ours, truth, strict=True):
        assert fused.shape == exact.shape
        torch.testing.assert_close(fused.double(), exact.double(), atol=tolerance, rtol=tolerance)


def momentum(choice, device="cpu", dtype=torch.float32, out=None):
    m, g = tensors(0, device, dtype), tensors(1, device, dtype)
    with backend(choice):
        d = momentum_directions(m, g, 0.9, out or dtype)
    return m, d


def descent(choice, decay, device="cpu", dtype=torch.float32, update=None, rule=cautious_descent):
    x, u = tensors(0, device, dtype), [t.to(update or dtype) for t in tensors(1, device, dtype)]
    x[0][0, 0] = 0.0  # a zero weight and a zero update: the mask counts both as towards zero
    u[1][0] = 0.0
    with backend(choice):
        rule(x, u, 0.3, decay)
    return x


def test_momentum_and_directions_equal_the_reference_in_float64():
    (m, d), (exact_m, exact_d) = momentum("triton"), momentum("reference", dtype=torch.float64)
    near(m, exact_m, 1e-6)
    near(d, exact_d, 1e-6)


def adam(choice, dtype=torch.float32):
    m, v, g = tensors(0, dtype=dtype), [t.abs() for t in tensors(1, dtype=dtype)], tensors(2, dtype=dtype)
    with backend(choice):
        u = adam_directions(m, v, g, (0.9, 0.95), 1e-3)
    return *m, *v, *u


def test_adam_directions_equal_the_reference_in_float64():
    near(adam("triton"), adam("reference", torch.float64), 1e-6)


@pytest.mark.parametrize(("decay", "rule"), [(0.0, cautious_descent), (0.2, cautious_descent), (0.2, plain_descent)])
def test_descent_equals_the_reference_in_float64(decay, rule):
    exact = descent("reference", decay, dtype=torch.float64, rule=rule)
    near(descent("triton", decay, rule=rule), exact, 1e-6)


@pytest.mark.parametrize(
    ("rule", "rate", "moved"),
    [(cautious_descent, 0.0, [0.5, 1.0, -1.0, -0.5]), (plain_descent, 0.25, [0.25, 0.75, -0.75, -0.25])],
)
def test_cautious_decay_acts_only_if_the_update_shrinks_weights(rule, rate, moved):
    weights, updates = [torch.tensor([1.0, 1.0, -1.0, -1.0])], [torch.tensor([1.0, -1.0, 1.0, -1.0])]
    with backend("triton"):
        rule(weights, updates, rate, 0.5)
    assert weights[0].tolist() == moved


def test_numbers_in_tensors_give_the_same_bits():
    """As float64 tensors, which a CUDA graph reads in each replay."""
    outcomes = []
    for held in (float, lambda value: torch.tensor(value, dtype=torch.float64)):
        x, m, v, g = (tensors(seed) for seed in range(4))
        with backend("triton"):
            u = adam_directions(m, [t.square() for t in v], g, (0.9, 0.95), held(1.3e-3))
            cautious_descent(x, u, held(0.3), held(0.1))
            plain_descent(x, u, held(0.7), held(0.2))
        outcomes.append([*m, *u, *x])
    assert all(torch.equal(by_value, read) for by_value, read in zip(*outcomes, strict=True))


@pytest.mark.parametrize("cut", [lambda t: t[1:], lambda t: t[::2]], ids=["misaligned", "strided"])
def test_gradients_and_updates_may_have_any_layout(cut):
    """Such as a gradient of two elements inside a packed one. The other weights of its group keep their kernels."""
    packed, whole = torch.randn(9, generator=torch.Generator().manual_seed(0)), tensors(3)
    outcomes = []
    for last in (cut(packed), cut(packed).clone()):
        weights, m, v = ([*tensors(seed), torch.ones(len(last))] for seed in range(3))
        with backend("triton"):
            assert optimizer_update._serves(weights, [*whole, last])
            d = momentum_directions(m, [*whole, last], 0.9, torch.float32)
            u = adam_directions(m, [t.square() for t in v], [*whole, last], (0.9, 0.95), 1e-3)
            cautious_descent(weights, [*whole, last], 0.3, 0.1)
        outcomes.append([*weights, *m, *d, *u])
    assert all(torch.equal(packed_one, alone) for packed_one, alone in zip(*outcomes, strict=True))


def test_slices_of_a_matrix_are_updated_in_place():
    matrix = torch.ones(6, 4)
    with backend("triton"):
        cautious_descent([matrix[:2], matrix[4:]], [torch.ones(2, 4)] * 2, 1.0, 0.0)
    assert matrix.sum(1).tolist() == [0, 0, 4, 4, 0, 0]


@pytest.mark.gpu
def test_gpu_gradient_off_its_alignment_equals_an_aligned_one():
    """Its group keeps the kernels, whose numbers a CUDA graph can read."""
    packed = torch.randn(9, generator=torch.Generator().manual_seed(0)).cuda()
    outcomes = []
    for g in (packed[1:3], packed[1:3].clone()):
        weights, m, v = (torch.ones(2, device="cuda") for _ in range(3))
        u = adam_directions([m], [v], [g], (0.9, 0.95), 1e-3)
        cautious_descent([weights], [g], *torch.tensor([0.3, 0.1], dtype=torch.float64, device="cuda"))
        assert optimizer_update._serves([weights], [g])
        outcomes.append(torch.cat([weights, m, v, *u]))
    assert torch.equal(*outcomes)


@pytest.mark.gpu
def test_gpu_passes_equal_the_reference():
    near(momentum("triton", "cuda")[1], momentum("reference", "cuda", torch.float64)[1], 1e-6)
    near(*(momentum(choice, "cuda", out=torch.bfloat16)[1] for choice in ("triton", "reference")), 8e-3)
    near(*(descent(choice, 0.2, "cuda", update=torch.bfloat16) for choice in ("triton", "reference")), 1e-6)
