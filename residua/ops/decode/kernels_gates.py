"""Triton kernels of a gated junction: n streams as vectors of C channels, and their dot products as scalars.

What a junction needs of the streams alone is `prepared` before the sublayer's output f is there: β_i, w2·s_i, s_i·s_j.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

CANCELLED = tl.constexpr(0.1)
"""Where ‖h‖² is a smaller share than this of its terms' squares, float32 dot products are no longer enough for it."""


@triton.jit
def _add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _add18(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15, b16, b17,
):  # fmt: skip
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8,
        a9 + b9, a10 + b10, a11 + b11, a12 + b12, a13 + b13, a14 + b14, a15 + b15, a16 + b16, a17 + b17,
    )  # fmt: skip


@triton.jit
def _sums_by_6(v, COUNT: tl.constexpr):
    """The sums of COUNT vectors, six in a round of reductions: as many as four streams have with f."""
    sums = ()
    for _ in tl.static_range((6 - COUNT % 6) % 6):
        v = v + (v[0],)
    for k in tl.static_range(0, COUNT, 6):
        sums = sums + tl.reduce((v[k], v[k + 1], v[k + 2], v[k + 3], v[k + 4], v[k + 5]), 0, _add6)
    return sums


@triton.jit
def _sums_by_18(v, COUNT: tl.constexpr):
    """The sums of COUNT vectors, 18 in a round: as many as four streams have without f."""
    sums = ()
    for _ in tl.static_range((18 - COUNT % 18) % 18):
        v = v + (v[0],)
    for k in tl.static_range(0, COUNT, 18):
        sums = sums + tl.reduce(
            (v[k], v[k + 1], v[k + 2], v[k + 3], v[k + 4], v[k + 5], v[k + 6], v[k + 7], v[k + 8], v[k + 9],
             v[k + 10], v[k + 11], v[k + 12], v[k + 13], v[k + 14], v[k + 15], v[k + 16], v[k + 17]), 0, _add18,
        )  # fmt: skip
    return sums


@triton.jit
def _vector(x, at, inside):
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _vectors(tensors, at, inside, N: tl.constexpr):
    v = ()
    for i in tl.static_range(N):
        v = v + (_vector(tensors[i], at, inside),)
    return v


