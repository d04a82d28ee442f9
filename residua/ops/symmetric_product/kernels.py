"""The symmetric product S = αXXᵀ + βC + γI: only the tiles on and below the diagonal are computed.

A tile below the diagonal is also written transposed at its mirror image, so S is exactly symmetric.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _triangle(t):
    """Tile t of those on and below the diagonal, row by row: its row i, of i + 1 tiles, and its column.

    The square root is of a whole number below 2²⁴ and rounded to the nearest, which makes its floor exact.
    """
    i = ((tl.sqrt_rn((8 * t + 1).to(tl.float32)) - 1) * 0.5).to(tl.int32)
    return i, t - i * (i + 1) // 2


@triton.jit
def _rows(x_desc, b, row, k, ROWS: tl.constexpr, DEPTH: tl.constexpr, TURNED: tl.constexpr):
    """X[b, row:row+ROWS, k:k+DEPTH]; `TURNED` if memory holds Xᵀ."""
    if TURNED:
        return x_desc.load([b, k, row]).reshape(DEPTH, ROWS).T
    return x_desc.load([b, row, k]).reshape(ROWS, DEPTH)


@triton.jit
def _write(s_desc, c_desc, b_product, b, i, j, alpha, beta, gamma, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Tile (i, j) and its mirror image (j, i)."""
    # S = αXXᵀ + βC + γI
    b_s = b_product * alpha
    if ADDED:
        b_s += beta * c_desc.load([b, i * BLOCK, j * BLOCK]).reshape(BLOCK, BLOCK).to(tl.float32)
    row, column = i * BLOCK + tl.arange(0, BLOCK)[:, None], j * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_s = tl.where(row == column, b_s + gamma, b_s).to(s_desc.dtype)
    b_s = tl.where(row >= column, b_s, b_s.T)
    # the tile, and its mirror image
    s_desc.store([b, i * BLOCK, j * BLOCK], b_s.reshape(1, BLOCK, BLOCK))
    s_desc.store([b, j * BLOCK, i * BLOCK], b_s.T.reshape(1, BLOCK, BLOCK))


@triton.jit(do_not_specialize=["tiles", "triangle", "alpha", "beta", "gamma"])
def product_kernel(
    x_desc, c_desc, s_desc, tiles, triangle, depth, alpha, beta, gamma,
    TURNED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Every program walks over its share of the `tiles`, `triangle` of them to a matrix."""
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT):
        b = t // triangle
        i, j = _triangle(t % triangle)
        # XXᵀ of tile (i, j), DEPTH columns of X at a time
        b_product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, depth, DEPTH):
            b_left = _rows(x_desc, b, i * BLOCK, k, BLOCK, DEPTH, TURNED)
            b_right = _rows(x_desc, b, j * BLOCK, k, BLOCK, DEPTH, TURNED)
            b_product = tl.dot(b_left, b_right.T, b_product, input_precision="ieee")
        _write(s_desc, c_desc, b_product, b, i, j, alpha, beta, gamma, ADDED, BLOCK)
