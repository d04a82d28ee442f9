"""QK-norm and rotation in one pass over the heads: read x, write y; backward: read dy and x, write dx.

The table has a row for each position or, while decoding, for each token: `turns` rows, used over and over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
PROGRAMS = 2048  # bounds the partial sums of the gain's gradient; each program walks over many rows


@triton.jit
def _load_halves(pointer, base, lane, HALF: tl.constexpr, mask):
    first = tl.load(pointer + base[:, None] + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + base[:, None] + HALF + lane[None, :], mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _forward_kernel(
    x, weight, cos, sin, y, rows, length, turns, heads, sb, st, sh, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    mask = (row < rows)[:, None] & (lane < HALF)[None, :]
    position = (row // heads) % length
    base = row // (length * heads) * sb + position * st + row % heads * sh
    x1, x2 = _load_halves(x, base, lane, HALF, mask)
    w1 = tl.load(weight + lane, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    turn = ((row // heads) % turns)[:, None] * HALF + lane[None, :]
    c = tl.load(cos + turn, mask=mask, other=0.0)
    s = tl.load(sin + turn, mask=mask, other=0.0)
    rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
    n1, n2 = x1 * rstd * w1, x2 * rstd * w2
    out = y + row[:, None] * (2 * HALF) + lane[None, :]
    tl.store(out, (n1 * c - n2 * s).to(y.dtype.element_ty), mask=mask)
    tl.store(out + HALF, (n2 * c + n1 * s).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy, x, weight, cos, sin, dx, dweight, rows, length, turns, heads, sb, st, sh, gb, gt, gh, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With n = x·rstd: dw = Σ dz ⊙ n, dx = rstd (w ⊙ dz − n · mean(w ⊙ dz ⊙ n)), dz = dy turned back."""
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    w1 = tl.load(weight + lane, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    # summed over rows only at the end: a reduction across warps in every turn would cost more than the memory traffic
    dw1 = tl.zeros([ROWS, LANES], tl.float32)
    dw2 = tl.zeros([ROWS, LANES], tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (lane < HALF)[None, :]
        position = (row // heads) % length
        batch = row // (length * heads)
        x1, x2 = _load_halves(x, batch * sb + position * st + row % heads * sh, lane, HALF, mask)
        g1, g2 = _load_halves(dy, batch * gb + position * gt + row % heads * gh, lane, HALF, mask)
        turn = ((row // heads) % turns)[:, None] * HALF + lane[None, :]
        c = tl.load(cos + turn, mask=mask, other=0.0)
        s = tl.load(sin + turn, mask=mask, other=0.0)
        rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
        n1, n2 = x1 * rstd, x2 * rstd
        z1, z2 = g1 * c + g2 * s, g2 * c - g1 * s
        dw1 += z1 * n1
        dw2 += z2 * n2
        z1, z2 = z1 * w1, z2 * w2
        mean = ((tl.sum(z1 * n1, 1) + tl.sum(z2 * n2, 1)) / (2 * HALF))[:, None]
        out = dx + row[:, None] * (2 * HALF) + lane[None, :]
        tl.store(out, (rstd * (z1 - n1 * mean)).to(dx.dtype.element_ty), mask=mask)
        tl.store(out + HALF, (rstd * (z2 - n2 * mean)).to(dx.dtype.element_ty), mask=mask)
    partial = dweight + program * 2 * HALF + lane
    tl.store(partial, tl.sum(dw1, 0), mask=lane < HALF)
    tl.store(partial + HALF, tl.sum(dw2, 0), mask=lane < HALF)


@torch.library.custom_op("residua::norm_rotate", mutates_args=())
def _norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    x, (batch, length, heads, width) = _last_axis_dense(x), x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = batch * length * heads
    if rows:
        _forward_kernel[(triton.cdiv(rows, ROWS),)](
            x, weight, cos, sin, y, rows, length, cos.shape[:-1].numel(), heads, *x.stride()[:3], eps, **_shape(width)
        )  # fmt: skip
    return y


@_norm_rotate.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("residua::norm_rotate_backward", mutates_args=())
def _norm_rotate_backward(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dy, x, (batch, length, heads, width) = _last_axis_dense(dy), _last_axis_dense(x), x.shape
    rows = batch * length * heads
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    if rows:
        _backward_kernel[(programs,)](
            dy, x, weight, cos, sin, dx, partial, rows, length, cos.shape[:-1].numel(), heads,
            *x.stride()[:3], *dy.stride()[:3], eps, **_shape(width),
        )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


@_norm_rotate_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    dx, dweight = _norm_rotate_backward(dy, *ctx.saved_tensors, ctx.eps)
    return dx, dweight, None, None, None


_norm_rotate.register_autograd(_differentiate, setup_context=_save)


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The fused twin of `reference.norm_rotate`."""
    result: Tensor = _norm_rotate(x, weight, cos, sin, eps)
    return result


def _last_axis_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(width: int) -> dict[str, int]:
    half = width // 2
    return {"HALF": half, "LANES": triton.next_power_of_2(half), "ROWS": ROWS}
