"""Two matrix products with relu(·)² or its slope applied to each tile of the sum:

    a = relu(x W_inᵀ)²            p = (g W_out) ⊙ 2√a

Programs are persistent and loop over tiles; operands and results go through tensor descriptors (TMA), which also mask
the part of a tile past the edge. The result is written in PARTS, so that one is written while the next is computed.

With the kernels of `warp_specialization.py`, relu² in the products gained 27 ms of a step of L (docs/lab/kernels.md,
"Gains of single parts", `residua bench step mgr-l-prenorm --micro-batch 16 --accumulate 4`). These run where Gluon is
missing, and are not measured alone.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles are walked column by column, so that L2 holds their operands."""
    first = tile // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    within = tile % (GROUP * columns)
    return first + within % height, within // height


@triton.jit
def halves(b_z):
    """The left and the right columns of z."""
    return b_z.reshape(b_z.shape[0], 2, b_z.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def write_squares(a_desc, b_z, row, column, PARTS: tl.constexpr):
    """a = relu(z)² at (row, column)."""
    if PARTS == 1:
        b_positive = tl.maximum(b_z, 0.0, tl.PropagateNan.ALL)
        a_desc.store([row, column], (b_positive * b_positive).to(a_desc.dtype))
    else:
        b_left, b_right = halves(b_z)
        write_squares(a_desc, b_left, row, column, PARTS // 2)
        write_squares(a_desc, b_right, row, column + b_z.shape[1] // 2, PARTS // 2)


@triton.jit
def write_slopes(p_desc, a_desc, b_g, row, column, PARTS: tl.constexpr):
    """p = g ⊙ 2√a at (row, column)."""
    if PARTS == 1:
        b_root = tl.sqrt(a_desc.load([row, column]).to(tl.float32))
        p_desc.store([row, column], (b_g * (2 * b_root)).to(p_desc.dtype))
    else:
        b_left, b_right = halves(b_g)
        write_slopes(p_desc, a_desc, b_left, row, column, PARTS // 2)
        write_slopes(p_desc, a_desc, b_right, row, column + b_g.shape[1] // 2, PARTS // 2)


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x_desc, w_desc, a_desc, y_desc, tokens,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """y [M, N] = relu(x wᵀ)² of x [M, K] and w [N, K]; if SLOPES, y = (x w) ⊙ 2√a of w [K, N] and a [M, N]."""
    rows, columns = tl.cdiv(tokens, ROWS), tl.cdiv(N, COLUMNS)
    # counted separately from the loop, so that the next tile's loads can begin before this one is written
    written = tl.program_id(0)
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
        row, column = place(tile, rows, columns, GROUP)
        # z = x wᵀ or x w
        b_z = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, K, DEPTH):
            b_x = x_desc.load([row * ROWS, k])
            if SLOPES:
                b_w = w_desc.load([k, column * COLUMNS])
            else:
                b_w = w_desc.load([column * COLUMNS, k]).T
            b_z = tl.dot(b_x, b_w, b_z, input_precision="ieee")
        row, column = place(written, rows, columns, GROUP)
        if SLOPES:
            write_slopes(y_desc, a_desc, b_z, row * ROWS, column * COLUMNS, PARTS)
        else:
            write_squares(y_desc, b_z, row * ROWS, column * COLUMNS, PARTS)
        written += tl.num_programs(0)
