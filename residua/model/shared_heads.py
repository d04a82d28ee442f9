"""Keys and values of an earlier layer in place of a layer's own: cross-layer attention, one source, SVFormer.

    y_l = softmax(Q_l K_sᵀ/√d) V_s,   s = s(l) ≤ l

    CLA (arXiv 2405.12981):        s(l) = g·⌊l/g⌋, groups of g layers
    one source m:                  s(l) = min(l, m)
    SVFormer (arXiv 2410.17897):   V_1 alone is shared, y_l = softmax(Q_l K_lᵀ/√d) V_1

Layers are counted among those with softmax attention. A layer with s(l) < l has no projection, no QK-norm gain and no
cache for the heads that it takes. Keys are shared as they enter the product, normed and rotated.
"""

from __future__ import annotations

from residua.config import choices
from residua.model.anchors import LayerPlace, Projections, Unmixed
from residua.model.context import Anchors
from residua.model.equivalence import InitFidelity


class SharedHeads(Unmixed):
    """A layer that lends its keys and values, or takes (`taken`) those of the last layer that did."""

    def __init__(self, config: choices.SharedHeads, place: LayerPlace) -> None:
        super().__init__(place.sections)
        self.pathways, self.taken = config.mixed, config.taken(place.layer)
        self.lender = config.lender(place.layer)
        self.last = not config.carried(place.layer + 1)

    def mix_turned(self, own: Projections, anchors: Anchors) -> tuple[Projections, Anchors]:
        heads = own | dict(zip(self.taken, anchors, strict=bool(self.taken)))
        return heads, () if self.last else tuple(heads[s] for s in self.pathways)

    def begin_as(self, old: Unmixed) -> InitFidelity:
        """A layer that takes heads drops its own; one that lends them is as before."""
        if isinstance(old, SharedHeads):
            same = (old.lender, old.taken) == (self.lender, self.taken)
        else:
            same = old.plain and not self.taken
        return InitFidelity.EXACTLY if same else InitFidelity.NOT


def build_shared_heads(config: choices.SharedHeads, place: LayerPlace) -> Unmixed:
    """Layers that neither lend nor take are plain."""
    lends = place.layer + 1 < place.layers and config.lender(place.layer + 1) == place.layer
    return SharedHeads(config, place) if lends or config.taken(place.layer) else Unmixed(place.sections)
