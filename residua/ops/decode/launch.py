"""Launching the kernels of decoding, as operators that `torch.compile` and CUDA graphs take whole."""

# No `from __future__ import annotations` here: custom_op reads the signatures as they are.
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from residua.ops import fused
from residua.ops.decode.reference import KEY_EPS

MOST_SOURCES = 32
TILE = 8
MOST_SPLITS = 16


@cache
def _kernels() -> Any:
    from residua.ops.decode import kernels

    return kernels


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether every row of every tensor begins at a 16-byte address."""
    return all(t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0 for t in tensors)


def _row(width: int) -> dict[str, int]:
    block = 1 << (width - 1).bit_length()
    return {"C": width, "BLOCK": block} if fused.INTERPRETED else {
        "C": width, "BLOCK": block, "num_warps": min(16, max(1, block // 256))
    }  # fmt: skip


@torch.library.custom_op("residua::add_norm_decode", mutates_args=())
def _add_norm(base: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, h = torch.empty_like(y), torch.empty_like(y)
    if len(y):
        _kernels().add_norm_kernel[(len(y),)](base, y, weight, normed, h, eps, **_row(y.shape[-1]))
    return normed, h


@_add_norm.register_fake
def _(base: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(y)


def add_norm(base: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The contract is the reference's."""
    normed, h = _add_norm(base.contiguous(), y.contiguous(), weight, eps)
    return normed, h


@torch.library.custom_op("residua::read_sources", mutates_args=())
def _read_sources(
    sources: Sequence[Tensor], y: Tensor, base: Tensor | None, queries: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _sources_outputs(sources, y, base, queries, weight, eps)
    rows, width = y.shape
    if rows:
        padded = (*sources, *[y] * (MOST_SOURCES - len(sources)))
        _kernels().read_sources_kernel[(rows, len(queries))](
            padded, y if base is None else base, y, queries, weight, *outputs, rows, len(sources), eps, KEY_EPS,
            ADD=base is not None, MOST=MOST_SOURCES, TILE=TILE, ALIGNED=_aligned(padded), **_row(width),
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
    base = None if base is None else base.contiguous()
    rows = [source.contiguous() for source in sources]
    return _read_sources(rows, y.contiguous(), base, queries, weight, eps)  # type: ignore[return-value]


@torch.library.custom_op("residua::read_partial", mutates_args=())
def _read_partial(
    o: Tensor, lse: Tensor, square: Tensor, y: Tensor, base: Tensor | None, query: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    normed, p = torch.empty_like(y), torch.empty_like(y)
    if len(y):
        _kernels().read_partial_kernel[(len(y),)](
            o, lse, square, y if base is None else base, y, query, weight, normed, p, eps, KEY_EPS,
            ADD=base is not None, **_row(y.shape[-1]),
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
    base = None if base is None else base.contiguous()
    normed, p = _read_partial(*finished, y.contiguous(), base, query, weight, eps)
    return normed, p


@torch.library.custom_op("residua::gate_norm", mutates_args=())
def _gate_norm(
    streams: Sequence[Tensor], y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor,
    competitive: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (rows, width), n = y.shape, len(streams)
    normed, after = torch.empty_like(y), y.new_empty(n, rows, width)
    if rows:
        padded = (*streams, *[y] * (max(2, 1 << (n - 1).bit_length()) - n))
        _kernels().gate_norm_kernel[(rows,)](
            padded, y, gate_query, gate_bias, pool_query, weight, normed, after, rows, eps, KEY_EPS, width**-0.5,
            N=n, ROWS=len(padded), COMPETITIVE=competitive, ALIGNED=_aligned(padded), **_row(width),
        )  # fmt: skip
    return normed, after


@_gate_norm.register_fake
def _(
    streams: Sequence[Tensor], y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor,
    competitive: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(y), y.new_empty(len(streams), *y.shape)


def gate_norm(
    streams: Sequence[Tensor],
    y: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    weight: Tensor,
    *,
    competitive: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The contract is the reference's."""
    normed, after = _gate_norm(
        [s.contiguous() for s in streams], y.contiguous(), gate_query, gate_bias, pool_query, weight, competitive, eps
    )
    return normed, after.unbind()


@torch.library.custom_op("residua::enter_cache", mutates_args=("keys", "values"))
def _enter_cache(
    projected: Tensor, heads: int, gains: Sequence[Tensor], cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, positions: Tensor,
) -> Tensor:  # fmt: skip
    batch, (kv, width) = len(projected), keys.shape[2:]
    q = projected.new_empty(batch, heads, width)
    if batch:
        first, second = gains or (projected, projected)
        _kernels().enter_cache_kernel[(batch, heads + kv)](
            projected, first, second, cos, sin, keys, values, positions, q, projected.stride(0), *keys.stride()[:3],
            KEY_EPS, HEADS=heads, KV=kv, HALF=width // 2, LANES=1 << (width // 2 - 1).bit_length(), NORM=bool(gains),
            num_warps=1,
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
    batch, heads, width = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if batch == 0:
        return out
    splits = _splits(keys, batch * heads)
    slots = max(16, 4096 // (1 << (width - 1).bit_length()))
    part = q.new_empty(batch * heads * splits, width, dtype=torch.float32)
    lse = q.new_empty(batch * heads * splits, dtype=torch.float32)
    _kernels().decode_attention_kernel[(batch * heads, splits)](
        q, keys, values, until, q if sink is None else sink, out, part, lse, _counters(q.device, batch * heads),
        width**-0.5, q.stride(0), *keys.stride()[:3],
        HEADS=heads, GROUPS=heads // keys.shape[2], D=width, LANES=1 << (width - 1).bit_length(), SLOTS=slots,
        SPLITS=splits, SINK=sink is not None,
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


@cache
def _counters(device: torch.device, heads: int) -> Tensor:
    """One count per head, zero between launches: whoever counts to the last sets it back."""
    return torch.zeros(heads, dtype=torch.int32, device=device)


def _splits(keys: Tensor, heads: int) -> int:
    """Shares of a head's slots, a power of two: enough programs for every multiprocessor, none for 64 slots."""
    wanted = max(1, 2 * fused.multiprocessors(keys) // heads)
    most = max(1, keys.shape[1] // 64)
    limit = min(wanted, most, MOST_SPLITS)
    return 1 << (limit.bit_length() - 1)
