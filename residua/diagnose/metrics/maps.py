"""Maps of the first tokens: attention of queries to keys, and |h| by token and dimension; by layer on request.

In attention maps, a dark column is a sink: a token that every later one attends to. A dark diagonal is attention to
neighbours. In maps of |h|, a vertical stripe is a residual sink: a dimension that is large in every token. A single
dark cell is a massive activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.attention import CORNER
from residua.diagnose.metric import Metric, Models
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import LABELS, Model, Part, Topic, label_step, padded, tab_each, tabs_each
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report.figures import Figure, heatmap


class AttentionMap(Frozen):
    """`values[query][key]` of the first sequence, averaged over heads and layers; if causal, keys up to the query."""

    tokens: list[str]
    values: list[list[float]]


class AttentionLayerMap(Frozen):
    """The same for one layer; `heads[head][query][key]`."""

    layer: int
    heads: list[list[list[float]]]


class AttentionMapKeys(Frozen):
    """Null without softmax layers, and in older files."""

    attention_map: AttentionMap | None = None


class AttentionLayerMapKeys(Frozen):
    """Maps by layer and head; only on request."""

    attention_layer_maps: list[AttentionLayerMap] = Field(default_factory=list)


class AttentionMaps(Metric):
    """A[i, k] of the first tokens, averaged over heads and layers."""

    keys: ClassVar[type[Frozen]] = AttentionMapKeys
    file_place, page_place = 51, 22

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.first: dict[int, Tensor] = {}  # by layer, [heads, queries, keys]

    def add(self, observation: Observation) -> None:
        if not self.first:
            self.first = {layer: sums.corner.cpu() for layer, sums in sorted(observation.attention.items())}

    def facts(self) -> Frozen:
        if not self.first:
            return AttentionMapKeys()
        mean = torch.stack([corner.mean(0) for corner in self.first.values()]).mean(0)
        tokens = self.sample.opening(CORNER)
        return AttentionMapKeys(attention_map=AttentionMap(tokens=tokens, values=_weight_rows(mean)))

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        yield Topic(
            "Attention map",
            f"Mean attention among the first {CORNER} tokens, over heads and softmax layers. Healthy: "
            "weight spread along each row, or near the diagonal. A dark column is an attention sink. residua "
            "diagnose --maps draws every layer.",
            Part(tab_each(models, lambda m: m.attention_map and _attention_map(m, m.attention_map.values))),
        )


class AttentionLayerMaps(AttentionMaps):
    """A[i, k] of every layer and head."""

    keys = AttentionLayerMapKeys
    on_request = True
    file_place, page_place = 52, 23

    def facts(self) -> AttentionLayerMapKeys:
        maps = [
            AttentionLayerMap(layer=layer, heads=[_weight_rows(head) for head in corner])
            for layer, corner in self.first.items()
        ]
        return AttentionLayerMapKeys(attention_layer_maps=maps)

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        yield Topic(
            "Attention map, layer by layer",
            "The same for each softmax layer, averaged over its heads. Healthy: as above.",
            Part(tabs_each(models, _attention_layers)),
        )


def _weight_rows(weights: Tensor) -> list[list[float]]:
    """Each query's weights with four digits; if no query sees later keys, only keys up to the query."""
    causal = not bool(weights.triu(1).any())
    rows = weights.tolist()
    return [[float(f"{value:.4g}") for value in (row[: i + 1] if causal else row)] for i, row in enumerate(rows)]


def _attention_layers(model: Model) -> dict[str, Figure | None]:
    """By layer, the mean over its heads."""
    return {
        f"layer {layer.layer}": _attention_map(
            model,
            [[sum(one) / len(one) for one in zip(*rows, strict=True)] for rows in zip(*layer.heads, strict=True)],
        )
        for layer in model.attention_layer_maps
    }


def _attention_map(model: Model, values: Sequence[Sequence[float]]) -> Figure:
    """Keys that a query cannot see stay empty. The first query only sees itself, so the colour scale ignores it."""
    names = _numbered(model.attention_map.tokens)
    return heatmap(
        [padded(row, len(names)) for row in values], names, names, "key", "query", "attention",
        bounds=(0.0, _most(values[1:])), height=620, step=label_step(len(names), 2 * LABELS),
    )  # fmt: skip


def _numbered(tokens: Sequence[str]) -> list[str]:
    return [f"{position} {text!r}" for position, text in enumerate(tokens)]


