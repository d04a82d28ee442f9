"""Each sublayer: the size of its output and of its gradients, and whether it is dead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Explained, Finding, LayerTrack, Metric, Model, Models, Sentence
from residua.diagnose.metrics.removal import NO_CHANGE, AblationFacts
from residua.diagnose.observe import Observation, Site, SiteKind, Subject
from residua.diagnose.plots import Part, Points, Topic, by_layer, on_log, over
from residua.diagnose.sentences import listed, percent, short
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report import Bar
from residua.report.figures import Figure

GRADIENT_TOKENS = 512
SILENT = 1e-3
"""A sublayer is silent if its output is below this fraction of its input, in both RMS and median. With RMS alone, any
output would look small next to an outlier dimension; with the median alone, so would an output to few dimensions."""

Squares = tuple[float, int]
"""A sum of squares, and the number of its terms."""
NOTHING: Squares = (0.0, 0)


class SiteFacts(Frozen):
    """One sublayer: output RMS; the same relative to its input's RMS; median |output| relative to median |input|, which
    is robust to outlier dimensions; RMS of its parameters' gradients."""

    index: int
    layer: int
    kind: SiteKind
    name: str
    output_rms: float | None = None
    relative_rms: float | None = None
    relative_median: float | None = None
    gradient_rms: float | None = None


class LayerFacts(Frozen):
    """One layer: RMS of its output, the sum of its sublayers' outputs; RMS of the gradients of all their parameters."""

    layer: int
    output_rms: float | None = None
    gradient_rms: float | None = None


class SiteKeys(Frozen):
    """Every sublayer in execution order, and every layer; older files lack the layers."""

    sites: list[SiteFacts]
    layer_sizes: list[LayerFacts] = Field(default_factory=list)


