"""Streams of a multi-stream residual: how each turns along depth, how alike they are, and the gates that write them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Mean, Metric, Models
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import add_figure, by_layer, line, over_sublayers
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report import Page, theme
from residua.report.figures import heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BINS = 20


class BetaFacts(Frozen):
    """Gates of the write after one sublayer: the mean of each stream's, and shares of twenty equal bins of [0, 1]."""

    site: int
    mean: list[float]
    histogram: list[float]


class StreamFacts(Frozen):
    """Streams as reader `reader` finds them: angular distance of each to itself one sublayer earlier (null: it is new),
    and mean cosine between different streams."""

    reader: int
    angular_distance: list[float | None]
    similarity: float


class StreamKeys(Frozen):
    """Write gates by sublayer, streams by reader."""

    betas: list[BetaFacts] = Field(default_factory=list)
    streams: list[StreamFacts] = Field(default_factory=list)


class Streams(Metric):
    """Means over all tokens."""

    keys = StreamKeys
    file_place, page_place = 70, 80

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.beta: dict[int, Mean] = defaultdict(Mean)
        self.histogram: dict[int, Mean] = defaultdict(Mean)
        self.turned: dict[int, Mean] = defaultdict(Mean)
        self.alike: dict[int, Mean] = defaultdict(Mean)

    def add(self, seen: Observation) -> None:
        for site, beta in seen.betas.items():
            # An elementwise gate has one β per channel of its one stream.
            by_stream = wide(beta).mean(-1, keepdim=True) if beta.shape[-1] == self.subject.width else wide(beta)
            self.beta[site].add(by_stream.double().flatten(0, 1).sum(0), seen.tokens.numel())
            counts = torch.histc(wide(beta).float().flatten(), BINS, 0.0, 1.0)
            self.histogram[site].add(counts, beta.numel())
        before: Tensor | None = None
        for reader in sorted(seen.streams):
            before = self._add_streams(reader, wide(seen.streams[reader]), before)

    def _add_streams(self, reader: int, streams: Tensor, before: Tensor | None) -> Tensor:
        """Angular distance arccos(cos)/π of each stream to itself one reader earlier; mean cosine between streams.

        Takes and returns unit vectors, `before` being those of the reader before.
        """
        u: Tensor = streams / streams.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        count, tokens = u.shape[-2], u.shape[:2].numel()
        if before is not None:
            shared = min(count, before.shape[-2])
            cosine = (u[..., :shared, :] * before[..., :shared, :]).sum(-1).double().clamp(-1, 1)
            self.turned[reader].add((cosine.arccos() / torch.pi).flatten(0, 1).sum(0), tokens)
        if count > 1:
            total = u.double().sum(-2).square().sum(-1) - u.double().square().sum((-2, -1))
            self.alike[reader].add((total / (count * (count - 1))).sum(), tokens)
        return u

    def facts(self) -> StreamKeys:
        betas = [
            BetaFacts(site=site, mean=mean.value().tolist(), histogram=self.histogram[site].value().tolist())
            for site, mean in sorted(self.beta.items())
        ]
        streams = [
            StreamFacts(
                reader=reader,
                angular_distance=self.turned[reader].value().tolist() if reader in self.turned else [],
                similarity=float(alike.value()),
            )
            for reader, alike in sorted(self.alike.items())
        ]
        return StreamKeys(betas=betas, streams=streams)

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        turned, betas = _turned(models), _betas(models)
        if not turned and not betas:
            return
        section = page.section(
            "Streams",
            "Each stream apart. Healthy: streams turn at different speeds and stay different from each other.",
        )
        if turned:
            section.tabs(
                turned,
                "Angular distance of each stream to itself one sublayer earlier; zero is a stream nobody writes.",
            )
            alike = by_layer(
                models,
                lambda m: [(s.reader, s.similarity) for s in m.streams],
                "mean cosine between streams",
                x="as read by",
            )
            add_figure(section, alike, "Healthy: well below 1; equal streams are one stream kept n times.")
        if betas:
            section.subheading("Write gates β")
            section.tabs(
                betas,
                "Distribution of β over tokens and streams. Healthy: spread out; all near 0 writes nothing, all near 1 "
                "forgets everything.",
            )


def _turned(models: Models) -> dict[str, Figure]:
    """Angular distance of each stream to itself one sublayer earlier."""
    found = {}
    for m in models:
        if m.streams:
            count = max(len(s.angular_distance) for s in m.streams)
            series = []
            for i in range(count):
                points = [
                    (float(s.reader), d)
                    for s in m.streams
                    if i < len(s.angular_distance) and (d := s.angular_distance[i]) is not None
                ]
                series.append(line(f"stream {i}", points, theme.colour(i + 1)))
            owners, y = [m] * len(series), "angular distance to one earlier"
            found[m.name] = over_sublayers(series, owners, "as read by", y, height=340)
    return found


def _betas(models: Models) -> dict[str, Figure]:
    """Writer × bin of [0, 1]."""
    found = {}
    for m in models:
        if m.betas:
            bins = len(m.betas[0].histogram)
            edges = [f"{i / bins:.2f}" for i in range(bins)]
            names = [m.sites[b.site].name for b in m.betas]
            found[m.name] = heatmap(
                [b.histogram for b in m.betas], edges, names, "β from", "written by", "share of gates"
            )
    return found
