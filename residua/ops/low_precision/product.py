"""Linear maps that train in low precision: y = x Wᵀ with rounded operands and straight-through gradients.

Q rounds to a number format. The gradients are those of the rounded products, as if Q were the identity.

**FP8**, one scale per tensor; the weight gradient stays in high precision:

    y = Q(x) Q(W)ᵀ        dx = Q'(g) Q(W)        dW = gᵀ x
    Q(x) = s E4M3(clamp(x / s, ±448)),   s = 2^⌈log₂(r / 448)⌉;   Q' is the same with E5M2 and 57,344

r is the tensor's expected largest magnitude, so that Q knows s (`Scales`) and reads the tensor once; W uses its actual
one, and is rounded once per step (`EncodedWeight`). Scaling by a power of two does not round. A clamped value is
finite; a plain cast to E5M2 would give infinity.

**NVFP4**, the recipe of arXiv 2509.25149; all three products are rounded:

    y = Q₁(x) Q₁₆(W)ᵀ     dx = Q̃₁(g) Q₁₆(W)     dW = Q̃₁((H g)ᵀ) Q₁((H x)ᵀ)ᵀ

Q₁ shares a scale between 16 values along the sum, Q₁₆ between 16 × 16 of them, so that W and Wᵀ are rounded alike. Q̃
rounds stochastically, which leaves gradients unbiased. H rotates blocks of 16 tokens by a random Hadamard matrix with
fixed signs; Hᵀ H = 1, so it only changes rounding.

Products are computed by `simulated`, or by `on_hardware` for FP8, which multiplies the codes themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops._runtime.numeric import no_autocast, working_dtype
from residua.ops.fp8_codes import encode_slopes, encode_squares, encode_values
from residua.ops.low_precision.fp8 import (
    E4M3,
    E5M2_MAX,
    Codes,
    EncodedWeight,
    Scales,
    encode_weight,
    largest_of,
    scale_of,
)
from residua.ops.low_precision.nvfp4 import GROUP, Nvfp4, encode_nvfp4

NEGATIVE = 0b1101_1000_1011_0010
"""Bits: columns of the Hadamard matrix with a negative sign; drawn once and the same everywhere, as in the paper."""


Multiply = Callable[[Codes, Codes, torch.dtype], Tensor]
"""a [M, K], b [N, K] → a bᵀ [M, N] in a dtype."""


def simulated(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """The product of the rounded values in single precision, as in hardware except for the order of the sum.

    For a result in bf16, the factors are in bf16 too, which holds every FP8 code times a power of two: its products are
    summed in float32, and on a GPU's matrix units.
    """
    kind = dtype if dtype is torch.bfloat16 else torch.float32
    with no_autocast(a.values):
        x, y = ((codes.values.float() * codes.scale).to(kind) for codes in (a, b))
        return (x @ y.t()).to(dtype)


def on_hardware(a: Codes, b: Codes, dtype: torch.dtype) -> Tensor:
    """The product of FP8 codes on matrix units; needs K and N to be multiples of 16."""
    quick = a.values.dtype is E4M3  # partial sums of gradients are added in float32
    return torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=quick
    )


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    multiply: Multiply = simulated,
    *,
    delayed: bool = True,
    encoded: EncodedWeight | None = None,
) -> Tensor:
    """y [..., N] for x [..., K] and weight [N, K] in FP8. With gradients on, records the magnitudes of x and g.

    Without `delayed`, x and g are rounded in their actual ranges, which takes another pass over them. `encoded` is the
    weight's encoding, if known.
    """
    encoded = encode_weight(weight) if encoded is None else encoded
    scale_x = scales.x if delayed else scale_of(largest_of(x))
    y, largest = _Fp8.apply(x, weight, *encoded, scale_x, scales.g, scales.seen_g, multiply, delayed)
    note_learning(largest, scales.seen_x)
    result: Tensor = y
    return result


def _note(largest: Tensor, seen: Tensor) -> None:
    """Update the largest magnitude seen, hidden from autograd's version counter: a product may run twice."""
    seen.data.copy_(torch.maximum(seen, largest))


