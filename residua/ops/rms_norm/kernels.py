"""RMSNorm on the GPU, with the additions beside it.

A program has one row at a time, of any width, in TILES tiles of BLOCK channels, all of them on chip.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(x, k: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Tile k of a row, as it is stored."""
    c = k * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x + c, mask=c < C, other=0.0)


@triton.jit
def _put(x, k: tl.constexpr, tile, C: tl.constexpr, BLOCK: tl.constexpr):
    c = k * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + c, tile.to(x.dtype.element_ty), mask=c < C)


@triton.jit
def forward_kernel(
    x, update, weight, added, normed, rstds, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Of x, or of x + update, which is written to `added`."""
    row = tl.program_id(0).to(tl.int64)
    s, square = (), tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TILES):
        new = _tile(x + row * C, k, C, BLOCK).to(tl.float32)
        if ADDED:
            sum = (new + _tile(update + row * C, k, C, BLOCK).to(tl.float32)).to(added.dtype.element_ty)
            _put(added + row * C, k, sum, C, BLOCK)
            new = sum.to(tl.float32)
        s = s + (new,)
        square += new * new
    rstd = tl.rsqrt(tl.sum(square, 0) / C + eps)
    tl.store(rstds + row, rstd)
    for k in tl.static_range(TILES):
        _put(normed + row * C, k, s[k] * rstd * _tile(weight, k, C, BLOCK).to(tl.float32), C, BLOCK)


@triton.jit
def _loaded(x, g, residual, row, tokens, C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
            ADDED: tl.constexpr):  # fmt: skip
    """All that the backward pass reads of a row, as it is stored: loaded a row ahead, in few registers."""
    at = tl.minimum(row, tokens - 1).to(tl.int64) * C
    tiles = ()
    for k in tl.static_range(TILES):
        tiles = tiles + (_tile(x + at, k, C, BLOCK), _tile(g + at, k, C, BLOCK))
        if ADDED:
            tiles = tiles + (_tile(residual + at, k, C, BLOCK),)
    return tiles


@triton.jit
def backward_kernel(
    g, residual, x, weight, rstds, g_x, dots, partial, tokens,
    C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ADDED: tl.constexpr, DOTTED: tl.constexpr,
):  # fmt: skip
    """Every P-th row, P the number of programs. With n = x·rstd and g the gradient of the norm:

    g_x = rstd (weight ⊙ g − n · mean(weight ⊙ g ⊙ n)) + residual,   g_weight = Σ g ⊙ n

    The sum over tokens stays in registers until the end, when each program writes its own row of `partial`. `dots` are
    x·g_x with g_x as it is stored.
    """
    EACH: tl.constexpr = 3 if ADDED else 2
    program = tl.program_id(0)
    g_w, gain = (), ()
    for k in tl.static_range(TILES):
        g_w, gain = g_w + (tl.zeros([BLOCK], tl.float32),), gain + (_tile(weight, k, C, BLOCK).to(tl.float32),)
    tiles = _loaded(x, g, residual, program, tokens, C, BLOCK, TILES, ADDED)
    for row in range(program, tokens, tl.num_programs(0)):
        coming = _loaded(x, g, residual, row + tl.num_programs(0), tokens, C, BLOCK, TILES, ADDED)
        rstd = tl.load(rstds + row)
        through, new_w = tl.zeros([BLOCK], tl.float32), ()
        for k in tl.static_range(TILES):
            product = tiles[EACH * k].to(tl.float32) * tiles[EACH * k + 1].to(tl.float32)
            new_w = new_w + (g_w[k] + product * rstd,)
            through += product * gain[k]
        g_w = new_w
        pull = tl.sum(through, 0) / C * rstd * rstd * rstd
        dot = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(TILES):
            d = rstd * tiles[EACH * k + 1].to(tl.float32) * gain[k] - pull * tiles[EACH * k].to(tl.float32)
            if ADDED:
                d += tiles[EACH * k + 2].to(tl.float32)
            _put(g_x + tl.cast(row, tl.int64) * C, k, d, C, BLOCK)
            if DOTTED:
                dot += d.to(g_x.dtype.element_ty).to(tl.float32) * tiles[EACH * k].to(tl.float32)
        if DOTTED:
            tl.store(dots + row, tl.sum(dot, 0))
        tiles = coming
    for k in tl.static_range(TILES):
        _put(partial + program * C, k, g_w[k], C, BLOCK)
