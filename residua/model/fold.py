"""Fold the static scale of projection mixing into the weights, for inference.

    Ŝ = λ1 ⊙ S_anc + λ2 ⊙ (W x) = λ1 ⊙ S_anc + W' x,   W' = diag(λ2) W

Mixing comes before QK-norm, rotation and the gate's sigmoid, so on every pathway the scale moves into W exactly, but
for rounding. A layer that writes the anchors does not mix and keeps its W; a dynamic λ depends on the token and stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from residua import ops
from residua.model.anchors import Mix, Projections, QueryKeyNorm, RotaryTable, Unmixed, over_values
from residua.model.attention import SoftmaxAttention
from residua.model.context import Anchors
from residua.model.projection import Projection

if TYPE_CHECKING:
    from residua.model.decoder import Decoder


class FoldedMix(Unmixed):
    """Ŝ = λ1 ⊙ S_anc + S on each pathway."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix.sections)
        self.pathways = mix.pathways
        self.anchor_scale = mix.anchor_scale
        ones = {s: torch.ones_like(scale) for s, scale in mix.current_scale.items()}
        self.ones = nn.ParameterDict({s: nn.Parameter(one, requires_grad=False) for s, one in ones.items()})

    @property
    def only_values(self) -> bool:
        return self.pathways == ("v",)

    def value_scales(self) -> tuple[Tensor, Tensor] | None:
        return over_values(self.sections, self.anchor_scale, self.ones)

    def mixes(self, pathway: str) -> bool:
        return pathway in self.pathways

    def forward(
        self, projected: Tensor, anchors: Anchors, x: Tensor, qk_norm: QueryKeyNorm, table: RotaryTable
    ) -> tuple[Projections, Anchors]:
        named = dict(zip(self.pathways, anchors, strict=True))
        scales, ones = dict(self.anchor_scale.items()), dict(self.ones.items())
        heads = (projected, self.sections, named, scales, ones, table)
        return ops.mix_heads(*heads, gains=qk_norm.gains, eps=qk_norm.eps)


def fold_mixing(model: Decoder) -> int:
    """Fold every static λ2 of a model into its projections, in place; returns the number of layers changed."""
    folded = 0
    for module in model.modules():
        # a projection in low precision keeps its rounded rows
        if isinstance(module, SoftmaxAttention) and type(module.mix) is Mix and type(module.project) is Projection:
            _fold(module, module.mix)
            module.mix = FoldedMix(module.mix)
            folded += 1
    return folded


@torch.no_grad()
def _fold(attention: SoftmaxAttention, mix: Mix) -> None:
    attention.project.weight.copy_(mix.folded(attention.project.weight))
