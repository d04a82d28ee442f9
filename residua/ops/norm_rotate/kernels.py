"""QK-norm and rotation on the GPU: tiles of ROWS tokens of a sequence, GROUP heads with one look at the table.

    n = x·rstd,  y = rotate(w ⊙ n);   dz = dy turned back,  dw = Σ dz ⊙ n,  dx = rstd (w ⊙ dz − n mean(w ⊙ dz ⊙ n))

A head is held as its two halves, which the rotation pairs. A tile lies within one sequence, and where it begins is
worked out once for all of its rows: divisions for every row took longer than the memory traffic.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(pointer, batch, start, sb, st, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Where the first half of head 0 lies, for ROWS tokens of a sequence from `start` on."""
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    return pointer + (tl.cast(batch, tl.int64) * sb + tl.cast(start, tl.int64) * st) + (row * st + lane)


@triton.jit
def _load(at, mask, HALF: tl.constexpr):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(at, x1, x2, mask, HALF: tl.constexpr):
    tl.store(at, x1.to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, x2.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _gain(weight, HALF: tl.constexpr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)[None, :]
    return _load(weight + lane, lane < HALF, HALF)


@triton.jit
def _mean(x1, x2, HALF: tl.constexpr):
    return (tl.sum(x1 + x2, 1) / (2 * HALF))[:, None]


@triton.jit(do_not_specialize=["length", "tiles", "groups"])
def forward_kernel(
    x, weight, cos, sin, y, length, tiles, groups, sb, st, sh, yb, yt, turns, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`turns` is how far the table of the next sequence is, 0 if all share one."""
    block = tl.program_id(0) // groups
    first = tl.program_id(0) % groups * GROUP
    batch, start = block // tiles, block % tiles * ROWS
    mask = (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, LANES) < HALF)[None, :]
    source = _tile(x, batch, start, sb, st, LANES, ROWS) + first * sh
    target = _tile(y, batch, start, yb, yt, LANES, ROWS) + first * (2 * HALF)
    a1, a2 = _load(source, mask, HALF)
    c = tl.load(_tile(cos, batch, start, turns, HALF, LANES, ROWS), mask=mask, other=0.0)
    s = tl.load(_tile(sin, batch, start, turns, HALF, LANES, ROWS), mask=mask, other=0.0)
    w1, w2 = _gain(weight, HALF, LANES)
    for head in tl.static_range(GROUP):
        x1, x2 = a1, a2
        if head + 1 < GROUP:  # on its way while this head is worked on
            a1, a2 = _load(source + (head + 1) * sh, mask, HALF)
        rstd = tl.rsqrt(_mean(x1 * x1, x2 * x2, HALF) + eps)
        n1, n2 = x1 * rstd * w1, x2 * rstd * w2
        _store(target + head * (2 * HALF), n1 * c - n2 * s, n2 * c + n1 * s, mask, HALF)


@triton.jit
def _turn_back(
    dy, x, weight, cos, sin, dx, partial, group, chunk, chunks, batches, length, tiles,
    gb, gt, gh, sb, st, sh, db, dt, turns, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP heads of every `chunks`-th tile; their part of dw goes to `partial` [D].

    It is summed over rows only at the end: a reduction across warps in every turn would cost more than the traffic.
    """
    lane = tl.arange(0, LANES)
    first = group * GROUP
    w1, w2 = _gain(weight, HALF, LANES)
    dw1 = tl.zeros([ROWS, LANES], tl.float32)
    dw2 = tl.zeros([ROWS, LANES], tl.float32)
    for block in tl.range(chunk, batches * tiles, chunks, num_stages=STAGES):
        batch, start = block // tiles, block % tiles * ROWS
        mask = (start + tl.arange(0, ROWS) < length)[:, None] & (lane < HALF)[None, :]
        c = tl.load(_tile(cos, batch, start, turns, HALF, LANES, ROWS), mask=mask, other=0.0)
        s = tl.load(_tile(sin, batch, start, turns, HALF, LANES, ROWS), mask=mask, other=0.0)
        source = _tile(x, batch, start, sb, st, LANES, ROWS) + first * sh
        given = _tile(dy, batch, start, gb, gt, LANES, ROWS) + first * gh
        target = _tile(dx, batch, start, db, dt, LANES, ROWS) + first * (2 * HALF)
        for head in tl.static_range(GROUP):
            x1, x2 = _load(source + head * sh, mask, HALF)
            g1, g2 = _load(given + head * gh, mask, HALF)
            rstd = tl.rsqrt(_mean(x1 * x1, x2 * x2, HALF) + eps)
            n1, n2 = x1 * rstd, x2 * rstd
            z1, z2 = g1 * c + g2 * s, g2 * c - g1 * s
            dw1 += z1 * n1
            dw2 += z2 * n2
            z1, z2 = z1 * w1, z2 * w2
            mean = _mean(z1 * n1, z2 * n2, HALF)
            _store(target + head * (2 * HALF), rstd * (z1 - n1 * mean), rstd * (z2 - n2 * mean), mask, HALF)
    tl.store(partial + lane, tl.sum(dw1, 0), mask=lane < HALF)
    tl.store(partial + HALF + lane, tl.sum(dw2, 0), mask=lane < HALF)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "groups"])
