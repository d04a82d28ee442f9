"""The output norm and gate of linear attention in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from residua.ops._runtime.numeric import rms, wide

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": torch.sigmoid}


def gated_output(o: Tensor, z: Tensor, weight: Tensor, *, eps: float = 1e-6, gate: str = "silu") -> Tensor:
    """y = weight ⊙ o / sqrt(mean(o²) + eps) ⊙ gate(z), per head: o, z [..., H, D], weight [D]. Returns o's dtype.

    The gate is silu or sigmoid.
    """
    return (rms(wide(o), eps, weight) * GATES[gate](wide(z))).to(o.dtype)
