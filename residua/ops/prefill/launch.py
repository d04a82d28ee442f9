"""A forward pass over whole sequences: launching the kernels, with the tiles of the operators they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.launch import addresses, aligned, cdiv, extent, on
from residua.ops.depth_attention.launch import row_address
from residua.ops.depth_attention.tiles import UNROLL, row_tile
from residua.ops.multi_gate.launch import forward_plan
from residua.ops.norm_rotate.launch import FORWARD
from residua.ops.prefill import kernels
from residua.ops.prefill.reference import KEY_EPS


def turn_heads_outputs(
    projected: Tensor, heads: int, kv_heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    width = 2 * cos.shape[-1]
    q, k = (projected.new_empty(*projected.shape[:2], count, width) for count in (heads, kv_heads))
    return q, k


def turn_heads(
    projected: Tensor, heads: int, kv_heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    q, k = turn_heads_outputs(projected, heads, kv_heads, gains, cos, sin, eps)
    _launch_heads(projected, gains, cos, sin, eps, q, k, None)
    return q, k


def enter_heads_output(
    projected: Tensor, heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    mixing: Sequence[Tensor], eps: float,
) -> Tensor:  # fmt: skip
    return projected.new_empty(*projected.shape[:2], heads, keys.shape[-1])


def enter_heads(
    projected: Tensor, heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    mixing: Sequence[Tensor], eps: float,
) -> Tensor:  # fmt: skip
    q = enter_heads_output(projected, heads, gains, cos, sin, keys, values, mixing, eps)
    _launch_heads(projected, gains, cos, sin, eps, q, keys, values, mixing)
    return q


def _launch_heads(
    projected: Tensor, gains: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float,
    q: Tensor, k: Tensor, v: Tensor | None, mixing: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    batch, length, heads, width = q.shape
    if not q.numel():
        return
    sizes = FORWARD.sizes(width, heads, k.shape[2])
    tiles, query_groups, key_groups = cdiv(length, sizes["ROWS"]), heads // sizes["GROUP"], k.shape[2] // sizes["GROUP"]
    groups = query_groups + key_groups * (1 if v is None else 2)
    first, second = gains or (cos, cos)
    anchor, anchor_scale, scale = mixing or (q, cos, cos)
    with on(q):
        kernels.heads_kernel[(batch * tiles * groups,)](
            projected, first, second, cos, sin, q, k, k if v is None else v, anchor, anchor_scale, scale,
            length, tiles, groups, query_groups, key_groups, *projected.stride()[:2], *q.stride()[:2], *k.stride()[:2],
            *anchor.stride()[:2], *scale.stride(), eps, **sizes,
            NORM=bool(gains), MIXED=bool(mixing), num_warps=FORWARD.warps,
        )  # fmt: skip


def read_norm_outputs(
    others: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], y: Tensor, base: Tensor | None,
    query: Tensor, weight: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(y), torch.empty_like(y if base is not None else y[:0])


def read_norm(
    others: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], y: Tensor, base: Tensor | None,
    query: Tensor, weight: Tensor, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The normed read, and base + y; if there is no base, nothing in its place."""
    normed, v = outputs = read_norm_outputs(others, scores, rows, y, base, query, weight, eps)
    width, tokens = extent(y)
    if tokens:
        tile = _read_tile(width)
        others, y = [aligned(s) for s in others], aligned(y)
        with on(y):
            kernels.read_norm_kernel[(cdiv(tokens, tile["TOKENS"]),)](
                addresses(others, [*map(row_address, scores, rows)]), y if base is None else aligned(base), y,
                aligned(query), weight, v, normed, tokens, len(others), eps, KEY_EPS,
                LANES=8, UNROLL=UNROLL, ADD=base is not None, **tile,
            )  # fmt: skip
    return outputs


def _read_tile(width: int) -> dict[str, Any]:
    """The tile of a read alone; rows between 1024 and 1536, which are also normed here, take a second warp."""
    tile = row_tile(width)
    return {**tile, "num_warps": 2} if 1024 < width <= 1536 else tile


def gate_norm_outputs(
    streams: Sequence[Tensor], updates: Sequence[Tensor], betas: Sequence[Tensor], y: Tensor, gate_query: Tensor,
    gate_bias: Tensor, pool_query: Tensor, weight: Tensor, store: bool, competitive: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n = len(streams)
    made = y.new_empty(n, *y.shape) if store else y.new_empty(len(y), n, dtype=torch.float32)
    return torch.empty_like(y), made


def gate_norm(
    streams: Sequence[Tensor], updates: Sequence[Tensor], betas: Sequence[Tensor], y: Tensor, gate_query: Tensor,
    gate_bias: Tensor, pool_query: Tensor, weight: Tensor, store: bool, competitive: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The normed read, and the streams [n, M, C] after the write or, if they are not stored, β [M, n]."""
    weights = (gate_query, gate_bias, pool_query, weight)
    normed, made = gate_norm_outputs(streams, updates, betas, y, *weights, store, competitive, eps)
    (tokens, width), n = y.shape, len(streams)
    if tokens:
        tile = forward_plan(n, width, y.element_size()).settings(n, width)
        with on(y):
            kernels.gate_norm_kernel[(tokens,)](
                tuple(aligned(s) for s in streams), tuple(aligned(f) for f in updates), tuple(betas), aligned(y),
                *weights, normed, made.unbind() if store else (), y if store else made,
                eps, KEY_EPS, 1 / width, width**-0.5, COMPETITIVE=competitive, STORE=store, **tile,
            )  # fmt: skip
    return normed, made
