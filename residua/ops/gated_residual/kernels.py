"""Gated Residual on the GPU. With r_i = 1/rms(X'_i), w = g/n, and rows of `matrices` M = W_down and W_inj times w:

    X'_i = X_i + inj_i y,   p_i = r_i M_i X'_i,   [u, v] = Σ_i p_i,   t = silu(u),   inj' = 2σ(v)
    s_i = σ(U_i t),   h = Σ_i s_i w_i r_i X'_i

`project_kernel` loops over channels, writes X' and computes p, r, t and inj' of every row. `gate_kernel` keeps a block
of channels, loops over tokens and computes scores s on chip. Backward, with G, F and J the gradients of h, X' and inj':

    e_i = G w_i r_i X'_i s_i(1 − s_i),   d = [silu'(u) · Σ_i U_iᵀe_i,  J inj'(1 − inj'/2)],   a_i = G w_i s_i + M_iᵀd
    m_i = r_i³/C · X'_i·a_i,   dX_i = r_i a_i − m_i X'_i + F_i,   dy = Σ_i inj_i dX_i,   dinj_i = y·dX_i
    dw = Σ G s r X',   dM = Σ d (r X')ᵀ,   dU = Σ e tᵀ

`reduce_kernel` computes d and m of every token with the scores computed again; the part of m that comes through M is
r_i²/C · d·p_i, so one sweep gives both. `spread_kernel` keeps a block of a stream's channels and loops over tokens,
with the sums over tokens in registers. `write_backward_kernel` finds dy and dinj.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from residua.ops.gated_norm.kernels import NEGATIVE_LOG2_E, mask_of, squash, tile_of, vector_of


@triton.jit
def keep_tile(x_ptr, t, c, live, b_x, C: tl.constexpr, BLOCK: tl.constexpr):
    """Store what `tile_of` loads. In rows of several streams, C numbers each, a token is N rows: t·N."""
    tl.store(x_ptr + t[:, None] * C + c[None, :], b_x.to(x_ptr.dtype.element_ty), mask=mask_of(live, c, C, BLOCK))


@triton.jit
def matrix_of(matrices_ptr, first: tl.constexpr, ROWS: tl.constexpr, i, c, C: tl.constexpr, N: tl.constexpr):
    """Rows first, … of `matrices` [2·RANK + FACTORS, N, C] in stream i, [ROWS, BLOCK]."""
    rows = first + tl.arange(0, ROWS)
    return tl.load(matrices_ptr + (rows[:, None] * N + i) * C + c[None, :], mask=(c < C)[None, :], other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def project_kernel(
    x_ptr, injection_ptr, y_ptr, matrices_ptr, after_ptr, factors_ptr, parts_ptr, rstd_ptr, t_ptr, tokens, eps,
    C: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, FACTORS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """X', p, r, t and inj' of TOKENS rows."""
    start, t = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    live = t < tokens - start
    b_u, b_v = tl.zeros([TOKENS, RANK], tl.float32), tl.zeros([TOKENS, FACTORS], tl.float32)
    width: tl.constexpr = RANK + FACTORS
    r, j = tl.arange(0, RANK), tl.arange(0, FACTORS)
    parts_ptr += start * N * width
    for i in range(N):
        at = (start * N + i) * C
        b_factor = tl.load(injection_ptr + (start + t) * N + i, mask=live, other=0.0)[:, None]
        b_square = tl.zeros([TOKENS, BLOCK], tl.float32)
        b_p, b_q = tl.zeros([TOKENS, RANK], tl.float32), tl.zeros([TOKENS, FACTORS], tl.float32)
        for first in tl.range(0, C, BLOCK, num_stages=STAGES):
            c = first + tl.arange(0, BLOCK)
            # X' = X + inj·y, rounded as it is stored
            b_x = tile_of(x_ptr + at, t * N, c, live, C, BLOCK).to(tl.float32)  # [TOKENS, BLOCK]
            b_x += b_factor * tile_of(y_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32)
            b_x = b_x.to(after_ptr.dtype.element_ty)
            keep_tile(after_ptr + at, t * N, c, live, b_x, C, BLOCK)
            # Σ X'², M X'
            b_square += b_x.to(tl.float32) * b_x.to(tl.float32)
            b_down = matrix_of(matrices_ptr, 0, RANK, i, c, C, N)
            b_inject = matrix_of(matrices_ptr, RANK, FACTORS, i, c, C, N)
            b_p = tl.dot(b_x, tl.trans(b_down), b_p, input_precision="ieee")
            b_q = tl.dot(b_x, tl.trans(b_inject), b_q, input_precision="ieee")
        # r and p of the stream
        b_rstd = tl.rsqrt(tl.sum(b_square, 1) / C + eps)  # [TOKENS]
        tl.store(rstd_ptr + (start + t) * N + i, b_rstd, mask=live)
        b_p, b_q = b_p * b_rstd[:, None], b_q * b_rstd[:, None]
        keep_tile(parts_ptr + i * width, t * N, r, live, b_p, width, RANK)
        keep_tile(parts_ptr + i * width, t * N, RANK + j, live, b_q, width, FACTORS)
        b_u, b_v = b_u + b_p, b_v + b_q
    # t = silu(u), inj' = 2σ(v)
    keep_tile(t_ptr + start * RANK, t, r, live, b_u * squash(b_u * NEGATIVE_LOG2_E, FAST), RANK, RANK)
    keep_tile(factors_ptr + start * N, t, j, live, 2 * squash(b_v * NEGATIVE_LOG2_E, FAST), N, FACTORS)


@triton.jit(do_not_specialize=["tokens"])
def gate_kernel(
    after_ptr, weight_ptr, matrices_ptr, rstd_ptr, t_ptr, h_ptr, tokens,
    C: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, FACTORS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h in BLOCK channels of every P-th tile of rows, last first: `project_kernel` has left the last ones in L2."""
    c, t, r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS), tl.arange(0, RANK)
    tiles = tl.cdiv(tokens, TOKENS)
    for before in range(tl.program_id(1), tiles, tl.num_programs(1)):
        start = (tiles - 1 - before).to(tl.int64) * TOKENS
        live = t < tokens - start
        b_t = tile_of(t_ptr + start * RANK, t, r, live, RANK, RANK)  # [TOKENS, RANK]
        b_h = tl.zeros([TOKENS, BLOCK], tl.float32)
        for i in tl.range(0, N, num_stages=STAGES):
            # s = σ(U t), h += s·w·r·X'
            b_up = matrix_of(matrices_ptr, RANK + FACTORS, RANK, i, c, C, N)
            b_s = squash(tl.dot(b_t, b_up, input_precision="ieee") * NEGATIVE_LOG2_E, FAST)  # [TOKENS, BLOCK]
            b_rstd = tl.load(rstd_ptr + (start + t) * N + i, mask=live, other=0.0)
            b_x = tile_of(after_ptr + (start * N + i) * C, t * N, c, live, C, BLOCK).to(tl.float32)
            b_h += b_x * b_rstd[:, None] * (b_s * vector_of(weight_ptr + i * C, c, C)[None, :])
        keep_tile(h_ptr + start * C, t, c, live, b_h, C, BLOCK)


