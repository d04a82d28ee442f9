"""What cannot be quantized is refused with a sentence, not turned into numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def require_finite(x: Tensor, what: str = "the tensor") -> None:
    """Raise `ValueError` if x holds NaN or infinity: no scale fits them, and one would silence its whole block."""
    finite = torch.isfinite(x)
    if not finite.all():
        kind = "NaN" if torch.isnan(x).any() else "infinity"
        count = int((~finite).sum())
        raise ValueError(f"{what} holds {count} value(s) that are {kind}: quantize finite values only.")
