"""Products of experts with their rows, which are sorted by expert.

An expert's rows may end inside a tile, and only the GPU knows where: `tiles_kernel` writes the expert and the rows
of each tile. The grid has as many tiles as could be needed; surplus ones have expert −1 and exit. If GATHERED, the rows
of x are those of tokens, read through `order`, which holds the token-major slot (token · CHOICES + choice) of each
sorted row; if SCATTERED, a row of the result is written to its slot.

With 3 of 16 experts, forward and backward: 1.59 ms, and 2.93 with PyTorch's grouped product (docs/results/mixtures.md,
`residua bench ops expert_ffn --implementations fused`).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_2_PI = tl.constexpr(0.7978845608028654)  # √(2/π)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def tiles_kernel(
    ends_ptr, tiles_ptr, count, E: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """tiles [count, 3]: expert, first row and end of its rows; WIDE is E as a power of two."""
    e = tl.arange(0, WIDE)
    b_end = tl.load(ends_ptr + e, mask=e < E, other=0)
    b_start = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    b_tiles = tl.where(e < E, (b_end - b_start + ROWS - 1) // ROWS, 0)
    b_until = tl.cumsum(b_tiles, 0)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # experts whose tiles all come before t, and how many tiles they have
    b_before = (b_until[None, :] <= t[:, None]) & (e < E)[None, :]  # [BLOCK, WIDE]
    b_expert = tl.sum(b_before.to(tl.int32), 1)
    b_skipped = tl.sum(tl.where(b_before, b_tiles[None, :], 0), 1)
    b_own = e[None, :] == b_expert[:, None]
    b_row = tl.sum(tl.where(b_own, b_start[None, :], 0), 1) + (t - b_skipped) * ROWS
    b_last = tl.sum(tl.where(b_own, b_end[None, :], 0), 1)
    tl.store(tiles_ptr + 3 * t, tl.where(b_expert < E, b_expert, -1), mask=t < count)
    tl.store(tiles_ptr + 3 * t + 1, b_row, mask=t < count)
    tl.store(tiles_ptr + 3 * t + 2, b_last, mask=t < count)


@triton.jit
def _columns(
    w_ptr, e, k, n, K: tl.constexpr, N: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr
):
    """b_w [DEPTH, COLUMNS] at (k, n) of expert e's matrix, which is [N, K] in memory or, if TURNED, [K, N]."""
    ks, ns = k + tl.arange(0, DEPTH), n + tl.arange(0, COLUMNS)
    at = w_ptr + e.to(tl.int64) * (K * N)
    at = at + ks[:, None] * N + ns[None, :] if TURNED else at + ns[None, :] * K + ks[:, None]
    if K % DEPTH or N % COLUMNS:
        return tl.load(at, mask=(ks < K)[:, None] & (ns < N)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _rows(x_ptr, b_row, k, K: tl.constexpr, DEPTH: tl.constexpr):
    """b_x [ROWS, DEPTH] at column k of some rows of x […, K]."""
    ks = k + tl.arange(0, DEPTH)
    at = x_ptr + b_row.to(tl.int64)[:, None] * K + ks[None, :]
    if K % DEPTH:
        return tl.load(at, mask=(ks < K)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _tile(tiles_ptr, order_ptr, tile, ROWS: tl.constexpr, ORDERED: tl.constexpr):
    """The rows of a tile, which of them there are, and their slots (without an order, the rows themselves)."""
    r = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, ROWS)
    end = tl.load(tiles_ptr + 3 * tile + 2)
    inside = r < end
    r = tl.minimum(r, end - 1)
    slot = r
    if ORDERED:
        slot = tl.load(order_ptr + r)
    return r, inside, slot


@triton.jit
def _sigmoid_of(b_z, ACT: tl.constexpr):
    """The sigmoid inside an activation other than relu² and gelu."""
    if ACT == "geglu":
        b_z = (b_z + b_z * b_z * b_z * CUBIC) * 2 * ROOT_2_PI
    return tl.sigmoid(b_z)


@triton.jit
def _act(b_z, ACT: tl.constexpr):
    if ACT == "relu2":
        b_z = tl.maximum(b_z, 0.0, tl.PropagateNan.ALL)
        return b_z * b_z
    elif ACT == "gelu":
        return b_z * 0.5 * (1 + tl.erf(b_z * ROOT_HALF))
    elif ACT == "glu":
        return tl.sigmoid(b_z)
    else:
        return b_z * _sigmoid_of(b_z, ACT)


@triton.jit
def _slope(b_z, ACT: tl.constexpr):
    """The derivative of `_act`, of all but relu²."""
    if ACT == "gelu":
        return 0.5 * (1 + tl.erf(b_z * ROOT_HALF)) + b_z * 0.5 * ROOT_2_PI * tl.exp(-0.5 * b_z * b_z)
    else:
        b_s = _sigmoid_of(b_z, ACT)
        if ACT == "glu":
            return b_s * (1 - b_s)
        elif ACT == "geglu":
            return b_s * (1 + b_z * (1 - b_s) * 2 * ROOT_2_PI * (1 + b_z * b_z * 3 * CUBIC))
        else:
            return b_s * (1 + b_z * (1 - b_s))


@triton.jit
def up_kernel(
    x_ptr, w_ptr, order_ptr, tiles_ptr, weights_ptr, z_ptr, a_ptr,
    K: tl.constexpr, H: tl.constexpr, CHOICES: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    GATHERED: tl.constexpr, WEIGHTED: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """a [slots, H] = v act(W_e x), or if GATED v act(W_gate x) ⊙ W_up x, with v the slot's weight.

    If KEPT, the sums z [slots, H or 2H], too.
    """
    tile, column = tl.program_id(0) // tl.cdiv(H, COLUMNS), tl.program_id(0) % tl.cdiv(H, COLUMNS)
    e = tl.load(tiles_ptr + 3 * tile)
    if e < 0:
        return
    R: tl.constexpr = 2 * H if GATED else H
    r, inside, slot = _tile(tiles_ptr, order_ptr, tile, ROWS, GATHERED)
    token = slot // CHOICES
    n = column * COLUMNS
    # z = W_e x
    b_z = tl.zeros([ROWS, COLUMNS], tl.float32)
    b_u = b_z
    for k in range(0, K, DEPTH):
        b_x = _rows(x_ptr, token, k, K, DEPTH)
        b_w = _columns(w_ptr, e, k, n, K, R, DEPTH, COLUMNS, False)
        b_z = tl.dot(b_x, b_w, b_z, input_precision="ieee")
        if GATED:
            b_w_u = _columns(w_ptr, e, k, H + n, K, R, DEPTH, COLUMNS, False)
            b_u = tl.dot(b_x, b_w_u, b_u, input_precision="ieee")
    ns = n + tl.arange(0, COLUMNS)
    there = inside[:, None] & (ns < H)[None, :]
    row = r.to(tl.int64)[:, None]
    if KEPT:
        tl.store(z_ptr + row * R + ns[None, :], b_z.to(z_ptr.dtype.element_ty), mask=there)
        if GATED:
            tl.store(z_ptr + row * R + H + ns[None, :], b_u.to(z_ptr.dtype.element_ty), mask=there)
    # a = v act(z), times the linear branch
    b_a = _act(b_z, ACT)
    if GATED:
        b_a = b_a * b_u
    if WEIGHTED:
        b_a = b_a * tl.load(weights_ptr + slot).to(tl.float32)[:, None]
    tl.store(a_ptr + row * H + ns[None, :], b_a.to(a_ptr.dtype.element_ty), mask=there)


@triton.jit
def product_kernel(
    x_ptr, w_ptr, order_ptr, tiles_ptr, y_ptr,
    K: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr, SCATTERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """y [slots, N] = W_e x, or W_eᵀ x if TURNED, of sorted rows x [slots, K]."""
    tile, column = tl.program_id(0) // tl.cdiv(N, COLUMNS), tl.program_id(0) % tl.cdiv(N, COLUMNS)
    e = tl.load(tiles_ptr + 3 * tile)
    if e < 0:
        return
    r, inside, slot = _tile(tiles_ptr, order_ptr, tile, ROWS, SCATTERED)
    n = column * COLUMNS
    # y = W_e x
    b_y = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, K, DEPTH):
        b_x = _rows(x_ptr, r, k, K, DEPTH)
        b_w = _columns(w_ptr, e, k, n, K, N, DEPTH, COLUMNS, TURNED)
        b_y = tl.dot(b_x, b_w, b_y, input_precision="ieee")
    ns = n + tl.arange(0, COLUMNS)
    at = y_ptr + slot.to(tl.int64)[:, None] * N + ns[None, :]
    tl.store(at, b_y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (ns < N)[None, :])


@triton.jit
def _write_slopes(
    b_p, b_v, r, inside, n, kept_ptr, g_z_ptr, a_ptr,
    H: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """g_z and a of a tile's columns from n on, in PARTS, to need fewer registers; returns p · act(z) [ROWS].

    Of relu², v act(z) is kept: then v act′(z) = 2√(v² act(z)) with v's sign, and what is returned is p · (v act(z)).
    """
    if PARTS == 1:
        R: tl.constexpr = 2 * H if GATED else H
        ns = n + tl.arange(0, b_p.shape[1])
        there = inside[:, None] & (ns < H)[None, :]
        at_z, at_a = r.to(tl.int64)[:, None] * R + ns[None, :], r.to(tl.int64)[:, None] * H + ns[None, :]
        b_z = tl.load(kept_ptr + at_z, mask=there, other=0.0).to(tl.float32)
        # act(z) and act′(z)
        if ACT == "relu2":
            b_a, b_slope = b_z, tl.where(b_v < 0, -2.0, 2.0)[:, None] * tl.sqrt(b_v[:, None] * b_z)
        else:
            b_a, b_slope = _act(b_z, ACT), b_v[:, None] * _slope(b_z, ACT)
        if GATED:
            b_u = tl.load(kept_ptr + at_z + H, mask=there, other=0.0).to(tl.float32)
            b_g_u = b_v[:, None] * b_p * b_a
            tl.store(g_z_ptr + at_z + H, b_g_u.to(g_z_ptr.dtype.element_ty), mask=there)
            b_a, b_slope = b_a * b_u, b_slope * b_u
        tl.store(g_z_ptr + at_z, (b_p * b_slope).to(g_z_ptr.dtype.element_ty), mask=there)
        if ACT != "relu2":
            tl.store(a_ptr + at_a, (b_v[:, None] * b_a).to(a_ptr.dtype.element_ty), mask=there)
        return tl.sum(tl.where(there, b_p * b_a, 0.0), 1)
    else:
        HALF: tl.constexpr = b_p.shape[1] // 2
        b_left, b_right = b_p.reshape(b_p.shape[0], 2, HALF).permute(0, 2, 1).split()
        b_dot = _write_slopes(b_left, b_v, r, inside, n, kept_ptr, g_z_ptr, a_ptr, H, ACT, GATED, PARTS // 2)
        return b_dot + _write_slopes(
            b_right, b_v, r, inside, n + HALF, kept_ptr, g_z_ptr, a_ptr, H, ACT, GATED, PARTS // 2
        )


@triton.jit
def slope_kernel(
    g_ptr, w_ptr, order_ptr, tiles_ptr, weights_ptr, kept_ptr, g_z_ptr, a_ptr, dots_ptr, slots,
    K: tl.constexpr, H: tl.constexpr, CHOICES: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    GATHERED: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """With p = W_outᵀ g, v a slot's weight and z the kept sums:

    g_z = v p ⊙ act′(z) [slots, H],   a = v act(z) [slots, H],   dots[column of tiles] = p · act(z) [slots]

    If GATED, act(z) is act(z_gate) ⊙ z_up and g_z has both gradients, [slots, 2H]. Of relu², a is what is kept, and not
    written again; the dot product with act(z) is that with a, divided by v (0 if v is 0: such a slot teaches no router,
    for the gradient of its score is a multiple of the score).
    """
    tile, column = tl.program_id(0) // tl.cdiv(H, COLUMNS), tl.program_id(0) % tl.cdiv(H, COLUMNS)
    e = tl.load(tiles_ptr + 3 * tile)
    if e < 0:
        return
    r, inside, slot = _tile(tiles_ptr, order_ptr, tile, ROWS, GATHERED)
    token = slot // CHOICES
    n = column * COLUMNS
    # p = W_outᵀ g
    b_p = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, K, DEPTH):
        b_g = _rows(g_ptr, token, k, K, DEPTH)
        b_w = _columns(w_ptr, e, k, n, K, H, DEPTH, COLUMNS, True)
        b_p = tl.dot(b_g, b_w, b_p, input_precision="ieee")
    b_v = tl.full([ROWS], 1.0, tl.float32)
    if WEIGHTED:
        b_v = tl.load(weights_ptr + slot).to(tl.float32)
    b_dot = _write_slopes(b_p, b_v, r, inside, n, kept_ptr, g_z_ptr, a_ptr, H, ACT, GATED, PARTS)
    if WEIGHTED:
        if ACT == "relu2":
            b_dot = tl.where(b_v == 0, 0.0, b_dot / tl.where(b_v == 0, 1.0, b_v))
        tl.store(dots_ptr + column * slots + slot, b_dot, mask=inside)


@triton.jit
def _slots(order_ptr, row, end, DEPTH: tl.constexpr, ORDERED: tl.constexpr):
    """The slots of DEPTH rows from `row` on; without an order, the rows themselves."""
    r = row + tl.arange(0, DEPTH)
    if ORDERED:
        r = tl.load(order_ptr + r, mask=r < end, other=0)
    return r


@triton.jit
def _outer(
    b_w, p_ptr, q_ptr, b_slot, s, end, m, n, M, N, of_out,
    CHOICES: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, SHORT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """b_w + Σ p qᵀ over DEPTH rows from s on, of which those from `end` on are missing unless WHOLE."""
    r, token = s + tl.arange(0, DEPTH), b_slot // CHOICES
    at_p, at_q = tl.where(of_out, token, r)[:, None], tl.where(of_out, r, token)[:, None]
    if not SHORT:
        at_p, at_q = at_p.to(tl.int64), at_q.to(tl.int64)
    at_p, at_q = p_ptr + (at_p * M + m[None, :]), q_ptr + (at_q * N + n[None, :])
    if WHOLE and EVEN:
        b_p, b_q = tl.load(at_p), tl.load(at_q)
    else:
        inside = (r < end)[:, None]
        b_p = tl.load(at_p, mask=inside & (m < M)[None, :], other=0.0)
        b_q = tl.load(at_q, mask=inside & (n < N)[None, :], other=0.0)
    return tl.dot(b_p.T, b_q, b_w, input_precision="ieee")


@triton.jit
def weight_kernel(
    g_ptr, a_ptr, g_z_ptr, x_ptr, order_ptr, ends_ptr, g_out_ptr, g_up_ptr,
    C: tl.constexpr, H: tl.constexpr, R: tl.constexpr, CHOICES: tl.constexpr, GATHERED: tl.constexpr,
    SHORT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """g_out[e] [C, H] = Σ g aᵀ and g_up[e] [R, C] = Σ g_z xᵀ over expert e's rows; one tile to a program.

    Both in one launch, since the last programs of a launch leave multiprocessors idle: g_w [M, N] = Σ p qᵀ is either.
    SHORT if offsets fit into 32 bits.
    """
    OUT: tl.constexpr = tl.cdiv(C, ROWS) * tl.cdiv(H, COLUMNS)
    BOTH: tl.constexpr = OUT + tl.cdiv(R, ROWS) * tl.cdiv(C, COLUMNS)
    EVEN: tl.constexpr = C % ROWS == 0 and C % COLUMNS == 0 and H % COLUMNS == 0 and R % ROWS == 0
    e, tile = tl.program_id(0) // BOTH, tl.program_id(0) % BOTH
    of_out = tile < OUT
    if of_out:
        p_ptr, q_ptr, g_w_ptr = g_ptr, a_ptr, g_out_ptr
    else:
        p_ptr, q_ptr, g_w_ptr = g_z_ptr, x_ptr, g_up_ptr
    M, N = tl.multiple_of(tl.where(of_out, C, R), 8), tl.multiple_of(tl.where(of_out, H, C), 8)
    tile = tl.where(of_out, tile, tile - OUT)
    m = tile // tl.cdiv(N, COLUMNS) * ROWS + tl.arange(0, ROWS)
    n = tile % tl.cdiv(N, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(ends_ptr + e - 1, mask=e > 0, other=0)
    end = tl.load(ends_ptr + e)
    whole = start + (end - start) // DEPTH * DEPTH
    b_w = tl.zeros([ROWS, COLUMNS], tl.float32)
    # slots are read one turn ahead: a load whose address is being loaded would stall the ones behind it
    b_slot = _slots(order_ptr, start, end, DEPTH, GATHERED)
    for s in range(start, whole, DEPTH):
        b_next = _slots(order_ptr, s + DEPTH, end, DEPTH, GATHERED)
        b_w = _outer(b_w, p_ptr, q_ptr, b_slot, s, end, m, n, M, N, of_out, CHOICES, True, EVEN, SHORT, DEPTH)
        b_slot = b_next
    if whole < end:
        b_slot = _slots(order_ptr, whole, end, DEPTH, GATHERED)
        b_w = _outer(b_w, p_ptr, q_ptr, b_slot, whole, end, m, n, M, N, of_out, CHOICES, False, EVEN, SHORT, DEPTH)
    at = g_w_ptr + e.to(tl.int64) * (M * N) + m[:, None] * N + n[None, :]
    tl.store(at, b_w.to(g_w_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
