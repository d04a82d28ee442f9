"""QK-norm and rotation on the GPU: tiles of ROWS tokens of a sequence, GROUP heads per load of the table.

    n = x·rstd,  y = rotate(w ⊙ n);   dz = dy rotated back,  dw = Σ dz ⊙ n,  dx = rstd (w ⊙ dz − n mean(w ⊙ dz ⊙ n))

A head is held as its two halves [ROWS, LANES], which the rotation pairs. A tile is within one sequence, and its first
token is computed once for all of its rows: divisions for every row took longer than the memory traffic.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import put_halves


@triton.jit
def _tile(x_ptr, batch, start, stride_b, stride_t, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Pointers to the first half of head 0, for ROWS tokens of a sequence from `start` on."""
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    return x_ptr + (tl.cast(batch, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_t) + (row * stride_t + lane)


@triton.jit
def _load(x_ptr, mask, HALF: tl.constexpr):
    return tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32), tl.load(x_ptr + HALF, mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _gain(weight_ptr, HALF: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)[None, :]
    return _load(weight_ptr + lane, lane < HALF, HALF)


@triton.jit
def _mean(b_x1, b_x2, HALF: tl.constexpr):
    return (tl.sum(b_x1 + b_x2, 1) / (2 * HALF))[:, None]


@triton.jit(do_not_specialize=["length", "tiles", "groups"])
def forward_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, length, tiles, groups,
    stride_xb, stride_xt, stride_xh, stride_yb, stride_yt, turns, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`turns` is how far the table of the next sequence is, 0 if all share one."""
    block = tl.program_id(0) // groups
    first = tl.program_id(0) % groups * GROUP
    batch, start = block // tiles, block % tiles * ROWS
    mask = (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, LANES) < HALF)[None, :]
    source_ptr = _tile(x_ptr, batch, start, stride_xb, stride_xt, LANES, ROWS) + first * stride_xh
    target_ptr = _tile(y_ptr, batch, start, stride_yb, stride_yt, LANES, ROWS) + first * (2 * HALF)
    b_next1, b_next2 = _load(source_ptr, mask, HALF)  # [ROWS, LANES]
    b_cos = tl.load(_tile(cos_ptr, batch, start, turns, HALF, LANES, ROWS), mask=mask, other=0.0)
    b_sin = tl.load(_tile(sin_ptr, batch, start, turns, HALF, LANES, ROWS), mask=mask, other=0.0)
    b_w1, b_w2 = _gain(weight_ptr, HALF, LANES)
    for head in tl.static_range(GROUP):
        b_x1, b_x2 = b_next1, b_next2
        if head + 1 < GROUP:  # in flight while this head is worked on
            b_next1, b_next2 = _load(source_ptr + (head + 1) * stride_xh, mask, HALF)
        # y = rotate(w ⊙ x · rstd)
        b_rstd = tl.rsqrt(_mean(b_x1 * b_x1, b_x2 * b_x2, HALF) + eps)
        b_n1, b_n2 = b_x1 * b_rstd * b_w1, b_x2 * b_rstd * b_w2
        put_halves(target_ptr + head * (2 * HALF), b_n1 * b_cos - b_n2 * b_sin, b_n2 * b_cos + b_n1 * b_sin, mask, HALF)


@triton.jit
def _turn_back(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, group, chunk, chunks, batches, length, tiles,
    stride_gb, stride_gt, stride_gh, stride_xb, stride_xt, stride_xh, stride_db, stride_dt, turns, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP heads of every `chunks`-th tile; their part of dw goes to `partial` [D].

    It is summed over rows only at the end: a reduction across warps for every tile would cost more than the traffic.
    """
    lane = tl.arange(0, LANES)
    first = group * GROUP
    b_w1, b_w2 = _gain(weight_ptr, HALF, LANES)
    b_dw1 = tl.zeros([ROWS, LANES], tl.float32)
    b_dw2 = tl.zeros([ROWS, LANES], tl.float32)
    for block in tl.range(chunk, batches * tiles, chunks, num_stages=STAGES):
        batch, start = block // tiles, block % tiles * ROWS
        mask = (start + tl.arange(0, ROWS) < length)[:, None] & (lane < HALF)[None, :]
        b_cos = tl.load(_tile(cos_ptr, batch, start, turns, HALF, LANES, ROWS), mask=mask, other=0.0)
        b_sin = tl.load(_tile(sin_ptr, batch, start, turns, HALF, LANES, ROWS), mask=mask, other=0.0)
        source_ptr = _tile(x_ptr, batch, start, stride_xb, stride_xt, LANES, ROWS) + first * stride_xh
        dy_at = _tile(dy_ptr, batch, start, stride_gb, stride_gt, LANES, ROWS) + first * stride_gh
        target_ptr = _tile(dx_ptr, batch, start, stride_db, stride_dt, LANES, ROWS) + first * (2 * HALF)
        for head in tl.static_range(GROUP):
            b_x1, b_x2 = _load(source_ptr + head * stride_xh, mask, HALF)
            b_dy1, b_dy2 = _load(dy_at + head * stride_gh, mask, HALF)
            # n = x · rstd, dz = dy rotated back
            b_rstd = tl.rsqrt(_mean(b_x1 * b_x1, b_x2 * b_x2, HALF) + eps)
            b_n1, b_n2 = b_x1 * b_rstd, b_x2 * b_rstd
            b_z1, b_z2 = b_dy1 * b_cos + b_dy2 * b_sin, b_dy2 * b_cos - b_dy1 * b_sin
            # dw += dz ⊙ n
            b_dw1 += b_z1 * b_n1
            b_dw2 += b_z2 * b_n2
            # dx = rstd (w ⊙ dz − n mean(w ⊙ dz ⊙ n))
            b_z1, b_z2 = b_z1 * b_w1, b_z2 * b_w2
            b_mean = _mean(b_z1 * b_n1, b_z2 * b_n2, HALF)
            put_halves(
                target_ptr + head * (2 * HALF),
                b_rstd * (b_z1 - b_n1 * b_mean),
                b_rstd * (b_z2 - b_n2 * b_mean),
                mask,
                HALF,
            )
    tl.store(partial_ptr + lane, tl.sum(b_dw1, 0), mask=lane < HALF)
    tl.store(partial_ptr + HALF + lane, tl.sum(b_dw2, 0), mask=lane < HALF)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "groups"])
