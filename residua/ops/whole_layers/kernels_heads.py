"""Triton kernels of whole layers: heads mixed with anchors, normed and rotated; and the gates of what they make.

Ŝ = λ1 γ1 ⊙ S_anc + λ2 γ2 ⊙ S for each S of queries, keys, values and gate, as in `model/anchors.py`. A layer's mixing
is λ1 and λ2 of all channels, in the projection's order, and where there are γ, W2 and b: a row for each γ.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.inference.kernels_sublayers import activation
from residua.ops.whole_layers.kernels_gates import _sums_by_6, _vector


@triton.jit
def anchored(anchor_ptr, mixing_ptr, c, known, live, WIDTH: tl.constexpr):
    """λ1 ⊙ S_anc and λ2 of the channels c, of WIDTH in all."""
    b_anchor = _vector(anchor_ptr, c, known)
    b_anchor *= tl.load(mixing_ptr + c, mask=live, other=0.0)
    return b_anchor, tl.load(mixing_ptr + WIDTH + c, mask=live, other=0.0)


@triton.jit
def _other_half(d, D: tl.constexpr):
    return tl.where(d < D // 2, d + D // 2, d - D // 2)


@triton.jit
def half_mixtures(
    anchor_ptr, mixing_ptr, first, D: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """`anchored` of a head [LANES] that begins at channel `first`, and of its halves exchanged."""
    d = tl.arange(0, LANES)
    own = anchored(anchor_ptr, mixing_ptr, first + d, d < D, d < D, WIDTH)
    return own + anchored(anchor_ptr, mixing_ptr, first + _other_half(d, D), d < D, d < D, WIDTH)


@triton.jit
def scaled(mixtures, first, second):
    """`half_mixtures` with λ1 γ1 and λ2 γ2."""
    return mixtures[0] * first, mixtures[1] * second, mixtures[2] * first, mixtures[3] * second


@triton.jit
def turned(
    x_ptr, mixtures, gain_ptr, cos_ptr, sin_ptr, eps, D: tl.constexpr, LANES: tl.constexpr, NORM: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """A head [LANES]: mixed, gain ⊙ RMS(x), then rotated."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, LANES)
    live, low = d < D, d < HALF
    other, angle = _other_half(d, D), tl.where(low, d, d - HALF)
    b_x = tl.load(x_ptr + d, mask=live, other=0.0).to(tl.float32)
    b_y = tl.load(x_ptr + other, mask=live, other=0.0).to(tl.float32)
    if MIXED:
        b_x, b_y = mixtures[0] + mixtures[1] * b_x, mixtures[2] + mixtures[3] * b_y
    if NORM:
        rstd = tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
        b_x = b_x * rstd * tl.load(gain_ptr + d, mask=live, other=0.0)
        b_y = b_y * rstd * tl.load(gain_ptr + other, mask=live, other=0.0)
    b_cos = tl.load(cos_ptr + angle, mask=live, other=0.0)
    b_sin = tl.load(sin_ptr + angle, mask=live, other=0.0)
    return b_x * b_cos + tl.where(low, -b_y, b_y) * b_sin


@triton.jit
def network(network_ptr, FIRST: tl.constexpr, COUNT: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr):
    """COUNT rows of W2 and b from row FIRST on, for `factors`; there before the projection is."""
    e, b_w, bias = tl.arange(0, LANES), (), ()
    for i in tl.static_range(FIRST, FIRST + COUNT):
        b_w = b_w + (_vector(network_ptr + i * (E + 1), e, e < E),)
        bias = bias + (tl.load(network_ptr + i * (E + 1) + E),)
    return b_w, bias


@triton.jit
def factors(hidden_ptr, b_network, COUNT: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr):
    """γ = σ(GELU(h) W2 + b) of the rows that `network` has."""
    e, b_products, made = tl.arange(0, LANES), (), ()
    b_hidden = activation(_vector(hidden_ptr, e, e < E), "gelu")
    for i in tl.static_range(COUNT):
        b_products = b_products + (b_hidden * b_network[0][i],)
    sums = _sums_by_6(b_products, COUNT)
    for i in tl.static_range(COUNT):
        made = made + (tl.sigmoid(sums[i] + b_network[1][i]),)
    return made


@triton.jit
def gates(
    projected_ptr, anchor_ptr, mixing_ptr, layer, m, HEADS: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr,
    GATE: tl.constexpr, E: tl.constexpr, LANES_E: tl.constexpr, MIXED: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """σ(G) of the heads of row m, as lines [LINE]. Channels of the gate, GATE for a head, begin at FIRST."""
    HEADED: tl.constexpr = FIRST + HEADS * GATE
    row_ptr, b_gates = projected_ptr + m * (HEADED + E), ()
    own_mixing_ptr = mixing_ptr + layer * (2 * HEADED + 8 * (E + 1) * (E > 0))
    if E:
        g = factors(row_ptr + HEADED, network(own_mixing_ptr + 2 * HEADED, 6, 2, E, LANES_E), 2, E, LANES_E)
    for piece in tl.static_range((HEADS * D + LINE - 1) // LINE):
        c = piece * LINE + tl.arange(0, LINE)
        live, channel = c < HEADS * D, FIRST + (c if GATE == D else c // D)
        b_g = _vector(row_ptr, channel, live)
        if MIXED:
            b_anchor, b_own = anchored(anchor_ptr + m * HEADED, own_mixing_ptr, channel, live, live, HEADED)
            if E:
                b_anchor, b_own = b_anchor * g[0], b_own * g[1]
            b_g = b_anchor + b_own * b_g
        b_gates = b_gates + (tl.sigmoid(b_g),)
    return b_gates


@triton.jit
def gated(b_x, b_gates, m, M: tl.constexpr, LINES: tl.constexpr):
    """The heads' outputs of row m times its gates, of those of M rows."""
    b_y = ()
    for piece in tl.static_range(LINES):
        b_g = b_gates[0][piece]
        for r in tl.static_range(1, M):
            b_g = tl.where(m == r, b_gates[r][piece], b_g)
        b_y = b_y + (b_x[piece] * b_g,)
    return b_y