class Sublayers(Metric):
    """Sizes of outputs and states: sqrt(mean y²) over all tokens, and the median of |y|, averaged over tokens."""

    keys = SiteKeys
    kinds = ("dead_layer", "dead_sublayer")
    defect = "dead layer"
    file_place, page_place = 10, 50

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.by_layer: dict[int, list[Site]] = defaultdict(list)
        for site in subject.sites:
            self.by_layer[site.layer].append(site)
        self.sums: dict[tuple[str, int], Tensor | float] = defaultdict(float)
        self.tokens = 0
        self.sites: list[SiteFacts] = []

    def add(self, observation: Observation) -> None:
        for k, output in observation.outputs.items():
            y = wide(output)
            self.sums["output", k] += y.double().square().mean(-1).sum()
            self.sums["output median", k] += y.abs().median(-1).values.double().sum()
        for layer, sites in self.by_layer.items():
            written = [wide(observation.outputs[site.index]) for site in sites if site.index in observation.outputs]
            if len(written) == len(sites):
                self.sums["layer", layer] += sum(written[1:], written[0]).double().square().mean(-1).sum()
        for k in observation.states:
            self.sums["state", k] += observation.mean_square(k).sum()
            self.sums["state median", k] += observation.median(k).double().sum()
        self.tokens += observation.tokens.numel()

    def facts(self) -> SiteKeys:
        gradients = self._gradients()
        self.sites = [self._site(site, _rms([gradients.get(site.index, NOTHING)])) for site in self.subject.sites]
        layers = [
            LayerFacts(
                layer=layer,
                output_rms=self._size("layer", layer),
                gradient_rms=_rms([gradients.get(site.index, NOTHING) for site in sites]),
            )
            for layer, sites in self.by_layer.items()
        ]
        return SiteKeys(sites=self.sites, layer_sizes=layers)

    def _site(self, site: Site, gradient: float | None) -> SiteFacts:
        k = site.index
        output, state = self._size("output", k), self._size("state", k)
        medians = [float(self.sums[f"{what} median", k]) for what in ("output", "state") if (what, k) in self.sums]
        return SiteFacts(
            index=k,
            layer=site.layer,
            kind=site.kind,
            name=site.name,
            output_rms=output,
            relative_rms=None if output is None or not state else output / state,
            relative_median=medians[0] / max(medians[1], 1e-30) if len(medians) == 2 else None,
            gradient_rms=gradient,
        )

    def _size(self, what: str, k: int) -> float | None:
        """The RMS over all tokens; None without data."""
        return (float(self.sums[what, k]) / self.tokens) ** 0.5 if (what, k) in self.sums else None

    def _gradients(self) -> dict[int, Squares]:
        """By sublayer, the squared gradients of its parameters for the loss of the first few tokens."""
        subject, few = self.subject, self.sample.first(GRADIENT_TOKENS)
        device = next(subject.model.parameters()).device
        tokens, targets = (t[:, :GRADIENT_TOKENS].to(device) for t in (few.tokens, few.targets))
        subject.model.zero_grad(set_to_none=True)
        try:
            with torch.enable_grad():
                subject.loss(tokens, targets).backward()
            squares = {site.index: _squares(subject, site) for site in subject.sites}
            if not any(count for _, count in squares.values()):
                self.skipped.append("Gradients: no sublayer weight has one (quantized weights do not).")
            return squares
        except Exception as error:  # the model's own code may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            self.skipped.append(f"Gradients: the model's backward pass failed ({reason[:200]}).")
            return {}
        finally:
            subject.model.zero_grad(set_to_none=True)

    def suspects(self) -> Sequence[int]:
        return _silent(self.sites)

    def findings(self, model: Model) -> list[Finding]:
        """Find layers whose sublayers are all silent and whose removal changes nothing; likewise single sublayers."""
        changes = _changes(model.ablations)
        dead = [k for k in _silent(model.sites) if abs(changes.get(("sublayer", k), 0.0)) < NO_CHANGE]
        findings = []
        for layer in dict.fromkeys(s.layer for s in model.sites):
            parts, change = [s for s in model.sites if s.layer == layer], changes.get(("layer", layer))
            if all(s.index in dead for s in parts) and abs(change or 0.0) < NO_CHANGE:
                words = _dead(f"layer {layer}", parts, change)
                findings.append(Finding(kind="dead_layer", where={"layer": layer}, words=words))
                continue
            for site in (s for s in parts if s.index in dead):
                words = _dead(site.name, [site], changes.get(("sublayer", site.index)))
                findings.append(Finding(kind="dead_sublayer", where={"sublayer": site.index}, words=words))
        return findings

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        changes = _changes(model.ablations)
        if findings[0].kind == "dead_layer":
            where = listed("layer", [place_of(f) for f in findings])
            removed = [changes.get(("layer", place_of(f))) for f in findings]
            remedy = (
                "Remove it: the model computes the same in less time. If it should contribute, check its "
                "gradient, and train longer, with a longer warmup or a lower learning rate."
            )
        else:
            where = ", ".join(model.sites[place_of(f)].name for f in findings)
            removed = [changes.get(("sublayer", place_of(f))) for f in findings]
            remedy = (
                "Compare its gradient below with that of its neighbours: a sublayer without a gradient never learns."
            )
        known = [abs(change) for change in removed if change is not None]
        sure = (
            f"Certain: removal changes the loss by at most {max(known):.4f} nats, on {model.ablation_tokens:,} tokens."
            if known
            else f"Likely: its output is below {percent(SILENT)} of its input. Confirm it by removal (--ablations)."
        )
        return Explained(where, sure, remedy)

    @classmethod
    def tracks(cls, models: Models) -> Iterable[LayerTrack]:
        high = max([1.0, *(s.relative_rms for m in models for s in m.sites if s.relative_rms)])
        yield LayerTrack(
            "writes",
            f"log, 0.001 to {short(high)}",
            "RMS of the output divided by RMS of the input: attention above, feed-forward below.",
            [_written(model, high) for model in models],
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        known = [s for s in model.sites if s.output_rms]
        if known:
            first, largest = known[0], max(known, key=lambda s: s.output_rms or 0)
            growth = model.states[-1].rms / model.states[0].rms if model.states[0].rms else float("inf")
            yield Sentence(
                60,
                f"Outputs are largest at {largest.name} (RMS {largest.output_rms:.3g}, {first.name} "
                f"{first.output_rms:.3g}); the {model.state_name} ends {growth:.3g}× as large as it begins.",
            )
        gradients: dict[str, float] = {s.name: s.gradient_rms for s in model.sites if s.gradient_rms}
        if len(gradients) > 1:
            most, least = max(gradients, key=lambda n: gradients[n]), min(gradients, key=lambda n: gradients[n])
            yield Sentence(
                100,
                f"Gradients differ by a factor of {gradients[most] / gradients[least]:.3g}, largest at {most}, "
                f"smallest at {least}.",
            )

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        def sublayers(value: str, title: str, facts: str = "sites", x: str = "sublayer") -> Figure | None:
            return by_layer(models, over(facts, value, "index", zeros=False), title, log=True, x=x)

        def layers(value: str, title: str) -> Figure | None:
            return by_layer(models, over("layer_sizes", value, zeros=False), title, log=True)

        sizes = {
            "output": sublayers("output_rms", "output RMS"),
            "relative to input": sublayers("relative_rms", "output RMS / input RMS"),
            "hidden state": sublayers("rms", "RMS of the state", "states", "read by"),
            "output of a layer": layers("output_rms", "output RMS"),
            "state after a layer": by_layer(models, _states_after, "RMS of the state", log=True),
        }
        yield Topic(
            "Magnitude per sublayer",
            "Healthy: outputs of the same order from first to last. A steep climb means that late layers need "
            "larger and larger outputs to change a growing stream; an output far below its stream changes nothing.",
            Part(
                sizes,
                "The output of a layer is the sum of its sublayers' outputs. The state after it is the input "
                "of the next layer or, after the last layer, of the final norm.",
            ),
        )
        gradients = {
            "by sublayer": sublayers("gradient_rms", "gradient RMS"),
            "by layer": layers("gradient_rms", "gradient RMS"),
        }
        yield Topic(
            "Gradient per sublayer",
            "RMS of the loss gradient over each sublayer's parameters. Healthy: a flat line; a first layer "
            "far above the rest means that layers train at very different rates.",
            Part(gradients, "By layer: over the parameters of all sublayers of a layer."),
        )


def _states_after(model: Model) -> Points:
    """By layer, the RMS of the first state after it."""
    rms = {state.index: state.rms for state in model.states}
    last = {site.layer: site.index + 1 for site in model.sites}
    return [(layer, value) for layer, state in last.items() if (value := rms.get(state))]


def _squares(subject: Subject, site: Site) -> Squares:
    gradients = [p.grad for p in subject.parameters_of(site) if p.grad is not None]
    return sum(float(g.double().square().sum()) for g in gradients), sum(g.numel() for g in gradients)


def _rms(parts: Sequence[Squares]) -> float | None:
    """sqrt(mean g²) over all parts together; None if they are empty."""
    count = sum(numbers for _, numbers in parts)
    return (sum(squares for squares, _ in parts) / count) ** 0.5 if count else None


def _silent(sites: Sequence[SiteFacts]) -> list[int]:
    """Sublayers whose output is tiny compared with their input; removing them shows whether they are dead."""
    return [s.index for s in sites if _relative(s) < SILENT]


def _relative(site: SiteFacts) -> float:
    known = [share for share in (site.relative_rms, site.relative_median) if share is not None]
    return max(known, default=float("inf"))


def place_of(finding: Finding) -> int:
    """The number of a dead layer or sublayer."""
    (number,) = finding.where.values()
    assert isinstance(number, int)
    return number


def _changes(ablations: Sequence[AblationFacts]) -> dict[tuple[str, int], float]:
    return {(a.kind, a.index): a.change for a in ablations}


def _written(model: Model, high: float) -> dict[int, Bar]:
    """By layer, the size of its outputs relative to the state they are added to."""
    dead, parts = (
        {place_of(f): f.words for f in model.findings if f.kind == kind} for kind in ("dead_layer", "dead_sublayer")
    )
    bars = {}
    for layer in range(model.layers):
        sites = [s for s in model.sites if s.layer == layer]
        known = [s for s in sites if s.relative_rms is not None]
        if known:
            words = dead.get(layer) or "; ".join(parts[s.index] for s in sites if s.index in parts)
            lengths = tuple(None if s.relative_rms is None else on_log(s.relative_rms, SILENT, high) for s in sites)
            text = "dead" if layer in dead else short(max(s.relative_rms for s in known))
            shown = ", ".join(f"{s.name} {s.relative_rms:.3g}" for s in known)
            bars[layer] = Bar(lengths, text, flag="bad" if words else "", words=words or f"{shown} of its input")
    return bars


def _dead(name: str, sites: Sequence[SiteFacts], change: float | None) -> str:
    relative = max(map(_relative, sites))
    removed = "" if change is None else f", and removing it changes the loss by {change:+.4f}"
    return f"{name} is dead: its output is {percent(relative)} of its input{removed}"
