"""RMSNorm with a gain, and the residual addition before it, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from residua.ops._runtime.numeric import rms


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """weight ⊙ x / sqrt(mean(x²) + eps) over the last axis: x [..., C], weight [C]."""
    return rms(x, eps, weight)


def add_norm(h: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add a sublayer's output to the residual stream, and normalise the sum for the next sublayer.

        s = h + y,   x = weight ⊙ RMS(s)

    h, y [..., C], weight [C]. Returns s and x.
    """
    s = h + y
    return s, rms(s, eps, weight)
