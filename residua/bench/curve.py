"""Compares training with fused operators to training with their references: three runs from the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn

from residua import ops
from residua.config.run import RunConfig
from residua.data import Dataset, Loader
from residua.model.size import build_if_it_fits
from residua.report.terminal import new_table
from residua.train.step import arithmetic, build_step
from residua.train.timing import release_memory

WINDOW = 10
"""Steps per mean."""
RUNS = {"fused": "auto", "fused again": "auto", "reference": "reference"}
"""The backend of each run."""


@dataclass(frozen=True)
class Curve:
    """A run's mean loss over each WINDOW of steps, and a digest of its final weights."""

    losses: list[float]
    weights: str


@dataclass(frozen=True)
class CurveResult:
    """The curves by the names of RUNS."""

    curves: dict[str, Curve]

    @property
    def differences(self) -> list[float]:
        """|fused − reference| for each mean, in nats."""
        fused, reference = self.curves["fused"], self.curves["reference"]
        return [abs(a - b) for a, b in zip(fused.losses, reference.losses, strict=True)]

    @property
    def same_bits(self) -> bool:
        """Whether the losses and final weights of both fused runs are bit-identical."""
        return self.curves["fused"] == self.curves["fused again"]


def bench_curve(
    config: RunConfig, dataset: Dataset, device: torch.device, tell: Callable[[str], object] = lambda text: None
) -> CurveResult:
    """Train a configuration three times from the same weights on the same batches, to its last step.

    `train.determinism` should be "exact"; otherwise PyTorch's own operators may differ between runs on a GPU.
    """
    curves = {}
    for name, backend in RUNS.items():
        with ops.backend(backend), arithmetic(config.train):
            curves[name] = _train(config, dataset, device, partial(_tell_step, tell, name))
        release_memory(device)
    return CurveResult(curves)


def _tell_step(tell: Callable[[str], object], name: str, done: int) -> None:
    tell(f"{name}: step {done}")


def _train(config: RunConfig, dataset: Dataset, device: torch.device, tell: Callable[[int], object]) -> Curve:
    recipe, data = config.train, config.data
    torch.manual_seed(recipe.seed)
    step = build_step(build_if_it_fits(config.model, "this model"), recipe, device)
    segments = data.masking == "documents"
    loader = Loader(dataset.split("train"), config.sequence, recipe.micro_batch, seed=data.seed, segments=segments)
    losses = []
    try:
        for done in range(1, recipe.steps + 1):
            step([next(loader) for _ in range(recipe.accumulate)], recipe.schedule.factor(done - 1, recipe.steps))
            if done % WINDOW == 0 or done == recipe.steps:
                totals = step.totals()
                losses.append(totals.loss / totals.steps)
                step.set_totals([0.0] * 4)
                tell(done)
    finally:
        loader.close()
    return Curve(losses, _digest(step.model))


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def print_curves(console: Console, config: RunConfig, device: torch.device, result: CurveResult) -> None:
    """Print the mean losses, the largest difference, and whether the fused runs are bit-identical."""
    recipe = config.train
    console.print(
        f"{recipe.steps} steps of {config.tokens_per_step:,} tokens, three runs from the same weights, "
        f"precision {recipe.precision}, compile {recipe.compile}, determinism {recipe.determinism}"
    )
    table = new_table((), ("steps", "fused", "reference", "difference"))
    fused, reference = result.curves["fused"].losses, result.curves["reference"].losses
    for i, difference in enumerate(result.differences):
        table.add_row(_steps(i, recipe.steps), f"{fused[i]:.4f}", f"{reference[i]:.4f}", f"{difference:.5f}")
    console.print(table)
    worst = max(range(len(result.differences)), key=result.differences.__getitem__)
    console.print(
        f"largest difference between {WINDOW}-step means: {result.differences[worst]:.5f} nats, in steps "
        f"{_steps(worst, recipe.steps)}"
    )
    console.print(
        f"two fused runs: losses and weights are "
        f"{'identical bit for bit' if result.same_bits else 'not identical bit for bit'}"
    )
    if device.type != "cuda":
        console.print("No GPU: all three runs used the references, so this shows only that the command works.")


def _steps(window: int, steps: int) -> str:
    return f"{window * WINDOW + 1}–{min((window + 1) * WINDOW, steps)}"


def curve_facts(config: RunConfig, result: CurveResult) -> dict[str, Any]:
    """The contents of the report file; losses in nats."""
    return {
        "config": config.model_dump(mode="json"),
        "window": WINDOW,
        "curves": {name: asdict(curve) for name, curve in result.curves.items()},
        "largest_difference": max(result.differences),
        "same_bits": result.same_bits,
    }
