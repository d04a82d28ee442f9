"""The softmax of a block of logits, in place, in one read from memory and one write."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops._runtime.launch import on

LOG2E = tl.constexpr(1.4426950408889634)
# Far below any logit, but finite: −inf minus −inf would be NaN.
LOWEST = tl.constexpr(-1.0e30)

LANES, ROWS, WARPS = 4096, 4, 16


@triton.jit
def _softmax_kernel(
    logits, targets, lse, nll, vocabulary, stride, ignored, WRITE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """One token: lse and −log p(target), and with WRITE the probabilities over the logits.

    Each lane keeps its own running maximum and sum, and takes ROWS logits at a time, so that the row costs
    (ROWS + 1)/ROWS exponentials per logit and one reduction across lanes. The second read finds the row in L2.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    offsets = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]

    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, vocabulary, ROWS * LANES):
        mask = start + offsets < vocabulary
        x = tl.load(row + start + offsets, mask=mask, other=-float("inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher[None, :]), axis=0)
        top = higher
    highest = tl.max(top, axis=0)
    log2_sum = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), axis=0))

    target = tl.load(targets + token)
    counted = target != ignored
    picked = tl.load(row + tl.where(counted, target, 0)).to(tl.float32) * LOG2E
    tl.store(lse + token, log2_sum / LOG2E)
    tl.store(nll + token, tl.where(counted, (log2_sum - picked) / LOG2E, 0.0))

    if WRITE:
        # every warp reads the target's logit, one of them writes over it
        tl.debug_barrier()
        for start in range(0, vocabulary, ROWS * LANES):
            mask = start + offsets < vocabulary
            x = tl.load(row + start + offsets, mask=mask, other=0.0).to(tl.float32) * LOG2E
            tl.store(row + start + offsets, tl.exp2(x - log2_sum).to(logits.dtype.element_ty), mask=mask)


def softmax_(logits: Tensor, targets: Tensor, ignore_index: int, write: bool) -> tuple[Tensor, Tensor]:
    """lse [N] and −log p(target) [N] (0 where ignored) in float32; with `write`, logits [N, V] become probabilities."""
    tokens, vocabulary = logits.shape
    lse = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    nll = torch.empty_like(lse)
    if tokens:
        with on(logits):
            _softmax_kernel[(tokens,)](
                logits,
                targets,
                lse,
                nll,
                vocabulary,
                logits.stride(0),
                ignore_index,
                WRITE=write,
                ROWS=ROWS,
                LANES=min(LANES, triton.next_power_of_2(vocabulary)),
                num_warps=WARPS,
            )
    return lse, nll
