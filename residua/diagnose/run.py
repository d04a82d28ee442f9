"""One diagnosis from beginning to end: observe, remove parts, name what stands out."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from residua.diagnose.metric import Metric, on_page
from residua.diagnose.metrics.removal import Budget, measure, planned
from residua.diagnose.observe import Subject
from residua.diagnose.schema import ModelDiagnosis, with_metrics
from residua.diagnose.sentences import summary
from residua.diagnose.text import Sample
from residua.errors import UserError

TOKENS_AT_ONCE = 2048
SCORED_ON_GPU = 16_384
"""The same for passes that record nothing, where the host would not keep a GPU busy with fewer."""
ABLATION_TOKENS = 4096

Progress = Callable[[str, int, int], None]


def diagnose_model(
    subject: Subject,
    sample: Sample,
    *,
    path: str = "",
    ablations: Budget = "layers",
    ablation_tokens: int = ABLATION_TOKENS,
    extra: Sequence[type[Metric]] = (),
    maps: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> ModelDiagnosis:
    """Measure one model on one sample of text, with the metrics of this package and `extra` ones.

    `maps` adds the metrics that are measured on request.
    """
    start = time.monotonic()
    schema = with_metrics(tuple(extra))
    metrics = {metric: metric(subject, sample) for metric in schema.metrics if maps or not metric.on_request}
    loss = _observe(subject, sample, list(metrics.values()), progress)
    facts = {key: value for metric in metrics.values() for key, value in metric.facts()}
    skipped = [*subject.skipped, *(reason for metric in metrics.values() for reason in metric.skipped)]
    if ablations == "none":
        skipped.append("Removal of layers, sources and heads: left out by --ablations none.")
    few = sample.first(ablation_tokens)
    plan = planned(subject, ablations, [k for metric in metrics.values() for k in metric.suspects()])
    ticks = iter(range(1, len(plan) + 1))
    on_gpu = next(subject.model.parameters()).is_cuda
    at_once = SCORED_ON_GPU if on_gpu else TOKENS_AT_ONCE
    removed = measure(subject, plan, few, at_once, lambda: progress("removing", next(ticks), len(plan)))
    made = schema(
        name=subject.name,
        path=path,
        description=subject.description,
        parameters=sum(p.numel() for p in subject.model.parameters()),
        layers=subject.layers,
        width=subject.width,
        state_name=subject.state_name,
        text=sample.facts,
        device=_device_name(subject),
        precision=_precision(subject),
        seconds=time.monotonic() - start,
        loss=loss,
        ablation_tokens=few.tokens.numel() if plan else 0,
        **facts,
        ablations=removed,
        skipped=skipped,
    )
    measured = [metrics[metric] for metric in on_page(made) if metric in metrics]
    found = [
        finding
        for metric in sorted(measured, key=lambda metric: not metric.defect)
        for finding in metric.findings(made)
    ]
    made = schema.model_validate(dict(made) | {"findings": found})
    return made.model_copy(update={"summary": summary(made)})


def _observe(subject: Subject, sample: Sample, metrics: Sequence[Metric], progress: Progress) -> float:
    """Show the model the whole sample, a batch at a time; its mean loss."""
    batches = list(sample.batches(TOKENS_AT_ONCE))
    total = 0.0
    for done, (tokens, targets) in enumerate(batches):
        total += _observe_batch(subject, tokens, targets, metrics) * tokens.numel()
        progress("looking", done + 1, len(batches))
    return total / sample.tokens.numel()


def _observe_batch(subject: Subject, tokens: Tensor, targets: Tensor, metrics: Sequence[Metric]) -> float:
    """The loss of one batch. A function of its own: an observation is large and must be freed before the next."""
    device = next(subject.model.parameters()).device
    seen = subject.observe(tokens.to(device), targets.to(device))
    if not math.isfinite(seen.loss):
        raise UserError(f"{subject.name} gives a loss of {seen.loss} on this text: its weights are broken.")
    for metric in metrics:
        metric.add(seen)
    return seen.loss


def _precision(subject: Subject) -> str:
    """The dtype of most weights."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in subject.model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.")


def _device_name(subject: Subject) -> str:
    device = next(subject.model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
