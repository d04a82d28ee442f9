"""Attention over depth: h = Σ softmax(w · RMS(v_i)) v_i."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.depth_attention import autograd, reference


def _serves(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    key_norm: str = "rms",
    activation: str = "softmax",
    return_weights: bool = False,
    **_: Any,
) -> bool:
    """Supports sources of one shape and dtype, with normalised keys and a softmax, without `return_weights`."""
    if key_norm != "rms" or activation != "softmax" or return_weights or len(sources) == 0:
        return False
    first = sources[0]
    alike = all(v.shape == first.shape and v.dtype == first.dtype and v.device == first.device for v in sources)
    return alike and query.shape == first.shape[-1:] and supports(first)


def _cases(d: Draw) -> Cases:
    sources = [d.x() for _ in range(d.sizes.sources)]
    yield Case((sources, d.gain()), {"norm_weight": d.gain()}, moved=(len(sources) + 1, 2 * len(sources) + 1))


depth_attention = Operator(reference.depth_attention, _cases, autograd.depth_attention, _serves, compile_seconds=8)

__all__ = ["depth_attention"]
