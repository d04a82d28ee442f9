"""Token × dimension: |h| of the first tokens in the largest dimensions, over all states and, on request, by layer.

A stripe downward is a dimension that is large in every token, a residual sink; a single cell a massive activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Metric, Models
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import LABELS
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report import Page
from residua.report.figures import heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TOKENS = DIMENSIONS = 48


class TokenMap(Frozen):
    """|h| of the first sequence's first tokens: `values[token][dimension]`, the largest dimensions first."""

    tokens: list[str]
    dimensions: list[int]
    values: list[list[float]]


class LayerMap(Frozen):
    """The same of what one sublayer reads."""

    state: int
    name: str
    values: list[list[float]]


class TokenMapKeys(Frozen):
    """The mean over all states; null in older files."""

    token_map: TokenMap | None = None


class LayerMapKeys(Frozen):
    """State by state, with the tokens and dimensions of `token_map`; only on request."""

    layer_maps: list[LayerMap] = Field(default_factory=list)


class TokenMaps(Metric):
    """H_avg[n, j] = mean over states i of |h_i[n, j]|, dimensions j in order of their mean |h| over tokens and states
    of the whole sample (arXiv 2601.22966, section 2)."""

    keys: ClassVar[type[Frozen]] = TokenMapKeys
    file_place, page_place = 46, 32

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.sums: Tensor | None = None  # [C]
        self.first: dict[int, Tensor] = {}  # by state, [tokens, C]

    def add(self, seen: Observation) -> None:
        sizes = {k: wide(h).abs() for k, h in sorted(seen.states.items())}
        total = torch.stack([size.double().sum((0, 1)) for size in sizes.values()]).sum(0)
        self.sums = total if self.sums is None else self.sums + total
        if not self.first:
            self.first = {k: size[0, :TOKENS].double().cpu() for k, size in sizes.items()}

    def facts(self) -> Frozen:
        mean = torch.stack(list(self.first.values())).mean(0)
        tokens = self.sample.tokens[0, :TOKENS].tolist()
        return TokenMapKeys(
            token_map=TokenMap(
                tokens=[self.sample.text_of(token) for token in tokens],
                dimensions=self._dimensions(),
                values=self._rows(mean),
            )
        )

    def _dimensions(self) -> list[int]:
        assert self.sums is not None
        order: list[int] = self.sums.cpu().argsort(descending=True, stable=True)[:DIMENSIONS].tolist()
        return order

    def _rows(self, sizes: Tensor) -> list[list[float]]:
        """[tokens, C] in the order of the dimensions, with five digits."""
        return [[float(f"{value:.5g}") for value in row] for row in sizes[:, self._dimensions()].tolist()]

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        maps = {m.name: _map(m.token_map, m.token_map.values) for m in models if m.token_map is not None}
        if maps:
            page.section(
                "Tokens and dimensions",
                f"Mean |h| over depth of the first {TOKENS} tokens in the {DIMENSIONS} largest dimensions, largest "
                "first. Healthy: an even field. A stripe downward is a residual sink, a single dark cell a massive "
                "activation; the largest 1 % of the cells share a colour. residua diagnose --maps draws every layer.",
            ).tabs(maps)


class LayerMaps(TokenMaps):
    """|h| of what each layer's first sublayer reads, and the final norm."""

    keys = LayerMapKeys
    on_request = True
    file_place, page_place = 47, 33

    def facts(self) -> LayerMapKeys:
        sites = self.subject.sites
        shown = [k for k in self.first if k == len(sites) or k == 0 or sites[k].layer != sites[k - 1].layer]
        return LayerMapKeys(
            layer_maps=[
                LayerMap(state=k, name=self.subject.reader_name(k), values=self._rows(self.first[k])) for k in shown
            ]
        )

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        maps = {
            found.name if len(models) == 1 else f"{m.name}: {found.name}": _map(m.token_map, found.values)
            for m in models
            for found in m.layer_maps
        }
        if maps:
            page.section(
                "Tokens and dimensions, layer by layer",
                "The same for what each layer reads. Healthy: an even field at every depth.",
            ).tabs(maps)


def _map(of: TokenMap, values: Sequence[Sequence[float]]) -> Figure:
    """A row for each token, numbered; the largest hundredth of the cells share a colour."""
    every = sorted(value for row in values for value in row)
    names = [f"{position} {text!r}" for position, text in enumerate(of.tokens)]
    return heatmap(
        values, [str(j) for j in of.dimensions], names, "dimension", "token", "|h|",
        bounds=(0.0, every[int(0.99 * (len(every) - 1))]), height=620, step=max(1, -(-len(names) // (2 * LABELS))),
    )  # fmt: skip
