"""The causal side: the loss, on the same tokens, with one thing switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from residua.diagnose.observe import Ablation, AblationKind, Subject
from residua.diagnose.schema import AblationFacts
from residua.diagnose.text import Sample

Budget = Literal["none", "layers", "all"]
KINDS: dict[Budget, tuple[AblationKind, ...]] = {
    "none": (),
    "layers": ("layer", "source", "stream", "uniform"),
    "all": ("layer", "sublayer", "source", "stream", "uniform", "head"),
}


def planned(subject: Subject, budget: Budget, silent: Sequence[int]) -> list[Ablation]:
    """What the budget pays for; silent sublayers are removed one by one in any case, since they may be dead."""
    kinds = KINDS[budget]
    chosen = subject.ablations(kinds)
    if kinds and "sublayer" not in kinds:
        chosen += [a for a in subject.ablations(("sublayer",)) if a.index in silent]
    return chosen


def measure(
    subject: Subject, ablations: Sequence[Ablation], sample: Sample, tokens_at_once: int, tick: Callable[[], None]
) -> list[AblationFacts]:
    """Loss and change of loss for each ablation, over the whole sample."""
    if not ablations:
        return []
    whole = mean_loss(subject, sample, tokens_at_once)
    found = []
    for ablation in ablations:
        with ablation.applied():
            loss = mean_loss(subject, sample, tokens_at_once)
        found.append(
            AblationFacts(
                kind=ablation.kind,
                index=ablation.index,
                head=ablation.second,
                label=ablation.label,
                loss=loss,
                change=loss - whole,
            )
        )
        tick()
    return found


@torch.no_grad()
def mean_loss(subject: Subject, sample: Sample, tokens_at_once: int) -> float:
    """Mean cross-entropy in nats per target."""
    device = next(subject.model.parameters()).device
    total = 0.0
    for tokens, targets in sample.batches(tokens_at_once):
        total += float(subject.loss(tokens.to(device), targets.to(device))) * tokens.numel()
    return total / sample.tokens.numel()
