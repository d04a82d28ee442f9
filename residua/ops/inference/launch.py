"""Operators of inference: launching the kernels, with the tile sizes of the training operators.

`torch.compile` and CUDA graphs treat each as one call. None has a gradient. A function with the name of a reference is
its fused twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.launch import (
    Kernels,
    addresses,
    aligned,
    cdiv,
    dense_last,
    dense_like,
    either,
    extent,
    next_power_of_2,
)
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import INTERPRETED, multiprocessors
from residua.ops.depth_attention.launch import depth_mix_group, depth_scores, depth_sum_scores, row_address
from residua.ops.depth_attention.tiles import UNROLL, narrow, row_tile
from residua.ops.inference.reference import GATED, KEY_EPS, Gains, Queries, Streams
from residua.ops.mix_projection.reference import Mixing
from residua.ops.multi_gate.launch import forward_plan
from residua.ops.norm_rotate.launch import FORWARD
from residua.ops.rms_norm.launch import forward as rms_norm

kernels_junctions = Kernels("residua.ops.inference.kernels_junctions")
kernels_sublayers = Kernels("residua.ops.inference.kernels_sublayers")

FEW_ROWS = 256
"""Up to this many rows, programs are so few that their latency limits speed, not the bytes they move."""
FEW_SOURCES = 32
"""A kernel is compiled for this many sources or, for more, for the next power of two."""
TILE = 8
MOST_SPLITS = 16
STEP = 1024


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether every row of every tensor starts at a 16-byte address."""
    return all(t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0 for t in tensors)


