"""One diagnosis from beginning to end: observe, take gradients, remove things, name what stands out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from residua.diagnose import findings
from residua.diagnose.ablate import Budget, measure, planned
from residua.diagnose.metrics.attention import AttentionMetrics
from residua.diagnose.metrics.depth import DepthMetrics
from residua.diagnose.metrics.hidden import HiddenMetrics
from residua.diagnose.observe import Subject
from residua.diagnose.schema import (
    AnchorFacts,
    DimensionFacts,
    DimensionProfile,
    Finding,
    ModelDiagnosis,
    ReaderFacts,
    SiteFacts,
    StateFacts,
    TokenSink,
)
from residua.diagnose.sentences import summary
from residua.diagnose.text import Sample

TOKENS_AT_ONCE = 2048
GRADIENT_TOKENS = 512
ABLATION_TOKENS = 4096
DIMENSIONS_SHOWN = 64

Progress = Callable[[str, int, int], None]


def diagnose_model(
    subject: Subject,
    sample: Sample,
    *,
    path: str = "",
    ablations: Budget = "layers",
    ablation_tokens: int = ABLATION_TOKENS,
    progress: Progress = lambda stage, done, total: None,
) -> ModelDiagnosis:
    """Everything this package measures of one model on one sample of text."""
    start = time.monotonic()
    measured = _Measured(subject)
    batches = list(sample.batches(TOKENS_AT_ONCE))
    device = next(subject.model.parameters()).device
    for done, (tokens, targets) in enumerate(batches):
        measured.add(tokens.to(device), targets.to(device))
        progress("looking", done + 1, len(batches))
    skipped = list(subject.skipped)
    sites = _sites(subject, measured.hidden, _gradients(subject, sample, skipped))
    few = _first(sample, ablation_tokens)
    plan = planned(subject, ablations, findings.silent_sites(sites))
    ticks = iter(range(1, len(plan) + 1))
    removed = measure(subject, plan, few, TOKENS_AT_ONCE, lambda: progress("removing", next(ticks), len(plan)))
    if ablations == "none":
        skipped.append("Removal of layers, sources and heads: left out by --ablations none.")
    states, profile, readers = measured.states(), measured.dimensions(), measured.readers()
    token_sinks = measured.token_sinks(sample)
    found = [
        *findings.attention_sinks(measured.attention.layers),
        *findings.token_sinks(token_sinks),
        *findings.residual_sinks(profile),
        *findings.massive_activations(states),
        *findings.dead_layers(sites, removed),
        *findings.depth_routing(readers, removed),
    ]
    cosine, angle = measured.pairs()
    made = ModelDiagnosis(
        name=subject.name,
        path=path,
        description=subject.description,
        parameters=sum(p.numel() for p in subject.model.parameters()),
        layers=subject.layers,
        width=subject.width,
        state_name=subject.state_name,
        text=sample.facts,
        device=_device_name(device),
        seconds=time.monotonic() - start,
        loss=measured.loss / measured.tokens,
        ablation_tokens=few.tokens.numel() if plan else 0,
        sites=sites,
        states=states,
        similarity=cosine,
        angular_distance=angle,
        dimensions=profile,
        attention=measured.attention.facts(),
        token_sinks=token_sinks,
        depth_weights=readers,
        betas=measured.depth.betas(),
        streams=measured.depth.streams(),
        gates=measured.depth.gates(),
        experts=measured.depth.experts(),
        anchors=[AnchorFacts(**vars(scales)) for scales in subject.anchor_scales()],
        ablations=removed,
        findings=found,
        skipped=skipped,
    )
    return made.model_copy(update={"summary": summary(made)})


class _Measured:
    """The running sums of one model."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.hidden = HiddenMetrics(len(subject.sites), subject.width)
        self.attention = AttentionMetrics(subject.vocabulary)
        self.depth = DepthMetrics()
        self.loss, self.tokens = 0.0, 0

    def add(self, tokens: Tensor, targets: Tensor) -> None:
        seen = self.subject.observe(tokens, targets)
        if not math.isfinite(seen.loss):
            raise ValueError(f"{self.subject.name} gives a loss of {seen.loss} on this text: its weights are broken.")
        self.hidden.add(seen)
        self.attention.add(seen)
        self.depth.add(seen)
        self.loss += seen.loss * tokens.numel()
        self.tokens += tokens.numel()

    def state_name(self, index: int) -> str:
        return self.subject.sites[index].name if index < len(self.subject.sites) else "the final norm"

    def states(self) -> list[StateFacts]:
        return [self._state(k) for k in self.hidden.present]

    def _state(self, k: int) -> StateFacts:
        sums = self.hidden.states[k]
        core = self.hidden.core.get(k)
        return StateFacts(
            index=k,
            name=self.state_name(k),
            rms=self.hidden.state_rms(k),
            median=sums.medians / sums.tokens,
            largest=sums.largest,
            token_similarity=sums.token_similarity / sums.sequences,
            input_similarity=sums.input_similarity / sums.sequences,
            core_features=None if core is None else core.result(),
        )

    def pairs(self) -> tuple[list[list[float]], list[list[float]]]:
        assert self.hidden.pairs is not None
        return self.hidden.pairs.means()

    def dimensions(self) -> DimensionProfile:
        mean, share = self.hidden.dimensions()
        gains = [gain.double().abs().cpu() for gain in self.subject.gains.values()]
        gain = torch.stack(gains).mean(0) if gains else None
        median = max(float(mean.median()), 1e-30)
        order = mean.argsort(descending=True)[:DIMENSIONS_SHOWN].tolist()
        return DimensionProfile(
            median=median,
            median_gain=None if gain is None else float(gain.median()),
            largest=[
                DimensionFacts(
                    dimension=j,
                    mean=float(mean[j]),
                    ratio=float(mean[j]) / median,
                    share=float(share[j]),
                    gain=None if gain is None else float(gain[j]),
                )
                for j in order
            ],
        )

    def readers(self) -> list[ReaderFacts]:
        return [
            ReaderFacts(
                reader=reader,
                name=self.state_name(reader),
                sources=[self.subject.source_name(reader, i) for i in range(len(mean.value()))],
                initial=self.subject.initial_source(reader),
                mean=mean.value().tolist(),
            )
            for reader, mean in sorted(self.depth.weights.items())
        ]

    def token_sinks(self, sample: Sample) -> list[TokenSink]:
        return [
            sink
            for layer, sums in sorted(self.attention.layers.items())
            for sink in sums.token_sinks(layer, sample.text_of)
        ]


