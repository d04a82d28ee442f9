"""Decoding: tile sizes, and launching the kernels. Triton is imported when the first of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.launch import cdiv, on, power
from residua.ops.decode.reference import GATED, KEY_EPS

MOST_SOURCES = 128
FEW_SOURCES = 32
"""A kernel is compiled for as many sources as this, or for the next power of two."""
TILE = 8
MOST_SPLITS = 16
STEP = 1024


class _Kernels(NamedTuple):
    junctions: Any
    sublayers: Any


@cache
def _kernels() -> _Kernels:
    from residua.ops.decode import kernels, kernels_sublayer

    return _Kernels(kernels, kernels_sublayer)


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether every row of every tensor begins at a 16-byte address."""
    return all(t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0 for t in tensors)


def _row_settings(width: int, least: int = 1) -> dict[str, int]:
    """Sizes of a program that holds a row, and its warps: at least `least` from 512 channels on."""
    sizes = {"C": width, "BLOCK": power(width)}
    warps = max(least if width >= 512 else 1, min(16, power(width) // 256))
    return sizes if fused.INTERPRETED else sizes | {"num_warps": warps}


def add_norm_outputs(base: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(y)


def add_norm(base: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, h = add_norm_outputs(base, y, weight, eps)
    if len(y):
        settings = _row_settings(y.shape[-1], least=8)
        with on(y):
            _kernels().junctions.add_norm_kernel[(len(y),)](base, y, weight, normed, h, eps, **settings)
    return normed, h


def _sources_tile(count: int) -> tuple[int, int]:
    """The most sources that a kernel takes, and how many at a time: with the newest one in one tile, or in several."""
    if count >= TILE:
        return max(FEW_SOURCES, power(count)), TILE
    tile = max(2, power(count + 1))
    return tile - 1, tile


def read_sources_outputs(
    sources: Sequence[Tensor], y: Tensor, base: Tensor | None, queries: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (rows, width), others = y.shape, len(queries) - 1
    o = queries.new_empty(others, rows, width)
    return torch.empty_like(y), torch.empty_like(y), o, queries.new_empty(others, rows), queries.new_empty(others, rows)


def read_sources(
    sources: Sequence[Tensor], y: Tensor, base: Tensor | None, queries: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = read_sources_outputs(sources, y, base, queries, weight, eps)
    rows, width = y.shape
    if rows:
        most, tile = _sources_tile(len(sources))
        padded = (*sources, *[y] * (max(most, tile) - len(sources)))
        with on(y):
            _kernels().junctions.read_sources_kernel[(rows, len(queries))](
                padded, y if base is None else base, y, queries, weight, *outputs, rows, len(sources), eps, KEY_EPS,
                ADD=base is not None, MOST=most, TILE=tile, ALIGNED=_aligned(padded), **_row_settings(width),
            )  # fmt: skip
    return outputs


def read_partial_outputs(
    o: Tensor, lse: Tensor, square: Tensor, y: Tensor, base: Tensor | None, query: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(y)


def read_partial(
    o: Tensor, lse: Tensor, square: Tensor, y: Tensor, base: Tensor | None, query: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    normed, p = read_partial_outputs(o, lse, square, y, base, query, weight, eps)
    if len(y):
        with on(y):
            _kernels().junctions.read_partial_kernel[(len(y),)](
                o, lse, square, y if base is None else base, y, query, weight, normed, p, eps, KEY_EPS,
                ADD=base is not None, **_row_settings(y.shape[-1], least=8),
            )  # fmt: skip
    return normed, p


def gate_norm_outputs(
    streams: Sequence[Tensor], y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor,
    competitive: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(y), y.new_empty(len(streams), *y.shape)


def gate_norm(
    streams: Sequence[Tensor], y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor,
    competitive: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    queries = (gate_query, gate_bias, pool_query)
    normed, after = gate_norm_outputs(streams, y, *queries, weight, competitive, eps)
    (rows, width), n = y.shape, len(streams)
    if rows:
        tile = _padded(streams)
        with on(y):
            _kernels().junctions.gate_norm_kernel[(rows,)](
                tile, y, *queries, weight, normed, after, rows, eps, KEY_EPS, width**-0.5, N=n, ROWS=len(tile),
                COMPETITIVE=competitive, ALIGNED=_aligned((*tile, y)), **_row_settings(width),
            )  # fmt: skip
    return normed, after


def _padded(streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tiles have a power of two rows, and at least two."""
    n = len(streams)
    return (*streams, *[streams[0]] * (max(2, power(n)) - n))


def enter_cache_output(
    projected: Tensor, heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, positions: Tensor, mixing: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    return projected.new_empty(len(projected), heads, keys.shape[3])


def enter_cache(
    projected: Tensor, heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, positions: Tensor, mixing: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    q = enter_cache_output(projected, heads, gains, cos, sin, keys, values, positions, mixing)
    batch, (kv, width) = len(projected), keys.shape[2:]
    if batch:
        first, second = gains or (projected, projected)
        anchor, anchor_scale, scale = mixing or (projected, cos, cos)
        with on(keys):
            _kernels().sublayers.enter_cache_kernel[(batch, heads + kv)](
                projected, first, second, cos, sin, keys, values, anchor, anchor_scale, scale, positions, q,
                projected.stride(0), *keys.stride()[:3], anchor.stride(0), *scale.stride(),
                KEY_EPS, HEADS=heads, KV=kv, HALF=width // 2, LANES=power(width // 2),
                NORM=bool(gains), MIXED=bool(mixing), num_warps=1,
            )  # fmt: skip
    return q


def decode_attention_output(q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None) -> Tensor:
    out = decode_attention_output(q, keys, values, until, sink)
    if not len(q):
        return out
    batch, heads, width = q.shape
    splits = _splits(keys, batch * heads)
    part = q.new_empty(batch * heads * splits, width, dtype=torch.float32)
    lse = q.new_empty(batch * heads * splits, dtype=torch.float32)
    with on(q):
        _kernels().sublayers.decode_attention_kernel[(batch * heads, splits)](
            q, keys, values, until, q if sink is None else sink, out, part, lse, _counters(keys, batch * heads),
            width**-0.5, q.stride(0), *keys.stride()[:3], HEADS=heads, GROUPS=heads // keys.shape[2], D=width,
            LANES=power(width), SLOTS=max(16, 4096 // power(width)), SPLITS=splits, SINK=sink is not None,
        )  # fmt: skip
    return out


_COUNTERS: dict[tuple[torch.device, int, int], Tensor] = {}


def _counters(keys: Tensor, heads: int) -> Tensor:
    """One count per head, zero between launches: the last program of a head to finish resets it.

    Each cache has its own counters, for two generators may run at once. They are never freed, for a captured graph may
    hold them. During a capture nothing is zeroed yet: counters made there are zeroed by every replay, and not shared.
    """
    place = (keys.device, heads, keys.data_ptr())
    counts = _COUNTERS.get(place)
    if counts is None:
        counts = torch.zeros(heads, dtype=torch.int32, device=keys.device)
        if not (keys.is_cuda and torch.cuda.is_current_stream_capturing()):
            _COUNTERS[place] = counts
    return counts


def _splits(keys: Tensor, heads: int) -> int:
    """Shares of a head's slots, a power of two: enough programs for every multiprocessor, at least 64 slots each."""
    wanted = max(1, 2 * fused.multiprocessors(keys) // heads)
    most = max(1, keys.shape[1] // 64)
    limit = min(wanted, most, MOST_SPLITS)
    return 1 << (limit.bit_length() - 1)


def activate_output(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(len(x), x.shape[1] // (2 if kind in GATED else 1))


def activate(x: Tensor, kind: str) -> Tensor:
    out = activate_output(x, kind)
    rows, hidden = out.shape
    if rows:
        settings = {"HIDDEN": hidden, "STEP": STEP, "KIND": kind}
        with on(x):
            _kernels().sublayers.activate_kernel[(rows, cdiv(hidden, STEP))](x, out, **settings)
    return out
