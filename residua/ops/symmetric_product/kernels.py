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
def _rows(x, b, row, k, ROWS: tl.constexpr, DEPTH: tl.constexpr, TURNED: tl.constexpr):
    """X[b, row:row+ROWS, k:k+DEPTH]; `TURNED` if memory holds Xᵀ."""
    if TURNED:
        return x.load([b, k, row]).reshape(DEPTH, ROWS).T
    return x.load([b, row, k]).reshape(ROWS, DEPTH)


@triton.jit
def _write(s, c, product, b, i, j, alpha, beta, gamma, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Tile (i, j) and its mirror image (j, i)."""
    value = product * alpha
    if ADDED:
        value += beta * c.load([b, i * BLOCK, j * BLOCK]).reshape(BLOCK, BLOCK).to(tl.float32)
    row, column = i * BLOCK + tl.arange(0, BLOCK)[:, None], j * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.where(row == column, value + gamma, value).to(s.dtype)
    value = tl.where(row >= column, value, value.T)
    s.store([b, i * BLOCK, j * BLOCK], value.reshape(1, BLOCK, BLOCK))
    s.store([b, j * BLOCK, i * BLOCK], value.T.reshape(1, BLOCK, BLOCK))


@triton.jit(do_not_specialize=["tiles", "triangle", "alpha", "beta", "gamma"])
def product_kernel(
    x, c, s, tiles, triangle, depth, alpha, beta, gamma,
    TURNED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Every program walks over its share of the `tiles`, `triangle` of them to a matrix."""
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT):
        b = t // triangle
        i, j = _triangle(t % triangle)
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, depth, DEPTH):
            left = _rows(x, b, i * BLOCK, k, BLOCK, DEPTH, TURNED)
            right = _rows(x, b, j * BLOCK, k, BLOCK, DEPTH, TURNED)
            product = tl.dot(left, right.T, product, input_precision="ieee")
        _write(s, c, product, b, i, j, alpha, beta, gamma, ADDED, BLOCK)
