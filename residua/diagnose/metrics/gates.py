"""Gates of attention, norms and writes: how far they open, and for which values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Mean, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import NONE, Part, Topic, by_layer, colours, line, over, tab_each, tabs_each
from residua.diagnose.sentences import percent
from residua.diagnose.text import Sample
from residua.model import gauges
from residua.ops._runtime.numeric import wide
from residua.report import Column
from residua.report.figures import Box, Figure, boxes, curves, heatmap


class GateFacts(Frozen):
    """The attention gate of one layer: its mean, and the share of its values below 0.2."""

    layer: int
    mean: float
    closed: float


class GateKeys(Frozen):
    """Every layer with gated attention."""

    gates: list[GateFacts] = Field(default_factory=list)


class Gates(Metric):
    """Means over tokens, heads and channels."""

    keys = GateKeys
    columns = (Column("gate", "of attention, its mean"),)
    file_place, page_place = 80, 100

    def add(self, observation: Observation) -> None:
        for layer, gate in observation.gates.items():
            sums = torch.stack([wide(gate).double().sum(), gauges.closed(gate).double().sum()])
            self.means[layer].add(sums, gate.numel())

    def facts(self) -> GateKeys:
        means = {layer: mean.value().tolist() for layer, mean in sorted(self.means.items())}
        return GateKeys(gates=[GateFacts(layer=layer, mean=m, closed=c) for layer, (m, c) in means.items()])

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        if model.gates:
            mean = sum(gate.mean for gate in model.gates) / len(model.gates)
            closed = sum(gate.closed for gate in model.gates) / len(model.gates)
            yield Sentence(50, f"Attention gates are {mean:.2f} on average, {percent(closed)} of them below 0.2.")

    @classmethod
    def cells(cls, model: Model) -> Sequence[str]:
        return [f"{sum(gate.mean for gate in model.gates) / len(model.gates):.2f}" if model.gates else NONE]

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        views = {
            title: by_layer(models, over("gates", value), title, bounds=(0.0, 1.0))
            for title, value in (("mean gate", "mean"), ("share below 0.2", "closed"))
        }
        yield Topic(
            "Attention gates",
            "Healthy: sparse but open somewhere. A gate mostly below 0.2 has switched its layer's attention off.",
            Part(views),
        )


EDGES = tuple(2.0**i for i in range(-6, 7))
"""Bin edges of |y|, in units of the token's RMS of y: one bin per factor of two, and one at either end."""


class NormGateFacts(Frozen):
    """The gate of one norm (the last entry: the final norm's): its mean, and its correlation with |y| over tokens and
    channels; null if either is constant."""

    state: int
    name: str
    mean: float
    correlation: float | None


class GateCurve(Frozen):
    """All norms together: the share of values and the mean gate (null if empty) in each bin of |y|, in units of the
    token's RMS. Bin i ends at `edges[i]`; the last is unbounded."""

    edges: list[float]
    share: list[float]
    gate: list[float | None]


class NormGateKeys(Frozen):
    """Gates of gated norms."""

    norm_gates: list[NormGateFacts] = Field(default_factory=list)
    gate_by_size: GateCurve | None = None


