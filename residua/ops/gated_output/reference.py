"""The output norm and gate of linear attention in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from residua.ops._runtime.numeric import rms, wide


def gated_output(o: Tensor, z: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """y = weight ⊙ o / sqrt(mean(o²) + eps) ⊙ silu(z), per head: o, z [..., H, D], weight [D]. Returns o's dtype."""
    return (rms(wide(o), eps, weight) * silu(wide(z))).to(o.dtype)
