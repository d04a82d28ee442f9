"""FP8 products on the matrix units agree with the simulation; where there are none, that is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from residua.quantize import load_quantized, quantize
from residua.quantize.fp8 import BLOCK, ROW, encode_fp8
from residua.quantize.real import RECIPES, Fp8Projection, find_product, takes, with_fp8_products
from residua.quantize.schemes import find_scheme

CPU = torch.device("cpu")


def compare(scheme: str, device: torch.device, tokens: int, columns: int, rows: int) -> float:
    """Relative distance of the real product from the simulated one, on activations with an outlier."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, columns, generator=generator)
    x[:, 3] *= 100
    x, w = x.to(device), torch.randn(rows, columns, generator=generator).to(device)
    chosen = find_scheme(scheme)
    weight = chosen.weight(w)
    modules, problems = with_fp8_products({"w": weight}, scheme, device)
    assert not problems, problems
    expected, found = chosen.activation(x) @ weight.dequantize().T, modules["w"](x[None])[0]
    assert expected.shape == found.shape
    return float((found - expected).norm() / expected.norm())


def test_row_wise_products_agree_with_the_simulation_on_a_cpu_that_has_them() -> None:
    if find_product("row", CPU) is None:
        pytest.skip("this PyTorch has no FP8 product on the CPU")
    assert compare("fp8-row", CPU, 37, 64, 48) < 4e-3  # bf16 results


def test_what_a_device_does_not_have_is_said_and_not_replaced() -> None:
    if find_product("block", CPU) is not None:
        pytest.skip("this CPU has block-wise FP8 products")
    modules, problems = with_fp8_products({"w": encode_fp8(torch.randn(128, 128), BLOCK)}, "fp8", CPU)
    assert not modules and "no block-wise FP8 product on cpu" in problems["w"]


def test_shapes_that_do_not_fit_the_units_are_left_out() -> None:
    assert takes(encode_fp8(torch.randn(48, 64), ROW), "row") and not takes(
        encode_fp8(torch.randn(48, 64), ROW), "block"
    )
    assert not takes(encode_fp8(torch.randn(40, 64), ROW), "row")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", RECIPES)
@pytest.mark.parametrize("shape", [(512, 512, 1024), (2048, 768, 2048), (1001, 640, 384), (3, 1280, 256)])
def test_products_on_the_gpu_agree_with_the_simulation(scheme: str, shape: tuple[int, int, int]) -> None:
    device = torch.device("cuda")
    if find_product(RECIPES[scheme][0], device) is None:
        pytest.skip(f"no {RECIPES[scheme][0]}-wise FP8 product on {torch.cuda.get_device_name()}, {torch.__version__}")
    assert compare(scheme, device, *shape) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["fp8", "fp8-group", "fp8-row", "nvfp4"])
def test_the_simulation_is_the_same_on_the_gpu(scheme: str) -> None:
    x = torch.randn(64, 384)
    x[:, 5] *= 1000
    chosen = find_scheme(scheme)
    for make in (chosen.activation, lambda t: chosen.weight(t).dequantize()):
        assert torch.equal(make(x.cuda()).cpu(), make(x))


@pytest.mark.gpu
def test_an_fp8_projection_runs_under_autocast_and_compile() -> None:
    device = torch.device("cuda")
    product = find_product("row", device)
    if product is None:
        pytest.skip("no row-wise FP8 product on this GPU")
    layer = Fp8Projection(encode_fp8(torch.randn(256, 128, device=device), ROW), ROW, product)
    x = torch.randn(2, 33, 128, device=device)
    with torch.autocast("cuda", torch.bfloat16):
        plain, compiled = layer(x), torch.compile(layer)(x)
    assert plain.dtype == torch.bfloat16
    assert (plain.float() - compiled.float()).norm() < 1e-2 * plain.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_checkpoint_multiplies_in_fp8_where_it_can_and_agrees_with_its_simulation(
    device: str, run: Path, tmp_path: Path
) -> None:
    where = torch.device(device)
    if find_product("row", where) is None:
        pytest.skip(f"no row-wise FP8 product on {device}")
    quantize(run, tmp_path / "q", scheme="fp8-row", probes=0, device=device)
    simulated = load_quantized(tmp_path / "q").to(where)
    real = load_quantized(tmp_path / "q", fp8_products=where)
    assert isinstance(real.sublayers[0].body.project, Fp8Projection)
    tokens = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0)).to(where)
    with torch.no_grad():
        found, expected = real(tokens), simulated(tokens)
    assert (found - expected).norm() < 3e-2 * expected.norm()  # FP8 products come out in bf16
