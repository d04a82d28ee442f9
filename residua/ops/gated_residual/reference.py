"""Gated Residual in plain PyTorch (Qwen4-Exp in transformers; no paper)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu
from torch.utils.checkpoint import checkpoint

from residua.ops._runtime.numeric import ALIGNED, wide


def gated_residual(
    streams: Tensor,
    injection: Tensor,
    update: Tensor,
    gain: Tensor,
    down: Tensor,
    up: Tensor,
    inject: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """Write a sublayer's output into n streams, then read the next input and the next factors of the output.

        X'_i = X_i + inj_i y,   X̂_i = g_i ⊙ RMS(X'_i)
        h = mean_i( σ(W_up silu(W_down vec(X̂)/n))_i ⊙ X̂_i ),   inj' = 2σ(W_inj vec(X̂)/n)

    streams X [..., n, C], injection [..., n], update y [..., C]; gain g [n, C], down [r, nC], up [nC, r] and inject
    [n, nC], or None for no inj'. Returns h [..., C], X' [..., n, C] and, if there is `inject`, inj' [..., n].
    """
    X = (wide(streams) + injection[..., None] * wide(update)[..., None, :]).to(streams.dtype)
    h, *factors = read(X, gain, down, up, inject, eps=eps)
    return h, X, *factors


def read(
    X: Tensor, gain: Tensor, down: Tensor, up: Tensor, inject: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, ...]:
    """h and, if there is `inject`, inj' of streams as they are."""
    normed, projected = _project(X, gain, down, inject, eps)
    h = wide(normed * _scores(projected, X, up)).mean(-2).to(X.dtype)
    rank = len(down)
    return (h,) if inject is None else (h, 2 * torch.sigmoid(projected[..., rank : rank + len(gain)]))


def gates(X: Tensor, gain: Tensor, down: Tensor, up: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The normed streams X̂ and σ(W_up …), both [..., n, C]."""
    normed, projected = _project(X, gain, down, None, eps)
    return normed, _scores(projected, X, up)


def _project(X: Tensor, gain: Tensor, down: Tensor, inject: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """X̂ [..., n, C], and vec(X̂)/n times W_down and W_inj [..., r + n, zero-padded], the latter in float32.

    One product computes both from X: the maps absorb the gains, and a stream's 1/rms multiplies its part of the
    result. A compiled step then neither writes X̂ nor stores it for the backward pass.
    """
    x = wide(X)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    maps = down if inject is None else torch.cat([down, inject])
    maps = wide(pad(maps, (0, 0, 0, -len(maps) % ALIGNED))).unflatten(1, gain.shape)
    weight = (maps * wide(gain) / len(gain)).permute(1, 2, 0).to(X.dtype)  # [n, C, r + n, zero-padded]
    parts = wide(torch.bmm(X.flatten(0, -3).transpose(0, 1), weight))  # [n, tokens, r + n, zero-padded]
    projected = (parts * rstd.flatten(0, -3).transpose(0, 1)).sum(0)
    return (x * rstd * wide(gain)).to(X.dtype), projected.view(*X.shape[:-2], projected.shape[-1])


def _scores(projected: Tensor, X: Tensor, up: Tensor) -> Tensor:
    """σ(W_up silu(…)), in the shape of X.

    Compiled code computes it again in the backward pass: the scores would take as much memory as the streams.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return checkpoint(_gate, projected, X, up, use_reentrant=False)
    return _gate(projected, X, up)


def _gate(projected: Tensor, X: Tensor, up: Tensor) -> Tensor:
    hidden = silu(projected[..., : up.shape[1]]).to(X.dtype)
    return torch.sigmoid(linear(hidden, up.to(X.dtype))).to(X.dtype).view_as(X)
