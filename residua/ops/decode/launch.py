"""Launching the kernels of decoding, as operators that `torch.compile` and CUDA graphs take whole."""

# No `from __future__ import annotations` here: custom_op reads the signatures as they are.
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.launch import on, power
from residua.ops.decode.reference import GATED, KEY_EPS

MOST_SOURCES = 32
TILE = 8
MOST_SPLITS = 16
STEP = 1024


@cache
def junction_kernels() -> Any:
    from residua.ops.decode import kernels

    return kernels


@cache
def gate_kernels() -> Any:
    from residua.ops.decode import gate_kernels

    return gate_kernels


@cache
def sublayer_kernels() -> Any:
    from residua.ops.decode import sublayer_kernels

    return sublayer_kernels


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether every row of every tensor begins at a 16-byte address."""
    return all(t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0 for t in tensors)


def block(width: int) -> int:
    """The power of two that holds a row."""
    return 1 << (width - 1).bit_length()


def row_settings(width: int, least: int = 1) -> dict[str, int]:
    """Sizes of a program that holds a row, and its warps: at least `least` from 512 channels on."""
    sizes = {"C": width, "BLOCK": block(width)}
    warps = max(least if width >= 512 else 1, min(16, block(width) // 256))
    return sizes if fused.INTERPRETED else sizes | {"num_warps": warps}


@torch.library.custom_op("residua::add_norm_decode", mutates_args=())
def _add_norm(base: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, h = torch.empty_like(y), torch.empty_like(y)
    if len(y):
        settings = row_settings(y.shape[-1], least=8)
        with on(y):
            junction_kernels().add_norm_kernel[(len(y),)](base, y, weight, normed, h, eps, **settings)
    return normed, h


@_add_norm.register_fake
def _(base: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(y)


def add_norm(base: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The contract is the reference's."""
    normed, h = _add_norm(base.contiguous(), y.contiguous(), weight, eps)
    return normed, h


def _sources_tile(count: int) -> tuple[int, int]:
    """The most sources that a kernel takes, and how many at a time: with the newest one in one tile, or in several."""
    if count >= TILE:
        return MOST_SOURCES, TILE
    tile = max(2, power(count + 1))
    return tile - 1, tile


