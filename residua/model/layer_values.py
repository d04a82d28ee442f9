"""Depth-Attention: a query attends over the keys that earlier layers have for the same token, and mixes their values.

    V̂_l = a_l V_l + Σ_{l' < l} a_{l'} V̂_{l'},   a = softmax_{l' ≤ l}(q_l · k_{l'}/√d)        (arXiv 2606.05014)

for each token and key-value head; attention over the sequence then reads V̂_l in place of V_l. There are no parameters.
The abstract leaves three choices open: queries and keys as they enter attention's product, the mean of the queries that
share a head, and mixed values of earlier layers, which are the ones that caches hold. Nanbeige4.2's code has the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from residua.config import choices
from residua.model.anchors import LayerPlace, Projections, Unmixed
from residua.model.context import Anchors
from residua.model.equivalence import InitFidelity
from residua.ops._runtime.numeric import wide


class LayerValues(Unmixed):
    """V̂ by a softmax over layers; the anchors are keys and mixed values of earlier layers, in turn."""

    pathways = ("k", "v")

    def mix_turned(self, own: Projections, anchors: Anchors) -> tuple[Projections, Anchors]:
        v = mix_layers(own["q"], (*anchors[::2], own["k"]), (*anchors[1::2], own["v"]))
        return own | {"v": v}, (*anchors, own["k"], v)

    def begin_as(self, old: Unmixed) -> InitFidelity:
        """Weights of the softmax cannot be zero: the function changes."""
        return InitFidelity.EXACTLY if isinstance(old, LayerValues) else InitFidelity.NOT


def mix_layers(q: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Tensor:
    """Σ a V over layers, a = softmax(q̄ · k/√d) [B, T, H_kv, layers], q̄ the mean of the queries of a key-value head."""
    mean = wide(q).unflatten(2, (keys[0].shape[2], -1)).mean(3) / q.shape[-1] ** 0.5
    weights = torch.stack([(mean * k).sum(-1) for k in keys], -1).softmax(-1).to(q.dtype)
    first, *others = (a[..., None] * v for a, v in zip(weights.unbind(-1), values, strict=True))
    return sum(others, start=first)


def build_layer_values(config: choices.DepthAttention, place: LayerPlace) -> Unmixed:
    """The same in every layer; the first has only itself to attend to."""
    return LayerValues(place.sections)
