"""Projection mixing: attention layers mix anchor projections into their own (ResFormer, NuResFormer, ExoFormer).

    Ŝ_k = λ1 ⊙ N(S_anc) + λ2 ⊙ S_k          for each pathway S of Q, K, V, G

The anchors are normalised once, when they are written, since every layer reads the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from residua import ops
from residua.model import choices
from residua.model.context import Anchors
from residua.model.projection import Projection
from residua.ops.mix_projection import per_head

Projections = dict[str, Tensor]
"""Pathway name to [B, T, heads, head_dim]."""


class HeadShape(NamedTuple):
    """Heads of each pathway, and their width."""

    heads: Mapping[str, int]
    head_dim: int

    def rows(self, pathway: str) -> int:
        return self.heads[pathway] * self.head_dim


class AnchorNorm(nn.Module):
    """RMS over head_dim with a gain shared by heads and layers, one per normalised pathway; others pass."""

    NORMED: Mapping[str, tuple[str, ...]] = {"none": (), "qk": ("q", "k"), "all": ("q", "k", "v", "g")}

    def __init__(self, pathways: tuple[str, ...], norm: str, head_dim: int) -> None:
        super().__init__()
        normed = [s for s in pathways if s in self.NORMED[norm]]
        self.gains = nn.ParameterDict({s: nn.Parameter(torch.empty(head_dim)) for s in normed})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for gain in self.gains.values():
            nn.init.ones_(gain)

    def forward(self, pathway: str, anchor: Tensor) -> Tensor:
        return ops.rms(anchor, weight=self.gains[pathway]) if pathway in self.gains else anchor


class NoSource(nn.Module):
    """Nothing is projected from the embedding: anchors, if any, come from the first attention layer."""

    def open(self, x: Tensor) -> Anchors:
        return ()


class ExoSource(nn.Module):
    """ExoFormer's anchors (arXiv 2601.08131): dedicated projections of the raw embedding, fused in one matrix."""

    def __init__(self, config: choices.ExoFormer, shape: HeadShape, width: int, *, std: float) -> None:
        super().__init__()
        self.pathways, self.shape = config.pathways, shape
        self.parts = tuple(shape.rows(s) for s in config.pathways)
        self.project = Projection(width, sum(self.parts), std=std, parts=self.parts)
        self.norm = AnchorNorm(config.pathways, config.norm, shape.head_dim)

    def open(self, x: Tensor) -> Anchors:
        split = self.project(x).split(self.parts, -1)
        heads = [s.unflatten(-1, (-1, self.shape.head_dim)) for s in split]
        return tuple(self.norm(s, a) for s, a in zip(self.pathways, heads, strict=True))


class Unmixed(nn.Module):
    """A layer that leaves its projections alone."""

    def forward(self, own: Projections, anchors: Anchors, x: Tensor) -> tuple[Projections, Anchors]:
        return own, anchors


class Write(nn.Module):
    """The first layer of ResFormer and NuResFormer: unmixed itself, its projections become the anchors."""

    def __init__(self, pathways: tuple[str, ...], norm: str, shape: HeadShape) -> None:
        super().__init__()
        self.pathways = pathways
        self.norm = AnchorNorm(pathways, norm, shape.head_dim)

    def forward(self, own: Projections, anchors: Anchors, x: Tensor) -> tuple[Projections, Anchors]:
        return own, tuple(self.norm(s, own[s]) for s in self.pathways)


class Mix(nn.Module):
    """Ŝ = λ1 ⊙ S_anc + λ2 ⊙ S on each pathway, λ per element, head or layer; both start at ½."""

    START = 0.5

    def __init__(self, pathways: tuple[str, ...], granularity: str, shape: HeadShape) -> None:
        super().__init__()
        self.pathways = pathways
        sizes = {s: _scale_shape(granularity, shape.heads[s], shape.head_dim) for s in pathways}
        self.anchor_scale = nn.ParameterDict({s: nn.Parameter(torch.empty(sizes[s])) for s in pathways})
        self.current_scale = nn.ParameterDict({s: nn.Parameter(torch.empty(sizes[s])) for s in pathways})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for scale in (*self.anchor_scale.values(), *self.current_scale.values()):
            nn.init.constant_(scale, self.START)

    def scales(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(λ1, λ2) of each pathway."""
        return [(self.anchor_scale[s], self.current_scale[s]) for s in self.pathways]

    def forward(self, own: Projections, anchors: Anchors, x: Tensor) -> tuple[Projections, Anchors]:
        mixed = dict(own)
        for s, anchor, (l1, l2) in zip(self.pathways, anchors, self.scales(x), strict=True):
            mixed[s] = ops.mix_projection(own[s], anchor, l2, l1)
        return mixed, anchors


class Modulation(nn.Module):
    """γ = σ(GELU(x W1) W2 + b): one factor per λ and token. W2 and b start at zero, so that γ = ½ exactly."""

    def __init__(self, factors: int, width: int, hidden: int, *, std: float) -> None:
        super().__init__()
        self.down = Projection(width, hidden, std=std)
        self.up = Projection(hidden, factors, std=0.0)
        self.bias = nn.Parameter(torch.empty(factors))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = gelu(self.down(x))
        return torch.sigmoid(self.up(hidden) + self.bias.to(hidden.dtype))


class DynamicMix(Mix):
    """λ ⊙ γ in λ's place, γ computed from the layer's pre-normed input x, in the order q1, q2, k1, k2, …

    λ starts at 1, so that with γ = ½ the mixture starts as the static one does.
    """

    START = 1.0

    def __init__(
        self, pathways: tuple[str, ...], granularity: str, shape: HeadShape, *, width: int, hidden: int, std: float
    ) -> None:
        super().__init__(pathways, granularity, shape)
        self.gamma = Modulation(2 * len(pathways), width, hidden, std=std)

    def scales(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        gamma = self.gamma(x)[..., None, None].unbind(2)
        scales = [(per_head(l1), per_head(l2)) for l1, l2 in super().scales(x)]
        return [(l1 * gamma[2 * i], l2 * gamma[2 * i + 1]) for i, (l1, l2) in enumerate(scales)]


def _scale_shape(granularity: str, heads: int, head_dim: int) -> tuple[int, ...]:
    return {"elementwise": (heads, head_dim), "headwise": (heads,), "scalar": ()}[granularity]


def build_source(config: choices.Anchors, shape: HeadShape | None, width: int, *, std: float) -> NoSource | ExoSource:
    """The anchors a model opens with."""
    if isinstance(config, choices.ExoFormer):
        assert shape is not None
        return ExoSource(config, shape, width, std=std)
    return NoSource()


def build_mix(config: choices.Anchors, layer: int, shape: HeadShape, width: int, *, std: float) -> nn.Module:
    """What attention layer `layer` does with the anchors: leaves, writes or mixes them."""
    if isinstance(config, choices.NoAnchors):
        return Unmixed()
    if isinstance(config, choices.ResFormer):
        config = choices.NuResFormer(pathways=("v",), granularity=config.granularity, norm="none")
    if isinstance(config, choices.NuResFormer) and layer == 0:
        return Write(config.pathways, config.norm, shape)
    if isinstance(config.mixing, choices.DynamicMixing):
        return DynamicMix(config.pathways, config.granularity, shape, width=width, hidden=config.mixing.hidden, std=std)
    return Mix(config.pathways, config.granularity, shape)
