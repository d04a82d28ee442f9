"""Routing of tokens to experts, without atomics: the same input gives the same bits and the same order of slots.

Three kernels: `route_kernel` computes the logits, scores and choices of a block of tokens, and counts its choices;
`scan_kernel` sums the counts of all earlier blocks; `place_kernel` then computes each slot's place. A token chooses an
expert at most once, so a slot's place in its block is the number of earlier tokens with the same choice.
E experts take WIDE lanes, a power of two. 40 µs forward and 58 backward at 32,768 tokens (docs/results/mixtures.md);
the gain over plain PyTorch is not measured alone (`residua bench ops route --implementations fused,reference`).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
"""Below any score, but above what is excluded: a NaN ranks here, so that every choice is an expert."""


@triton.jit
def _split(b_v):
    """A float32 block as the sum of three bfloat16 ones, exact to float32's precision."""
    b_high = b_v.to(tl.bfloat16)
    b_rest = b_v - b_high.to(tl.float32)
    b_middle = b_rest.to(tl.bfloat16)
    return b_high, b_middle, (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot_exact(b_x, b_w, b_sum):
    """b_sum + b_x b_w, with b_w in float32: x's products with three bfloat16 parts of w, or in float32."""
    if b_x.dtype == tl.bfloat16:
        b_high, b_middle, b_low = _split(b_w)
        b_sum = tl.dot(b_x, b_low, b_sum)
        b_sum = tl.dot(b_x, b_middle, b_sum)
        return tl.dot(b_x, b_high, b_sum)
    else:
        return tl.dot(b_x, b_w, b_sum, input_precision="ieee")


@triton.jit
def _scores(b_l, present, SIGMOID: tl.constexpr):
    """Scores, probabilities, softmax (all [TOKENS, WIDE]) and log-sum-exp [TOKENS] of the logits."""
    b_l = tl.where(present, b_l, -float("inf"))
    b_top = tl.max(b_l, 1)
    b_e = tl.exp(b_l - b_top[:, None])
    b_total = tl.sum(b_e, 1)
    b_soft = b_e / b_total[:, None]
    b_lse = b_top + tl.log(b_total)
    if SIGMOID:
        b_s = tl.where(present, tl.sigmoid(b_l), 0.0)
        return b_s, b_s / tl.sum(b_s, 1)[:, None], b_soft, b_lse
    else:
        return b_soft, b_soft, b_soft, b_lse


@triton.jit
def route_kernel(
    x_ptr, weight_ptr, bias_ptr, logits_ptr, weights_ptr, chosen_ptr, counts_ptr, sums_ptr, squares_ptr, tokens, scale,
    C: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    BIASED: tl.constexpr, NORMALIZED: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Logits [N, E], weights and choices [N, k]; of a block, its choices and Σ probability [E] and Σ lse²."""
    block = tl.program_id(0)
    t, e = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDE)
    here, present = t < tokens, (e < E)[None, :]
    # l = W x
    b_l = tl.zeros([TOKENS, WIDE], tl.float32)
    for c0 in range(0, C, DEPTH):
        c = c0 + tl.arange(0, DEPTH)
        b_x = tl.load(
            x_ptr + t.to(tl.int64)[:, None] * C + c[None, :], mask=here[:, None] & (c < C)[None, :], other=0.0
        )
        b_w = tl.load(weight_ptr + e[None, :] * C + c[:, None], mask=present & (c < C)[:, None], other=0.0)
        b_l = _dot_exact(b_x, b_w.to(tl.float32), b_l)
    at = t[:, None] * E + e[None, :]
    tl.store(logits_ptr + at, b_l, mask=here[:, None] & present)
    b_s, b_p, _, b_lse = _scores(b_l, present, SIGMOID)
    # the CHOICES largest of s + bias, in turn; of equal ones the first
    b_rank = b_s
    if BIASED:
        b_rank += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    b_rank = tl.where(present, tl.where(b_rank > LOWEST, b_rank, LOWEST), -float("inf"))
    b_taken = tl.zeros([TOKENS, WIDE], tl.int32)
    b_norm, b_own = tl.zeros([TOKENS], tl.float32), ()
    for j in tl.static_range(CHOICES):
        b_best = tl.max(b_rank, 1)
        b_e = tl.min(tl.where(b_rank == b_best[:, None], e[None, :], WIDE), 1)
        picked = e[None, :] == b_e[:, None]
        tl.store(chosen_ptr + t * CHOICES + j, b_e, mask=here)
        b_w = tl.sum(tl.where(picked, b_s, 0.0), 1)
        b_norm, b_own = b_norm + b_w, b_own + (b_w,)
        b_taken += picked.to(tl.int32)
        b_rank = tl.where(picked, -float("inf"), b_rank)
    # w_e = scale · s_e / Σ s_j
    for j in tl.static_range(CHOICES):
        b_w = b_own[j] / b_norm if NORMALIZED else b_own[j]
        tl.store(weights_ptr + t * CHOICES + j, b_w * scale, mask=here)
    # sums over the block
    inside = here[:, None] & present
    tl.store(counts_ptr + block * E + e, tl.sum(tl.where(inside, b_taken, 0), 0), mask=e < E)
    tl.store(sums_ptr + block * E + e, tl.sum(tl.where(inside, b_p, 0.0), 0), mask=e < E)
    tl.store(squares_ptr + block, tl.sum(tl.where(here, b_lse * b_lse, 0.0), 0))


@triton.jit
def scan_kernel(
    counts_ptr, sums_ptr, squares_ptr, before_ptr, totals_ptr, load_ptr, probability_ptr, z_ptr, blocks, tokens,
    E: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """before [blocks, E]: the choices of an expert in earlier blocks; totals [E], load [E], probability [E] and z."""
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    b_total, b_sum = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.float32)
    b_z = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        b = first + tl.arange(0, BLOCK)
        inside = (b < blocks)[:, None] & (e < E)[None, :]
        at = b[:, None] * E + e[None, :]
        b_count = tl.load(counts_ptr + at, mask=inside, other=0)
        tl.store(before_ptr + at, b_total[None, :] + tl.cumsum(b_count, 0) - b_count, mask=inside)
        b_total += tl.sum(b_count, 0)
        b_sum += tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0), 0)
        b_z += tl.load(squares_ptr + b, mask=b < blocks, other=0.0)
    tl.store(totals_ptr + e, b_total, mask=e < E)
    tl.store(load_ptr + e, b_total.to(tl.float32) / (tokens * CHOICES), mask=e < E)
    tl.store(probability_ptr + e, b_sum / tokens, mask=e < E)
    if tl.program_id(0) == 0:
        tl.store(z_ptr, tl.sum(b_z, 0) / tokens)


@triton.jit
def place_kernel(
    chosen_ptr, before_ptr, totals_ptr, order_ptr, ends_ptr, tokens,
    E: tl.constexpr, WIDE: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """order [N·k] of a block's slots, and ends [E]."""
    block = tl.program_id(0)
    t, e = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDE)
    here = t < tokens
    b_total = tl.load(totals_ptr + e, mask=e < E, other=0)
    b_end = tl.cumsum(b_total, 0)
    if block == 0:
        tl.store(ends_ptr + e, b_end, mask=e < E)
    # the place of an expert's first row of this block, then that of each token's row
    b_first = b_end - b_total + tl.load(before_ptr + block * E + e, mask=e < E, other=0)
    b_taken = tl.zeros([TOKENS, WIDE], tl.int32)
    for j in tl.static_range(CHOICES):
        b_e = tl.load(chosen_ptr + t * CHOICES + j, mask=here, other=-1)
        b_taken += (e[None, :] == b_e[:, None]).to(tl.int32)
    b_place = b_first[None, :] + tl.cumsum(b_taken, 0) - b_taken
    for j in tl.static_range(CHOICES):
        b_e = tl.load(chosen_ptr + t * CHOICES + j, mask=here, other=-1)
        b_row = tl.sum(tl.where(e[None, :] == b_e[:, None], b_place, 0), 1)
        tl.store(order_ptr + b_row, t * CHOICES + j, mask=here)


@triton.jit
def backward_kernel(
    g_weights_ptr, g_probability_ptr, g_z_ptr, x_ptr, weight_ptr, logits_ptr, chosen_ptr, g_x_ptr, partial_ptr,
    tokens, share, scale,
    C: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of g_x = Wᵀ g_l and of g_W = Σ g_l xᵀ, over `share` tokens.

    With T the chosen, S = Σ_T s and N tokens, the gradient of the scores is, through the weights,

        g_s = scale (g_w − Σ_T g_w s / S) / S on T,   or scale · g_w if not normalised,

    plus that of the probabilities, g_P / N. Softmax: g_l = s ⊙ (g_s − Σ s g_s); sigmoid: g_l = g_s ⊙ s ⊙ (1 − s).
    The z-term adds 2 g_z lse softmax(l) / N.
    """
    e, c = tl.arange(0, WIDE), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    present, columns = (e < E)[None, :], (c < C)[None, :]
    b_w = tl.load(weight_ptr + e[:, None] * C + c[None, :], mask=(e < E)[:, None] & columns, other=0.0).to(tl.float32)
    b_g_p = tl.load(g_probability_ptr + e, mask=e < E, other=0.0)[None, :] / tokens
    g_z = tl.load(g_z_ptr) / tokens
    b_g_w = tl.zeros([WIDE, COLUMNS], tl.float32)
    first = tl.program_id(0) * share
    for start in range(first, tl.minimum(first + share, tokens), TOKENS):
        t = start + tl.arange(0, TOKENS)
        here = (t < tokens)[:, None]
        b_l = tl.load(logits_ptr + t[:, None] * E + e[None, :], mask=here & present, other=0.0)
        b_s, b_p, b_soft, b_lse = _scores(b_l, present, SIGMOID)
        # g_s through the weights
        b_g, b_taken = tl.zeros([TOKENS, WIDE], tl.float32), tl.zeros([TOKENS, WIDE], tl.int32)
        for j in tl.static_range(CHOICES):
            b_e = tl.load(chosen_ptr + t * CHOICES + j, mask=t < tokens, other=-1)
            b_g_j = tl.load(g_weights_ptr + t * CHOICES + j, mask=t < tokens, other=0.0)
            picked = e[None, :] == b_e[:, None]
            b_g += tl.where(picked, b_g_j[:, None] * scale, 0.0)
            b_taken += picked.to(tl.int32)
        if NORMALIZED:
            b_own = tl.where(b_taken > 0, b_s, 0.0)
            b_norm = tl.where(here, tl.sum(b_own, 1)[:, None], 1.0)
            b_g = tl.where(b_taken > 0, (b_g - tl.sum(b_g * b_own, 1)[:, None] / b_norm) / b_norm, 0.0)
        # g_l
        if SIGMOID:
            b_g += (b_g_p - tl.sum(b_g_p * b_p, 1)[:, None]) / tl.sum(b_s, 1)[:, None]
            b_g_l = b_g * b_s * (1 - b_s)
        else:
            b_g += b_g_p
            b_g_l = b_s * (b_g - tl.sum(b_s * b_g, 1)[:, None])
        b_g_l += 2 * g_z * b_lse[:, None] * b_soft
        b_g_l = tl.where(here & present, b_g_l, 0.0)
        # g_x = Wᵀ g_l, g_W += g_l xᵀ
        at = t.to(tl.int64)[:, None] * C + c[None, :]
        b_x = tl.load(x_ptr + at, mask=here & columns, other=0.0)
        if b_x.dtype == tl.bfloat16:
            b_high, b_low, _ = _split(b_g_l)
            b_w_high, b_w_low, _ = _split(b_w)
            b_g_x = tl.dot(b_high, b_w_high, tl.dot(b_high, b_w_low, tl.dot(b_low, b_w_high)))
            b_g_w = tl.dot(b_low.T, b_x, tl.dot(b_high.T, b_x, b_g_w))
        else:
            b_g_x = tl.dot(b_g_l, b_w, input_precision="ieee")
            b_g_w = tl.dot(b_g_l.T, b_x, b_g_w, input_precision="ieee")
        tl.store(g_x_ptr + at, b_g_x.to(g_x_ptr.dtype.element_ty), mask=here & columns)
    at = tl.program_id(0).to(tl.int64) * (E * C) + e[:, None] * C + c[None, :]
    tl.store(partial_ptr + at, b_g_w, mask=(e < E)[:, None] & columns)
