"""The cross-entropy of a head in FP8: logits and the gradient of hidden multiply codes, as in `fp8_linear`.

With p, w, c as in `launch.py`, t a token's target and Q as in `low_precision/product.py`:

    logits = Q(x) Q(W)ᵀ     dx = c (P(p₋) + (p_t − 1/w) e_t) Q(W)     dW = (c (p − e_t / w))ᵀ x

p₋ is p without p_t, and P rounds to E5M2 under the fixed scale 2⁻¹⁵: probabilities are at most 1, so no range is
measured, and the pass that computes them also encodes them. E4M3 has one bit more, but under a fixed scale it rounds
p < 2⁻¹⁴ coarsely and drops p < 2⁻¹⁸, thus much of a vocabulary's tail. If rows of W share a direction, dx gets an error
as large as the lost mass (docs/lab/kernels.md). E5M2 keeps its precision down to 2⁻²⁹.

The target's entry is about as large as all others together, so its rounding would be most of the error. It multiplies
its row of Q(W) exactly instead, one row per token. That row is the rounded one: where p_t is 1, dx must be 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops._runtime.numeric import working_dtype
from residua.ops.fp8_codes import encode_values
from residua.ops.linear_cross_entropy.launch import fp8_forward
from residua.ops.low_precision.fp8 import EncodedWeight, Scales, encode_weight, largest_of, scale_of
from residua.ops.low_precision.product import Multiply, note_learning, on_hardware, simulated


def fp8_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, scales: Scales, multiply: Multiply = simulated, *,
    z_loss: float = 0.0, ignore_index: int = -100, delayed: bool = True, encoded: EncodedWeight | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`training_cross_entropy` of a head in FP8. With gradients on, records the magnitude of hidden.

    `delayed` and `encoded` are those of `fp8_linear`. Products on hardware need V and C to be multiples of 16.
    """
    codes, turned, scale = encode_weight(weight) if encoded is None else encoded
    rows = hidden.to(working_dtype(hidden)).reshape(-1, hidden.shape[-1])
    scale_x = scales.x if delayed else scale_of(largest_of(rows))
    low, largest = encode_values(rows.detach(), scale_x)
    note_learning(largest, scales.seen_x)
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if turned is None:
        turned = codes.t().contiguous() if trains else codes
    loss, z, *_ = fp8_forward(
        rows, weight, low, scale_x, codes, turned, scale, targets.reshape(-1), z_loss, ignore_index, trains,
        multiply is on_hardware,
    )  # fmt: skip
    return loss, z
