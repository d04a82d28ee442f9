"""Addition and RMSNorm on the GPU: ROWS rows of any width in TILES tiles of BLOCK channels, all of them on chip."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    h, y, weight, added, normed, rstds, tokens, eps,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < tokens)[:, None]
    s, square = (), tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(TILES):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        at, mask = row[:, None] * C + c, inside & (c < C)
        new = (_tile(h, at, mask) + _tile(y, at, mask)).to(added.dtype.element_ty)
        tl.store(added + at, new, mask=mask)
        s = s + (new.to(tl.float32),)
        square += s[k] * s[k]
    rstd = tl.rsqrt(tl.sum(square, 1) / C + eps)
    tl.store(rstds + row, rstd, mask=row < tokens)
    for k in tl.static_range(TILES):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = s[k] * rstd[:, None] * _tile(weight, c, c < C)
        tl.store(normed + row[:, None] * C + c, x.to(normed.dtype.element_ty), mask=inside & (c < C))


@triton.jit
def backward_kernel(
    g_normed, g_added, added, weight, rstds, g_h, partial, tokens,
    C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """Every P-th group of rows, P the number of programs. With n = s·rstd and g the gradient of x:

    g_s = rstd (weight ⊙ g − n · mean(weight ⊙ g ⊙ n)) + the gradient that s itself was given;  g_weight = Σ g ⊙ n

    The sum over tokens stays per row until the end, when each program writes its own row of `partial`.
    """
    program = tl.program_id(0)
    g_w = ()
    for _ in tl.static_range(TILES):
        g_w = g_w + (tl.zeros([ROWS, BLOCK], tl.float32),)
    for group in range(program, tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = tl.cast(group, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None]
        rstd = tl.load(rstds + row, mask=row < tokens, other=0.0)[:, None]
        n, g, through, new_w = (), (), tl.zeros([ROWS, BLOCK], tl.float32), ()
        for k in tl.static_range(TILES):
            c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
            at, mask = row[:, None] * C + c, inside & (c < C)
            n, d = n + (_tile(added, at, mask) * rstd,), _tile(g_normed, at, mask)
            new_w = new_w + (g_w[k] + d * n[k],)
            g = g + (d * _tile(weight, c, c < C),)
            through += g[k] * n[k]
        g_w = new_w
        mean = (tl.sum(through, 1) / C)[:, None]
        for k in tl.static_range(TILES):
            c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
            at, mask = row[:, None] * C + c, inside & (c < C)
            d = rstd * (g[k] - n[k] * mean)
            if HAS_ADDED:
                d += _tile(g_added, at, mask)
            tl.store(g_h + at, d.to(g_h.dtype.element_ty), mask=mask)
    for k in tl.static_range(TILES):
        c = k * BLOCK + tl.arange(0, BLOCK)
        tl.store(partial + program * C + c, tl.sum(g_w[k], 0), mask=c < C)
