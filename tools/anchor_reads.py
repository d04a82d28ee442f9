"""Which queries, keys, values and gates depend on those of other layers, and on what their weights depend.

The layers of a small model get random projections, and gradients find what the results depend on. tools/anchors.py
draws it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from residua.config import choices
from residua.model.anchor_kinds import build_mix, build_source
from residua.model.anchor_source import HeadShape
from residua.model.anchors import LayerPlace
from residua.model.attention import NoQKNorm
from residua.model.context import Context

LAYERS, HEADS, HEAD_DIM, WIDTH, VOCABULARY, TOKENS = 4, 2, 4, 12, 7, 16
PATHWAYS = ("q", "k", "v", "g")
Name = tuple[int, str]
"""A projection: its layer, counted from 1, and its pathway. Layer 0 is the embedding, "t" the ids of tokens."""


class Layer(NamedTuple):
    """What one layer projects itself, and how each of its pathways reads other layers."""

    own: tuple[str, ...]
    reads: dict[str, dict[Name, str]]


def trace(settings: Mapping[str, object]) -> list[Layer]:
    """The layers of a model with anchors of this kind."""
    torch.manual_seed(0)
    config = choices.AnchorChoice.choose(dict(settings))
    heads = HeadShape(dict.fromkeys(PATHWAYS, HEADS), HEAD_DIM)
    source = build_source(config, heads, WIDTH, std=1.0)
    anchors = tuple(anchor.detach().requires_grad_() for anchor in source.open(_random(WIDTH)))
    leaves = {(0, s): anchor for s, anchor in zip(config.mixed, anchors, strict=False)}
    norm = NoQKNorm(heads, choices.SoftmaxAttention(heads=HEADS))
    table = (torch.ones(TOKENS, HEAD_DIM // 2), torch.zeros(TOKENS, HEAD_DIM // 2))
    context = Context(table, None, tokens=torch.arange(TOKENS)[None] % VOCABULARY)
    layers = []
    for number in range(1, LAYERS + 1):
        own = tuple(s for s in PATHWAYS if s not in config.taken(number - 1))
        sections = dict.fromkeys(own, (HEADS, HEAD_DIM))
        mix = build_mix(config, LayerPlace(number - 1, LAYERS, heads, sections, WIDTH, 1.0, VOCABULARY))
        leaves |= {(number, s): _random(HEADS * HEAD_DIM) for s in own}
        projected, x = torch.cat([leaves[number, s] for s in own], -1), _random(WIDTH)
        mixed, anchors = mix(lambda _, out=projected: out, x, anchors, norm, table, context)
        results = {"q": mixed.q, "k": mixed.k, "v": mixed.v, "g": mixed.gate.values()}
        layers.append(Layer(own, {s: _reads((number, s), result, leaves, x, mix) for s, result in results.items()}))
        kept = {id(results[s]): (number, s) for s in own}  # what later layers get is theirs as it is, mixed or not
        cut = {name: anchor.detach().requires_grad_() for anchor in anchors if (name := kept.get(id(anchor)))}
        anchors = tuple(cut.get(kept.get(id(anchor)), anchor) for anchor in anchors)
        leaves |= cut
    return layers


def _random(width: int) -> Tensor:
    return torch.randn(1, TOKENS, width, requires_grad=True)


def _reads(reader: Name, result: Tensor, leaves: dict[Name, Tensor], x: Tensor, mix: Module) -> dict[Name, str]:
    """The projections of other layers that a result depends on, and how it weighs them."""
    weights = dict(mix.named_parameters())
    tokens = weights.pop("table.weight", None)
    found = leaves | {(0, "t"): tokens} if tokens is not None else leaves
    layer, pathway = reader
    sources = [name for name in _needed(result, found) if name[0] != layer]
    if _needed(result, {reader: leaves.get((layer, "q"))}) and pathway != "q":
        return {name: "attended" if name[1] == pathway else "compared" for name in sources}
    how = "gate" if _needed(result, {reader: x}) else "learned" if _needed(result, weights) else "taken"
    return dict.fromkeys(sources, how)


def _needed(result: Tensor, inputs: dict) -> list:
    """The names of the tensors that a result depends on."""
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    total = (result * torch.randn_like(result)).sum()
    slopes = torch.autograd.grad(total, list(given.values()), retain_graph=True, allow_unused=True) if given else ()
    return [name for name, slope in zip(given, slopes, strict=True) if slope is not None and slope.any()]
