"""The short causal convolution before the delta rule, with silu and the norms of queries and keys.

Not measured alone: `residua bench step mini --micro-batch 16 --sequence 1024 --accumulate 4 --compare "hybrid,hybrid
backend=reference"` times all kernels of a hybrid together.
"""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case
from residua.ops._runtime.triton_support import supports
from residua.ops.short_convolution import launch, reference
from residua.ops.short_convolution.reference import short_convolution, unit

MOST_TAPS = 4


def _serves(projected: Tensor, weight: Tensor, key_heads: int, value_heads: int, **_: Any) -> bool:
    """Supports heads whose width is a power of two, and at most four taps."""
    width = weight.shape[1] // (2 * key_heads + value_heads)
    fits = 16 <= width <= 256 and width & (width - 1) == 0 and weight.shape[0] <= MOST_TAPS
    return fits and projected.numel() > 0 and supports(projected, weight)


convolve_heads = Operator(
    reference.convolve_heads,
    lambda d: [Case((d.x(*d.sizes.batch, 6 * d.sizes.head_dim), d.w(4, 4 * d.sizes.head_dim), 1, 2))],
    launch.convolve_heads,
    _serves,
    compile_seconds=2,
)

__all__ = ["convolve_heads", "short_convolution", "unit"]
