"""LIMe: keys and values are learned mixtures of those of all layers so far (arXiv 2502.09245).

    K̂_l[g] = Σ_{l' ≤ l} Σ_{g'} R_l[g, (l', g')] K_{l'}[g'],   V̂_l[g] = the same with V,   R_l: H_kv × (l + 1)·H_kv

K_{l'} and V_{l'} are projections as they were made: not mixed, before QK-norm and rotation. Layers count among those
with softmax attention; the first mixes nothing. R_l begins with 1 for the layer's own head. Heads of earlier layers
begin with numbers uniform in ±√(3/((l + 1)·H_kv)), as in the public code. With `start = "identity"` they begin with 0,
as a plain model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.anchors import LayerPlace, Projections, Unmixed, Write
from residua.model.context import Anchors, Context
from residua.model.equivalence import InitFidelity, take_parameters


class LayerMixture(Unmixed):
    """K̂ = Σ R K and V̂ = Σ R V over heads of this layer and earlier ones, whose K and V are the anchors, in turn."""

    pathways = ("k", "v")

    def __init__(self, config: choices.Lime, place: LayerPlace) -> None:
        super().__init__(place.sections)
        self.heads, self.start = place.shape.heads["k"], config.start
        self.router = nn.Parameter(torch.empty(self.heads, (place.layer + 1) * self.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = math.sqrt(3 / self.router.shape[1]) if self.start == "random" else 0.0
        nn.init.uniform_(self.router, -bound, bound)
        with torch.no_grad():
            self.router[:, -self.heads :] = torch.eye(self.heads)

    def mix(self, own: Projections, x: Tensor, anchors: Anchors, context: Context) -> tuple[Projections, Anchors]:
        anchors = (*anchors, own["k"], own["v"])
        routes = self.router.to(x.dtype).split(self.heads, 1)
        return own | {"k": _routed(routes, anchors[::2]), "v": _routed(routes, anchors[1::2])}, anchors

    def scales(self, gamma: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """By head, the sum of the weights of all earlier heads, and the weight of its own."""
        own = self.router.detach()[:, -self.heads :].diagonal()
        earlier = self.router.detach()[:, : -self.heads].sum(1)
        return dict.fromkeys(self.pathways, (earlier, own))

    @torch.no_grad()
    def begin_as(self, old: Unmixed) -> InitFidelity:
        """Earlier heads begin with the weight 0."""
        if isinstance(old, LayerMixture):
            take_parameters(self, old)
            return InitFidelity.EXACTLY
        self.router[:, : -self.heads] = 0
        return super().begin_as(old)


def _routed(routes: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Σ R S over layers, for R [H_kv, H_kv] and S [B, T, H_kv, D]; nothing is stacked."""
    first, *others = (torch.einsum("gh,bthd->btgd", R, S) for R, S in zip(routes, sources, strict=True))
    return sum(others, start=first)


def build_layer_mixture(config: choices.Lime, place: LayerPlace) -> Unmixed:
    """The first layer writes its keys and values, the others mix and write."""
    if place.layer == 0:
        return Write(place.sections, ("k", "v"), "none", place.shape)
    return LayerMixture(config, place)
