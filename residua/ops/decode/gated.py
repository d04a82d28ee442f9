"""Launching the gated junctions of decoding, whole or in two: what the streams alone decide, and the rest."""

# No `from __future__ import annotations` here: custom_op reads the signatures as they are.
from collections.abc import Sequence

import torch
from torch import Tensor

from residua.ops._runtime.launch import on
from residua.ops.decode import launch, overlap
from residua.ops.decode.reference import KEY_EPS, Gate

MOST_VALUES = 8192
"""Values of all streams of a row, each filled up to a power of two, that a program holds as vectors."""
MOST_VECTORS = 8


def as_vectors(streams: Sequence[Tensor]) -> bool:
    """Whether a program can hold these streams as vectors, which a junction in two takes; a whole one has a tile."""
    n = len(streams)
    return n <= MOST_VECTORS and n * launch.block(streams[0].shape[-1]) <= MOST_VALUES


def _padded(streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tiles have a power of two rows, and at least two."""
    n = len(streams)
    return (*streams, *[streams[0]] * (max(2, 1 << (n - 1).bit_length()) - n))


@torch.library.custom_op("residua::gate_norm", mutates_args=())
def _gate_norm(
    streams: Sequence[Tensor], y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor,
    competitive: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (rows, width), n = y.shape, len(streams)
    normed, after = torch.empty_like(y), y.new_empty(n, rows, width)
    queries = (gate_query, gate_bias, pool_query)
    if rows:
        tile = _padded(streams)
        with on(y):
            launch.junction_kernels().gate_norm_kernel[(rows,)](
                tile, y, *queries, weight, normed, after, rows, eps, KEY_EPS, width**-0.5, N=n, ROWS=len(tile),
                COMPETITIVE=competitive, ALIGNED=launch.aligned((*tile, y)), **launch.row_settings(width),
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
    queries = (gate_query, gate_bias, pool_query)
    normed, after = _gate_norm([s.contiguous() for s in streams], y.contiguous(), *queries, weight, competitive, eps)
    return normed, after.unbind()


@torch.library.custom_op("residua::prepare_gates", mutates_args=())
def _prepare_gates(
    streams: Sequence[Tensor], gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, competitive: bool
) -> Tensor:
    prepared = _prepared_like(streams, gate_query, gate_bias, pool_query, competitive)
    rows, width = streams[0].shape
    if rows:
        with on(prepared), overlap.beside(prepared):
            launch.gate_kernels().prepare_gates_kernel[(rows,)](
                tuple(streams), gate_query, gate_bias, pool_query, prepared, KEY_EPS, width**-0.5,
                N=len(streams), COMPETITIVE=competitive, **launch.row_settings(width),
            )  # fmt: skip
    return prepared


@_prepare_gates.register_fake
def _prepared_like(
    streams: Sequence[Tensor], gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, competitive: bool
) -> Tensor:
    n = len(streams)
    return streams[0].new_empty(len(streams[0]), n * (n + 5) // 2, dtype=torch.float32)


def prepare_gates(gate: Gate) -> Tensor:
    """The contract is the reference's. In a capture it runs beside what comes behind it, up to `gate_prepared`."""
    prepared: Tensor = _prepare_gates(list(gate.streams), *gate[1:])
    return prepared


@torch.library.custom_op("residua::gate_prepared", mutates_args=())
def _gate_prepared(
    streams: Sequence[Tensor], y: Tensor, prepared: Tensor, pool_query: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    (rows, width), n = y.shape, len(streams)
    normed, after = torch.empty_like(y), y.new_empty(n, rows, width)
    overlap.join(y)
    if rows:
        with on(y):
            launch.gate_kernels().gate_prepared_kernel[(rows,)](
                tuple(streams), y, prepared, pool_query, weight, normed, after, rows, eps, KEY_EPS, width**-0.5, N=n,
                **launch.row_settings(width, least=4),
            )  # fmt: skip
    return normed, after


@_gate_prepared.register_fake
def _(
    streams: Sequence[Tensor], y: Tensor, prepared: Tensor, pool_query: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), y.new_empty(len(streams), *y.shape)


def gate_prepared(
    gate: Gate, prepared: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The contract is the reference's."""
    normed, after = _gate_prepared(list(gate.streams), y.contiguous(), prepared, gate.pool_query, weight, eps)
    return normed, after.unbind()
