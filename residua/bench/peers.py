"""Kernels of other libraries for the same operators, if installed, to be timed in the same run as ours."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from residua.bench.cases import Function


def peers(operator: str) -> dict[str, Function]:
    """The installed implementations of an operator; they take the inputs of its case."""
    candidates: dict[str, dict[str, Function]] = {
        "depth_attention": {"fla": _fla_attention, "liger_kernel": _liger_attention},
        "manifold_hyper": {"liger_kernel": _liger_manifold_hyper},
        "gated_delta": {"fla": _fla_gated_delta},
        "gated_delta_long": {"fla": _fla_gated_delta},
        "kimi_delta": {"fla": _fla_kimi_delta},
        "linear_cross_entropy": {"liger_kernel": _liger_cross_entropy},
        "training_cross_entropy": {"liger_kernel": _liger_cross_entropy},
    }
    return {name: peer for name, peer in candidates.get(operator, {}).items() if find_spec(name) is not None}


def _fla_attention(query: Tensor, gain: Tensor, *sources: Tensor) -> Sequence[Tensor]:
    from fla.ops.attnres import fused_attnres

    return [fused_attnres(query, list(sources), gain)]


def _liger_attention(query: Tensor, gain: Tensor, *sources: Tensor) -> Sequence[Tensor]:
    """Liger takes the sources stacked, so stacking them counts."""
    from liger_kernel.ops.attn_res import LigerAttnResFunction

    return [LigerAttnResFunction.apply(torch.stack(sources), query, gain, 1e-6)]


def _fla_gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Sequence[Tensor]:
    """Refuses its backward pass on Hopper with Triton 3.4.0 to 3.7.0, which compile it wrongly (its issue 640)."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return [chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0)[0]]


def _fla_kimi_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Sequence[Tensor]:
    from fla.ops.kda import chunk_kda

    return [chunk_kda(q, k, v, g, beta, scale=1.0)[0]]


def _liger_manifold_hyper(
    X: Tensor, y: Tensor, post: Tensor, mix: Tensor, phi: Tensor, a: Tensor, b: Tensor
) -> Sequence[Tensor]:
    """Liger's three operators of one junction; its Sinkhorn takes rows first, at the same cost."""
    from liger_kernel.ops.mhc import LigerMHCCoeffsFunction, LigerMHCPostResFunction, LigerMHCPreFunction

    X = LigerMHCPostResFunction.apply(X, y, post, mix)
    settings = (True, 20, 1e-6, 0.0, 1e-6, 2.0)
    pre, post, mix = LigerMHCCoeffsFunction.apply(X, phi.T.to(X.dtype), b, *a.unbind(), *settings)
    return [LigerMHCPreFunction.apply(X, pre), X, post, mix]


def _liger_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Sequence[Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return [LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-5)(weight.to(hidden.dtype), hidden, targets)]
