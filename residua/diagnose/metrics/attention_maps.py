"""Token × token: attention of the first queries to the first keys, over all softmax layers and, on request, by layer.

A dark column is a token that every later one attends to, an attention sink; a dark diagonal is attention to neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.attention import CORNER
from residua.diagnose.metric import Metric, Models
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import LABELS
from residua.diagnose.text import Sample
from residua.report import Page
from residua.report.figures import heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class AttentionMap(Frozen):
    """`values[query][key]` of the first sequence, up to the query if causal: the mean over heads and layers."""

    tokens: list[str]
    values: list[list[float]]


class AttentionLayerMap(Frozen):
    """The same of one layer; `heads[head][query][key]`."""

    layer: int
    heads: list[list[list[float]]]


class AttentionMapKeys(Frozen):
    """Null without softmax layers, and in older files."""

    attention_map: AttentionMap | None = None


class AttentionLayerMapKeys(Frozen):
    """Layer by layer, head by head; only on request."""

    attention_layer_maps: list[AttentionLayerMap] = Field(default_factory=list)


class AttentionMaps(Metric):
    """A[i, k] of the first tokens, the mean over heads and layers."""

    keys: ClassVar[type[Frozen]] = AttentionMapKeys
    file_place, page_place = 51, 22

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.first: dict[int, Tensor] = {}  # by layer, [heads, queries, keys]

    def add(self, seen: Observation) -> None:
        if not self.first:
            self.first = {layer: sums.corner.cpu() for layer, sums in sorted(seen.attention.items())}

    def facts(self) -> Frozen:
        if not self.first:
            return AttentionMapKeys()
        tokens = self.sample.tokens[0, :CORNER].tolist()
        mean = torch.stack([corner.mean(0) for corner in self.first.values()]).mean(0)
        return AttentionMapKeys(
            attention_map=AttentionMap(tokens=[self.sample.text_of(token) for token in tokens], values=_rows(mean))
        )

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        maps = {
            m.name: _map(m.attention_map.tokens, m.attention_map.values) for m in models if m.attention_map is not None
        }
        if maps:
            page.section(
                "Attention map",
                f"Mean attention of the first {CORNER} tokens to each other, over heads and softmax layers. Healthy: "
                "weight spread along each row, or near the diagonal. A dark column is an attention sink. residua "
                "diagnose --maps draws every layer.",
            ).tabs(maps)


class AttentionLayerMaps(AttentionMaps):
    """A[i, k] of every layer and head."""

    keys = AttentionLayerMapKeys
    on_request = True
    file_place, page_place = 52, 23

    def facts(self) -> AttentionLayerMapKeys:
        return AttentionLayerMapKeys(
            attention_layer_maps=[
                AttentionLayerMap(layer=layer, heads=[_rows(head) for head in corner])
                for layer, corner in self.first.items()
            ]
        )

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        maps = {}
        for m in models:
            for found in m.attention_layer_maps:
                name = f"layer {found.layer}" if len(models) == 1 else f"{m.name}: layer {found.layer}"
                maps[name] = _map(m.attention_map.tokens, _mean_over_heads(found.heads))
        if maps:
            page.section(
                "Attention map, layer by layer",
                "The same for each softmax layer, the mean over its heads. Healthy: as above.",
            ).tabs(maps)


def _rows(weights: Tensor) -> list[list[float]]:
    """Each query's weights with four digits; if no query sees later keys, up to itself."""
    causal = not bool(weights.triu(1).any())
    rows = weights.tolist()
    return [[float(f"{value:.4g}") for value in (row[: i + 1] if causal else row)] for i, row in enumerate(rows)]


def _mean_over_heads(heads: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    return [[sum(values) / len(values) for values in zip(*rows, strict=True)] for rows in zip(*heads, strict=True)]


def _map(tokens: Sequence[str], values: Sequence[Sequence[float]]) -> Figure:
    """Keys that a query cannot see stay empty; the first query, which sees itself alone, does not set the colours."""
    names = [f"{position} {text!r}" for position, text in enumerate(tokens)]
    every = sorted(value for row in values[1:] for value in row) or [1.0]
    padded = [[*row, *[None] * (len(names) - len(row))] for row in values]
    return heatmap(
        padded, names, names, "key", "query", "attention", bounds=(0.0, every[int(0.99 * (len(every) - 1))]),
        height=620, step=max(1, -(-len(names) // (2 * LABELS))),
    )  # fmt: skip
