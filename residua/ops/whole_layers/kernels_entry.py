"""Triton kernels of whole layers: the junction and norm before a projection, and their preparation by other programs.

Every program that multiplies computes the sublayer's input, a few kilobytes, for itself. A row of C channels is a tuple
of lines of LINE channels, like the tiles of weights. Junction J computes the input of sublayer J; J = 0 treats the
embedding as the output y of a previous sublayer.

Programs without weights write the new state (`write`) while the others project. Later in the sublayer they compute the
part of the next junction that depends only on the state (`prepare`); each reads a share of the sources. The state, each
before and after the junction, is a sum, or a running sum and the sources after both, or N streams. Equations and
letters are those of `reference.py`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import add4
from residua.ops.inference.kernels_junctions import _scores
from residua.ops.whole_layers.kernels_gates import (
    CANCELLED,
    _pool_score,
    _prepared,
    _softmax,
    _squared_norm,
    _sums_by_6,
    _vector,
    _vectors,
)

SOURCES = tl.constexpr(8)
"""Sources that a program reads at a time."""


@triton.jit
def _line(x_ptr, known, piece: tl.constexpr, C: tl.constexpr, LINE: tl.constexpr):
    """A piece of a vector [LINE]; 0 unless it is `known`."""
    c = piece * LINE + tl.arange(0, LINE)
    mask = known & (c >= 0) if (piece + 1) * LINE <= C else known & (c < C)
    return tl.load(x_ptr + c, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sum_line(base_ptr, y_ptr, has_base, J, piece: tl.constexpr, C: tl.constexpr, LINE: tl.constexpr):
    """base + y in float32, rounded as it is stored."""
    b_v = _line(y_ptr, J >= 0, piece, C, LINE) + _line(base_ptr, has_base, piece, C, LINE)
    return b_v.to(y_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _enter_sum(y_ptr, base_ptr, J, C: tl.constexpr, LINE: tl.constexpr):
    """h = base + y; h and ‖h‖²."""
    b_h, b_square = (), tl.zeros([LINE], tl.float32)
    for piece in tl.static_range((C + LINE - 1) // LINE):
        b_v = _sum_line(base_ptr, y_ptr, J > 0, J, piece, C, LINE)
        b_h = b_h + (b_v,)
        b_square += b_v * b_v
    return b_h, tl.sum(b_square, 0)


@triton.jit
def _share_weights(lse_ptr, J, M: tl.constexpr, SPARE: tl.constexpr):
    """w_s = exp(lse_s) / Σ exp(lse_s) of the shares of a read, and lse = log Σ exp(lse_s). For J = 0: 0 and −∞."""
    parts, weights = (), ()
    for s in tl.static_range(SPARE):
        parts = parts + (tl.load(lse_ptr + s * M, mask=J > 0, other=-float("inf")),)
    top = parts[0]
    for s in tl.static_range(1, SPARE):
        top = tl.maximum(top, parts[s])
    safe = tl.where(top == -float("inf"), 0.0, top)
    total = tl.exp(parts[0] - safe)
    for s in tl.static_range(1, SPARE):
        total += tl.exp(parts[s] - safe)
    total = tl.where(total == 0.0, 1.0, total)
    for s in tl.static_range(SPARE):
        weights = weights + (tl.exp(parts[s] - safe) / total,)
    return weights, top + tl.log(total)


@triton.jit
def _share_lines(
    o_ptr, J, piece: tl.constexpr, M: tl.constexpr, C: tl.constexpr, SPARE: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    b_parts = ()
    for s in tl.static_range(SPARE):
        b_parts = b_parts + (_line(o_ptr + s * (M * C), J > 0, piece, C, LINE),)
    return b_parts


@triton.jit
def _enter_read(
    y_ptr, base_ptr, o_ptr, lse_ptr, u_ptr, J, key_eps,
    M: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, SPARE: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """`reference.read_partial` of o = Σ w_s o_s, a read in SPARE shares: h and ‖h‖²."""
    LINES: tl.constexpr = (C + LINE - 1) // LINE
    has_base = ((J + SIZE - 1) % SIZE > 0) & (J > 0)
    b_p, b_u, b_parts = (), (), ()
    for piece in tl.static_range(LINES):
        b_p = b_p + (_sum_line(base_ptr, y_ptr, has_base, J, piece, C, LINE),)
        b_u = b_u + (_line(u_ptr, J >= 0, piece, C, LINE),)
        b_parts = b_parts + (_share_lines(o_ptr, J, piece, M, C, SPARE, LINE),)
    tl.debug_barrier()  # or the compiler would have loads above wait until the weights are known
    weights, lse = _share_weights(lse_ptr, J, M, SPARE)
    b_o, b_pp = (), tl.zeros([LINE], tl.float32)
    b_up, b_op, b_oo = b_pp, b_pp, b_pp
    for piece in tl.static_range(LINES):
        b_v, b_w = b_p[piece], weights[0] * b_parts[piece][0]
        for s in tl.static_range(1, SPARE):
            b_w += weights[s] * b_parts[piece][s]
        b_pp += b_v * b_v
        b_up += b_u[piece] * b_v
        b_op += b_w * b_v
        b_oo += b_w * b_w
        b_o = b_o + (b_w,)
    pp, up, op, oo = tl.reduce((b_pp, b_up, b_op, b_oo), 0, add4)
    # t = sigmoid(u · RMS(p) − lse), ‖h‖² from dot products, h = o + t (p − o)
    t = tl.sigmoid(up * tl.rsqrt(pp / C + key_eps) - lse)
    hh = (1 - t) * (1 - t) * oo + 2 * t * (1 - t) * op + t * t * pp
    b_h = ()
    for piece in tl.static_range(LINES):
        b_h = b_h + (b_o[piece] + t * (b_p[piece] - b_o[piece]),)
    return b_h, tl.maximum(hh, 0.0)


@triton.jit
def _begun(ready_ptr, i: tl.constexpr, J):
    """β_i. Nothing is prepared for J = 0, where the embedding begins the first stream."""
    return tl.load(ready_ptr + i, mask=J > 0, other=1.0 if i == 0 else 0.0)


@triton.jit
def _ready(ready_ptr, J, N: tl.constexpr):
    """β_i, w2·s_i, and s_i·s_j as `_prepared` returns them."""
    beta, s2, products = (), (), ()
    for i in tl.static_range(N):
        beta, s2 = beta + (_begun(ready_ptr, i, J),), s2 + (tl.load(ready_ptr + N + i, mask=J > 0, other=0.0),)
    for i in tl.static_range(N * (N + 1) // 2):
        products = products + (tl.load(ready_ptr + 2 * N + i, mask=J > 0, other=0.0),)
    return beta, s2, products


@triton.jit
def _pooled(beta, s2, products, sums, J, key_eps, per_root, C: tl.constexpr, N: tl.constexpr):
    """a = softmax_i(w2 · RMS(s'_i)/√C). While the streams fill, those after number J are empty."""
    z = ()
    for i in tl.static_range(N):
        score = _pool_score(i, beta, s2, products, sums, key_eps, per_root, C, N)
        z = z + (tl.where(i <= J, score, -float("inf")),)
    return _softmax(z, N)


@triton.jit
def _mixed(b_f, b_s, a, beta, N: tl.constexpr):
    """h = Σ a_i s'_i, s'_i = s_i + β_i (f − s_i)."""
    b_h = a[0] * (b_s[0] + beta[0] * (b_f - b_s[0]))
    for i in tl.static_range(1, N):
        b_h += a[i] * (b_s[i] + beta[i] * (b_f - b_s[i]))
    return b_h


@triton.jit
def _added(b_sums, b_more, COUNT: tl.constexpr):
    b_all = ()
    for i in tl.static_range(COUNT):
        b_all = b_all + (b_sums[i] + b_more[i],)
    return b_all


@triton.jit
def _enter_gates(
    y_ptr, s_ptr, ready_ptr, w2_ptr, J, key_eps, per_root, STRIDE: tl.constexpr,
    C: tl.constexpr, N: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """`reference.gate_norm`: h and ‖h‖². A stream that y begins has β = 1."""
    LINES: tl.constexpr = (C + LINE - 1) // LINE
    beta, s2, products = _ready(ready_ptr, J, N)
    b_f, b_s, b_sums = (), (), ()
    for _ in tl.static_range(N + 2):
        b_sums = b_sums + (tl.zeros([LINE], tl.float32),)
    for piece in tl.static_range(LINES):
        # f and the streams, and the products whose sums are s_i·f, ‖f‖², w2·f
        b_v, b_streams, b_products = _line(y_ptr, J >= 0, piece, C, LINE), (), ()
        for i in tl.static_range(N):
            b_streams = b_streams + (_line(s_ptr + i * STRIDE, J > 0, piece, C, LINE),)
            b_products = b_products + (b_streams[i] * b_v,)
        b_products = b_products + (b_v * b_v, b_v * _line(w2_ptr, J >= 0, piece, C, LINE))
        b_f, b_s, b_sums = b_f + (b_v,), b_s + (b_streams,), _added(b_sums, b_products, N + 2)
    sums = _sums_by_6(b_sums, N + 2)
    a = _pooled(beta, s2, products, sums, J, key_eps, per_root, C, N)
    hh, parts = _squared_norm(a, beta, products, sums, N)
    b_h = ()
    for piece in tl.static_range(LINES):
        b_h = b_h + (_mixed(b_f[piece], b_s[piece], a, beta, N),)
    if hh < parts * CANCELLED:
        b_square = b_h[0] * b_h[0]
        for piece in tl.static_range(1, LINES):
            b_square += b_h[piece] * b_h[piece]
        hh = tl.sum(b_square, 0)
    return b_h, hh


@triton.jit
def enter(
    y_ptr, state_ptr, ready_ptr, vectors_ptr, m, J, eps, key_eps, per_root,
    M: tl.constexpr, C: tl.constexpr, JUNCTION: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    SPARE: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """The normed input of sublayer J for row m, as lines [LINE]."""
    LINES: tl.constexpr = (C + LINE - 1) // LINE
    gain_ptr, row_ptr = vectors_ptr + J * (3 * C), y_ptr + m * C
    b_gain = ()
    for piece in tl.static_range(LINES):
        b_gain = b_gain + (_line(gain_ptr, J >= 0, piece, C, LINE),)
    if JUNCTION == "gate":
        b_h, hh = _enter_gates(
            row_ptr, state_ptr + ((J + 1) % 2) * (N * M * C) + m * C, ready_ptr + m * (N * (N + 5) // 2), gain_ptr + C,
            J, key_eps, per_root, M * C, C, N, LINE,
        )  # fmt: skip
    else:
        base_ptr = state_ptr + ((J + 1) % 2) * (M * C) + m * C
        if JUNCTION == "read":
            b_h, hh = _enter_read(
                row_ptr, base_ptr, ready_ptr + m * C, ready_ptr + SPARE * M * C + m, gain_ptr + C,
                J, key_eps, M, C, SIZE, SPARE, LINE,
            )  # fmt: skip
        else:
            b_h, hh = _enter_sum(row_ptr, base_ptr, J, C, LINE)
    rstd, b_x = tl.rsqrt(hh / C + eps), ()
    for piece in tl.static_range(LINES):
        b_x = b_x + (b_h[piece] * rstd * b_gain[piece],)
    return b_x


@triton.jit
def _write_sum(
    y_ptr, state_ptr, m, J, c, live, M: tl.constexpr, C: tl.constexpr, READ: tl.constexpr, SIZE: tl.constexpr
):
    """base + y. If sources are READ, it is one of them when its block of SIZE sublayers has ended; the embedding is the
    first."""
    has_base, to = J > 0, J % 2
    if READ:
        place, source = (J + SIZE - 1) % SIZE, (J + SIZE - 1) // SIZE
        has_base = has_base & (place > 0)
        to = tl.where(place == SIZE - 1, 2 + source, to)
    b_y = tl.load(y_ptr + m * C + c, mask=live, other=0.0)
    b_base = tl.load(state_ptr + ((J + 1) % 2) * (M * C) + m * C + c, mask=live & has_base, other=0.0)
    b_sum = b_base.to(tl.float32) + b_y.to(tl.float32)
    tl.store(state_ptr + to * (M * C) + m * C + c, b_sum.to(b_y.dtype), mask=live)


@triton.jit
def _write_streams(
    y_ptr, state_ptr, ready_ptr, m, J, c, live, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """s'_i = s_i + β_i (f − s_i)."""
    b_f = _vector(y_ptr, m * C + c, live)
    b_s = ()
    for i in tl.static_range(N):
        s_ptr = state_ptr + ((J + 1) % 2) * (N * M * C) + i * (M * C)
        b_s = b_s + (_vector(s_ptr, m * C + c, live & (J > 0)),)
    for i in tl.static_range(N):
        after_ptr = state_ptr + (J % 2) * (N * M * C) + i * (M * C) + m * C + c
        b_after = b_s[i] + _begun(ready_ptr + m * (N * (N + 5) // 2), i, J) * (b_f - b_s[i])
        tl.store(after_ptr, b_after.to(state_ptr.dtype.element_ty), mask=live)


@triton.jit
def write(
    y_ptr, state_ptr, ready_ptr, spare, J,
    M: tl.constexpr, C: tl.constexpr, JUNCTION: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    SPARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The state after junction J, for the rows of program `spare` of SPARE; other programs read another buffer."""
    c = tl.arange(0, WIDE)
    for turn in range((M + SPARE - 1) // SPARE):
        m = turn * SPARE + spare
        if m < M:
            if JUNCTION == "gate":
                _write_streams(y_ptr, state_ptr, ready_ptr, m, J, c, c < C, M, C, N)
            else:
                _write_sum(y_ptr, state_ptr, m, J, c, c < C, M, C, JUNCTION == "read", SIZE)


@triton.jit
def _prepare_read(
    state_ptr, ready_ptr, u_ptr, spare, m, J, key_eps,
    M: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, SPARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """o_s and lse_s of the read of junction J over share s = `spare` of the sources that were finished before it.

    They are stored as o [SPARE, M, C] and lse [SPARE, M]. A share without sources has o = 0 and lse = −∞.
    """
    count = (J + SIZE - 1) // SIZE
    first, end = spare * count // SPARE, (spare + 1) * count // SPARE
    c, lane = tl.arange(0, WIDE), tl.arange(0, SOURCES)
    live = c < C
    b_u = _vector(u_ptr, c, live)
    b_o = tl.zeros([WIDE], tl.float32)
    total = tl.sum(b_o, 0)
    top = total - float("inf")
    for start in range(first, end, SOURCES):
        known = start + lane < end
        v_ptr = state_ptr + (2 + start + lane)[:, None] * (M * C) + m * C + c[None, :]
        b_v = tl.load(v_ptr, mask=known[:, None] & live[None, :], other=0.0).to(tl.float32)  # [SOURCES, WIDE]
        b_z = _scores(b_v, b_u, known, key_eps, C)
        # online softmax
        higher = tl.maximum(top, tl.max(b_z, 0))
        b_e, keep = tl.exp(b_z - higher), tl.exp(top - higher)
        b_o = b_o * keep + tl.sum(b_e[:, None] * b_v, 0)
        total = total * keep + tl.sum(b_e, 0)
        top = higher
    part, total = spare * M + m, tl.where(first < end, total, 1.0)
    tl.store(ready_ptr + part * C + c, b_o / total, mask=live)
    tl.store(ready_ptr + SPARE * M * C + part, top + tl.log(total))


@triton.jit
def _prepare_gates(
    state_ptr, ready_ptr, w2_ptr, w1_ptr, bias_ptr, m, J, key_eps, per_root,
    M: tl.constexpr, C: tl.constexpr, N: tl.constexpr, COMPETITIVE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """β_i, w2·s_i and s_i·s_j of junction J."""
    c = tl.arange(0, WIDE)
    live = c < C
    s_ptrs = ()
    for i in tl.static_range(N):
        s_ptrs = s_ptrs + (state_ptr + ((J + 1) % 2) * (N * M * C) + i * (M * C),)
    b_s = _vectors(s_ptrs, m * C + c, live, N)
    beta, s2, products = _prepared(
        b_s, w1_ptr, bias_ptr, _vector(w2_ptr, c, live), c, live, key_eps, per_root, C, N, COMPETITIVE
    )
    own_ptr = ready_ptr + m * (N * (N + 5) // 2)
    for i in tl.static_range(N):
        tl.store(own_ptr + i, tl.where(J < N, tl.where(i == J, 1.0, 0.0), beta[i]))
        tl.store(own_ptr + N + i, s2[i])
    for i in tl.static_range(N * (N + 1) // 2):
        tl.store(own_ptr + 2 * N + i, products[i])


@triton.jit
def prepare(
    state_ptr, ready_ptr, vectors_ptr, biases_ptr, spare, J, key_eps, per_root,
    M: tl.constexpr, C: tl.constexpr, JUNCTION: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    COMPETITIVE: tl.constexpr, SPARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The part of junction J that depends only on the state: program `spare` of SPARE has a share of every row's
    sources, or all streams of its own rows."""
    query_ptr = vectors_ptr + J * (3 * C) + C
    if JUNCTION == "read":
        for m in range(M):
            _prepare_read(state_ptr, ready_ptr, query_ptr, spare, m, J, key_eps, M, C, SIZE, SPARE, WIDE)
    if JUNCTION == "gate":
        for turn in range((M + SPARE - 1) // SPARE):
            m = turn * SPARE + spare
            if m < M:
                _prepare_gates(
                    state_ptr, ready_ptr, query_ptr, query_ptr + C, biases_ptr + J * (N + 1), m, J, key_eps, per_root,
                    M, C, N, COMPETITIVE, WIDE,
                )  # fmt: skip