def note_learning(largest: Tensor, seen: Tensor) -> None:
    """Update the largest magnitude seen, if gradients are on."""
    if torch.is_grad_enabled():
        _note(largest, seen)


class _Fp8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, codes: Tensor, turned: Tensor | None, scale: Tensor, scale_x: Tensor,
        scale_g: Tensor, seen_g: Tensor, multiply: Multiply, delayed: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype, rows = working_dtype(x), x.flatten(end_dim=-2)
        low, largest = encode_values(rows, scale_x)
        y = multiply(Codes(low, scale_x), Codes(codes, scale), dtype)
        ctx.save_for_backward(rows.to(dtype), codes if turned is None else turned, scale, scale_g, seen_g)
        ctx.multiply, ctx.delayed, ctx.is_turned = multiply, delayed, turned is not None
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype)
        ctx.mark_non_differentiable(largest)
        return y.view(*x.shape[:-1], weight.shape[0]), largest

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, codes, scale, scale_g, seen_g = ctx.saved_tensors
        g, (x_dtype, w_dtype) = dy.flatten(end_dim=-2), ctx.dtypes
        scale_g = scale_g if ctx.delayed else scale_of(largest_of(g), E5M2_MAX)
        low, largest = encode_values(g, scale_g, gradient=True)
        _note(largest, seen_g)
        turned = Codes(codes if ctx.is_turned else codes.t().contiguous(), scale)
        dx = ctx.multiply(Codes(low, scale_g), turned, g.dtype).view(ctx.shape).to(x_dtype)
        return dx, (g.t() @ x).to(w_dtype), *[None] * 8


class Operand(NamedTuple):
    """A weight of an FP8 product: the tensor that gets gradients, its codes, and the product's scales."""

    weight: Tensor
    encoded: EncodedWeight
    scales: Scales


def fp8_squared_relu(x: Tensor, entry: Operand, out: Operand, multiply: Multiply = simulated) -> Tensor:
    """y = W_out a, a = relu(W_in x)² for x [..., C]; a and its gradient are rounded as they are computed.

    Results equal those of two `fp8_linear` with `delayed` and `encoded`.
    """
    y, *largest = _Fp8SquaredRelu.apply(
        x, entry.weight, *entry.encoded, *entry.scales, out.weight, *out.encoded, *out.scales, multiply
    )
    for each, operand in zip(largest, (entry, out), strict=True):
        note_learning(each, operand.scales.seen_x)
    result: Tensor = y
    return result