def backward_kernel(
    dy, x, weight, cos, sin, dx, partial, batches, length, tiles, groups,
    gb, gt, gh, sb, st, sh, db, dt, turns, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    _turn_back(
        dy, x, weight, cos, sin, dx, partial + program * 2 * HALF,
        program % groups, program // groups, tl.num_programs(0) // groups, batches, length, tiles,
        gb, gt, gh, sb, st, sh, db, dt, turns, eps, HALF, LANES, ROWS, GROUP, STAGES,
    )  # fmt: skip


@triton.jit
def _copy(
    source, target, group, chunk, chunks, batches, length, tiles, gb, gt, gh, db, dt,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP heads of every `chunks`-th tile as they are."""
    for block in tl.range(chunk, batches * tiles, chunks, num_stages=STAGES):
        batch, start = block // tiles, block % tiles * ROWS
        mask = (start + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, LANES) < HALF)[None, :]
        at = _tile(source, batch, start, gb, gt, LANES, ROWS) + group * GROUP * gh
        to = _tile(target, batch, start, db, dt, LANES, ROWS) + group * GROUP * (2 * HALF)
        for head in tl.static_range(GROUP):
            v1 = tl.load(at + head * gh, mask=mask, other=0.0)
            v2 = tl.load(at + head * gh + HALF, mask=mask, other=0.0)
            _store(to + head * (2 * HALF), v1, v2, mask, HALF)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "query_groups", "key_groups"])
def packed_kernel(
    dq, dk, dv, q, k, query, key, cos, sin, packed, partial, batches, length, tiles, query_groups, key_groups,
    dqb, dqt, dqh, dkb, dkt, dkh, dvb, dvt, dvh, qb, qt, qh, kb, kt, kh, db, dt, turns, query_eps, key_eps,
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
            dq, q, query, cos, sin, packed, partial + (chunk * query_groups + group) * 2 * HALF,
            group, chunk, chunks, batches, length, tiles,
            dqb, dqt, dqh, qb, qt, qh, db, dt, turns, query_eps, HALF, LANES, ROWS, GROUP, STAGES,
        )  # fmt: skip
    elif group < query_groups + key_groups:
        group -= query_groups
        _turn_back(
            dk, k, key, cos, sin, packed + query_groups * columns,
            partial + ((chunks * query_groups) + chunk * key_groups + group) * 2 * HALF,
            group, chunk, chunks, batches, length, tiles,
            dkb, dkt, dkh, kb, kt, kh, db, dt, turns, key_eps, HALF, LANES, ROWS, GROUP, STAGES,
        )  # fmt: skip
    else:
        group -= query_groups + key_groups
        _copy(
            dv, packed + (query_groups + key_groups) * columns, group, chunk, chunks, batches, length, tiles,
            dvb, dvt, dvh, db, dt, HALF, LANES, ROWS, GROUP, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_rows", "second_rows"])
def sum_rows_kernel(
    partial, first, second, first_rows, second_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK columns of the sum of the first rows of `partial` or, if there is a second result, of the others."""
    if tl.program_id(1) == 0:
        _sum_rows(partial, first, first_rows, WIDTH, ROWS, BLOCK)
    elif second is not None:
        _sum_rows(partial + first_rows * WIDTH, second, second_rows, WIDTH, ROWS, BLOCK)


@triton.jit
def _sum_rows(partial, out, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (lane < WIDTH)[None, :]
        total += tl.load(partial + row[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
    tl.store(out + lane, tl.sum(total, 0).to(out.dtype.element_ty), mask=lane < WIDTH)