def _sites(subject: Subject, hidden: HiddenMetrics, gradients: dict[int, float]) -> list[SiteFacts]:
    made = []
    for site in subject.sites:
        output = hidden.output_rms(site.index)
        read = hidden.state_rms(site.index) if site.index in hidden.present else None
        made.append(
            SiteFacts(
                index=site.index,
                layer=site.layer,
                kind=site.kind,
                name=site.name,
                output_rms=output,
                relative_rms=None if output is None or not read else output / read,
                relative_median=hidden.relative_median(site.index),
                gradient_rms=gradients.get(site.index),
            )
        )
    return made


def _gradients(subject: Subject, sample: Sample, skipped: list[str]) -> dict[int, float]:
    """By sublayer, sqrt(mean g²) over its parameters, of the loss of the first few tokens."""
    device = next(subject.model.parameters()).device
    tokens, targets = (t[:1, :GRADIENT_TOKENS].to(device) for t in (sample.tokens, sample.targets))
    subject.model.zero_grad(set_to_none=True)
    try:
        with torch.enable_grad():
            subject.loss(tokens, targets).backward()
        return {site.index: rms for site in subject.sites if (rms := _gradient_rms(subject, site)) is not None}
    except (RuntimeError, NotImplementedError) as error:
        skipped.append(f"Gradients: the model's backward pass failed ({str(error).splitlines()[0]}).")
        return {}
    finally:
        subject.model.zero_grad(set_to_none=True)


def _gradient_rms(subject: Subject, site: object) -> float | None:
    gradients = [p.grad for p in subject.parameters_of(site) if p.grad is not None]  # type: ignore[arg-type]
    count = sum(g.numel() for g in gradients)
    return (sum(float(g.double().square().sum()) for g in gradients) / count) ** 0.5 if count else None


def _first(sample: Sample, tokens: int) -> Sample:
    rows = max(1, tokens // sample.tokens.shape[1])
    return replace(sample, tokens=sample.tokens[:rows], targets=sample.targets[:rows])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


__all__ = ["Finding", "diagnose_model"]