def _row_settings(width: int, least: int = 1) -> dict[str, int]:
    """Sizes and warps of a program that holds a row; from 512 channels on, at least `least` warps."""
    sizes = {"C": width, "BLOCK": next_power_of_2(width)}
    warps = max(least if width >= 512 else 1, min(16, next_power_of_2(width) // 256))
    return sizes if INTERPRETED else sizes | {"num_warps": warps}


@launcher("add_norm_rows")
def _add_norm(base: Tensor, y: Tensor, weight: Tensor, eps: float) -> Iterator[tuple[Tensor, Tensor]]:
    normed, h = dense_like(y), dense_like(y)
    yield normed, h
    if len(y):
        kernels_junctions.add_norm_kernel[(len(y),)](
            base.contiguous(), y.contiguous(), weight, normed, h, eps, **_row_settings(y.shape[-1], least=8)
        )


def add_norm(base: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.add_norm`; many rows use training's kernel."""
    if len(y) <= FEW_ROWS:
        return _add_norm(base, y, weight, eps)
    normed, _, h = rms_norm(base, weight, eps, y)
    return normed, h


def _sources_tile(count: int) -> tuple[int, int]:
    """The most sources that a kernel supports, and the tile size: one tile, including the newest source, or several."""
    if count >= TILE:
        return max(FEW_SOURCES, next_power_of_2(count)), TILE
    tile = max(2, next_power_of_2(count + 1))
    return tile - 1, tile


@launcher("read_sources")
def read_sources(
    sources: Sequence[Tensor], y: Tensor, base: Tensor | None, queries: Tensor, weight: Tensor, eps: float = 1e-6
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    (rows, width), others = y.shape, len(queries) - 1
    o, lse, square = (queries.new_empty(others, rows, *size) for size in ((width,), (), ()))
    outputs = dense_like(y), dense_like(y), o, lse, square
    yield outputs
    if rows:
        most, tile = _sources_tile(len(sources))
        y = y.contiguous()
        padded = (*(s.contiguous() for s in sources), *[y] * (max(most, tile) - len(sources)))
        kernels_junctions.read_sources_kernel[(rows, len(queries))](
            padded, either(base, y).contiguous(), y, queries, weight, *outputs, rows, len(sources), eps, KEY_EPS,
            ADD=base is not None, MOST=most, TILE=tile, ALIGNED=_aligned(padded), **_row_settings(width),
        )  # fmt: skip


@launcher("read_partial")
def read_partial(
    finished: Sequence[Tensor], y: Tensor, base: Tensor | None, query: Tensor, weight: Tensor, eps: float = 1e-6
) -> Iterator[tuple[Tensor, Tensor]]:
    normed, p = dense_like(y), dense_like(y)
    yield normed, p
    if len(y):
        kernels_junctions.read_partial_kernel[(len(y),)](
            *(t.contiguous() for t in (*finished, either(base, y), y)), query, weight, normed, p, eps, KEY_EPS,
            ADD=base is not None, **_row_settings(y.shape[-1], least=8),
        )  # fmt: skip


def source_scores(y: Tensor, base: Tensor | None, queries: Queries, first: int, count: int) -> tuple[Tensor, Tensor]:
    u = queries.parts if narrow(y) else queries.u
    if base is None:
        return depth_scores(y, u, first, count, KEY_EPS)[0], y
    v, z, _ = depth_sum_scores(base, y, u, first, count, KEY_EPS)
    return z, v


def read_group(
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], readers: int
) -> tuple[Tensor, Sequence[Tensor]]:
    lse, *o = depth_mix_group(list(sources), list(scores), list(rows), readers)
    return lse, o


@launcher("read_norm")
def _read_norm(
    others: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], y: Tensor, base: Tensor | None,
    query: Tensor, weight: Tensor, eps: float,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The normed read, and base + y, which is empty without a base."""
    normed, v = torch.empty_like(y), torch.empty_like(y if base is not None else y[:0])
    yield normed, v
    width, tokens = extent(y)
    if tokens:
        tile, others, y = _read_tile(width), [aligned(s) for s in others], aligned(y)
        kernels_junctions.read_norm_kernel[(cdiv(tokens, tile["TOKENS"]),)](
            addresses(others, [*map(row_address, scores, rows)]), y if base is None else aligned(base), y,
            aligned(query), weight, v, normed, tokens, len(others), eps, KEY_EPS,
            LANES=8, UNROLL=UNROLL, ADD=base is not None, **tile,
        )  # fmt: skip


def _read_tile(width: int) -> dict[str, Any]:
    """The tile of a read without a norm; as rows are also normed here, those from 1024 to 1536 take a second warp."""
    tile = row_tile(width)
    return {**tile, "num_warps": 2} if 1024 < width <= 1536 else tile


def read_norm(
    others: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], y: Tensor, base: Tensor | None,
    query: Tensor, weight: Tensor, *, eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    normed, v = _read_norm(list(others), list(scores), list(rows), y, base, query, weight, eps)
    return normed, y if base is None else v


@launcher("gate_norm_rows")
def _gate_rows(
    streams: Sequence[Tensor], y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor,
    competitive: bool, eps: float,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The normed read, and the streams [n, M, C] after the write."""
    (rows, width), n = y.shape, len(streams)
    normed, after = dense_like(y), y.new_empty(n, *y.shape)
    yield normed, after
    if rows:
        y, dense = y.contiguous(), [s.contiguous() for s in streams]
        tile = (*dense, *[dense[0]] * (max(2, next_power_of_2(n)) - n))
        kernels_junctions.gate_norm_kernel[(rows,)](
            tile, y, gate_query, gate_bias, pool_query, weight, normed, after, rows, eps, KEY_EPS, width**-0.5,
            N=n, ROWS=len(tile), COMPETITIVE=competitive, ALIGNED=_aligned((*tile, y)), **_row_settings(width),
        )  # fmt: skip


def _gate_tiles(
    streams: Sequence[Tensor], updates: Sequence[Tensor], betas: Sequence[Tensor], y: Tensor, gate_query: Tensor,
    gate_bias: Tensor, pool_query: Tensor, weight: Tensor, store: bool, competitive: bool, eps: float,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The normed read, and the streams [n, M, C] after the write or, if they are not stored, β [M, n]."""
    (tokens, width), n = y.shape, len(streams)
    normed = torch.empty_like(y)
    result = y.new_empty(n, *y.shape) if store else y.new_empty(len(y), n, dtype=torch.float32)
    yield normed, result
    if tokens:
        tile = forward_plan(n, width, y.element_size()).settings(n, width)
        kernels_junctions.gate_norm_tiles_kernel[(tokens,)](
            tuple(aligned(s) for s in streams), tuple(aligned(f) for f in updates), tuple(betas), aligned(y),
            gate_query, gate_bias, pool_query, weight, normed, result.unbind() if store else (),
            y if store else result, eps, KEY_EPS, 1 / width, width**-0.5,
            COMPETITIVE=competitive, STORE=store, **tile,
        )  # fmt: skip


# two names for one operator: its kernels take longest to compile, and operators compile in parallel
_gate_stored, _gate_noted = (launcher(name)(_gate_tiles) for name in ("gate_norm_stored", "gate_norm_noted"))


def gate_norm(
    state: Streams, y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor, *,
    store: bool = True, competitive: bool = True, eps: float = 1e-6,
) -> tuple[Tensor, Streams]:  # fmt: skip
    """The fused twin of `reference.gate_norm`; without deferred writes, a program holds a whole row at once."""
    weights = (gate_query, gate_bias, pool_query, weight)
    if not store:
        normed, beta = _gate_noted(*map(list, state), y, *weights, store, competitive, eps)
        return normed, state.later(y, beta)
    if state.updates:
        normed, after = _gate_stored(*map(list, state), y, *weights, store, competitive, eps)
    else:
        normed, after = _gate_rows(list(state.stored), y, *weights, competitive, eps)
    return normed, Streams(after.unbind())


def _launch_heads(
    projected: Tensor, gains: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float,
    q: Tensor, k: Tensor, v: Tensor | None, mixing: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """Launch the kernel for the heads of prompts."""
    batch, length, heads, width = q.shape
    sizes = FORWARD.sizes(width, heads, k.shape[2])
    tiles, query_groups, key_groups = cdiv(length, sizes["ROWS"]), heads // sizes["GROUP"], k.shape[2] // sizes["GROUP"]
    groups = query_groups + key_groups * (1 if v is None else 2)
    anchor, anchor_scale, scale = mixing or (q, cos, cos)
    kernels_sublayers.heads_kernel[(batch * tiles * groups,)](
        projected, *(gains or (cos, cos)), cos, sin, q, k, either(v, k), anchor, anchor_scale, scale,
        length, tiles, groups, query_groups, key_groups, *projected.stride()[:2], *q.stride()[:2], *k.stride()[:2],
        *anchor.stride()[:2], *scale.stride(), eps, **sizes,
        NORM=bool(gains), MIXED=bool(mixing), num_warps=FORWARD.warps,
    )  # fmt: skip


@launcher("turn_heads")
def _turn_heads(
    projected: Tensor, heads: int, kv_heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor, eps: float
) -> Iterator[tuple[Tensor, Tensor]]:
    q, k = (projected.new_empty(*projected.shape[:2], count, 2 * cos.shape[-1]) for count in (heads, kv_heads))
    yield q, k
    if q.numel():
        _launch_heads(dense_last(projected), gains, cos.contiguous(), sin.contiguous(), eps, q, k, None)


def turn_heads(
    projected: Tensor, heads: int, kv_heads: int, gains: Gains | None, cos: Tensor, sin: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    return _turn_heads(projected, heads, kv_heads, gains or (), cos, sin, eps)


@launcher("enter_cache", mutates=("keys", "values"))
def _enter_cache(
    projected: Tensor, heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    positions: Tensor | None, mixing: Sequence[Tensor], eps: float,
) -> Iterator[Tensor]:  # fmt: skip
    kv_heads, width = keys.shape[2:]
    q = projected.new_empty(*projected.shape[:2], heads, width)
    yield q
    if not q.numel():
        return
    projected, cos, sin = dense_last(projected), cos.contiguous(), sin.contiguous()
    if positions is None:
        _launch_heads(projected, gains, cos, sin, eps, q, keys, values, mixing)
        return
    anchor, anchor_scale, scale = mixing or (projected, cos, cos)
    kernels_sublayers.enter_cache_kernel[(len(q), heads + kv_heads)](
        projected, *(gains or (projected, projected)), cos, sin, keys, values, anchor, anchor_scale, scale,
        positions, q, projected.stride(0), *keys.stride()[:3], anchor.stride(0), *scale.stride(), eps,
        HEADS=heads, KV=kv_heads, HALF=width // 2, LANES=next_power_of_2(width // 2),
        NORM=bool(gains), MIXED=bool(mixing), num_warps=1,
    )  # fmt: skip


def enter_cache(
    projected: Tensor, heads: int, gains: Gains | None, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    positions: Tensor | None = None, mixing: Mixing | None = None, *, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    return _enter_cache(projected, heads, gains or (), cos, sin, keys, values, positions, list(mixing or ()), eps)


@launcher("decode_attention")
def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None = None
) -> Iterator[Tensor]:  # fmt: skip
    out = dense_like(q)
    yield out
    if not len(q):
        return
    batch, heads, width = q.shape
    q = q if q.stride(2) == 1 and q.stride(1) == width else q.contiguous()
    splits, lanes = _splits(keys, batch * heads), next_power_of_2(width)
    part = q.new_empty(batch * heads * splits, width, dtype=torch.float32)
    lse = q.new_empty(batch * heads * splits, dtype=torch.float32)
    kernels_sublayers.decode_attention_kernel[(batch * heads, splits)](
        q, keys, values, until, either(sink, q), out, part, lse, _counters(keys, batch * heads),
        width**-0.5, q.stride(0), *keys.stride()[:3], HEADS=heads, GROUPS=heads // keys.shape[2], D=width,
        LANES=lanes, SLOTS=max(16, 4096 // lanes), SPLITS=splits, SINK=sink is not None,
    )  # fmt: skip


_COUNTERS: dict[tuple[torch.device, int, int], Tensor] = {}


def _counters(keys: Tensor, heads: int) -> Tensor:
    """One counter per head, zero between launches: the last program of a head to finish resets it.

    Each cache has its own counters, because two generators may run at once. They are never freed, because a captured
    graph may hold them. A capture does not run the zeroing: every replay zeroes counters created in it, so they are not
    shared.
    """
    place = (keys.device, heads, keys.data_ptr())
    counts = _COUNTERS.get(place)
    if counts is None:
        counts = torch.zeros(heads, dtype=torch.int32, device=keys.device)
        if not (keys.is_cuda and torch.cuda.is_current_stream_capturing()):
            _COUNTERS[place] = counts
    return counts


def _splits(keys: Tensor, heads: int) -> int:
    """Parts to split a head's slots into, a power of two: enough programs for all multiprocessors, at least 64 slots
    each.
    """
    wanted = max(1, 2 * multiprocessors(keys) // heads)
    most = max(1, keys.shape[1] // 64)
    limit = min(wanted, most, MOST_SPLITS)
    return 1 << (limit.bit_length() - 1)


@launcher("activate")
def activate(x: Tensor, kind: str) -> Iterator[Tensor]:
    rows, hidden = len(x), x.shape[1] // (2 if kind in GATED else 1)
    out = x.new_empty(rows, hidden)
    yield out
    if rows:
        settings = {"HIDDEN": hidden, "STEP": STEP, "KIND": kind}
        kernels_sublayers.activate_kernel[(rows, cdiv(hidden, STEP))](x.contiguous(), out, **settings)
