"""RMSNorm on the GPU, with the additions before it and after its gradient, and with PreAffine's scaling of its input.

A program holds one row of any width at a time, as TILES tiles of BLOCK channels, all in registers.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(row_ptr, k: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Tile k of a row [BLOCK], in the dtype it is stored in."""
    c = k * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row_ptr + c, mask=c < C, other=0.0)


@triton.jit
def _put(row_ptr, k: tl.constexpr, b_tile, C: tl.constexpr, BLOCK: tl.constexpr):
    c = k * BLOCK + tl.arange(0, BLOCK)
    tl.store(row_ptr + c, b_tile.to(row_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def forward_kernel(
    x_ptr, update_ptr, weight_ptr, affine_ptr, added_ptr, normed_ptr, rstd_ptr, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The norm of x, or of x + update, which is written to `added`; if SCALED, of affine ⊙ that."""
    row = tl.program_id(0).to(tl.int64)
    b_s, b_square = (), tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TILES):
        # s = x, or x + update rounded as it is stored, times affine
        b_new = _tile(x_ptr + row * C, k, C, BLOCK).to(tl.float32)
        if ADDED:
            b_sum = (b_new + _tile(update_ptr + row * C, k, C, BLOCK).to(tl.float32)).to(added_ptr.dtype.element_ty)
            _put(added_ptr + row * C, k, b_sum, C, BLOCK)
            b_new = b_sum.to(tl.float32)
        if SCALED:
            b_new = b_new * _tile(affine_ptr, k, C, BLOCK).to(tl.float32)
        b_s = b_s + (b_new,)
        b_square += b_new * b_new
    # rstd = (mean(s²) + eps)^-½, and weight ⊙ s · rstd
    rstd = tl.rsqrt(tl.sum(b_square, 0) / C + eps)
    tl.store(rstd_ptr + row, rstd)
    for k in tl.static_range(TILES):
        _put(normed_ptr + row * C, k, b_s[k] * rstd * _tile(weight_ptr, k, C, BLOCK).to(tl.float32), C, BLOCK)


@triton.jit
def _loaded(x_ptr, g_ptr, residual_ptr, row, tokens, C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
            ADDED: tl.constexpr):  # fmt: skip
    """All that the backward pass reads of a row, in the dtype it is stored in: a row ahead takes few registers so."""
    at = tl.minimum(row, tokens - 1).to(tl.int64) * C
    b_tiles = ()
    for k in tl.static_range(TILES):
        b_tiles = b_tiles + (_tile(x_ptr + at, k, C, BLOCK), _tile(g_ptr + at, k, C, BLOCK))
        if ADDED:
            b_tiles = b_tiles + (_tile(residual_ptr + at, k, C, BLOCK),)
    return b_tiles


@triton.jit
def backward_kernel(
    g_ptr, residual_ptr, x_ptr, weight_ptr, affine_ptr, rstd_ptr, g_x_ptr, dots_ptr, partial_ptr, tokens,
    C: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ADDED: tl.constexpr, DOTTED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Every P-th row, P the number of programs. With n = x·rstd and g the gradient of the norm:

    g_x = rstd (weight ⊙ g − n · mean(weight ⊙ g ⊙ n)) + residual,   g_weight = Σ g ⊙ n

    If SCALED, with s = affine ⊙ x, n = s·rstd and g_s as g_x above without the residual:

    g_x = affine ⊙ g_s + residual,   g_affine = Σ g_s ⊙ x

    The sums over tokens stay in registers until the end, when each program writes its own row of `partial` [P, C], or
    [2, P, C] with those of affine. `dots` are x·g_x with g_x as it is stored.
    """
    EACH: tl.constexpr = 3 if ADDED else 2
    program = tl.program_id(0)
    b_g_w, b_w = (), ()
    b_g_a, b_a = (), ()
    for k in tl.static_range(TILES):
        b_g_w, b_w = b_g_w + (tl.zeros([BLOCK], tl.float32),), b_w + (_tile(weight_ptr, k, C, BLOCK).to(tl.float32),)
        if SCALED:
            b_g_a = b_g_a + (tl.zeros([BLOCK], tl.float32),)
            b_a = b_a + (_tile(affine_ptr, k, C, BLOCK).to(tl.float32),)
    b_tiles = _loaded(x_ptr, g_ptr, residual_ptr, program, tokens, C, BLOCK, TILES, ADDED)
    for row in range(program, tokens, tl.num_programs(0)):
        # load the next row while this one is worked on
        b_next = _loaded(x_ptr, g_ptr, residual_ptr, row + tl.num_programs(0), tokens, C, BLOCK, TILES, ADDED)
        rstd = tl.load(rstd_ptr + row)
        b_through, b_new_w = tl.zeros([BLOCK], tl.float32), ()
        for k in tl.static_range(TILES):
            # g_weight += g ⊙ n, and Σ weight ⊙ g ⊙ s; if SCALED, n without affine
            b_product = b_tiles[EACH * k].to(tl.float32) * b_tiles[EACH * k + 1].to(tl.float32)  # [BLOCK]
            b_new_w = b_new_w + (b_g_w[k] + b_product * rstd,)
            if SCALED:
                b_product = b_product * b_a[k]
            b_through += b_product * b_w[k]
        b_g_w = b_new_w
        pull = tl.sum(b_through, 0) / C * rstd * rstd * rstd
        b_dot, b_new_a = tl.zeros([BLOCK], tl.float32), ()
        for k in tl.static_range(TILES):
            # g_s = rstd · weight ⊙ g − pull · s, which is g_x or, if SCALED, times affine
            b_s = b_tiles[EACH * k].to(tl.float32)
            if SCALED:
                b_s = b_s * b_a[k]
            b_g_x = rstd * b_tiles[EACH * k + 1].to(tl.float32) * b_w[k] - pull * b_s
            if SCALED:
                b_new_a = b_new_a + (b_g_a[k] + b_tiles[EACH * k].to(tl.float32) * b_g_x,)
                b_g_x = b_g_x * b_a[k]
            if ADDED:
                b_g_x += b_tiles[EACH * k + 2].to(tl.float32)
            _put(g_x_ptr + tl.cast(row, tl.int64) * C, k, b_g_x, C, BLOCK)
            if DOTTED:
                b_dot += b_g_x.to(g_x_ptr.dtype.element_ty).to(tl.float32) * b_tiles[EACH * k].to(tl.float32)
        if DOTTED:
            tl.store(dots_ptr + row, tl.sum(b_dot, 0))
        if SCALED:
            b_g_a = b_new_a
        b_tiles = b_next
    for k in tl.static_range(TILES):
        if SCALED:
            _put(partial_ptr + program * C, k, b_g_w[k] * b_a[k], C, BLOCK)
            _put(partial_ptr + (tl.num_programs(0) + program) * C, k, b_g_a[k], C, BLOCK)
        else:
            _put(partial_ptr + program * C, k, b_g_w[k], C, BLOCK)
