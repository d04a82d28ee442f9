"""The quantization schemes by name: how weights and activations are rounded.

| name | weights | activations (dynamic, if not said otherwise) |
|---|---|---|
| fp8 | E4M3, 128 × 128 | E4M3, one scale per token |
| fp8-group | E4M3, 128 × 128 | E4M3, one scale per token and 128 channels |
| fp8-row | E4M3, one scale per row | E4M3, one scale per token |
| nvfp4 | E2M1 by 16, E4M3 scales, fp32 per tensor | E2M1 by 16, E4M3 scales, fp32 per token |
| nvfp4-static | the same | the same, but fp32 per module, from calibration, as engines have it |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from residua.errors import UserError
from residua.ops.low_precision import fp8, nvfp4
from residua.ops.low_precision.fp8 import BLOCK, Fp8, Tile, encode_fp8
from residua.ops.low_precision.nvfp4 import Nvfp4, Span, encode_nvfp4
from residua.quantize.recipe import SCHEME_NAMES, check_scheme

Quantized = Fp8 | Nvfp4


def require_finite(x: Tensor, what: str = "the tensor") -> None:
    """Raise `ValueError` if x holds NaN or infinity: no scale fits them, and one would turn its whole block to NaN."""
    finite = torch.isfinite(x)
    if not finite.all():
        kind = "NaN" if torch.isnan(x).any() else "infinity"
        count = int((~finite).sum())
        raise UserError(f"{what} holds {count} value(s) that are {kind}: quantize finite values only.")


def quantize_fp8(x: Tensor, tile: Tile = BLOCK, *, what: str = "the tensor") -> Fp8:
    """Quantize a matrix [R, C]; edge tiles are padded with zeros, which do not affect scales."""
    require_finite(x, what)
    return encode_fp8(x, tile)


def quantize_nvfp4(x: Tensor, span: Span = "tensor", *, what: str = "the tensor") -> Nvfp4:
    """Quantize a matrix [R, C]; a row's last block is padded with zeros. Each `span` shares a second-level scale."""
    require_finite(x, what)
    return encode_nvfp4(x, span)


@dataclass(frozen=True)
class Scheme:
    """`weight(w [R, C], what=name)` quantizes a matrix; `activation(x [..., C])` rounds it and returns fp32.

    `static(x, global_scale=…)` rounds with a scale from calibration; it is None if scales come from x itself.
    """

    name: str
    bits: str
    words: str
    weight: Callable[..., Quantized]
    activation: Callable[[Tensor], Tensor]
    static: Callable[..., Tensor] | None = None

    def rounding(self, scale: float | None) -> Callable[[Tensor], Tensor]:
        """Return the function that rounds a module's input, given its scale from calibration, if any."""
        if self.static is None:
            return self.activation
        if scale is None:
            raise UserError(
                f"{self.name} rounds inputs with calibrated scales: measure them with residua.quantize.static_scales "
                "and pass them as `scales`."
            )
        return partial(self.static, global_scale=scale)


def _fp8(name: str, words: str, weight: fp8.Tile, activation: fp8.Tile) -> Scheme:
    return Scheme(name, "W8A8", words, partial(quantize_fp8, tile=weight), partial(fp8.round_fp8, tile=activation))


_PER_TOKEN = "activations E4M3 per token"
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        _fp8("fp8", f"weights E4M3 in 128 × 128 blocks, {_PER_TOKEN}", fp8.BLOCK, fp8.ROW),
        _fp8("fp8-group", f"weights E4M3 in 128 × 128 blocks, {_PER_TOKEN} and 128 channels", fp8.BLOCK, fp8.GROUP),
        _fp8("fp8-row", f"weights E4M3 per row, {_PER_TOKEN}", fp8.ROW, fp8.ROW),
        Scheme(
            "nvfp4",
            "W4A4",
            "E2M1 in blocks of 16 with E4M3 scales, second scale per tensor for weights and per token for activations",
            quantize_nvfp4,
            nvfp4.round_nvfp4,
        ),
        Scheme(
            "nvfp4-static",
            "W4A4",
            "E2M1 in blocks of 16 with E4M3 scales, second scale per tensor, for activations from calibration",
            quantize_nvfp4,
            nvfp4.round_nvfp4,
            nvfp4.round_nvfp4_static,
        ),
    )
}
assert set(SCHEMES) == set(SCHEME_NAMES)


def find_scheme(name: str) -> Scheme:
    """Find a scheme by name."""
    check_scheme(name)
    return SCHEMES[name]
