"""FP8 matrix products on the hardware's tensor cores, through PyTorch's `scaled_mm`.

There are two ways to scale. `row`: one scale per token and one per row of the weight. `block`: one scale per token and
128 channels, and one per 128 × 128 block of the weight. One scale per token is the special case in which all groups of
a token share a scale, so the `block` product serves both `fp8` and `fp8-group`. The available products and the memory
layout of their scales differ between devices and PyTorch versions: we use a product if a small example agrees with the
simulation. Since versions also differ in which products `torch.compile` can trace, ours is a custom operator that is
opaque to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from residua.ops._runtime.library import launcher
from residua.ops._runtime.numeric import working_dtype
from residua.ops.low_precision import fp8
from residua.ops.low_precision.fp8 import Fp8, Tile, encode_fp8
from residua.quantize.modules import FixedPrecision

Scaling = Literal["row", "block"]
Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""codes [M, K], codes [N, K], their scales → [M, N] in bf16."""

SCALINGS: dict[str, tuple[Scaling, Tile]] = {
    "fp8": ("block", fp8.ROW),
    "fp8-group": ("block", fp8.GROUP),
    "fp8-row": ("row", fp8.ROW),
}
"""The scaling of each scheme, and the tile of its activations."""
AGREES = 1e-2
TOKENS = 4
"""Block-wise products need the number of tokens to be a multiple of this."""


class Fp8Projection(FixedPrecision):
    """y = x̂ Ŵᵀ with both operands in E4M3 on tensor cores; the output is bf16."""

    def __init__(self, weight: Fp8, tile: Tile, product: Product) -> None:
        super().__init__()
        self.tile, self.product = tile, product
        self.codes = nn.Buffer(weight.codes)
        self.scale = nn.Buffer(weight.scale)

    def forward(self, x: Tensor) -> Tensor:
        # autocast changes none of these operations; a context manager to disable it would break the compiled graph
        dtype, rows = working_dtype(x), x.flatten(end_dim=-2)
        low = encode_fp8(pad(rows, (0, 0, 0, -len(rows) % TOKENS)), self.tile)
        y = self.product(low.codes, self.codes, low.scale, self.scale)[: len(rows)]
        return y.view(*x.shape[:-1], -1).to(dtype)


@cache
def find_product(scaling: Scaling, device: torch.device) -> Product | None:
    """Find a working product with this scaling on a device, or None."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 384, generator=generator).to(device) for rows in (64, 256))
    sides = {"row": (fp8.ROW, fp8.ROW), "block": (fp8.GROUP, fp8.BLOCK)}[scaling]
    a, b = (encode_fp8(t, tile) for t, tile in zip((x, w), sides, strict=True))
    expected = a.dequantize() @ b.dequantize().T
    for number, product in enumerate(PRODUCTS[scaling]):
        try:
            result = product(a.codes, b.codes, a.scale, b.scale).float()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError):
            continue
        if (result - expected).norm() <= AGREES * expected.norm():
            return partial(_multiply, scaling, number)
    return None


def takes(weight: Fp8, scaling: Scaling) -> bool:
    """Return whether the hardware accepts the shape: both sides in multiples of 16 bytes, or in whole blocks."""
    whole = 128 if scaling == "block" else 16
    return all(extent % whole == 0 for extent in weight.codes.shape)


def with_fp8_products(
    weights: Mapping[str, Fp8], scheme: str, device: torch.device
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return, by name, the modules that multiply in FP8, and for the others the reason why not."""
    if scheme not in SCALINGS:
        return {}, dict.fromkeys(weights, f"{scheme} is not FP8")
    scaling, tile = SCALINGS[scheme]
    product = find_product(scaling, device)
    if product is None:
        return {}, dict.fromkeys(weights, f"no {scaling}-wise FP8 product on {device} with PyTorch {torch.__version__}")
    fits = {name: weight for name, weight in weights.items() if takes(weight, scaling)}
    modules: dict[str, nn.Module] = {
        name: Fp8Projection(Fp8(w.codes.to(device), w.scale.to(device), w.tile), tile, product)
        for name, w in fits.items()
    }
    return modules, {name: "its shape is not supported by the hardware" for name in weights.keys() - fits.keys()}


def _public_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    library: Any = torch.nn.functional
    row = library.ScalingType.RowWise
    y: Tensor = library.scaled_mm(a, b.t(), scale_a, row, scale_b.t(), row, output_dtype=torch.bfloat16)
    return y


def _private_rows(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=torch.bfloat16)


def _public_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, aligned: bool) -> Tensor:
    library: Any = torch.nn.functional
    scale_a = _by_token(scale_a, a)
    types = library.ScalingType.BlockWise1x128, library.ScalingType.BlockWise128x128
    other = pad(scale_b, (0, -scale_b.shape[1] % 4)) if aligned else scale_b
    y: Tensor = library.scaled_mm(a, b.t(), scale_a, types[0], other.t(), types[1], output_dtype=torch.bfloat16)
    return y


def _private_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, aligned: bool) -> Tensor:
    scale_a = _by_token(scale_a, a)
    padded = pad(scale_b, (0, -scale_b.shape[1] % 4))[:, : scale_b.shape[1]] if aligned else scale_b
    return torch._scaled_mm(a, b.t(), scale_a, padded.t(), out_dtype=torch.bfloat16)


def _by_token(scale: Tensor, codes: Tensor) -> Tensor:
    """Expand to one scale per token and 128 channels, with tokens contiguous in memory."""
    return scale.expand(-1, -(-codes.shape[1] // 128)).t().contiguous().t()


PRODUCTS: dict[Scaling, tuple[Product, ...]] = {
    "row": (_public_rows, _private_rows),
    "block": tuple(
        partial(product, aligned=aligned) for aligned in (True, False) for product in (_public_blocks, _private_blocks)
    ),
}
"""The functions to try, PyTorch's public one first."""


@launcher("fp8_product", ahead=False)
def _product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, scaling: str, number: int) -> Iterator[Tensor]:
    yield a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
    yield PRODUCTS[cast("Scaling", scaling)][number](a, b, scale_a, scale_b)


def _multiply(scaling: Scaling, number: int, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    y: Tensor = _product(a, b, scale_a, scale_b, scaling, number)
    return y
