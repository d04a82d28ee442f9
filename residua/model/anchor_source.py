"""Where anchors come from: projections of the embedding (ExoFormer), or the first attention layer; and their norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from residua import ops
from residua.config import choices
from residua.model.context import Anchors, Context
from residua.model.equivalence import InitFidelity
from residua.model.projection import Projection


class HeadShape(NamedTuple):
    """The heads of each pathway, and their width."""

    heads: Mapping[str, int]
    head_dim: int

    def rows(self, pathway: str) -> int:
        return self.heads[pathway] * self.head_dim


class AnchorNorm(nn.Module):
    """RMS over head_dim with a gain shared by heads and layers, one per normalised pathway; others pass through."""

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

    @torch.no_grad()
    def begin_as(self, old: AnchorNorm, pathways: Sequence[str]) -> InitFidelity:
        """Copy the gains of these pathways; the function changes if only one of the models norms a pathway."""
        for pathway in pathways:
            if pathway in self.gains and pathway in old.gains:
                self.gains[pathway].copy_(old.gains[pathway])
        alike = all((pathway in self.gains) == (pathway in old.gains) for pathway in pathways)
        return InitFidelity.EXACTLY if alike else InitFidelity.NOT


class AnchorSource(nn.Module):
    """Makes the first anchors from the embedding. This base class makes none; the first attention layer may."""

    shares_gradient: bool = True
    """Whether one backward pass may serve all layers that mix the anchors (`anchor_sharing.find_sharing`).

    Code that replaces the `forward` of sublayers or bodies sets it to False; FSDP units pass no sharing at all.
    Recomputed sublayers store nothing whose memory the gradients could reuse. Sublayers that share compiled code need
    inputs of equal structure, but each takes a handle from them.
    """

    def open(self, x: Tensor, context: Context | None = None) -> Anchors:
        """The anchors made from the embedding x [B, T, C]; without a context, layers share no gradient pass."""
        return ()

    def begin_as(self, old: AnchorSource) -> InitFidelity:
        return InitFidelity.EXACTLY


class ExoSource(AnchorSource):
    """ExoFormer's anchors (arXiv 2601.08131): dedicated projections of the raw embedding, fused in one matrix."""

    def __init__(self, config: choices.ExoFormer, shape: HeadShape, width: int, *, std: float) -> None:
        super().__init__()
        self.pathways, self.shape = config.pathways, shape
        self.parts = tuple(shape.rows(s) for s in config.pathways)
        self.project = Projection(width, sum(self.parts), std=std, parts=self.parts)
        self.norm = AnchorNorm(config.pathways, config.norm, shape.head_dim)

    def open(self, x: Tensor, context: Context | None = None) -> Anchors:
        projected = self.project(x)
        heads = [part.unflatten(-1, (-1, self.shape.head_dim)) for part in projected.split(self.parts, -1)]
        anchors = tuple(self.norm(s, a) for s, a in zip(self.pathways, heads, strict=True))
        sharing = None if context is None else context.sharing
        return anchors if sharing is None else sharing.share(anchors, projected, self.norm)

    @torch.no_grad()
    def begin_as(self, old: AnchorSource) -> InitFidelity:
        """Copy the projections of the pathways that both have. Layers start with zero weight on a new one."""
        if not isinstance(old, ExoSource):
            return InitFidelity.EXACTLY
        ours, theirs = (
            dict(zip(source.pathways, source.project.weight.split(source.parts), strict=True)) for source in (self, old)
        )
        both = [s for s in ours if s in theirs]
        for pathway in both:
            ours[pathway].copy_(theirs[pathway])
        return self.norm.begin_as(old.norm, both)
