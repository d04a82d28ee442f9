"""The softmax of a block of logits, in place, in one read from memory and one write; also its FP8 codes."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.fp8_codes.kernels import on_grid

LOG2E = tl.constexpr(1.4426950408889634)
# Far below any logit, but finite: −inf minus −inf would be NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def softmax_kernel(
    logits_ptr, codes_ptr, targets_ptr, lse_ptr, nll_ptr, vocabulary, stride_t, ignored,
    WRITE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, ENCODE: tl.constexpr, STEPWISE: tl.constexpr,
):  # fmt: skip
    """One token: lse and −log p(target), and with WRITE the probabilities over the logits.

    ENCODE, unless 0: then also the E5M2 codes of ENCODE · p, but 0 for the target (STEPWISE: as in `values_kernel`).

    Each lane keeps its own running maximum and sum, and takes ROWS logits at a time, so a row costs
    (ROWS + 1)/ROWS exponentials per logit and one reduction across lanes. The second read finds the row in L2.
    """
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride_t
    offsets = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]

    # running maximum and Σ exp of each lane, in base 2
    b_top = tl.full([LANES], LOWEST, tl.float32)
    b_total = tl.zeros([LANES], tl.float32)
    for start in range(0, vocabulary, ROWS * LANES):
        mask = start + offsets < vocabulary
        b_x = tl.load(row_ptr + start + offsets, mask=mask, other=-float("inf")).to(tl.float32) * LOG2E
        b_higher = tl.maximum(b_top, tl.max(b_x, axis=0))
        b_total = b_total * tl.exp2(b_top - b_higher) + tl.sum(tl.exp2(b_x - b_higher[None, :]), axis=0)
        b_top = b_higher
    # lse over all lanes
    highest = tl.max(b_top, axis=0)
    log2_sum = highest + tl.log2(tl.sum(b_total * tl.exp2(b_top - highest), axis=0))

    # −log p(target) = lse − logit_target
    target = tl.load(targets_ptr + token)
    counted = target != ignored
    picked = tl.load(row_ptr + tl.where(counted, target, 0)).to(tl.float32) * LOG2E
    tl.store(lse_ptr + token, log2_sum / LOG2E)
    tl.store(nll_ptr + token, tl.where(counted, (log2_sum - picked) / LOG2E, 0.0))

    if WRITE:
        # p = exp(logit − lse), in place. The barrier: every warp has read the target's logit before one overwrites it.
        tl.debug_barrier()
        for start in range(0, vocabulary, ROWS * LANES):
            mask = start + offsets < vocabulary
            b_x = tl.load(row_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32) * LOG2E
            b_p = tl.exp2(b_x - log2_sum).to(logits_ptr.dtype.element_ty)
            tl.store(row_ptr + start + offsets, b_p, mask=mask)
            if ENCODE:
                b_p = tl.where(start + offsets == target, 0.0, b_p.to(tl.float32) * ENCODE)
                if STEPWISE:
                    b_p = on_grid(b_p, 2, 2.0**-14)
                # 8 at a time as for the logits, not 16, so that no value changes threads
                at = tl.max_contiguous(start + offsets, [1, 8])
                tl.store(codes_ptr + token * vocabulary + at, b_p.to(codes_ptr.dtype.element_ty), mask=mask)