@triton.jit
def _prepared(
    s, gate_query, gate_bias, w2, c, inside, key_eps, per_root,
    C: tl.constexpr, N: tl.constexpr, COMPETITIVE: tl.constexpr,
):  # fmt: skip
    """β_i, w2·s_i, and s_i·s_j as ‖s_0‖² … ‖s_n‖², s_0·s_1, s_0·s_2 …"""
    bias = ()
    for i in tl.static_range(N):
        bias = bias + (tl.load(gate_bias + COMPETITIVE + i).to(tl.float32),)
    forget = tl.load(gate_bias).to(tl.float32)
    w1 = _vector(gate_query, c, inside)
    by_w1, by_w2, squares, others = (), (), (), ()
    for i in tl.static_range(N):
        by_w1, by_w2, squares = by_w1 + (s[i] * w1,), by_w2 + (s[i] * w2,), squares + (s[i] * s[i],)
        for j in tl.static_range(i + 1, N):
            others = others + (s[i] * s[j],)
    sums = _sums_by_18(by_w1 + by_w2 + squares + others, N * (N + 5) // 2)

    z, top = (), forget
    for i in tl.static_range(N):
        z = z + (sums[i] * tl.rsqrt(sums[2 * N + i] / C + key_eps) * per_root + bias[i],)
        top = tl.maximum(top, z[i])
    total = tl.exp(forget - top)
    for i in tl.static_range(N):
        total += tl.exp(z[i] - top)
    beta, s2, products = (), (), ()
    for i in tl.static_range(N):
        if COMPETITIVE:
            beta = beta + (tl.exp(z[i] - top) / total,)
        else:
            beta = beta + (tl.sigmoid(z[i]),)
        s2 = s2 + (sums[N + i],)
    for i in tl.static_range(N * (N + 1) // 2):
        products = products + (sums[2 * N + i],)
    return beta, s2, products


@triton.jit
def prepare_gates_kernel(
    streams, gate_query, gate_bias, pool_query, prepared, key_eps, per_root,
    C: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, COMPETITIVE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    s = _vectors(streams, row * C + c, inside, N)
    w2 = _vector(pool_query, c, inside)
    beta, s2, products = _prepared(
        s, gate_query, gate_bias, w2, c, inside, key_eps, per_root, C, N, COMPETITIVE
    )  # fmt: skip
    ready = prepared + row * (N * (N + 5) // 2)
    for i in tl.static_range(N):
        tl.store(ready + i, beta[i])
        tl.store(ready + N + i, s2[i])
    for i in tl.static_range(N * (N + 1) // 2):
        tl.store(ready + 2 * N + i, products[i])


@triton.jit
def _loaded(ready, N: tl.constexpr):
    beta, s2, products = (), (), ()
    for i in tl.static_range(N):
        beta, s2 = beta + (tl.load(ready + i),), s2 + (tl.load(ready + N + i),)
    for i in tl.static_range(N * (N + 1) // 2):
        products = products + (tl.load(ready + 2 * N + i),)
    return beta, s2, products


@triton.jit
def _pool_weights(beta, s2, products, sums, key_eps, per_root, C: tl.constexpr, N: tl.constexpr):
    """a = softmax_i(w2 · RMS(s'_i)/√C) of s'_i = (1 − β_i) s_i + β_i f; `sums` are s_i·f, ‖f‖², w2·f."""
    z = ()
    for i in tl.static_range(N):
        keep = 1 - beta[i]
        squared = keep * keep * products[i] + 2 * beta[i] * keep * sums[i] + beta[i] * beta[i] * sums[N]
        rstd = tl.rsqrt(tl.maximum(squared, 0.0) / C + key_eps)
        z = z + ((keep * s2[i] + beta[i] * sums[N + 1]) * rstd * per_root,)
    top = z[0]
    for i in tl.static_range(1, N):
        top = tl.maximum(top, z[i])
    e, total = (), top * 0
    for i in tl.static_range(N):
        e = e + (tl.exp(z[i] - top),)
        total += e[i]
    a = ()
    for i in tl.static_range(N):
        a = a + (e[i] / total,)
    return a


@triton.jit
def _squared_norm(a, beta, products, sums, N: tl.constexpr):
    """‖h‖² = Σ_ij c_i c_j s_i·s_j + 2d Σ c_i s_i·f + d² ‖f‖² with c_i = a_i (1 − β_i), d = Σ a_i β_i; its squares."""
    d = a[0] * beta[0]
    for i in tl.static_range(1, N):
        d += a[i] * beta[i]
    parts = d * d * sums[N]
    mixed = d * 0
    for i in tl.static_range(N):
        kept = a[i] * (1 - beta[i])
        parts += kept * kept * products[i]
        across = d * sums[i]
        for j in tl.static_range(i + 1, N):
            across += a[j] * (1 - beta[j]) * products[N + i * (2 * N - i - 1) // 2 + j - i - 1]
        mixed += kept * across
    return parts + 2 * mixed, parts


@triton.jit(do_not_specialize=["rows"])
def gate_prepared_kernel(
    streams, y, prepared, pool_query, weight, normed, after, rows, eps, key_eps, per_root,
    C: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scalars without f are `prepared`; N + 2 sums are left."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    at = row * C + c
    s = _vectors(streams, at, inside, N)
    w2, w = _vector(pool_query, c, inside), _vector(weight, c, inside)
    f = _vector(y, at, inside)
    beta, s2, products = _loaded(prepared + row * (N * (N + 5) // 2), N)
    by_f = ()
    for i in tl.static_range(N):
        by_f = by_f + (s[i] * f,)
    sums = _sums_by_6(by_f + (f * f, f * w2), N + 2)
    a = _pool_weights(beta, s2, products, sums, key_eps, per_root, C, N)
    hh, parts = _squared_norm(a, beta, products, sums, N)

    h = f * 0
    for i in tl.static_range(N):
        written = s[i] + beta[i] * (f - s[i])
        h += a[i] * written
        to = after + i * (rows * C).to(tl.int64) + at
        tl.store(to, written.to(after.dtype.element_ty), mask=inside)
    if hh < parts * CANCELLED:
        hh = tl.sum(h * h, 0)
    rstd = tl.rsqrt(hh / C + eps)
    tl.store(normed + at, (h * rstd * w).to(normed.dtype.element_ty), mask=inside)
