"""Plans as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from residua.bench.plan import GIB, Machine, MeshPlan
from residua.config.run import RunConfig
from residua.reading import counted
from residua.report.terminal import new_table

MIB = 2**20


def print_plans(
    console: Console, asked: Sequence[str], config: RunConfig, machine: Machine, plans: Sequence[MeshPlan]
) -> None:
    """One row per mesh, and how to start the first; `asked` is the preset and the changes to it."""
    batches = counted(config.train.accumulate, "micro-batch", "micro-batches")
    console.print(
        f"one step: {config.tokens_per_step} tokens in {batches} of "
        f"{config.train.micro_batch} × {config.sequence}; a device has {machine.memory / GIB:.0f} GiB, reaches "
        f"{machine.flops / 1e12:.0f} TFLOP/s in an additive step, copies {machine.bandwidth / 1e9:.0f} GB/s and "
        f"sends {machine.link / 1e9:.0f}"
    )
    axes, memory = ("data", "shard", "pipeline", "stages"), ("GiB", "states", "activations", "gathered")
    sent, times = ("MiB sent", "gradients", "weights", "Muon", "stages"), ("bubble", "depth ms", "step ms")
    table = new_table((), (*axes, *memory, *sent, *times, ""))
    for p in plans:
        table.add_row(*_cells(p))
    console.print(table)
    console.print(_next(plans[0], asked), soft_wrap=True, markup=False)


def _cells(p: MeshPlan) -> list[str]:
    sent = (p.gradient_bytes, p.weight_bytes, p.muon_bytes, p.stage_bytes)
    return [
        *(str(n) for n in (p.parallel.data, p.parallel.shard, p.parallel.pipeline, p.parallel.stages)),
        *(f"{n / GIB:.1f}" for n in (p.memory, p.states, p.activations, p.gathered)),
        *(f"{n / MIB:,.0f}" for n in (sum(sent), *sent)),
        f"{p.bubble:.0%}",
        *(f"{seconds * 1e3:.0f}" for seconds in (p.depth, p.seconds)),
        "" if p.fits else "too large",
    ]


def _next(p: MeshPlan, asked: Sequence[str]) -> str:
    parallel = p.parallel
    words = [f"parallel.{axis}={getattr(parallel, axis)}" for axis in ("data", "shard", "pipeline")]
    if parallel.stages_per_rank > 1:
        words += ["parallel.schedule=interleaved", f"parallel.stages_per_rank={parallel.stages_per_rank}"]
    if not p.fits:
        return "No mesh fits: lower train.micro_batch and raise train.accumulate, or set train.recompute=sublayers."
    return f"Next, on one machine: {parallel.command_on()} {' '.join([*asked, *words])}"


def plan_report(config: RunConfig, machine: Machine, plans: Sequence[MeshPlan]) -> dict[str, Any]:
    """Everything printed, as plain JSON."""
    rows = [{**asdict(p), "parallel": p.parallel.model_dump(), "memory": p.memory} for p in plans]
    return {"config": config.model_dump(mode="json"), "machine": asdict(machine), "plans": rows}