class _Fp8SquaredRelu(torch.autograd.Function):
    """p = (Q'(g) Q(W_out)) ⊙ 2√a is the gradient of W_in x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        (w_in, *encoded_in), scales_in = given[:4], Scales(*given[4:8])
        (w_out, *encoded_out), scales_out, multiply = given[8:12], Scales(*given[12:16]), given[16]
        dtype, rows = working_dtype(x), x.flatten(end_dim=-2)
        entry, out = EncodedWeight(*encoded_in), EncodedWeight(*encoded_out)
        low_x, largest_x = encode_values(rows, scales_in.x)
        h = multiply(Codes(low_x, scales_in.x), Codes(entry.codes, entry.scale), dtype)
        a, low_a, largest_a = encode_squares(h, scales_out.x)
        y = multiply(Codes(low_a, scales_out.x), Codes(out.codes, out.scale), dtype)
        gradient = (scales_in.g, scales_in.seen_g, scales_out.g, scales_out.seen_g)
        ctx.save_for_backward(rows.to(dtype), a, entry.turned, entry.scale, out.turned, out.scale, *gradient)
        ctx.multiply, ctx.shape, ctx.dtypes = multiply, x.shape, (x.dtype, w_in.dtype, w_out.dtype)
        ctx.mark_non_differentiable(largest_x, largest_a)
        return y.view(*x.shape[:-1], w_out.shape[0]), largest_x, largest_a

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, a, entry, entry_scale, out, out_scale, scale_p, seen_p, scale_g, seen_g = ctx.saved_tensors
        g, (x_dtype, in_dtype, out_dtype) = dy.flatten(end_dim=-2), ctx.dtypes
        low_g, largest_g = encode_values(g, scale_g, gradient=True)
        g_a = ctx.multiply(Codes(low_g, scale_g), Codes(out, out_scale), g.dtype)
        p, low_p, largest_p = encode_slopes(g_a, a, scale_p)
        _note(largest_g, seen_g)
        _note(largest_p, seen_p)
        dx = ctx.multiply(Codes(low_p, scale_p), Codes(entry, entry_scale), g.dtype).view(ctx.shape).to(x_dtype)
        g_in, g_out = (p.t() @ x).to(in_dtype), (g.t() @ a).to(out_dtype)
        return dx, g_in, *[None] * 7, g_out, *[None] * 8


def nvfp4_linear(x: Tensor, weight: Tensor) -> Tensor:
    """y [..., N] for x [..., K] and weight [N, K] in simulated NVFP4; the backward pass draws random numbers."""
    y: Tensor = _Nvfp4.apply(x, weight)
    return y


class _Nvfp4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        dtype, rows = working_dtype(x), x.flatten(end_dim=-2)
        low, scale = _factors(weight, dtype, height=GROUP)
        with no_autocast(x):
            y = _product(_factors(rows, dtype), (low.t(), scale), dtype)
        ctx.save_for_backward(rows, weight)
        ctx.shape = x.shape
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g, dtype = dy.flatten(end_dim=-2).float(), dy.dtype
        dx = _product(_factors(g, dtype, torch.rand_like(g)), _factors(weight, dtype, height=GROUP), dtype)
        turned_g, turned_x = (rotate_tokens(t.float()).t() for t in (g, x))
        low, scale = _factors(turned_x, dtype)
        noise = torch.rand(turned_g.shape, device=g.device)
        dw = _product(_factors(turned_g, dtype, noise), (low.t(), scale), dtype)
        return dx.view(ctx.shape).to(x.dtype), dw.to(weight.dtype)


Factors = tuple[Tensor, Tensor | float]
"""x̂ as values · scale."""


def _factors(x: Tensor, dtype: torch.dtype, noise: Tensor | None = None, height: int = 1) -> Factors:
    """x̂ for a product in this dtype; for bf16, values that it holds exactly and a GPU's matrix units multiply."""
    low = _encode(x, noise, height)
    if dtype is not torch.bfloat16:
        return low.dequantize()[: x.shape[0]], 1.0
    return low.unscaled()[: x.shape[0]], 1 / low.global_scale


def _product(a: Factors, b: Factors, dtype: torch.dtype) -> Tensor:
    """a b; the sum of a product in bf16 is rounded before its scale is applied, and after."""
    result: Tensor = a[0] @ b[0] * (a[1] * b[1])
    return result.to(dtype)


def round_nvfp4_blocks(x: Tensor) -> Tensor:
    """x [R, C] rounded to NVFP4 under one second scale, in blocks of 1 × 16."""
    return _encode(x, None, 1).dequantize()


def _encode(x: Tensor, noise: Tensor | None, height: int) -> Nvfp4:
    """x in blocks of `height` × 16, its rows padded to whole ones; stochastically with `noise`."""
    return encode_nvfp4(pad(x, (0, 0, 0, -x.shape[0] % height)), "tensor", height=height, noise=noise)


def rotate_tokens(x: Tensor) -> Tensor:
    """H x for x [tokens, C]: each block of 16 tokens, padded with zeros, by the same orthogonal matrix."""
    blocks = pad(x, (0, 0, 0, -x.shape[0] % GROUP)).unflatten(0, (-1, GROUP))
    with no_autocast(x):
        return (hadamard(x) @ blocks).flatten(0, 1)


def hadamard(like: Tensor) -> Tensor:
    """[16, 16]: a Hadamard matrix over √16 with columns of random signs; its transpose is its inverse."""
    index = torch.arange(GROUP, device=like.device)
    common = index[:, None] & index
    bits = torch.stack([(common >> shift) & 1 for shift in range(GROUP.bit_length() - 1)]).sum(0)
    # by bits: a list of signs would be copied to the device, which a CUDA graph does not allow
    signs = 1 - 2 * ((NEGATIVE >> index) & 1)
    return ((1 - 2 * (bits % 2)) * signs).to(like.dtype) / GROUP**0.5
