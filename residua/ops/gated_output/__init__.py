"""The output norm of linear attention, per head, times its gate.

Not measured alone: `residua bench step mini --micro-batch 16 --sequence 1024 --accumulate 4 --compare "hybrid,hybrid
backend=reference"` times all kernels of a hybrid together.
"""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case
from residua.ops._runtime.triton_support import supports
from residua.ops.gated_output import launch, reference


def _serves(o: Tensor, z: Tensor, weight: Tensor, **_: Any) -> bool:
    """Supports [B, T, H, D] with D a power of two."""
    width = o.shape[-1]
    fits = o.dim() == 4 and 16 <= width <= 1024 and width & (width - 1) == 0
    return fits and o.numel() > 0 and supports(o, z, weight)


gated_output = Operator(
    reference.gated_output,
    lambda d: [Case((d.heads(), d.heads(), d.w(d.sizes.head_dim)), {"gate": gate}, gate) for gate in reference.GATES],
    launch.gated_output,
    _serves,
)

__all__ = ["gated_output"]
