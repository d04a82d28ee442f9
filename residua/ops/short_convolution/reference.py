"""The short causal convolution of linear attention, and the heads computed with it, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from residua.ops._runtime.numeric import begins, wide


def short_convolution(x: Tensor, weight: Tensor, segments: Tensor | None = None) -> Tensor:
    """y_t = silu(Σ_j weight_j ⊙ x_{t−j}), j = 0 … kernel − 1, over tokens of the same document.

    x [B, kernel − 1 + T, channels] begins with the preceding inputs, weight [kernel, channels], segments [B, T].
    Returns y [B, T, channels].
    """
    past = weight.shape[0] - 1
    length = x.shape[1] - past
    y = weight[0] * x[:, past:]
    document = None if segments is None else pad(begins(x, segments).cumsum(1), (past, 0))
    for j in range(1, past + 1):
        earlier = slice(past - j, past - j + length)
        shifted = x[:, earlier]
        if document is not None:
            shifted = shifted.masked_fill((document[:, earlier] != document[:, past:])[..., None], 0)
        y = y + weight[j] * shifted
    return silu(y).to(x.dtype)


def convolve_heads(
    projected: Tensor,
    weight: Tensor,
    key_heads: int,
    value_heads: int,
    *,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn a layer's fused projection into the heads of the delta rule and their output gate.

        q, k, v = conv(·),   q ← q / (‖q‖ √D),   k ← k / ‖k‖  per head

    projected [B, T, (2 key_heads + 2 value_heads) D] holds q, k, v and the gate z; weight [kernel, channels] is for q,
    k and v. Returns q, k [B, T, key_heads, D] and v, z [B, T, value_heads, D]; zeros precede the first token.
    A projection that ends with v has no z: [B, T, 0, D].
    """
    channels = weight.shape[1]
    head_dim = channels // (2 * key_heads + value_heads)
    mixed, z = projected.split([channels, projected.shape[-1] - channels], -1)
    convolved = short_convolution(pad(mixed, (0, 0, weight.shape[0] - 1, 0)), weight, segments)
    q, k, v = convolved.unflatten(-1, (-1, head_dim)).split([key_heads, key_heads, value_heads], 2)
    return unit(q, eps) * head_dim**-0.5, unit(k, eps), v, z.unflatten(-1, (z.shape[-1] // head_dim, head_dim))


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σx² + eps) over the last axis, in x's own dtype."""
    w = wide(x)
    return (w * torch.rsqrt(w.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
