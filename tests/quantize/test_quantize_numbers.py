"""The value grids and scales, bit for bit as in the libraries that load our checkpoints."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from residua.ops.low_precision import nvfp4
from residua.ops.low_precision.fp8 import BLOCK, E4M3_MAX, GROUP, ROW, Tile, round_fp8
from residua.ops.low_precision.nvfp4 import E2M1, Nvfp4, e2m1_codes, e2m1_values, round_nvfp4, static_scale
from residua.quantize.recipe import Recipe
from residua.quantize.schemes import SCHEMES, find_scheme, quantize_fp8, quantize_nvfp4
from residua.quantize.store import quantization_config
from tests.quantize.adversarial import NAMES, TINY, tensors

pytestmark = pytest.mark.slow

BROKEN = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("span", ["tensor", "token"])
def test_nvfp4_codes_and_scales_match_torchao(name: str, span: str) -> None:
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")
    x = tensors()[name]
    ours = quantize_nvfp4(x, span)
    # a token of zeros or subnormals alone has a second scale whose reciprocal that library cannot represent
    rows = torch.arange(len(x)) if span == "tensor" else (x.abs().amax(-1) > 1e-30).nonzero().flatten()
    parts = [x] if span == "tensor" else list(x[rows].split(1))
    made = (torchao.nvfp4_quantize(p, 16, torchao.per_tensor_amax_to_scale(p.abs().max())) for p in parts)
    scales, packed = zip(*made, strict=True)
    assert torch.equal(torch.cat(scales).view(torch.uint8), ours.scale[rows].view(torch.uint8))
    assert torch.equal(torch.cat(packed).view(torch.uint8), ours.packed()[rows])


@pytest.mark.parametrize("name", NAMES)
def test_nvfp4_values_match_torchao_up_to_one_scale_rounding(name: str) -> None:
    """That library multiplies by t where checkpoints store t⁻¹ and engines divide: one rounding apart."""
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")
    x = tensors()[name]
    theirs = torchao.NVFP4Tensor.to_nvfp4(x, 16, torchao.per_tensor_amax_to_scale(x.abs().max()))
    ours = quantize_nvfp4(x).dequantize()
    torch.testing.assert_close(ours, theirs.dequantize(torch.float32), rtol=2.5e-7, atol=1e-44)


def test_e2m1_rounding_matches_torchaos_mx_formats() -> None:
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels", reason="torchao is not installed")
    values = torch.linspace(-6, 6, 100_001)
    ties = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)])
    near = torch.cat([torch.nextafter(ties, torch.tensor(to)) for to in (0.0, 9.0)])
    x = torch.cat([values, ties, -ties, near, -near, torch.tensor([0.0, -0.0])])
    codes = e2m1_codes(x)
    assert torch.equal(codes, kernels.f32_to_f4_unpacked(x))
    assert torch.equal(e2m1_values(codes), kernels.f4_unpacked_to_f32(codes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(48, 64), (130, 257), (1, 5), (128, 128)])
def test_fp8_blocks_match_compressed_tensors(name: str, shape: tuple[int, int]) -> None:
    grain = {"strategy": "block", "block_structure": [128, 128]}
    _compare_with_compressed_tensors(_tiled(tensors()[name], shape), BLOCK, grain)


@pytest.mark.parametrize("name", NAMES)
def test_fp8_rows_match_compressed_tensors(name: str) -> None:
    _compare_with_compressed_tensors(tensors()[name], ROW, {"strategy": "channel"})


@pytest.mark.parametrize("name", NAMES)
def test_fp8_activations_match_compressed_tensors(name: str) -> None:
    for tile, grain in ((ROW, {"strategy": "token"}), (GROUP, {"strategy": "group", "group_size": 128})):
        library = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

        x = _tiled(tensors()[name], (48, 256))[None]
        args = library.QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=True, **grain)
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
        theirs = fake_quantize(x, scale, zero, args)
        assert torch.equal(round_fp8(x, tile), theirs)


@pytest.mark.parametrize("share", [1.0, 0.01], ids=["whole range", "clipped"])
@pytest.mark.parametrize("name", NAMES)
def test_static_nvfp4_rounding_matches_compressed_tensors(name: str, share: float) -> None:
    library = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = tensors()[name][None]
    scale = static_scale(share * float(x.abs().max()))
    config = library.QuantizationConfig.model_validate(quantization_config("nvfp4-static", ["a"]))
    args, second = config.config_groups["group_0"].input_activations, torch.tensor([scale])
    scales, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale=second)
    theirs = fake_quantize(x, scales, zero, args, global_scale=second)
    assert torch.equal(nvfp4.round_nvfp4_static(x, scale), theirs)


def _compare_with_compressed_tensors(x: Tensor, tile: Tile, grain: dict[str, object]) -> None:
    library = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = library.QuantizationArgs(num_bits=8, type="float", symmetric=True, **grain)
    ours = quantize_fp8(x, tile)
    low, high = _extremes(x, ours.scale.shape, tile)
    scale, zero = calculate_qparams(low, high, args)
    assert torch.equal(scale.float(), ours.scale)
    codes = quantize(x, scale, zero, args, dtype=torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), ours.codes.view(torch.uint8))
    assert torch.equal(dequantize(codes, scale, zero, args), ours.dequantize())


def _extremes(x: Tensor, shape: torch.Size, tile: Tile) -> tuple[Tensor, Tensor]:
    """The least and the largest value of each tile, by a plain loop."""
    height, width = tile.rows or x.shape[0], tile.columns or x.shape[1]
    tiles = [strip.split(width, 1) for strip in x.split(height)]
    assert (len(tiles), len(tiles[0])) == tuple(shape)
    return tuple(torch.stack([torch.stack([f(t) for t in row]) for row in tiles]) for f in (torch.min, torch.max))


def _tiled(x: Tensor, shape: tuple[int, int]) -> Tensor:
    rows, columns = (-(-wanted // have) for wanted, have in zip(shape, x.shape, strict=True))
    return x.repeat(rows, columns)[: shape[0], : shape[1]].contiguous()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 33), (129, 130)])
def test_odd_shapes_keep_their_shape_and_their_error(scheme: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    chosen = find_scheme(scheme)
    bound = {"W8A8": 0.04, "W4A4": 0.2}[chosen.bits]
    for low in (chosen.weight(x).dequantize(), chosen.activation(x), chosen.activation(x[None])[0]):
        assert low.shape == x.shape and low.dtype == torch.float32
        assert (low - x).norm() <= bound * x.norm()


def test_partial_blocks_are_padded_with_zeros() -> None:
    x = torch.randn(5, 21, generator=torch.Generator().manual_seed(3))
    padded = torch.nn.functional.pad(x, (0, 11))
    assert torch.equal(quantize_nvfp4(x).dequantize(), quantize_nvfp4(padded).dequantize()[:, :21])


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_and_infinity_are_refused_in_one_sentence(scheme: str, what: str) -> None:
    x = torch.randn(4, 20)
    x[2, 3] = BROKEN[what]
    with pytest.raises(ValueError, match=r"layer 3 holds 1 value\(s\) that are (NaN|infinity): quantize finite"):
        find_scheme(scheme).weight(x, what="layer 3")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_non_finite_activation_stays_non_finite(scheme: str) -> None:
    """Inside a model nothing is checked, so a non-finite value must stay in its own token, and only there."""
    for value in BROKEN.values():
        x = torch.randn(3, 32)
        x[1, 3] = value
        low = find_scheme(scheme).activation(x)
        assert not low[1].isfinite().all() and low[[0, 2]].isfinite().all()


def test_tensors_of_only_zeros_or_subnormals_stay_finite() -> None:
    for x in (torch.zeros(4, 32), torch.full((4, 32), TINY), torch.full((4, 32), 1e-33)):
        for scheme in SCHEMES.values():
            for low in (scheme.weight(x).dequantize(), scheme.activation(x)):
                assert low.isfinite().all() and (low - x).abs().max() <= x.abs().max()


def test_a_tokens_scale_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(4, 64)
    alone = round_nvfp4(x[1:2])
    x[0] *= 6000
    assert torch.equal(round_nvfp4(x)[1:2], alone)


def test_every_code_and_scale_is_on_its_grid() -> None:
    x = torch.randn(16, 64)
    low = quantize_nvfp4(x)
    assert set(e2m1_values(low.codes).abs().unique().tolist()) <= set(E2M1)
    assert quantize_fp8(x).codes.float().abs().max() == E4M3_MAX
    low = quantize_nvfp4(torch.randn(6, 40))  # ends inside a block
    again = Nvfp4.unpacked(low.packed(), low.scale, low.global_scale, low.columns)
    assert torch.equal(again.codes, low.codes) and torch.equal(again.dequantize(), low.dequantize())


def test_the_sixteen_codes_map_to_the_table_and_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1_values(codes)
    assert values.tolist() == [*E2M1, *(-value for value in E2M1)] and values[8].signbit()
    assert torch.equal(e2m1_codes(values), codes)


def test_recipes_survive_a_round_trip() -> None:
    written = {"fp8": ("fp8",), "nvfp4+smooth": ("nvfp4", 0.5), "nvfp4+smooth:0.7": ("nvfp4", 0.7)}
    for text, expected in ((text, Recipe(*parts)) for text, parts in written.items()):
        assert Recipe.parse(text) == expected and str(expected) == text
    for wrong in ("int8", "nvfp4+rough", "nvfp4+smooth:2", "nvfp4+smooth:x"):
        with pytest.raises(ValueError, match=r"choose|unknown recipe|between 0 and 1"):
            Recipe.parse(wrong)