class NormGates(Metric):
    """With y the norm's output before its gate g: the correlation of |y| and g, and mean g by |y|/RMS(y)."""

    keys = NormGateKeys
    file_place, page_place = 85, 105

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.counts = torch.zeros(len(EDGES) + 1, dtype=torch.float64)
        self.gates = torch.zeros_like(self.counts)

    def add(self, observation: Observation) -> None:
        for k, state in observation.states.items():
            with torch.no_grad():
                gate = self.subject.norm_gate(k, state)
            if gate is not None:
                self._add_norm(k, wide(gate[0]).double(), wide(gate[1]).double().expand_as(gate[0]))

    def _add_norm(self, k: int, y: Tensor, gate: Tensor) -> None:
        size = y.abs()
        sums = [size.sum(), gate.sum(), size.square().sum(), gate.square().sum(), (size * gate).sum()]
        self.means[k].add(torch.stack(sums), size.numel())
        relative = size / y.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
        bins = torch.bucketize(relative, torch.tensor(EDGES, dtype=y.dtype, device=y.device)).flatten()
        self.counts += torch.bincount(bins, minlength=len(EDGES) + 1).double().cpu()
        self.gates += torch.bincount(bins, gate.flatten(), minlength=len(EDGES) + 1).cpu()

    def facts(self) -> NormGateKeys:
        if not self.means:
            return NormGateKeys()
        total = float(self.counts.sum())
        counts, gates = self.counts.tolist(), self.gates.tolist()
        return NormGateKeys(
            norm_gates=[self._facts(k, moments.value().tolist()) for k, moments in sorted(self.means.items())],
            gate_by_size=GateCurve(
                edges=list(EDGES),
                share=[count / total for count in counts],
                gate=[gate / count if count else None for gate, count in zip(gates, counts, strict=True)],
            ),
        )

    def _facts(self, k: int, moments: Sequence[float]) -> NormGateFacts:
        size, gate, size2, gate2, product = moments
        spread = max(size2 - size**2, 0.0) * max(gate2 - gate**2, 0.0)
        varies = size2 - size**2 > 1e-12 * size2 and gate2 - gate**2 > 1e-12 * gate2
        return NormGateFacts(
            state=k,
            name=self.subject.reader_name(k),
            mean=gate,
            correlation=(product - size * gate) / spread**0.5 if varies else None,
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        known = [n.correlation for n in model.norm_gates if n.correlation is not None]
        if known:
            mean = sum(known) / len(known)
            words = "close" if mean < 0 else "open"
            yield Sentence(
                55,
                f"Norm gates are {sum(n.mean for n in model.norm_gates) / len(model.norm_gates):.2f} on average and "
                f"{words} where |y| is large (mean correlation {mean:+.2f}).",
            )

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        series = [
            line(m.name, _gate_points(m.gate_by_size), colour)
            for m, colour in zip(models, colours(models), strict=True)
            if m.gate_by_size is not None
        ]
        if not series:
            return
        views = {
            "gate against |y|": curves(series, "|y| / RMS of y, up to", "mean gate", log_x=True, height=340),
            "mean gate": by_layer(models, over("norm_gates", "mean", "state"), "mean gate", x="norm before"),
            "correlation with |y|": by_layer(
                models, over("norm_gates", "correlation", "state"), "correlation of gate and |y|", x="norm before"
            ),
        }
        yield Topic(
            "Norm gates",
            "y is the output of a norm without its gate. Healthy: the gate falls with |y|, so that it "
            "suppresses outliers; a flat line is a gate that ignores magnitude.",
            Part(views, "Over tokens and channels of all norms together, and for each norm."),
        )


def _gate_points(curve: GateCurve) -> list[tuple[float, float]]:
    """The upper edge of each non-empty bin, and its mean gate; the last bin is drawn one factor further."""
    ends = [*curve.edges, 2 * curve.edges[-1]]
    return [(end, gate) for end, gate in zip(ends, curve.gate, strict=True) if gate is not None]


BINS = 20
KEPT = 1 << 20
"""Quartiles are computed from at most about this many values of a sublayer's gates; more are subsampled."""
WHISKER = 1.5


class Quartiles(Frozen):
    """A box plot in numbers. `low` and `high` are the outermost values within 1.5 interquartile ranges of the box;
    `largest` is the overall maximum."""

    low: float
    lower: float
    median: float
    upper: float
    high: float
    largest: float


class BetaFacts(Frozen):
    """Write gates after one sublayer: the mean by stream, the shares in twenty equal bins of [0, 1], and quartiles
    overall and by stream; these are null and empty in older files."""

    site: int
    mean: list[float]
    histogram: list[float]
    quartiles: Quartiles | None = None
    by_stream: list[Quartiles] = Field(default_factory=list)


class BetaKeys(Frozen):
    """Write gates by sublayer."""

    betas: list[BetaFacts] = Field(default_factory=list)


class WriteGates(Metric):
    """Statistics over all tokens. Quartiles come from the values themselves, interpolated between neighbours."""

    keys = BetaKeys
    file_place, page_place = 70, 82

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.histogram: dict[int, Mean] = defaultdict(Mean)
        self.values: dict[int, list[Tensor]] = defaultdict(list)
        self.largest: dict[int, Tensor] = {}

    def add(self, observation: Observation) -> None:
        for site, beta in observation.betas.items():
            # An elementwise gate has one β per channel of its one stream.
            one_stream = beta.shape[-1] == self.subject.width
            values = wide(beta).flatten()[:, None] if one_stream else wide(beta).flatten(0, 1)
            self.means[site].add(values.double().sum(0), len(values))
            self.histogram[site].add(torch.histc(values.float().flatten(), BINS, 0.0, 1.0), values.numel())
            largest = values.amax(0).double()
            self.largest[site] = torch.maximum(self.largest[site], largest) if site in self.largest else largest
            every = self._step(values.shape[1] * (self.subject.width if one_stream else 1))
            self.values[site].append(values[::every].contiguous())

    def _step(self, per_token: int) -> int:
        """Return the subsampling stride; it is odd so that every channel of an even width is sampled."""
        return max(1, -(-self.sample.tokens.numel() * per_token // KEPT)) | 1

    def facts(self) -> BetaKeys:
        return BetaKeys(betas=[self._facts(site, mean.value()) for site, mean in sorted(self.means.items())])

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
    def topics(cls, models: Models) -> Iterable[Topic]:
        yield Topic(
            "Write gates",
            "β is the fraction of a stream that a sublayer's output replaces. Healthy: spread out; all near 0 "
            "writes nothing, all near 1 forgets everything.",
            Part(
                tab_each(models, _boxes),
                "Quartiles of β over tokens and streams, whiskers to the last value within 1.5 interquartile "
                "ranges, mean dashed, ring at the largest value. Where the ring is near 1, a backward pass by "
                "inversion is inaccurate.",
            ),
            Part(
                tab_each(models, _histogram),
                "Share of β in each of twenty bins, over tokens and streams.",
                "Distribution",
            ),
            Part(
                tabs_each(models, _by_stream),
                "Healthy: streams differ; a column near 0 is a stream that nothing is written to.",
                "Stream by stream",
            ),
        )


def quartiles(values: Tensor, largest: float) -> Quartiles:
    """Compute quartiles of float64 values. `torch.quantile` takes at most 16 million values; KEPT is below that."""
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
    drawn = [
        Box(name=model.sites[b.site].name, mean=sum(b.mean) / len(b.mean), **b.quartiles.model_dump()) for b in known
    ]
    return boxes(drawn, "written by", "β")


def _histogram(model: Model) -> Figure | None:
    """Writer × bin of [0, 1]."""
    if not model.betas:
        return None
    bins, names = len(model.betas[0].histogram), [model.sites[b.site].name for b in model.betas]
    edges = [f"{i / bins:.2f}" for i in range(bins)]
    return heatmap([b.histogram for b in model.betas], edges, names, "β from", "written by", "share of gates")


def _by_stream(model: Model) -> dict[str, Figure | None]:
    """Writer × stream: median, quartiles and maximum."""
    known = [b for b in model.betas if len(b.by_stream) > 1]
    if not known:
        return {}
    streams = [f"stream {i}" for i in range(max(len(b.by_stream) for b in known))]
    names = [model.sites[b.site].name for b in known]
    shown = {"lower quartile": "lower", "median": "median", "upper quartile": "upper", "largest": "largest"}
    return {
        title: heatmap(
            [[getattr(q, value) for q in b.by_stream] for b in known], streams, names, "stream", "written by",
            f"{title} of β",
        )
        for title, value in shown.items()
    }  # fmt: skip