def backward_kernel(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, batches, length, tiles, groups,
    stride_gb, stride_gt, stride_gh, stride_xb, stride_xt, stride_xh, stride_db, stride_dt, turns, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    _turn_back(
        dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr + program * 2 * HALF,
        program % groups, program // groups, tl.num_programs(0) // groups, batches, length, tiles,
        stride_gb, stride_gt, stride_gh, stride_xb, stride_xt, stride_xh, stride_db, stride_dt, turns, eps,
        HALF, LANES, ROWS, GROUP, STAGES,
    )  # fmt: skip


@triton.jit
def _copy(
    x_ptr, y_ptr, group, chunk, chunks, batches, length, tiles, stride_xb, stride_xt, stride_xh, stride_yb, stride_yt,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP heads of every `chunks`-th tile as they are."""
    for block in tl.range(chunk, batches * tiles, chunks, num_stages=STAGES):
        batch, start = block // tiles, block % tiles * ROWS
        mask = (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, LANES) < HALF)[None, :]
        source_ptr = _tile(x_ptr, batch, start, stride_xb, stride_xt, LANES, ROWS) + group * GROUP * stride_xh
        target_ptr = _tile(y_ptr, batch, start, stride_yb, stride_yt, LANES, ROWS) + group * GROUP * (2 * HALF)
        for head in tl.static_range(GROUP):
            b_v1 = tl.load(source_ptr + head * stride_xh, mask=mask, other=0.0)
            b_v2 = tl.load(source_ptr + head * stride_xh + HALF, mask=mask, other=0.0)
            put_halves(target_ptr + head * (2 * HALF), b_v1, b_v2, mask, HALF)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "query_groups", "key_groups"])
def packed_kernel(
    dq_ptr, dk_ptr, dv_ptr, q_ptr, k_ptr, query_ptr, key_ptr, cos_ptr, sin_ptr, packed_ptr, partial_ptr,
    batches, length, tiles, query_groups, key_groups,
    stride_dqb, stride_dqt, stride_dqh, stride_dkb, stride_dkt, stride_dkh, stride_dvb, stride_dvt, stride_dvh,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_pb, stride_pt, turns, query_eps, key_eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of a projection [Q | K | V]: a program stays within one GROUP of the query, key or value heads.

    `partial` holds the rows of all query programs, then those of the key programs.
    """
    groups = query_groups + 2 * key_groups
    group, chunk, chunks = tl.program_id(0) % groups, tl.program_id(0) // groups, tl.num_programs(0) // groups
    columns = 2 * HALF * GROUP
    if group < query_groups:
        _turn_back(
            dq_ptr, q_ptr, query_ptr, cos_ptr, sin_ptr, packed_ptr,
            partial_ptr + (chunk * query_groups + group) * 2 * HALF,
            group, chunk, chunks, batches, length, tiles,
            stride_dqb, stride_dqt, stride_dqh, stride_qb, stride_qt, stride_qh, stride_pb, stride_pt, turns, query_eps,
            HALF, LANES, ROWS, GROUP, STAGES,
        )  # fmt: skip
    elif group < query_groups + key_groups:
        group -= query_groups
        _turn_back(
            dk_ptr, k_ptr, key_ptr, cos_ptr, sin_ptr, packed_ptr + query_groups * columns,
            partial_ptr + ((chunks * query_groups) + chunk * key_groups + group) * 2 * HALF,
            group, chunk, chunks, batches, length, tiles,
            stride_dkb, stride_dkt, stride_dkh, stride_kb, stride_kt, stride_kh, stride_pb, stride_pt, turns, key_eps,
            HALF, LANES, ROWS, GROUP, STAGES,
        )  # fmt: skip
    else:
        group -= query_groups + key_groups
        _copy(
            dv_ptr, packed_ptr + (query_groups + key_groups) * columns, group, chunk, chunks, batches, length, tiles,
            stride_dvb, stride_dvt, stride_dvh, stride_pb, stride_pt, HALF, LANES, ROWS, GROUP, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_rows", "second_rows"])
def sum_rows_kernel(
    partial_ptr,
    first_ptr,
    second_ptr,
    first_rows,
    second_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of the sum of the first rows of `partial` or, if there is a second result, of the others."""
    if tl.program_id(1) == 0:
        _sum_rows(partial_ptr, first_ptr, first_rows, WIDTH, ROWS, BLOCK)
    elif second_ptr is not None:
        _sum_rows(partial_ptr + first_rows * WIDTH, second_ptr, second_rows, WIDTH, ROWS, BLOCK)


@triton.jit
def _sum_rows(partial_ptr, out_ptr, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (lane < WIDTH)[None, :]
        b_total += tl.load(partial_ptr + row[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + lane, tl.sum(b_total, 0).to(out_ptr.dtype.element_ty), mask=lane < WIDTH)
