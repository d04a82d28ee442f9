"""Triton kernels of whole layers: heads mixed with anchors, normed and rotated, and the gates on attention's output.

Ŝ = λ1 γ1 ⊙ S_anc + λ2 γ2 ⊙ S for each S of queries, keys, values and gate, as in `model/anchors.py`. A layer's mixing
is λ1 and λ2 of all channels, in the projection's order, and with dynamic λ also W2 and b, with a row for each γ.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.whole_layers.kernels_gates import _sums_by_6, _vector


@triton.jit
def anchored(anchor_ptr, mixing_ptr, c, known, live, WIDTH: tl.constexpr):
    """S_anc, λ1 and λ2 of the channels c, of WIDTH in all. They are loaded before a barrier, and used after it: even a
    cast would have warps wait for them here."""
    b_1, b_2 = tl.load(mixing_ptr + c, mask=live, other=0.0), tl.load(mixing_ptr + WIDTH + c, mask=live, other=0.0)
    return tl.load(anchor_ptr + c, mask=known, other=0.0), b_1, b_2


@triton.jit
def mixed(b_x, parts, first, second):
    """λ1 γ1 ⊙ S_anc + λ2 γ2 ⊙ S of what `anchored` has."""
    return parts[1] * first * parts[0].to(tl.float32) + parts[2] * second * b_x.to(tl.float32)


@triton.jit
def _other_half(d, D: tl.constexpr):
    return tl.where(d < D // 2, d + D // 2, d - D // 2)


@triton.jit
def anchored_halves(
    anchor_ptr, mixing_ptr, first, D: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """`anchored` of a head [LANES] that begins at channel `first`, and of its halves exchanged."""
    d = tl.arange(0, LANES)
    head = anchored(anchor_ptr, mixing_ptr, first + d, d < D, d < D, WIDTH)
    return head, anchored(anchor_ptr, mixing_ptr, first + _other_half(d, D), d < D, d < D, WIDTH)


@triton.jit
def turned(
    x_ptr, parts, first, second, gain_ptr, cos_ptr, sin_ptr, eps, D: tl.constexpr, LANES: tl.constexpr,
    NORM: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """A head [LANES]: mixed, gain ⊙ RMS(x), then rotated."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, LANES)
    live, low = d < D, d < HALF
    other, angle = _other_half(d, D), tl.where(low, d, d - HALF)
    b_x = tl.load(x_ptr + d, mask=live, other=0.0).to(tl.float32)
    b_y = tl.load(x_ptr + other, mask=live, other=0.0).to(tl.float32)
    if MIXED:
        b_x, b_y = mixed(b_x, parts[0], first, second), mixed(b_y, parts[1], first, second)
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
def _gamma(b_hidden, b_network, COUNT: tl.constexpr):
    """γ = σ(g W2 + b) of the rows that `network` has; g = GELU(h)."""
    b_products, b_gamma = (), ()
    for i in tl.static_range(COUNT):
        b_products = b_products + (b_hidden.to(tl.float32) * b_network[0][i],)
    sums = _sums_by_6(b_products, COUNT)
    for i in tl.static_range(COUNT):
        b_gamma = b_gamma + (tl.sigmoid(sums[i] + b_network[1][i]),)
    return b_gamma


@triton.jit
def factors(hidden_ptr, b_network, COUNT: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr):
    """`_gamma` of g in memory."""
    e = tl.arange(0, LANES)
    return _gamma(_vector(hidden_ptr, e, e < E), b_network, COUNT)


@triton.jit
def gate_parts(
    projected_ptr, anchor_ptr, mixing_ptr, layer, m, HEADS: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr,
    GATE: tl.constexpr, E: tl.constexpr, LANES_E: tl.constexpr, MIXED: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """The projected gates of row m and `anchored`, as lines [LINE]; and what γ needs. Heads have GATE channels each."""
    HEADED: tl.constexpr = FIRST + HEADS * GATE
    row_ptr, own_mixing_ptr = (
        projected_ptr + m * (HEADED + E),
        mixing_ptr + layer * (2 * HEADED + 8 * (E + 1) * (E > 0)),
    )
    b_g, anchors, of_gamma, e = (), (), (), tl.arange(0, LANES_E)
    for piece in tl.static_range((HEADS * D + LINE - 1) // LINE):
        c = piece * LINE + tl.arange(0, LINE)
        live, channel = c < HEADS * D, FIRST + (c if GATE == D else c // D)
        b_g = b_g + (tl.load(row_ptr + channel, mask=live, other=0.0),)
        if MIXED:
            anchors = anchors + (anchored(anchor_ptr + m * HEADED, own_mixing_ptr, channel, live, live, HEADED),)
    if E:
        b_hidden = tl.load(row_ptr + HEADED + e, mask=e < E, other=0.0)
        of_gamma = b_hidden, network(own_mixing_ptr + 2 * HEADED, 6, 2, E, LANES_E)
    return b_g, anchors, of_gamma


@triton.jit
def _gates(parts, E: tl.constexpr, MIXED: tl.constexpr, LINES: tl.constexpr):
    """σ(G), as lines."""
    b_gates, g = (), (1.0, 1.0)
    if E:
        g = _gamma(parts[2][0], parts[2][1], 2)
    for piece in tl.static_range(LINES):
        b_g = parts[0][piece]
        if MIXED:
            b_g = mixed(b_g, parts[1][piece], g[0], g[1])
        b_gates = b_gates + (tl.sigmoid(b_g.to(tl.float32)),)
    return b_gates


@triton.jit
def gated(b_x, parts, m, M: tl.constexpr, E: tl.constexpr, MIXED: tl.constexpr, LINES: tl.constexpr):
    """The heads' outputs of row m times its gates, where `parts` are those of all M rows."""
    b_gates, b_y = _gates(parts[0], E, MIXED, LINES), ()
    for r in tl.static_range(1, M):
        b_other, b_chosen = _gates(parts[r], E, MIXED, LINES), ()
        for piece in tl.static_range(LINES):
            b_chosen = b_chosen + (tl.where(m == r, b_other[piece], b_gates[piece]),)
        b_gates = b_chosen
    for piece in tl.static_range(LINES):
        b_y = b_y + (b_x[piece] * b_gates[piece],)
    return b_y
