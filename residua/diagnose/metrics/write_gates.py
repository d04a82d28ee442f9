"""Write gates β: how much of each stream the output of a sublayer replaces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Mean, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report import Page
from residua.report.figures import Box, boxes, heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BINS = 20
KEPT = 1 << 20
"""Values of a sublayer's gates that quartiles are taken from; of more, one in so many is taken."""
WHISKER = 1.5


class Quartiles(Frozen):
    """A box plot in numbers. `low` and `high` are the last values within 1.5 interquartile ranges of the box,
    `largest` the largest of all."""

    low: float
    lower: float
    median: float
    upper: float
    high: float
    largest: float


class BetaFacts(Frozen):
    """Gates of the write after one sublayer: the mean of each stream's, shares of twenty equal bins of [0, 1], and
    quartiles of all of them and of each stream's; null and empty in older files."""

    site: int
    mean: list[float]
    histogram: list[float]
    quartiles: Quartiles | None = None
    by_stream: list[Quartiles] = Field(default_factory=list)


class BetaKeys(Frozen):
    """Write gates by sublayer."""

    betas: list[BetaFacts] = Field(default_factory=list)


class WriteGates(Metric):
    """Over all tokens. Quartiles are those of the values themselves, interpolated between neighbours."""

    keys = BetaKeys
    file_place, page_place = 70, 82

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.beta: dict[int, Mean] = defaultdict(Mean)
        self.histogram: dict[int, Mean] = defaultdict(Mean)
        self.values: dict[int, list[Tensor]] = defaultdict(list)
        self.largest: dict[int, Tensor] = {}

    def add(self, seen: Observation) -> None:
        for site, beta in seen.betas.items():
            # An elementwise gate has one β per channel of its one stream.
            one_stream = beta.shape[-1] == self.subject.width
            values = wide(beta).flatten()[:, None] if one_stream else wide(beta).flatten(0, 1)
            self.beta[site].add(values.double().sum(0), len(values))
            self.histogram[site].add(torch.histc(values.float().flatten(), BINS, 0.0, 1.0), values.numel())
            largest = values.amax(0).double()
            self.largest[site] = torch.maximum(self.largest[site], largest) if site in self.largest else largest
            every = self._step(values.shape[1] * (self.subject.width if one_stream else 1))
            self.values[site].append(values[::every].contiguous())

    def _step(self, per_token: int) -> int:
        """One value in so many is kept; odd, so that all channels of an even width take their turn."""
        return max(1, -(-self.sample.tokens.numel() * per_token // KEPT)) | 1

    def facts(self) -> BetaKeys:
        return BetaKeys(betas=[self._facts(site, mean.value()) for site, mean in sorted(self.beta.items())])

    def _facts(self, site: int, mean: Tensor) -> BetaFacts:
        values, largest = torch.cat(self.values[site]).double(), self.largest[site]
        return BetaFacts(
            site=site,
            mean=mean.tolist(),
            histogram=self.histogram[site].value().tolist(),
            quartiles=quartiles(values.flatten(), float(largest.max())),
            by_stream=[quartiles(values[:, i], float(largest[i])) for i in range(values.shape[1])],
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        known = [b for b in model.betas if b.quartiles is not None]
        if known:
            most = max(known, key=lambda b: b.quartiles.largest)
            medians = [b.quartiles.median for b in known]
            yield Sentence(
                66,
                f"Write gates have medians from {min(medians):.3g} to {max(medians):.3g}; the largest, "
                f"{most.quartiles.largest:.3g}, is that of {model.sites[most.site].name}.",
            )

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        if not any(m.betas for m in models):
            return
        section = page.section(
            "Write gates",
            "β is the share of a stream that a sublayer's output replaces. Healthy: spread out; all near 0 writes "
            "nothing, all near 1 forgets everything.",
        )
        plots = {m.name: figure for m in models if (figure := _boxes(m)) is not None}
        if plots:
            section.tabs(
                plots,
                "Quartiles of β over tokens and streams, whiskers to the last value within 1.5 interquartile ranges, "
                "the mean dashed; a ring is the largest value. Where the ring is near 1, a backward pass by inversion "
                "is not accurate.",
            )
        section.subheading("Distribution")
        section.tabs(_histograms(models), "Share of β in each of twenty bins, over tokens and streams.")
        maps = _by_stream(models)
        if maps:
            section.subheading("Stream by stream")
            section.tabs(maps, "Healthy: streams differ; a column near 0 is a stream that nobody writes.")


def quartiles(values: Tensor, largest: float) -> Quartiles:
    """Of values in float64. `torch.quantile` takes at most 16 million, which KEPT is below."""
    shares = torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype, device=values.device)
    lower, median, upper = torch.quantile(values, shares).tolist()
    reach = WHISKER * (upper - lower)
    inside = values[(values >= lower - reach) & (values <= upper + reach)]
    low, high = (float(inside.min()), float(inside.max())) if len(inside) else (lower, upper)
    return Quartiles(low=low, lower=lower, median=median, upper=upper, high=high, largest=largest)


def _boxes(model: Model) -> Figure | None:
    known = [b for b in model.betas if b.quartiles is not None]
    if not known:
        return None
    return boxes(
        [
            Box(
                model.sites[b.site].name, b.quartiles.low, b.quartiles.lower, b.quartiles.median, b.quartiles.upper,
                b.quartiles.high, sum(b.mean) / len(b.mean), b.quartiles.largest,
            )
            for b in known
        ],
        "written by",
        "β",
    )  # fmt: skip


def _histograms(models: Models) -> dict[str, Figure]:
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


def _by_stream(models: Models) -> dict[str, Figure]:
    """Writer × stream: median, quartiles and maximum."""
    titles = {"lower": "lower quartile", "median": "median", "upper": "upper quartile", "largest": "largest"}
    found = {}
    for m in models:
        known = [b for b in m.betas if len(b.by_stream) > 1]
        if known:
            streams = [f"stream {i}" for i in range(max(len(b.by_stream) for b in known))]
            names = [m.sites[b.site].name for b in known]
            for key, title in titles.items():
                rows = [[getattr(q, key) for q in b.by_stream] for b in known]
                label = title if len(models) == 1 else f"{m.name}: {title}"
                found[label] = heatmap(rows, streams, names, "stream", "written by", f"{title} of β")
    return found
