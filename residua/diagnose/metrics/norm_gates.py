"""Gated norms: how far the gate is open, and whether it closes where its input is large."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Mean, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import add_tabs, by_layer, colours, line
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report import Page
from residua.report.figures import curves

EDGES = tuple(2.0**i for i in range(-6, 7))
"""Ends of the bins of |y|, in units of the token's RMS of y: a bin for each factor of two, and one at either end."""


class NormGateFacts(Frozen):
    """The gate of one norm (the last: the final norm's): its mean, and its correlation with |y| over tokens and
    channels; null if either does not vary."""

    state: int
    name: str
    mean: float
    correlation: float | None


class GateCurve(Frozen):
    """All norms together: in each bin of |y|, in units of the token's RMS, the share of values and the mean gate
    (null: empty). Bin i ends at `edges[i]`, the last has no end."""

    edges: list[float]
    share: list[float]
    gate: list[float | None]


class NormGateKeys(Frozen):
    """Gates of gated norms."""

    norm_gates: list[NormGateFacts] = Field(default_factory=list)
    gate_by_size: GateCurve | None = None


class NormGates(Metric):
    """y is the norm's output before its gate g: correlation of |y| and g, and mean g by |y|/RMS(y)."""

    keys = NormGateKeys
    file_place, page_place = 85, 105

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.moments: dict[int, Mean] = defaultdict(Mean)
        self.counts = torch.zeros(len(EDGES) + 1, dtype=torch.float64)
        self.gates = torch.zeros_like(self.counts)

    def add(self, seen: Observation) -> None:
        for k, state in seen.states.items():
            with torch.no_grad():
                found = self.subject.norm_gate(k, state)
            if found is not None:
                self._add_norm(k, wide(found[0]).double(), wide(found[1]).double().expand_as(found[0]))

    def _add_norm(self, k: int, y: Tensor, gate: Tensor) -> None:
        size = y.abs()
        sums = [size.sum(), gate.sum(), size.square().sum(), gate.square().sum(), (size * gate).sum()]
        self.moments[k].add(torch.stack(sums), size.numel())
        relative = size / y.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
        bins = torch.bucketize(relative, torch.tensor(EDGES, dtype=y.dtype, device=y.device)).flatten()
        self.counts += torch.bincount(bins, minlength=len(EDGES) + 1).double().cpu()
        self.gates += torch.bincount(bins, gate.flatten(), minlength=len(EDGES) + 1).cpu()

    def facts(self) -> NormGateKeys:
        if not self.moments:
            return NormGateKeys()
        total = float(self.counts.sum())
        counts, gates = self.counts.tolist(), self.gates.tolist()
        return NormGateKeys(
            norm_gates=[self._facts(k, moments.value().tolist()) for k, moments in sorted(self.moments.items())],
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
    def draw(cls, page: Page, models: Models) -> None:
        if not any(m.norm_gates for m in models):
            return
        section = page.section(
            "Norm gates",
            "y is what a norm would return without its gate. Healthy: the gate falls with |y|, so that it takes "
            "outliers out; a flat line is a gate that does not look at the size.",
        )
        series = [
            line(m.name, _points(m.gate_by_size), colour)
            for m, colour in zip(models, colours(models), strict=True)
            if m.gate_by_size is not None
        ]
        views = {
            "gate against |y|": curves(series, "|y| / RMS of y, up to", "mean gate", log_x=True, height=340),
            "mean gate": by_layer(
                models, lambda m: [(n.state, n.mean) for n in m.norm_gates], "mean gate", x="norm before"
            ),
            "correlation with |y|": by_layer(
                models,
                lambda m: [(n.state, n.correlation) for n in m.norm_gates if n.correlation is not None],
                "correlation of gate and |y|",
                x="norm before",
            ),
        }
        add_tabs(section, views, "Over tokens and channels of all norms, and norm by norm.")


def _points(curve: GateCurve) -> list[tuple[float, float]]:
    """The end of each bin that has values, and its mean gate; the last bin is drawn one factor further."""
    ends = [*curve.edges, 2 * curve.edges[-1]]
    return [(end, gate) for end, gate in zip(ends, curve.gate, strict=True) if gate is not None]