@triton.jit(do_not_specialize=["tokens"])
def reduce_kernel(
    g_ptr, g_factors_ptr, after_ptr, weight_ptr, matrices_ptr, factors_ptr, parts_ptr, rstd_ptr, t_ptr, d_ptr, m_ptr,
    tokens,
    C: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, FACTORS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """TOKENS rows: t [M, RANK], d [M, RANK + FACTORS] and m [M, N]."""
    dtype: tl.constexpr = after_ptr.dtype.element_ty
    start, t = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    live = t < tokens - start
    r, j = tl.arange(0, RANK), tl.arange(0, FACTORS)
    width: tl.constexpr = RANK + FACTORS
    parts_ptr += start * N * width
    b_u = tl.zeros([TOKENS, RANK], tl.float32)
    for i in range(N):
        b_u += tile_of(parts_ptr + i * width, t * N, r, live, width, RANK)
    # t = silu(u) = u·σ(u)
    b_sigma = squash(b_u * NEGATIVE_LOG2_E, FAST)
    b_t = (b_u * b_sigma).to(dtype)
    keep_tile(t_ptr + start * RANK, t, r, live, b_t, RANK, RANK)

    b_through, b_g_t = tl.zeros([TOKENS, FACTORS], tl.float32), tl.zeros([TOKENS, RANK], tl.float32)
    # the streams of a block of channels after one another: G comes from the cache
    for step in tl.range(0, tl.cdiv(C, BLOCK) * N, num_stages=STAGES):
        i, c = step % N, step // N * BLOCK + tl.arange(0, BLOCK)
        b_up = matrix_of(matrices_ptr, width, RANK, i, c, C, N)  # [RANK, BLOCK]
        b_rstd = tl.load(rstd_ptr + (start + t) * N + i, mask=live, other=0.0)[:, None]
        b_z = tile_of(after_ptr + (start * N + i) * C, t * N, c, live, C, BLOCK).to(tl.float32)  # [TOKENS, BLOCK]
        b_z *= tile_of(g_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32)
        # z = G·w·r·X'·s, whose sum is r times m's part without the gate
        b_s = squash(tl.dot(b_t, b_up, input_precision="ieee") * NEGATIVE_LOG2_E, FAST)
        b_z *= b_s * vector_of(weight_ptr + i * C, c, C)[None, :] * b_rstd
        b_through += tl.where(j[None, :] == i, tl.sum(b_z, 1)[:, None], 0.0)
        # Σ Uᵀe, e = z(1 − s)
        b_g_t = tl.dot((b_z - b_z * b_s).to(dtype), tl.trans(b_up), b_g_t, input_precision="ieee")
    # d = [silu'(u)·Σ, J·inj'(1 − inj'/2)]
    b_d = b_g_t * (b_sigma + b_u * b_sigma * (1 - b_sigma))
    b_f = tile_of(factors_ptr + start * N, t, j, live, N, FACTORS)
    b_d_f = tile_of(g_factors_ptr + start * N, t, j, live, N, FACTORS) * b_f * (1 - b_f / 2)
    keep_tile(d_ptr + start * width, t, r, live, b_d, width, RANK)
    keep_tile(d_ptr + start * width, t, RANK + j, live, b_d_f, width, FACTORS)
    # m = r²/C · (Σ z + d·p)
    for i in range(N):
        b_p = tile_of(parts_ptr + i * width, t * N, r, live, width, RANK).to(tl.float32)
        b_q = tile_of(parts_ptr + i * width, t * N, RANK + j, live, width, FACTORS).to(tl.float32)
        b_sum = tl.sum(b_d * b_p, 1) + tl.sum(b_d_f * b_q, 1) + tl.sum(tl.where(j[None, :] == i, b_through, 0.0), 1)
        b_rstd = tl.load(rstd_ptr + (start + t) * N + i, mask=live, other=0.0)
        tl.store(m_ptr + (start + t) * N + i, b_rstd * b_rstd * b_sum / C, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def spread_kernel(
    g_ptr, g_after_ptr, after_ptr, weight_ptr, matrices_ptr, rstd_ptr, t_ptr, d_ptr, m_ptr, g_x_ptr, partial_ptr,
    tokens,
    C: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, FACTORS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of stream i in every P-th tile of rows: dX, and this program's part of the sums over tokens.

    A part [1 + 2·RANK + FACTORS, N, C] has dw, then the rows of d`matrices`.
    """
    dtype: tl.constexpr = after_ptr.dtype.element_ty
    width: tl.constexpr = RANK + FACTORS
    i, c = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t, r, j = tl.arange(0, TOKENS), tl.arange(0, RANK), tl.arange(0, FACTORS)
    b_w = vector_of(weight_ptr + i * C, c, C)
    b_up = matrix_of(matrices_ptr, width, RANK, i, c, C, N)
    b_down, b_inject = matrix_of(matrices_ptr, 0, RANK, i, c, C, N), matrix_of(matrices_ptr, RANK, FACTORS, i, c, C, N)
    b_to_weight = tl.zeros([TOKENS, BLOCK], tl.float32)
    # transposed: asynchronous products, which Triton makes of 64 rows or more, may read a tile that is overwritten
    b_to_down, b_to_up = tl.zeros([BLOCK, RANK], tl.float32), tl.zeros([BLOCK, RANK], tl.float32)
    b_to_inject = tl.zeros([BLOCK, FACTORS], tl.float32)
    tiles = tl.cdiv(tokens, TOKENS)
    for before in tl.range(tl.program_id(2), tiles, tl.num_programs(2), num_stages=STAGES):
        start = (tiles - 1 - before).to(tl.int64) * TOKENS  # `reduce_kernel` has left the last ones in L2
        live = t < tokens - start
        b_t = tile_of(t_ptr + start * RANK, t, r, live, RANK, RANK)  # [TOKENS, RANK]
        b_d = tile_of(d_ptr + start * width, t, r, live, width, RANK)
        b_d_f = tile_of(d_ptr + start * width, t, RANK + j, live, width, FACTORS)
        b_rstd = tl.load(rstd_ptr + (start + t) * N + i, mask=live, other=0.0)[:, None]
        b_m = tl.load(m_ptr + (start + t) * N + i, mask=live, other=0.0)[:, None]
        at = (start * N + i) * C
        b_x = tile_of(after_ptr + at, t * N, c, live, C, BLOCK).to(tl.float32)  # [TOKENS, BLOCK]
        b_y = b_x * b_rstd
        # G·s, z = G·s·r·X', e = w·z(1 − s)
        b_s = squash(tl.dot(b_t, b_up, input_precision="ieee") * NEGATIVE_LOG2_E, FAST)
        b_g = tile_of(g_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32) * b_s
        b_z = b_g * b_y
        # dX = r(G·w·s + Mᵀd) − m·X' + F
        b_a = tl.dot(b_d, b_down, b_g * b_w[None, :], input_precision="ieee")
        b_a = tl.dot(b_d_f, b_inject, b_a, input_precision="ieee")
        b_g_x = b_a * b_rstd - b_x * b_m + tile_of(g_after_ptr + at, t * N, c, live, C, BLOCK).to(tl.float32)
        keep_tile(g_x_ptr + at, t * N, c, live, b_g_x, C, BLOCK)
        # the sums over tokens
        b_to_weight += b_z
        b_y, b_e = tl.trans(b_y.to(dtype)), tl.trans((b_z - b_z * b_s).to(dtype))  # [BLOCK, TOKENS]
        b_to_down = tl.dot(b_y, b_d, b_to_down, input_precision="ieee")
        b_to_inject = tl.dot(b_y, b_d_f, b_to_inject, input_precision="ieee")
        b_to_up = tl.dot(b_e, b_t, b_to_up, input_precision="ieee")

    mine_ptr = partial_ptr + (tl.program_id(2).to(tl.int64) * (1 + width + RANK) * N + i) * C + c
    mask = c < C
    tl.store(mine_ptr, tl.sum(b_to_weight, 0), mask=mask)
    tl.store(mine_ptr[:, None] + (1 + r)[None, :] * (N * C), b_to_down, mask=mask[:, None])
    tl.store(mine_ptr[:, None] + (1 + RANK + j)[None, :] * (N * C), b_to_inject, mask=mask[:, None])
    tl.store(mine_ptr[:, None] + (1 + width + r)[None, :] * (N * C), b_to_up * b_w[:, None], mask=mask[:, None])


@triton.jit(do_not_specialize=["tokens"])
def write_backward_kernel(
    g_x_ptr, injection_ptr, y_ptr, g_y_ptr, g_injection_ptr, tokens,
    C: tl.constexpr, N: tl.constexpr, FACTORS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TOKENS rows: dy = Σ inj·dX, dinj = y·dX."""
    start, t = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    live, j = t < tokens - start, tl.arange(0, FACTORS)
    b_g_f = tl.zeros([TOKENS, FACTORS], tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        b_y = tile_of(y_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32)  # [TOKENS, BLOCK]
        b_g_y = tl.zeros([TOKENS, BLOCK], tl.float32)
        for i in tl.static_range(N):
            b_g = tile_of(g_x_ptr + (start * N + i) * C, t * N, c, live, C, BLOCK).to(tl.float32)
            b_g_y += tl.load(injection_ptr + (start + t) * N + i, mask=live, other=0.0)[:, None] * b_g
            b_g_f += tl.where(j[None, :] == i, tl.sum(b_g * b_y, 1)[:, None], 0.0)
        keep_tile(g_y_ptr + start * C, t, c, live, b_g_y, C, BLOCK)
    keep_tile(g_injection_ptr + start * N, t, j, live, b_g_f, N, FACTORS)
