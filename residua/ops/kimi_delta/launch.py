"""Products of decayed keys and queries: launching the kernels."""

from __future__ import annotations

from torch import Tensor

from residua.ops._runtime.launch import aligned, on, power
from residua.ops.gated_delta.reference import CHUNK
from residua.ops.kimi_delta import kernels
from residua.ops.kimi_delta.reference import BLOCKS

FORWARD_WARPS, BACKWARD_WARPS = 8, 4
"""The quickest of 2, 4 and 8 on an H200, with heads of 128."""


def forward_outputs(k: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    shape = *k.shape[:-1], CHUNK
    return k.new_empty(shape), k.new_empty(shape)


def forward(k: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """(k, k) and (q, k) [..., 64, 64] of k, q and G [..., 64, K], in float32."""
    outputs = forward_outputs(k, q, total)
    if k.numel():
        with on(k):
            kernels.forward_kernel[_grid(k)](*(aligned(x) for x in (k, q, total)), *outputs, **_sizes(k, FORWARD_WARPS))
    return outputs


def backward_outputs(
    d_keys: Tensor, d_queries: Tensor, k: Tensor, q: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return k.new_empty(k.shape), k.new_empty(k.shape), k.new_empty(k.shape)


def backward(d_keys: Tensor, d_queries: Tensor, k: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of k, q and G."""
    outputs = backward_outputs(d_keys, d_queries, k, q, total)
    if k.numel():
        with on(k):
            given = (aligned(x) for x in (d_keys, d_queries, k, q, total))
            kernels.backward_kernel[_grid(k)](*given, *outputs, **_sizes(k, BACKWARD_WARPS))
    return outputs


def _grid(k: Tensor) -> tuple[int]:
    """A program for each block of 16 tokens."""
    return (k.numel() // (k.shape[-1] * CHUNK) * BLOCKS,)


def _sizes(k: Tensor, warps: int) -> dict[str, int]:
    return {"K": k.shape[-1], "BLOCK": max(16, power(k.shape[-1])), "C": CHUNK, "num_warps": warps}
