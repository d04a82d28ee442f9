"""Gated values that layers add to their own: the first layer's values (SATFormer), or an embedding of the token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua.config import choices
from residua.model.anchors import LayerPlace, Projections, Unmixed, Write
from residua.model.context import Anchors, Context
from residua.model.equivalence import InitFidelity, take_parameters
from residua.model.projection import Embedding, Projection
from residua.model.taps import tap
from residua.ops._runtime.numeric import wide

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda logits: logits.softmax(-1) * logits.shape[-1],
}

LARGEST_START = 0.02
NEARLY_CLOSED = 1e-3
"""The factor on W_α's std when a relu gate should start closed: at exactly zero it would never open."""


class AddedValues(Unmixed):
    """Base class: adds other values to a layer's own, times a gate per token and key-value head."""

    pathways = ("v",)

    def gate(self, x: Tensor) -> Tensor:
        """[B, T, H_kv]"""
        raise NotImplementedError

    def publish(self, layer: int, x: Tensor) -> None:
        tap(f"attention.{layer}.value_gate", lambda: self.gate(x))

    def scales(self, gamma: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """λ1 and λ2: the gate's mean per head, and 1; empty without the gate."""
        if gamma is None:
            return {}
        mean = wide(gamma).flatten(0, -2).mean(0)
        return {"v": (mean, torch.ones_like(mean))}


class GatedValues(AddedValues):
    """Gated value residuals: each token and head decides how much of the first layer's values it reads (SATFormer).

        V̂_l = V_l + α_l ⊙ V_1,   α_l = gate(W_α x_l),   W_α: C → key-value heads        (arXiv 2605.03953)

    x_l is the layer's normed input, V_1 the projected values of the first softmax layer. `gate` is relu (as in the
    paper), σ, tanh, or H · softmax over the H key-value heads. W_α starts normal with the model's std, as in the public
    code.
    """

    def __init__(self, config: choices.GatedValue, place: LayerPlace) -> None:
        super().__init__(place.sections)
        self.kind = config.gate
        self.gates = Projection(place.width, place.shape.heads["v"], std=place.std)

    def gate(self, x: Tensor) -> Tensor:
        return GATES[self.kind](self.gates(x))

    def mix(self, own: Projections, x: Tensor, anchors: Anchors, context: Context) -> tuple[Projections, Anchors]:
        (first,) = anchors
        return own | {"v": own["v"] + self.gate(x)[..., None] * first}, anchors

    def readers(self) -> tuple[Tensor, ...]:
        return (self.gates.weight,)

    @torch.no_grad()
    def begin_as(self, old: Unmixed) -> InitFidelity:
        """W_α = 0 closes tanh exactly; relu starts with a thousandth of W_α, which is nearly closed and can open.

        σ and softmax cannot be closed, so the function changes. It also changes when `old` has other anchors.
        """
        if isinstance(old, GatedValues):
            take_parameters(self, old)
            return InitFidelity.EXACTLY if old.kind == self.kind else InitFidelity.NOT
        if not old.plain or self.kind in ("sigmoid", "softmax"):
            return InitFidelity.NOT
        if self.kind == "tanh":
            nn.init.zeros_(self.gates.weight)
            return InitFidelity.EXACTLY
        nn.init.normal_(self.gates.weight, std=self.gates.std * NEARLY_CLOSED)
        return InitFidelity.NEARLY


def build_gated_values(config: choices.GatedValue, place: LayerPlace) -> Unmixed:
    """The first layer writes its values; the others read them."""
    if place.layer == 0:
        return Write(place.sections, ("v",), "none", place.shape)
    return GatedValues(config, place)


class ValueEmbedding(AddedValues):
    """Value embeddings: some layers add a learned vector for each token to its values.

        V̂_l = V_l + s·σ(W_g x_l[:c]) ⊙ E_l[token],   W_g: c → key-value heads,  s = 3,  c = 12        (nanochat, gpt.py)

    x_l is the layer's normed input; its first c channels determine one gate per token and head. Every second softmax
    layer, counting back from the last, has a table E_l [vocabulary, key-value heads · head_dim]. E_l starts like W_v,
    normal with the model's std; W_g starts uniform in [0, 0.02], so that gates begin near s/2.

    The tables cost more than the reads: each step zeroes, clips and updates all their weights, 44 bytes each, whatever
    tokens the batch contains (docs/results/step.md).
    """

    def __init__(self, config: choices.ValueEmbeddings, place: LayerPlace) -> None:
        super().__init__(place.sections)
        self.scale, self.shape = config.gate_scale, place.sections["v"]
        self.table = Embedding(place.vocabulary, place.shape.rows("v"), std=place.std)
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
    """Every `every`-th layer has a table, counting back from the last."""
    has_table = (place.layers - 1 - place.layer) % config.every == 0
    return ValueEmbedding(config, place) if has_table else Unmixed(place.sections)
