"""QK-norm and rotation in one pass over the heads: read x, write y; backward: read dy and x, write dx.

The backward pass needs only the inputs. `packed_heads_backward` turns attention's gradients directly into that of the
projection [Q | K | V]: without it, a concatenation would read and write all three once more.
`residua.train.compile.rewrites` inserts it into compiled graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, dense_last, dense_like, next_power_of_2
from residua.ops._runtime.library import differentiate, launcher
from residua.ops._runtime.triton_support import multiprocessors

kernels = Kernels("residua.ops.norm_rotate.kernels")


class HeadsPlan(NamedTuple):
    tile: int
    """Elements per half tile: tokens times half a head."""
    group: int
    """Most heads that share one load of the rotation table."""
    warps: int
    programs: int = 0
    """Programs per multiprocessor in the backward pass, where each loops over many tiles."""
    stages: int = 1
    registers: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "maxnreg": self.registers}

    def sizes(self, width: int, *heads: int) -> dict[str, int]:
        """The kernels' constants; GROUP is the largest common divisor of the heads that is at most `group`."""
        half = width // 2
        lanes, shared = next_power_of_2(half), math.gcd(*heads)
        group = max(g for g in range(1, self.group + 1) if shared % g == 0)
        return {"HALF": half, "LANES": lanes, "ROWS": max(1, self.tile // lanes), "GROUP": group}


FORWARD = HeadsPlan(1024, 3, 4)
BACKWARD = HeadsPlan(1024, 1, 4, 5)
PACKED = HeadsPlan(1024, 2, 4, 8)


class Tokens(NamedTuple):
    """The tokens as sequences of `length`, whose rotation tables are `turns` elements apart."""

    batches: int
    length: int
    turns: int

    def tiles(self, rows: int) -> int:
        return cdiv(self.length, rows)

    def chunks(self, x: Tensor, plan: HeadsPlan, rows: int, groups: int) -> int:
        """The number of programs that share the tiles of each group of heads."""
        return min(self.batches * self.tiles(rows), cdiv(plan.programs * multiprocessors(x), groups))


def tokens(x: Tensor, cos: Tensor) -> Tokens:
    """Sequences of one token, each with its own table, count as one long sequence."""
    batch, length, _, width = x.shape
    per_row = batch > 1 and cos.shape[:-1].numel() == batch * length
    if per_row and length == 1:
        return Tokens(1, batch, 0)
    return Tokens(batch, length, per_row * length * width // 2)


def strides(x: Tensor, walk: Tokens) -> tuple[int, int, int]:
    """The strides from one sequence, token and head to the next."""
    batch, token, head, _ = x.stride()
    return (0, batch, head) if walk.length != x.shape[1] else (batch, token, head)


@launcher("norm_rotate")
def forward(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Iterator[Tensor]:
    y = dense_like(x)
    yield y
    x, (_, _, heads, width) = dense_last(x), x.shape
    if y.numel():
        sizes, walk = FORWARD.sizes(width, heads), tokens(x, cos)
        groups, tiles = heads // sizes["GROUP"], walk.tiles(sizes["ROWS"])
        kernels.forward_kernel[(walk.batches * tiles * groups,)](
            x, weight, cos.contiguous(), sin.contiguous(), y, walk.length, tiles, groups,
            *strides(x, walk), *strides(y, walk)[:2], walk.turns, eps, **sizes, **FORWARD.settings,
        )  # fmt: skip


@launcher("norm_rotate_backward")
def backward(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Iterator[tuple[Tensor, Tensor]]:
    dx, dweight = dense_like(x), torch.empty_like(weight)
    yield dx, dweight
    dy, x, (_, _, heads, width) = dense_last(dy), dense_last(x), x.shape
    sizes, walk = BACKWARD.sizes(width, heads), tokens(x, cos)
    groups = heads // sizes["GROUP"]
    rows = walk.chunks(x, BACKWARD, sizes["ROWS"], groups) * groups
    partial = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    if rows:
        kernels.backward_kernel[(rows,)](
            dy, x, weight, cos.contiguous(), sin.contiguous(), dx, partial, walk.batches, walk.length,
            walk.tiles(sizes["ROWS"]), groups, *strides(dy, walk), *strides(x, walk), *strides(dx, walk)[:2],
            walk.turns, eps, **sizes, STAGES=BACKWARD.stages, **BACKWARD.settings,
        )  # fmt: skip
    sum_rows(partial, dweight, rows=rows)


@launcher("packed_heads_backward")
def packed_heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor,
    query_eps: float, key_eps: float,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """The gradient [B, T, (H + 2 H_kv) D] of a projection [Q | K | V], and those of the gains `query` and `key` [D].

    dq and q [B, T, H, D], dk, dv and k [B, T, H_kv, D]: the gradients of the normalised, rotated queries and keys and
    of the values, and the projected queries and keys. Equals two `backward` calls and a concatenation.
    """
    packed = q.new_empty((*q.shape[:2], (q.shape[2] + 2 * k.shape[2]) * q.shape[3]))
    d_query, d_key = torch.empty_like(query), torch.empty_like(key)
    yield packed, d_query, d_key
    dq, dk, dv, q, k = (dense_last(t) for t in (dq, dk, dv, q, k))
    sizes, walk = PACKED.sizes(q.shape[3], q.shape[2], k.shape[2]), tokens(q, cos)
    query_groups, key_groups = q.shape[2] // sizes["GROUP"], k.shape[2] // sizes["GROUP"]
    groups = query_groups + 2 * key_groups
    chunks = walk.chunks(q, PACKED, sizes["ROWS"], groups)
    partial = torch.empty(chunks * (query_groups + key_groups), q.shape[3], dtype=torch.float32, device=q.device)
    if chunks:
        kernels.packed_kernel[(chunks * groups,)](
            dq, dk, dv, q, k, query, key, cos.contiguous(), sin.contiguous(), packed, partial,
            walk.batches, walk.length, walk.tiles(sizes["ROWS"]), query_groups, key_groups,
            *(step for t in (dq, dk, dv, q, k) for step in strides(t, walk)),
            *strides(packed[:, :, None], walk)[:2], walk.turns, query_eps, key_eps,
            **sizes, STAGES=PACKED.stages, **PACKED.settings,
        )  # fmt: skip
    sum_rows(partial, d_query, d_key, rows=chunks * query_groups)


def sum_rows(partial: Tensor, first: Tensor, second: Tensor | None = None, *, rows: int) -> None:
    """first = Σ of the first `rows` rows of `partial` [R, W], second = Σ of the rest: one launch, in a fixed order."""
    width, block = partial.shape[1], 16
    kernels.sum_rows_kernel[(cdiv(width, block), 1 if second is None else 2)](
        partial, first, second, rows, len(partial) - rows, WIDTH=width, ROWS=256, BLOCK=block
    )


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The fused twin of `reference.norm_rotate`."""
    return forward(x, weight, cos, sin, eps)


@differentiate(forward)
def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    return backward(dy, *ctx.saved_tensors, *ctx.settings)
