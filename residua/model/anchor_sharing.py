"""Which layers compute the anchors' gradient in one backward pass (`ops/mix_projection/anchor_gradients.py`)."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from residua.config.model import ModelConfig
from residua.model.anchor_source import AnchorNorm, AnchorSource
from residua.model.anchors import FoldedMix, Mix
from residua.model.attention import SoftmaxAttention
from residua.model.body import Body, Sublayer
from residua.model.context import Anchors
from residua.model.projection import Projection, is_plain, is_watched
from residua.ops._runtime.triton_support import INSTALLED

if INSTALLED:
    from residua.ops.mix_projection import anchor_gradients


def find_sharing(config: ModelConfig, source: AnchorSource, sublayers: nn.ModuleList) -> Sharing | None:
    """The layers that mix the anchors, if they can share one backward pass.

    Layers take handles in turn, so each must run once and have a single input. `source.shares_gradient` is False if
    Residua has changed how sublayers run.
    """
    several = len(config.topology.reads) > 1 or config.repeats
    if several or not source.shares_gradient or not torch.is_grad_enabled() or not _run_themselves(sublayers):
        return None
    bodies = [cast(Sublayer, sublayer).body for sublayer in sublayers]
    softmax = [body for body in bodies if isinstance(body, SoftmaxAttention)]
    readers = tuple((body.mix, body.project) for body in softmax if isinstance(body.mix, Mix))
    return Sharing(readers) if readers else None


def _run_themselves(sublayers: nn.ModuleList) -> bool:
    """Whether sublayers and bodies are of known classes and run their own `forward`.

    Residua's own wrappers set `AnchorSource.shares_gradient`. A user's wrapper does not: someone may assign `forward`
    by hand to skip a layer, run it twice or change its anchors. The next layer would then take that layer's handle,
    and gradients would be wrong without an error. Hooks on sublayers do not matter.
    """
    if any(type(sublayer) is not Sublayer for sublayer in sublayers):
        return False
    bodies = [cast(Sublayer, sublayer).body for sublayer in sublayers]
    known = all(isinstance(body, Body) for body in bodies)
    return known and not any("forward" in vars(part) for part in (*sublayers, *bodies))


class Sharing(NamedTuple):
    """The layers that mix the anchors, each with the projection that absorbs λ2 (`mix_projection/anchor_gradients`)."""

    readers: tuple[tuple[Mix, Projection], ...]

    def share(self, anchors: Anchors, source: Tensor | None = None, norm: AnchorNorm | None = None) -> Anchors:
        """Append each reader's handles to the anchors, so that one pass computes all gradients.

        `source` and `norm` are the fused projection that the anchors come from, and its norm. No handles are added
        where the anchors' gradient passes from layer to layer instead: outside training, with weights that are sharded
        or on several devices, or with a hook on a mixture or a projection.
        """
        watched = any(is_watched(part) for mix, _ in self.readers for part in (mix, *mix.children()))
        maps = [part for mix, project in self.readers for part in (project, *mix.projections)]
        folded = any(isinstance(mix, FoldedMix) for mix, _ in self.readers)
        if not INSTALLED or watched or folded or not all(map(is_plain, maps)) or len(self.readers) < 2:
            return anchors
        scales = [dict(mix.anchor_scale.items()) for mix, _ in self.readers]
        if not anchor_gradients.serves(
            anchors, [*(m.weight for m in maps), *(scale for by_pathway in scales for scale in by_pathway.values())]
        ):
            return anchors
        mix, _ = self.readers[0]
        gains = None if norm is None else dict(norm.gains.items())
        named = dict(zip(mix.pathways, anchors, strict=True))
        hidden = 0 if mix.network is None else mix.network[0].shape[1]
        handles = anchor_gradients.share(named, scales, mix.sections, source=source, gains=gains, hidden=hidden)
        return (*anchors, *chain.from_iterable(handles))
