"""Gated Residual: write a sublayer's output into n streams and read them through gates per channel, in one operator."""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.gated_residual import launch, reference

HIGHEST_RANK = 128
MOST_STREAMS = 16


def _serves(
    streams: Tensor, injection: Tensor, update: Tensor, gain: Tensor, down: Tensor, up: Tensor,
    inject: Tensor | None = None, **_: Any,
) -> bool:  # fmt: skip
    """Supports few streams and a rank whose sums fit into registers."""
    few = len(gain) <= MOST_STREAMS and len(down) <= HIGHEST_RANK
    return few and supports(streams, injection, update, gain, down, up, *([] if inject is None else [inject]))


def _cases(d: Draw) -> Cases:
    tokens, width, n, rank = d.sizes.tokens, d.sizes.width, d.sizes.streams, d.sizes.rank
    args = (d.x(tokens, n, width), d.w(tokens, n), d.x(), d.w(n, width))
    maps = (d.linear(rank, n * width), d.w(n * width, rank, scale=0.5), d.linear(n, n * width))
    yield Case((*args, *maps), moved=(2 * n + 2, 4 * n + 3))


gated_residual = Operator(reference.gated_residual, _cases, launch.gated_residual, _serves, compile_seconds=8)

__all__ = ["gated_residual"]
