"""Attention over depth in plain PyTorch (Attention Residuals, arXiv 2603.15031)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from residua.ops._runtime.numeric import wide

KeyNorm = Literal["rms", "none"]
Activation = Literal["softmax", "sigmoid"]


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    norm_weight: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
    key_norm: KeyNorm = "rms",
    activation: Activation = "softmax",
    return_weights: bool = False,
) -> Any:
    """Mix sources by attention along depth: raw values, normalised keys.

        z_i = scale · query · (norm_weight ⊙ RMS(v_i)),   a = softmax(z),   h = Σ_i a_i v_i

    sources: sequence of [..., C]; query and norm_weight [C]. Returns h [..., C], and with `return_weights` also
    a [..., sources]. `key_norm="none"` uses raw keys; `activation="sigmoid"` weights each source separately, without
    normalisation (both are ablations in the paper).
    """
    sources = _checked(sources, query)
    weights = _WEIGH[activation](
        torch.stack([_logit(v, query, norm_weight, scale, eps, key_norm) for v in sources], -1)
    )
    hidden = weights[..., 0, None] * wide(sources[0])
    for i in range(1, len(sources)):
        hidden = hidden + weights[..., i, None] * wide(sources[i])
    hidden = hidden.to(sources[0].dtype)
    return (hidden, weights) if return_weights else hidden


def _logit(v: Tensor, query: Tensor, gain: Tensor | None, scale: float, eps: float, key_norm: KeyNorm) -> Tensor:
    v = wide(v)
    q = query.to(v.dtype) if gain is None else query.to(v.dtype) * gain.to(v.dtype)
    return scale * (v * q).sum(-1) * _RSTD[key_norm](v, eps)


def _rms_rstd(v: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(v.square().mean(-1) + eps)


def _no_rstd(v: Tensor, eps: float) -> Tensor:
    return v.new_ones(())


def _checked(sources: Sequence[Tensor], query: Tensor) -> Sequence[Tensor]:
    if len(sources) == 0:
        raise ValueError("depth_attention needs at least one source.")
    for i, v in enumerate(sources):
        if v.shape != sources[0].shape:
            raise ValueError(
                f"depth_attention: source {i} has shape {tuple(v.shape)}, source 0 has {tuple(sources[0].shape)}."
            )
    if query.shape != sources[0].shape[-1:]:
        raise ValueError(f"depth_attention: query has shape {tuple(query.shape)}, expected ({sources[0].shape[-1]},).")
    return sources


def _softmax(z: Tensor) -> Tensor:
    return z.softmax(-1)


_WEIGH: dict[str, Callable[[Tensor], Tensor]] = {"softmax": _softmax, "sigmoid": torch.sigmoid}
_RSTD = {"rms": _rms_rstd, "none": _no_rstd}
