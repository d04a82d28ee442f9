"""Metrics of a model's internals, one formula each, for diagnoses and for telemetry during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from residua.ops._runtime.numeric import wide

CLOSED = 0.2
"""A gate below this is nearly closed."""
TOKENS_AT_ONCE = 256


def peak_and_sizes(h: Tensor) -> tuple[Tensor, Tensor]:
    """The largest |h|, and the mean of |h| over tokens, [C], of states [B, T, C]."""
    size = wide(h).abs()
    return size.amax(), size.mean((0, 1))


def relative_sizes(sizes: Tensor) -> Tensor:
    """The size of each dimension over that of the (lower) median dimension, [..., C].

    The largest is the residual-sink ratio. Sorts: on a GPU `Tensor.median` along an axis is not deterministic.
    """
    middle = sizes.sort(-1).values[..., (sizes.shape[-1] - 1) // 2, None]
    return sizes / middle.clamp(min=1e-30)


def cosines(rows: Sequence[Tensor], widened: Callable[[Tensor], Tensor] = wide) -> Iterator[Tensor]:
    """The cosine of every two of some vectors [N, C] for each token, [tokens, rows, rows], a few tokens at a time."""
    for start in range(0, len(rows[0]), TOKENS_AT_ONCE):
        x = torch.stack([widened(row[start : start + TOKENS_AT_ONCE]) for row in rows], 1)
        u = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        yield (u @ u.transpose(1, 2)).double().clamp(-1, 1)


def depth_entropy(weights: Tensor) -> Tensor:
    """−Σ p_i ln p_i in nats, [...], with p = |w|/Σ|w| of depth weights [..., sources].

    0: one source has all the weight; ln(sources): all have the same.
    """
    size = wide(weights).abs()
    p = size / size.sum(-1, keepdim=True).clamp(min=1e-30)
    terms: Tensor = torch.special.entr(p)
    return terms.sum(-1)


def closed(gate: Tensor) -> Tensor:
    """True where a gate is nearly closed."""
    return gate < CLOSED


def quantiles(values: Tensor, shares: Sequence[float]) -> list[Tensor]:
    """Quantiles of values [..., N] along the last axis, [...] each, by linear interpolation.

    Sorts: `torch.quantile` takes at most 16 M values.
    """
    ordered = wide(values).sort(-1).values
    last = ordered.shape[-1] - 1
    places = [share * last for share in shares]
    return [torch.lerp(ordered[..., int(at)], ordered[..., min(int(at) + 1, last)], at % 1) for at in places]