def _most(values: Sequence[Sequence[float]]) -> float:
    """The upper end of the colour scale; the largest hundredth of the cells share it."""
    every = sorted(value for row in values for value in row) or [1.0]
    return every[int(0.99 * (len(every) - 1))]


TOKENS = DIMENSIONS = 48


class TokenMap(Frozen):
    """|h| of the first sequence's first tokens: `values[token][dimension]`, the largest dimensions first."""

    tokens: list[str]
    dimensions: list[int]
    values: list[list[float]]


class LayerMap(Frozen):
    """The same for the input of one sublayer."""

    state: int
    name: str
    values: list[list[float]]


class TokenMapKeys(Frozen):
    """The mean over all states; null in older files."""

    token_map: TokenMap | None = None


class LayerMapKeys(Frozen):
    """Maps by state, with the tokens and dimensions of `token_map`; only on request."""

    layer_maps: list[LayerMap] = Field(default_factory=list)


class TokenMaps(Metric):
    """H_avg[n, j] = mean over states i of |h_i[n, j]|, dimensions j sorted by mean |h| over tokens and states of the
    whole sample (arXiv 2601.22966, section 2)."""

    keys: ClassVar[type[Frozen]] = TokenMapKeys
    file_place, page_place = 46, 32

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.sums: Tensor | None = None  # [C]
        self.first: dict[int, Tensor] = {}  # by state, [tokens, C]

    def add(self, observation: Observation) -> None:
        sizes = {k: wide(h).abs() for k, h in sorted(observation.states.items())}
        total = torch.stack([size.double().sum((0, 1)) for size in sizes.values()]).sum(0)
        self.sums = total if self.sums is None else self.sums + total
        if not self.first:
            self.first = {k: size[0, :TOKENS].double().cpu() for k, size in sizes.items()}

    def facts(self) -> Frozen:
        mean = torch.stack(list(self.first.values())).mean(0)
        tokens = self.sample.opening(TOKENS)
        token_map = TokenMap(tokens=tokens, dimensions=self._dimensions(), values=self._rows(mean))
        return TokenMapKeys(token_map=token_map)

    def _dimensions(self) -> list[int]:
        assert self.sums is not None
        order: list[int] = self.sums.cpu().argsort(descending=True, stable=True)[:DIMENSIONS].tolist()
        return order

    def _rows(self, sizes: Tensor) -> list[list[float]]:
        """[tokens, C] in the order of the dimensions, with five digits."""
        return [[float(f"{value:.5g}") for value in row] for row in sizes[:, self._dimensions()].tolist()]

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        yield Topic(
            "Tokens and dimensions",
            f"Mean |h| over depth of the first {TOKENS} tokens in the {DIMENSIONS} largest dimensions, largest "
            "first. Healthy: an even field. A vertical stripe is a residual sink, a single dark cell a "
            "massive activation; the largest 1 % of the cells share a colour. residua diagnose --maps draws every "
            "layer.",
            Part(tab_each(models, lambda m: m.token_map and _token_map(m.token_map, m.token_map.values))),
        )


class LayerMaps(TokenMaps):
    """|h| of the inputs of each layer's first sublayer and of the final norm."""

    keys = LayerMapKeys
    on_request = True
    file_place, page_place = 47, 33

    def facts(self) -> LayerMapKeys:
        sites = self.subject.sites
        shown = [k for k in self.first if k == len(sites) or k == 0 or sites[k].layer != sites[k - 1].layer]
        maps = [LayerMap(state=k, name=self.subject.reader_name(k), values=self._rows(self.first[k])) for k in shown]
        return LayerMapKeys(layer_maps=maps)

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        maps = tabs_each(models, lambda m: {one.name: _token_map(m.token_map, one.values) for one in m.layer_maps})
        yield Topic(
            "Tokens and dimensions, layer by layer",
            "The same for the input of each layer. Healthy: an even field at every depth.",
            Part(maps),
        )


def _token_map(of: TokenMap, values: Sequence[Sequence[float]]) -> Figure:
    """A row for each token, numbered."""
    names = _numbered(of.tokens)
    return heatmap(
        values, [str(j) for j in of.dimensions], names, "dimension", "token", "|h|", bounds=(0.0, _most(values)),
        height=620, step=label_step(len(names), 2 * LABELS),
    )  # fmt: skip
