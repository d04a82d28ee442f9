"""RMSNorm with a gain, and the residual addition before it, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from residua.ops._runtime.numeric import rms, wide


def rms_norm(x: Tensor, weight: Tensor, *, affine: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """weight ⊙ x / sqrt(mean(x²) + eps) over the last axis: x [..., C], weight [C].

    With affine [C], norms affine ⊙ x instead (PreAffine), without rounding that product to x's dtype.
    """
    if affine is None:
        return rms(x, eps, weight)
    scaled = wide(x)
    return rms(scaled * affine.to(scaled.dtype), eps, weight).to(x.dtype)


def add_norm(h: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the residual stream, and normalise the sum for the next sublayer.

        s = h + y,   x = weight ⊙ RMS(s)

    h, y [..., C], weight [C]. Returns s and x.
    """
    s = h + y
    return s, rms(s, eps, weight)
