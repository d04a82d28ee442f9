"""Short convolution, fused: operators, tile sizes, launches and gradients.

Backward needs the projection and the weight. The operator takes the whole projection and passes the gate's columns on,
so that the projection's gradient is written in one piece; splitting would require a concatenation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, dense_last, dense_like, sum_rows
from residua.ops._runtime.library import launcher
from residua.ops._runtime.numeric import begins as begin_documents
from residua.ops._runtime.tracing import differentiable

kernels = Kernels("residua.ops.short_convolution.kernels")


class TilePlan(NamedTuple):
    rows: int
    """Tokens per part."""
    warps: int
    parts: int = 1
    """Parts per program."""
    unroll: int = 0

    def settings(self) -> dict[str, int]:
        walk = {"PARTS": self.parts, "UNROLL": self.unroll} if self.unroll else {}
        return {"ROWS": self.rows, "num_warps": self.warps, **walk}

    def tiles(self, length: int) -> int:
        return cdiv(length, self.rows * self.parts)


FORWARD, BACKWARD = TilePlan(32, 4), TilePlan(32, 1, 2, 2)


class Sizes(NamedTuple):
    batch: int
    length: int
    taps: int
    key_heads: int
    value_heads: int
    width: int

    @classmethod
    def of(cls, projected: Tensor, weight: Tensor, key_heads: int, value_heads: int) -> Sizes:
        taps, channels = weight.shape
        batch, length, _ = projected.shape
        return cls(batch, length, taps, key_heads, value_heads, channels // (2 * key_heads + value_heads))

    @property
    def heads(self) -> int:
        return 2 * self.key_heads + self.value_heads

    def arguments(self, projected: Tensor, tiling: TilePlan) -> tuple[int, ...]:
        return self.length, tiling.tiles(self.length), self.heads, self.key_heads, *projected.stride()[:2]

    def programs(self, tiling: TilePlan) -> tuple[int]:
        return (self.batch * tiling.tiles(self.length) * self.heads,)


def empty_heads(projected: Tensor, weight: Tensor, key_heads: int, value_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty q, k and v for `launch_forward` to fill."""
    s = Sizes.of(projected, weight, key_heads, value_heads)
    q, k, v = (projected.new_empty((s.batch, s.length, n, s.width)) for n in (key_heads, key_heads, value_heads))
    return q, k, v


@launcher("convolve_heads")
def forward(
    projected: Tensor, weight: Tensor, begins: Tensor | None, key_heads: int, value_heads: int, eps: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v from the first columns of the projection; begins [B, T] is uint8."""
    outputs = empty_heads(projected, weight, key_heads, value_heads)
    yield outputs
    launch_forward(projected, weight, begins, eps, *outputs)


def launch_forward(
    projected: Tensor, weight: Tensor, begins: Tensor | None, eps: float, q: Tensor, k: Tensor, v: Tensor
) -> None:
    s, x = Sizes.of(projected, weight, k.shape[2], v.shape[2]), dense_last(projected)
    kernels.forward_kernel[s.programs(FORWARD)](
        x, weight.contiguous(), x if begins is None else begins.contiguous(), q, k, v, *s.arguments(x, FORWARD),
        eps, **_constants(s, begins), **FORWARD.settings(),
    )  # fmt: skip


@launcher("convolve_heads_backward")
def backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dz: Tensor, projected: Tensor, weight: Tensor, begins: Tensor | None, eps: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of the projection, in one piece with the gate's, and of the weight."""
    d_projected, d_weight = dense_like(projected), dense_like(weight, torch.float32)
    yield d_projected, d_weight
    d_projected[..., weight.shape[1] :] = dz.flatten(2)
    launch_backward(dq, dk, dv, projected, weight, begins, eps, dk.shape[2], d_projected, d_weight)


def launch_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, projected: Tensor, weight: Tensor, begins: Tensor | None, eps: float,
    key_heads: int, d_projected: Tensor, d_weight: Tensor,
) -> None:  # fmt: skip
    """Write d_weight and all of d_projected but the gate's columns. dq and dk may have more heads than q and k."""
    s, x = Sizes.of(projected, weight, key_heads, dv.shape[2]), dense_last(projected)
    partial = d_weight.new_empty((s.batch * BACKWARD.tiles(s.length), weight.numel()))
    kernels.backward_kernel[s.programs(BACKWARD)](
        x, weight.contiguous(), x if begins is None else begins.contiguous(),
        dq.contiguous(), dk.contiguous(), dv.contiguous(), d_projected, partial, *s.arguments(x, BACKWARD),
        *d_projected.stride()[:2], eps, GROUP=dk.shape[2] // key_heads, **_constants(s, begins),
        **BACKWARD.settings(),
    )  # fmt: skip
    sum_rows(partial, d_weight)


def _constants(s: Sizes, begins: Tensor | None) -> dict[str, Any]:
    return {"D": s.width, "TAPS": s.taps, "DOCUMENTS": begins is not None}


def convolve_heads(
    projected: Tensor,
    weight: Tensor,
    key_heads: int,
    value_heads: int,
    *,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fused twin of `reference.convolve_heads`."""
    first = None if segments is None else begin_documents(projected, segments).to(torch.uint8)
    return _convolve_heads(projected, weight, first, key_heads, value_heads, eps)


def _convolve_heads_backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dz: Tensor) -> Sequence[Tensor]:
    projected, weight, first = ctx.saved_tensors
    d_projected, d_weight = backward(dq, dk, dv, dz, projected, weight, first, ctx.eps)
    return d_projected, d_weight.to(weight.dtype)


@differentiable(_convolve_heads_backward)
def _convolve_heads(
    ctx: Any, projected: Tensor, weight: Tensor, first: Tensor | None, key_heads: int, value_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ctx.save_for_backward(projected, weight, first)
    ctx.eps = eps
    q, k, v = forward(projected, weight, first, key_heads, value_heads, eps)
    z, width = projected[..., weight.shape[1] :], v.shape[-1]
    return q, k, v, z.unflatten(-1, (z.shape[-1] // width, width))
