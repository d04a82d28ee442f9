"""FP8 codes: the fused passes have the bits of the reference."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from residua.ops._runtime.backend import backend
from residua.ops.fp8_codes import encode_slopes, encode_squares, encode_values, encode_weights
from residua.ops.low_precision.fp8 import E4M3, EncodedWeight
from tests.ops.harness import interpreter, on_gpu

pytest.importorskip("triton")

from residua.ops.fp8_codes import launch

pytestmark = pytest.mark.slow


def weights(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Several shapes, edges of tiles, values below the smallest normal number of E4M3, ties, and nothing but zeros."""
    torch.manual_seed(0)
    made = [torch.randn(96, 64), torch.randn(80, 144) * 1e-9, torch.randn(96, 64), torch.zeros(16, 32)]
    made[0][:, :8] = torch.logspace(-9, 0, 768).view(96, 8)
    made[2][:] = 448 * torch.arange(96 * 64).view(96, 64).remainder(512) / 512  # every fourth value is a tie
    return [w.to(device, dtype) for w in made]


def outputs(masters: list[Tensor]) -> list[EncodedWeight]:
    return [
        EncodedWeight(*(w.new_empty(shape, dtype=E4M3) for shape in (w.shape, w.shape[::-1])), w.new_empty(()).float())
        for w in masters
    ]


def encoded(choice: str, masters: list[Tensor], untransposed: Sequence[int] = ()) -> list[Tensor]:
    into = [o._replace(turned=None) if i in untransposed else o for i, o in enumerate(outputs(masters))]
    with backend(choice):
        encode_weights(masters, into)
    return [tensor.float() for weight in into for tensor in weight if tensor is not None]


def assert_same(masters: list[Tensor], untransposed: Sequence[int] = ()) -> None:
    results = [encoded(choice, masters, untransposed) for choice in ("triton", "reference")]
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True)


@interpreter
def test_interpreted_codes_transposes_and_scales_are_exact() -> None:
    assert_same(weights())
    codes, turned, scale = encoded("triton", weights())[:3]
    assert torch.equal(codes.t(), turned) and scale == 2**-6 and weights()[0].abs().max() > 448 * 2**-7


@interpreter
@pytest.mark.parametrize("untransposed", [(0,), (1, 2), (0, 1, 2, 3)], ids=str)
def test_interpreted_weights_may_have_no_transpose(untransposed: tuple[int, ...]) -> None:
    assert_same(weights(), untransposed)


@interpreter
def test_interpreted_wide_weights_are_transposed_across_tiles() -> None:
    assert_same([torch.randn(129, 257), torch.randn(129, 257), torch.randn(256, 128)])


@pytest.mark.parametrize("choice", ["auto", "reference", pytest.param("triton", marks=interpreter)])
def test_no_weights_are_encoded_without_error(choice: str) -> None:
    assert encoded(choice, []) == []


@interpreter
def test_kernels_take_only_dense_weights_codes_and_transposes() -> None:
    masters = weights()
    dense = outputs(masters)
    turned = [dense[0]._replace(turned=dense[0].codes.new_empty(96, 64).t()), *dense[1:]]
    with backend("triton"):
        assert encode_weights.fuses(masters, dense)
        assert not encode_weights.fuses(masters, turned)
        assert not encode_weights.fuses([masters[0].t(), *masters[1:]], dense)
        assert not encode_weights.fuses([torch.empty(0, 16)], outputs([torch.empty(0, 16)]))


def assert_transposed(rows: int, columns: int, count: int, device: str = "cpu") -> None:
    """Every byte is moved, also NaN and -0, and none is written behind the last."""
    source = torch.Generator().manual_seed(0)
    drawn = [torch.randint(256, (rows, columns), dtype=torch.uint8, generator=source) for _ in range(count)]
    codes = [each.to(device).view(E4M3) for each in drawn]
    rooms = [torch.full((rows * columns + 64,), 7, dtype=torch.uint8, device=device) for _ in codes]
    launch.transpose_codes([(c, r[:-64].view(E4M3).view(columns, rows)) for c, r in zip(codes, rooms, strict=True)])
    for each, room in zip(drawn, rooms, strict=True):
        assert torch.equal(room[:-64].view(columns, rows).cpu(), each.t()) and (room[-64:] == 7).all()


@interpreter
@pytest.mark.parametrize("size", [(1, 1), (3, 208), (257, 129), (128, 256)], ids=str)
def test_interpreted_transposes_move_every_byte(size: tuple[int, int]) -> None:
    assert_transposed(*size, count=2)


@interpreter
def test_interpreted_transpose_takes_any_number_of_matrices() -> None:
    assert_transposed(16, 48, count=65)


@on_gpu
@pytest.mark.parametrize("size", [(1, 1, 65), (3, 208, 65), (257, 129, 65), (1040, 2064, 4), (2048, 6144, 2)], ids=str)
def test_gpu_transposes_move_every_byte(size: tuple[int, int, int]) -> None:
    assert_transposed(*size, device="cuda")


OPERATORS = {
    "values": encode_values,
    "gradient": partial(encode_values, gradient=True),
    "squares": encode_squares,
    "slopes": encode_slopes,
}


def assert_same_codes(kind: str, x: Tensor, a: Tensor, scale: float) -> None:
    given = (x, a.relu().square()) if kind == "slopes" else (x,)
    results = []
    for choice in ("triton", "reference"):
        with backend(choice):
            results.append(OPERATORS[kind](*given, torch.tensor(scale, device=x.device)))
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype is exact.dtype
        torch.testing.assert_close(ours.float(), exact.float(), rtol=0, atol=0, equal_nan=True)


@interpreter
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("shape", [(3, 5), (0, 16), (13, 4096)], ids=str)
def test_interpreted_codes_and_largest_value_are_exact(kind: str, shape: tuple[int, int]) -> None:
    x, a = torch.randn(shape) * torch.randn(shape).exp(), torch.randn(shape)
    for scale in (2.0**-9, 2.0**9):  # values above the limit, and many below the smallest normal number
        assert_same_codes(kind, x, a, scale)


@on_gpu
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_codes_of_activations_are_exact(kind: str, dtype: torch.dtype) -> None:
    x, a = (torch.randn(2047, 1280, device="cuda").mul_(4).to(dtype) for _ in range(2))
    for broken in (False, True):
        if broken:
            x[5, 7] = float("nan")
        assert_same_codes(kind, x, a, 2.0**-8)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_codes_are_exact_and_keep_nan(dtype: torch.dtype) -> None:
    masters = weights("cuda", dtype)
    assert_same(masters)
    assert_same(masters, untransposed=(1, 2))
    masters[1][3, 5] = float("nan")
    assert_same(masters)
    assert encoded("triton", masters)[3].isnan().all()
