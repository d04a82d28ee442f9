"""A gated junction of whole layers in two parts: n streams as vectors [C], and their dot products as scalars.

Before the sublayer's output f is known, `_prepared` computes the terms that depend only on the streams: β_i, w2·s_i
and s_i·s_j. The rest follows from s_i·f, ‖f‖² and w2·f. Equations and letters are those of `multi_gate`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

CANCELLED = tl.constexpr(0.1)
"""If ‖h‖² is less than this share of the sum of its squared terms, float32 dot products are too inexact for it."""


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
def _sums_by_6(b_v, COUNT: tl.constexpr):
    """The sums of COUNT vectors, six to a round of reductions: four streams have six with f."""
    sums = ()
    for _ in tl.static_range((6 - COUNT % 6) % 6):
        b_v = b_v + (b_v[0],)
    for k in tl.static_range(0, COUNT, 6):
        sums = sums + tl.reduce((b_v[k], b_v[k + 1], b_v[k + 2], b_v[k + 3], b_v[k + 4], b_v[k + 5]), 0, _add6)
    return sums


@triton.jit
def _sums_by_18(b_v, COUNT: tl.constexpr):
    """The sums of COUNT vectors, 18 to a round: four streams have 18 without f."""
    sums = ()
    for _ in tl.static_range((18 - COUNT % 18) % 18):
        b_v = b_v + (b_v[0],)
    for k in tl.static_range(0, COUNT, 18):
        sums = sums + tl.reduce(
            (b_v[k], b_v[k + 1], b_v[k + 2], b_v[k + 3], b_v[k + 4], b_v[k + 5], b_v[k + 6], b_v[k + 7], b_v[k + 8],
             b_v[k + 9], b_v[k + 10], b_v[k + 11], b_v[k + 12], b_v[k + 13], b_v[k + 14], b_v[k + 15], b_v[k + 16],
             b_v[k + 17]), 0, _add18,
        )  # fmt: skip
    return sums


@triton.jit
def _vector(x_ptr, at, live):
    return tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _vectors(x_ptrs, at, live, N: tl.constexpr):
    b_v = ()
    for i in tl.static_range(N):
        b_v = b_v + (_vector(x_ptrs[i], at, live),)
    return b_v


@triton.jit
def _prepared(
    b_s, w1_ptr, bias_ptr, b_w2, c, live, key_eps, per_root,
    C: tl.constexpr, N: tl.constexpr, COMPETITIVE: tl.constexpr,
):  # fmt: skip
    """β_i, w2·s_i, and s_i·s_j as ‖s_0‖² … ‖s_n‖², s_0·s_1, s_0·s_2 …"""
    bias = ()
    for i in tl.static_range(N):
        bias = bias + (tl.load(bias_ptr + COMPETITIVE + i).to(tl.float32),)
    forget = tl.load(bias_ptr).to(tl.float32)
    b_w1 = _vector(w1_ptr, c, live)
    # the products w1·s_i, w2·s_i, ‖s_i‖² and s_i·s_j
    by_w1, by_w2, squares, others = (), (), (), ()
    for i in tl.static_range(N):
        by_w1, by_w2, squares = by_w1 + (b_s[i] * b_w1,), by_w2 + (b_s[i] * b_w2,), squares + (b_s[i] * b_s[i],)
        for j in tl.static_range(i + 1, N):
            others = others + (b_s[i] * b_s[j],)
    sums = _sums_by_18(by_w1 + by_w2 + squares + others, N * (N + 5) // 2)

    # z_i = w1 · RMS(s_i)/√C + b_i, and the gates' softmax
    z, top = (), forget
    for i in tl.static_range(N):
        z = z + (sums[i] * tl.rsqrt(sums[2 * N + i] / C + key_eps) * per_root + bias[i],)
        top = tl.maximum(top, z[i])
    total = tl.exp(forget - top)
    for i in tl.static_range(N):
        total += tl.exp(z[i] - top)
    # β_i
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
def _pool_score(i: tl.constexpr, beta, s2, products, sums, key_eps, per_root, C: tl.constexpr, N: tl.constexpr):
    """w2 · RMS(s'_i)/√C of s'_i = (1 − β_i) s_i + β_i f; `sums` are s_i·f, ‖f‖², w2·f."""
    keep = 1 - beta[i]
    squared = keep * keep * products[i] + 2 * beta[i] * keep * sums[i] + beta[i] * beta[i] * sums[N]
    rstd = tl.rsqrt(tl.maximum(squared, 0.0) / C + key_eps)
    return (keep * s2[i] + beta[i] * sums[N + 1]) * rstd * per_root


@triton.jit
def _softmax(z, N: tl.constexpr):
    """The weights of N scores. The first is not −∞."""
    top = z[0]
    for i in tl.static_range(1, N):
        top = tl.maximum(top, z[i])
    e, total = (), top * 0
    for i in tl.static_range(N):
        e = e + (tl.exp(z[i] - top),)
        total += e[i]
    weights = ()
    for i in tl.static_range(N):
        weights = weights + (e[i] / total,)
    return weights


@triton.jit
def _squared_norm(a, beta, products, sums, N: tl.constexpr):
    """‖h‖² = Σ_ij c_i c_j s_i·s_j + 2d Σ c_i s_i·f + d² ‖f‖² with c_i = a_i (1 − β_i), d = Σ a_i β_i.

    Returns it, and the sum of its squared terms.
    """
    d = a[0] * beta[0]
    for i in tl.static_range(1, N):
        d += a[i] * beta[i]
    parts = d * d * sums[N]
    mixed = d * 0
    for i in tl.static_range(N):
        weight = a[i] * (1 - beta[i])
        parts += weight * weight * products[i]
        across = d * sums[i]
        for j in tl.static_range(i + 1, N):
            across += a[j] * (1 - beta[j]) * products[N + i * (2 * N - i - 1) // 2 + j - i - 1]
        mixed += weight * across
    return parts + 2 * mixed, parts