@torch.library.custom_op("residua::read_sources", mutates_args=())
def _read_sources(
    sources: Sequence[Tensor], y: Tensor, base: Tensor | None, queries: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _sources_outputs(sources, y, base, queries, weight, eps)
    rows, width = y.shape
    if rows:
        most, tile = _sources_tile(len(sources))
        padded = (*sources, *[y] * (max(most, tile) - len(sources)))
        with on(y):
            junction_kernels().read_sources_kernel[(rows, len(queries))](
                padded, y if base is None else base, y, queries, weight, *outputs, rows, len(sources), eps, KEY_EPS,
                ADD=base is not None, MOST=most, TILE=tile, ALIGNED=aligned(padded), **row_settings(width),
            )  # fmt: skip
    return outputs


@_read_sources.register_fake
def _sources_outputs(
    sources: Sequence[Tensor], y: Tensor, base: Tensor | None, queries: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (rows, width), others = y.shape, len(queries) - 1
    o = queries.new_empty(others, rows, width)
    return torch.empty_like(y), torch.empty_like(y), o, queries.new_empty(others, rows), queries.new_empty(others, rows)


def read_sources(
    sources: Sequence[Tensor], y: Tensor, base: Tensor | None, queries: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The contract is the reference's."""
    dense, base = [s.contiguous() for s in sources], None if base is None else base.contiguous()
    return _read_sources(dense, y.contiguous(), base, queries, weight, eps)  # type: ignore[return-value]


@torch.library.custom_op("residua::read_partial", mutates_args=())
def _read_partial(
    o: Tensor, lse: Tensor, square: Tensor, y: Tensor, base: Tensor | None, query: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    normed, p = torch.empty_like(y), torch.empty_like(y)
    if len(y):
        with on(y):
            junction_kernels().read_partial_kernel[(len(y),)](
                o, lse, square, y if base is None else base, y, query, weight, normed, p, eps, KEY_EPS,
                ADD=base is not None, **row_settings(y.shape[-1], least=8),
            )  # fmt: skip
    return normed, p


@_read_partial.register_fake
def _(
    o: Tensor, lse: Tensor, square: Tensor, y: Tensor, base: Tensor | None, query: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(y)


def read_partial(
    finished: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    base: Tensor | None,
    query: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The contract is the reference's."""
    o, lse, square = (t.contiguous() for t in finished)
    base = None if base is None else base.contiguous()
    normed, p = _read_partial(o, lse, square, y.contiguous(), base, query, weight, eps)
    return normed, p


@torch.library.custom_op("residua::enter_cache", mutates_args=("keys", "values"))
def _enter_cache(
    projected: Tensor, heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, positions: Tensor,
) -> Tensor:  # fmt: skip
    batch, (kv, width) = len(projected), keys.shape[2:]
    q = projected.new_empty(batch, heads, width)
    if batch:
        first, second = gains or (projected, projected)
        with on(keys):
            sublayer_kernels().enter_cache_kernel[(batch, heads + kv)](
                projected, first, second, cos, sin, keys, values, positions, q, projected.stride(0), *keys.stride()[:3],
                KEY_EPS, HEADS=heads, KV=kv, HALF=width // 2, LANES=1 << (width // 2 - 1).bit_length(),
                NORM=bool(gains), num_warps=1,
            )  # fmt: skip
    return q


@_enter_cache.register_fake
def _(
    projected: Tensor, heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, positions: Tensor,
) -> Tensor:  # fmt: skip
    return projected.new_empty(len(projected), heads, keys.shape[3])


def enter_cache(
    projected: Tensor,
    heads: int,
    gains: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
) -> Tensor:
    """The contract is the reference's."""
    dense = projected if projected.stride(1) == 1 else projected.contiguous()
    tables = (cos.contiguous(), sin.contiguous())
    q: Tensor = _enter_cache(dense, heads, list(gains or ()), *tables, keys, values, positions)
    return q


@torch.library.custom_op("residua::decode_attention", mutates_args=())
def _decode_attention(q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not len(q):
        return out
    batch, heads, width = q.shape
    splits = _splits(keys, batch * heads)
    slots = max(16, 4096 // (1 << (width - 1).bit_length()))
    part = q.new_empty(batch * heads * splits, width, dtype=torch.float32)
    lse = q.new_empty(batch * heads * splits, dtype=torch.float32)
    with on(q):
        sublayer_kernels().decode_attention_kernel[(batch * heads, splits)](
            q, keys, values, until, q if sink is None else sink, out, part, lse, _counters(keys, batch * heads),
            width**-0.5, q.stride(0), *keys.stride()[:3], HEADS=heads, GROUPS=heads // keys.shape[2], D=width,
            LANES=1 << (width - 1).bit_length(), SLOTS=slots, SPLITS=splits, SINK=sink is not None,
        )  # fmt: skip
    return out


@_decode_attention.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None = None) -> Tensor:
    """The contract is the reference's."""
    dense = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
    result: Tensor = _decode_attention(dense, keys, values, until, sink)
    return result


_COUNTERS: dict[tuple[torch.device, int, int], Tensor] = {}


def _counters(keys: Tensor, heads: int) -> Tensor:
    """One count per head, zero between launches: whoever counts to the last sets it back.

    Those of each cache are its own, for two generators may run at once, and stay: a captured graph may hold them. In a
    capture nothing is zeroed yet: what is made there is zeroed by every replay, and for nobody else.
    """
    place = (keys.device, heads, keys.data_ptr())
    counts = _COUNTERS.get(place)
    if counts is None:
        counts = torch.zeros(heads, dtype=torch.int32, device=keys.device)
        if not (keys.is_cuda and torch.cuda.is_current_stream_capturing()):
            _COUNTERS[place] = counts
    return counts


def _splits(keys: Tensor, heads: int) -> int:
    """Shares of a head's slots, a power of two: enough programs for every multiprocessor, none for 64 slots."""
    wanted = max(1, 2 * fused.multiprocessors(keys) // heads)
    most = max(1, keys.shape[1] // 64)
    limit = min(wanted, most, MOST_SPLITS)
    return 1 << (limit.bit_length() - 1)


@torch.library.custom_op("residua::activate_decode", mutates_args=())
def _activate(x: Tensor, kind: str) -> Tensor:
    out = _activated_like(x, kind)
    rows, hidden = out.shape
    if rows:
        grid = (rows, -(-hidden // STEP))
        settings = {"HIDDEN": hidden, "STEP": STEP, "KIND": kind}
        with on(x):
            sublayer_kernels().activate_kernel[grid](x, out, **settings)
    return out


@_activate.register_fake
def _activated_like(x: Tensor, kind: str) -> Tensor:
    return x.new_empty(len(x), x.shape[1] // (2 if kind in GATED else 1))


def activate(x: Tensor, kind: str) -> Tensor:
    """The contract is the reference's."""
    result: Tensor = _activate(x.contiguous(), kind)
    return result
