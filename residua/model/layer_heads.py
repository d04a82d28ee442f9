"""Keys and values that layers take from earlier ones: mixed (LIMe), attended to (Depth-Attention), or unchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from residua.config import choices
from residua.model.anchors import LayerPlace, Projections, Unmixed, Write
from residua.model.context import Anchors, Context
from residua.model.equivalence import InitFidelity, take_parameters
from residua.ops._runtime.numeric import mix_slices, wide


class LayerMixture(Unmixed):
    """LIMe: keys and values are learned mixtures of those of all layers so far (arXiv 2502.09245).

        K̂_l[g] = Σ_{l' ≤ l} Σ_{g'} R_l[g, (l', g')] K_{l'}[g'],   V̂_l[g] = the same with V,   R_l: H_kv × (l + 1)·H_kv

    K_{l'} and V_{l'} are the unmixed projections, before QK-norm and rotation. l counts the layers with softmax
    attention; the first mixes nothing. R_l starts with 1 for the layer's own head. Weights of earlier layers' heads
    start uniform in ±√(3/((l + 1)·H_kv)), as in the public code. With `start = "identity"` they start at 0, which is
    the plain model.

    The anchors are K and V of earlier layers, alternating.
    """

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

    def mixing_products(self) -> int:
        """Every weight multiplies the d channels of a key and of a value."""
        return self.router.numel() * (2 * self.sections["k"][1] - 1)

    def mix(self, own: Projections, x: Tensor, anchors: Anchors, context: Context) -> tuple[Projections, Anchors]:
        anchors = (*anchors, own["k"], own["v"])
        routes = wide(self.router).split(self.heads, 1)
        return own | {"k": _routed(routes, anchors[::2]), "v": _routed(routes, anchors[1::2])}, anchors

    def scales(self, gamma: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """Per head, the sum of the weights of all earlier heads, and the weight of the layer's own head."""
        current = self.router.detach()[:, -self.heads :].diagonal()
        earlier = self.router.detach()[:, : -self.heads].sum(1)
        return dict.fromkeys(self.pathways, (earlier, current))

    @torch.no_grad()
    def begin_as(self, old: Unmixed) -> InitFidelity:
        """Earlier heads start with weight 0."""
        if isinstance(old, LayerMixture):
            take_parameters(self, old)
            return InitFidelity.EXACTLY
        self.router[:, : -self.heads] = 0
        return super().begin_as(old)


def _routed(routes: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Σ R S over layers, for R [H_kv, H_kv] and S [B, T, H_kv, D]; nothing is stacked."""
    first, *others = (mix_slices(R, S) for R, S in zip(routes, sources, strict=True))
    return sum(others, start=first).to(sources[-1].dtype)


def build_layer_mixture(config: choices.Lime, place: LayerPlace) -> Unmixed:
    """The first layer writes its keys and values; the others mix and write."""
    if place.layer == 0:
        return Write(place.sections, ("k", "v"), "none", place.shape)
    return LayerMixture(config, place)


class SharedHeads(Unmixed):
    """Keys and values of an earlier layer in place of a layer's own: cross-layer attention, one source, SVFormer.

        y_l = softmax(Q_l K_sᵀ/√d) V_s,   s = s(l) ≤ l

        CLA (arXiv 2405.12981):        s(l) = g·⌊l/g⌋, groups of g layers
        one source m:                  s(l) = min(l, m)
        SVFormer (arXiv 2410.17897):   V_1 alone is shared, y_l = softmax(Q_l K_lᵀ/√d) V_1

    l counts the layers with softmax attention. A layer with s(l) < l has no projection, no QK-norm gain and no cache
    for the heads that it takes. Keys are shared after norm and rotation.

    A layer lends its keys and values, or takes (`taken`) those of the last layer that lent them.
    """

    def __init__(self, config: choices.SharedHeads, place: LayerPlace) -> None:
        super().__init__(place.sections)
        self.pathways, self.taken = config.mixed, config.taken(place.layer)
        self.lender = config.lender(place.layer)
        self.last = not config.carried(place.layer + 1)

    def mix_turned(self, own: Projections, anchors: Anchors) -> tuple[Projections, Anchors]:
        heads = own | dict(zip(self.taken, anchors, strict=bool(self.taken)))
        return heads, () if self.last else tuple(heads[s] for s in self.pathways)

    def begin_as(self, old: Unmixed) -> InitFidelity:
        """A layer that takes heads drops its own; a layer that lends them is unchanged."""
        if isinstance(old, SharedHeads):
            same = (old.lender, old.taken) == (self.lender, self.taken)
        else:
            same = old.plain and not self.taken
        return InitFidelity.EXACTLY if same else InitFidelity.NOT


def build_shared_heads(config: choices.SharedHeads, place: LayerPlace) -> Unmixed:
    """Build a plain layer if it neither lends nor takes heads."""
    lends = place.layer + 1 < place.layers and config.lender(place.layer + 1) == place.layer
    return SharedHeads(config, place) if lends or config.taken(place.layer) else Unmixed(place.sections)


class LayerValues(Unmixed):
    """Depth-Attention: a query attends over the keys of earlier layers for the same token, and mixes their values.

        V̂_l = a_l V_l + Σ_{l' < l} a_{l'} V̂_{l'},   a = softmax_{l' ≤ l}(q_l · k_{l'}/√d)        (arXiv 2606.05014)

    for each token and key-value head; attention over the sequence then reads V̂_l in place of V_l. It has no parameters.
    The abstract leaves three choices open. We use queries and keys after norm and rotation, the mean of the queries
    that share a key-value head, and the mixed values of earlier layers, which caches hold. Nanbeige4.2's code does the
    same.

    The anchors are keys and mixed values of earlier layers, alternating.
    """

    pathways = ("k", "v")

    def __init__(self, place: LayerPlace) -> None:
        super().__init__(place.sections)
        self.layer = place.layer

    def mixing_products(self) -> int:
        """A score and a weighted value for every layer so far."""
        heads, dim = self.sections["k"]
        return 2 * heads * dim * (self.layer + 1)

    def mix_turned(self, own: Projections, anchors: Anchors) -> tuple[Projections, Anchors]:
        v = mix_layers(own["q"], (*anchors[::2], own["k"]), (*anchors[1::2], own["v"]))
        return own | {"v": v}, (*anchors, own["k"], v)

    def begin_as(self, old: Unmixed) -> InitFidelity:
        """Softmax weights cannot be zero, so the function changes."""
        return InitFidelity.EXACTLY if isinstance(old, LayerValues) else InitFidelity.NOT


def mix_layers(q: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Tensor:
    """Σ a V over layers, a = softmax(q̄ · k/√d) [B, T, H_kv, layers], q̄ the mean query of a key-value head."""
    mean = wide(q).unflatten(2, (keys[0].shape[2], -1)).mean(3) / q.shape[-1] ** 0.5
    weights = torch.stack([(mean * k).sum(-1) for k in keys], -1).softmax(-1).to(q.dtype)
    first, *others = (a[..., None] * v for a, v in zip(weights.unbind(-1), values, strict=True))
    return sum(others, start=first)


def build_layer_values(config: choices.DepthAttention, place: LayerPlace) -> Unmixed:
    """Build the same module for every layer; the first attends only to itself."""
    return LayerValues(place)
