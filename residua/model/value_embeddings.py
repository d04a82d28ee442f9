"""Value embeddings: some layers add a learned vector of the token itself to their values.

    V̂_l = V_l + s·σ(W_g x_l[:c]) ⊙ E_l[token],   W_g: c → key-value heads,  s = 3,  c = 12        (nanochat, gpt.py)

x_l is the layer's normed input, of which the first c channels make one gate per token and head. Every second softmax
layer has a table E_l [vocabulary, key-value heads · head_dim], the last one included. E_l starts like W_v, normal with
the model's std; W_g starts uniform in [0, 0.02], so that gates begin near s/2.

The tables cost more than the reads: each step zeroes, clips and updates all their weights, 44 bytes each, whichever
tokens it saw (docs/results/step.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua.config import choices
from residua.model.anchors import LayerPlace, Projections, Unmixed
from residua.model.context import Anchors, Context
from residua.model.equivalence import InitFidelity, take_parameters
from residua.model.gated_values import AddedValues

LARGEST_START = 0.02


class ValueTable(nn.Embedding):
    """Vectors [V, H_kv·D] of tokens, normal with `std`."""

    def __init__(self, vocabulary: int, width: int, *, std: float) -> None:
        self.std = std  # nn.Embedding initialises itself
        super().__init__(vocabulary, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class ValueEmbedding(AddedValues):
    """V̂ = V + s·σ(W_g x[:c]) ⊙ E[token]."""

    def __init__(self, config: choices.ValueEmbeddings, place: LayerPlace) -> None:
        super().__init__(place.sections)
        self.scale, self.shape = config.gate_scale, place.sections["v"]
        self.table = ValueTable(place.vocabulary, place.shape.rows("v"), std=place.std)
        self.gate_weight = nn.Parameter(torch.empty(place.shape.heads["v"], config.gate_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gate_weight, 0.0, LARGEST_START)

    def gate(self, x: Tensor) -> Tensor:
        weight = self.gate_weight.to(x.dtype)
        return self.scale * torch.sigmoid(linear(x[..., : weight.shape[1]], weight))

    def mix(self, own: Projections, x: Tensor, anchors: Anchors, context: Context) -> tuple[Projections, Anchors]:
        assert context.tokens is not None
        rows = self.table(context.tokens).unflatten(-1, self.shape).to(x.dtype)
        return own | {"v": own["v"] + self.gate(x)[..., None] * rows}, anchors

    def readers(self) -> tuple[Tensor, ...]:
        return (self.gate_weight,)

    @torch.no_grad()
    def begin_as(self, old: Unmixed) -> InitFidelity:
        """E = 0 adds nothing, and has a gradient."""
        if isinstance(old, ValueEmbedding):
            take_parameters(self, old)
            return InitFidelity.EXACTLY if self.scale == old.scale else InitFidelity.NOT
        nn.init.zeros_(self.table.weight)
        return super().begin_as(old)


def build_value_embedding(config: choices.ValueEmbeddings, place: LayerPlace) -> Unmixed:
    """Every so many layers, counted from the last, has a table."""
    has_table = (place.layers - 1 - place.layer) % config.every == 0
    return ValueEmbedding(config, place) if has_table else Unmixed(place.sections)
