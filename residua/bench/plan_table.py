"""Plans as a table, as JSON, and as the tables of docs/scale.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from typing import Any

from rich.console import Console

from residua.bench.plan import GIB, Machine, MeshPlan, plan
from residua.config.run import RunConfig
from residua.reading import counted
from residua.report.terminal import new_table

MIB = 2**20


def print_plans(
    console: Console, asked: Sequence[str], config: RunConfig, machine: Machine, plans: Sequence[MeshPlan], rows: int
) -> None:
    """The first `rows` meshes, and how to start the first of all; `asked` is the preset and the changes to it."""
    console.print(f"one step: {_step(config)}; {_device(machine)}", soft_wrap=True)
    inner, experts = any(p.tensor * p.context > 1 for p in plans), any(p.parallel.experts > 1 for p in plans)
    axes = ("data", "shard", *(("experts",) if experts else ()), "pipeline", "stages")
    axes += ("tensor", "context") if inner else ()
    memory = ("GiB", "host") if inner or experts else ("GiB", "states", "activations", "gathered", "host")
    sent = ("MiB sent", "gradients", "weights", "Muon", "stages", *(("tokens",) if experts else ()))
    sent += ("tensor", "context") if inner else ()
    table = new_table((), (*axes, *memory, *sent, "slowest", "bubble", "depth ms", "step ms", ""))
    for p in plans[:rows]:
        table.add_row(*_cells(p, inner, experts))
    console.print(table)
    if len(plans) > rows:
        console.print(f"and {len(plans) - rows} more, which --rows shows")
    console.print(_next(plans[0], asked, machine), soft_wrap=True, markup=False)


def _step(config: RunConfig) -> str:
    batches = counted(config.train.accumulate, "micro-batch", "micro-batches")
    return f"{config.tokens_per_step} tokens in {batches} of {config.train.micro_batch} × {config.sequence}"


def _device(machine: Machine) -> str:
    return (
        f"a device has {machine.memory / GIB:.0f} GiB, reaches {machine.flops / 1e12:.0f} TFLOP/s in an additive step, "
        f"copies {machine.bandwidth / 1e9:.0f} GB/s, sends {machine.link / 1e9:.0f} to the {machine.node} of its node "
        f"and {machine.between / 1e9:.0f} to others, {machine.latency * 1e6:.0f} µs a message"
    )


def _cells(p: MeshPlan, inner: bool, experts: bool) -> list[str]:
    groups = [p.parallel.experts] if experts else []
    axes = [p.parallel.data, p.parallel.shard, *groups, p.parallel.pipeline, p.parallel.stages]
    parts = (p.held.states, p.held.activations, p.held.gathered)
    sent = [p.sent.total, p.sent.gradients, p.sent.weights, p.sent.muon, p.sent.stages]
    sent += [p.sent.tokens] if experts else []
    return [
        *(str(n) for n in (*axes, *((p.tensor, p.context) if inner else ()))),
        *(f"{n / GIB:.1f}" for n in (p.memory, *(() if inner or experts else parts), p.host)),
        *(f"{n / MIB:,.0f}" for n in (*sent, *((p.sent.tensor, p.sent.context) if inner else ()))),
        f"{p.slowest:.2f}",
        f"{p.bubble:.0%}",
        *(f"{seconds * 1e3:.0f}" for seconds in (p.depth, p.seconds)),
        "" if p.fits else "too large",
    ]


def _next(p: MeshPlan, asked: Sequence[str], machine: Machine) -> str:
    if not p.fits:
        return "No mesh fits: lower train.micro_batch and raise train.accumulate, or set train.recompute=sublayers."
    nodes = ceil(p.ranks / machine.node)
    where = "on one machine" if nodes == 1 else f"on each of {nodes} nodes, HOST being one of them (docs/nodes.md)"
    return f"Next, {where}: {command(p, asked, nodes)}"


def command(p: MeshPlan, asked: Sequence[str], nodes: int) -> str:
    """The command that starts a run on this mesh."""
    parallel = p.parallel
    words = [f"parallel.{axis}={getattr(parallel, axis)}" for axis in ("data", "shard", "pipeline")]
    if parallel.experts > 1:
        words.append(f"parallel.experts={parallel.experts}")
    if parallel.stages_per_rank > 1:
        words += ["parallel.schedule=interleaved", f"parallel.stages_per_rank={parallel.stages_per_rank}"]
    if p.tensor * p.context == 1:
        return f"{parallel.command_on(nodes)} {' '.join([*asked, *words])}"
    launch = parallel.model_copy(update={"data": p.ranks, "shard": 1, "pipeline": 1}).command_on(nodes)
    degrees = {"tensor": p.tensor, "context": p.context}
    flags = [f"--parallelism.{axis}_parallel_degree {degree}" for axis, degree in degrees.items() if degree > 1]
    engine = launch.replace("--no-python residua train", "-m torchtitan.train")
    return (
        f'{engine} --module residua.integrations.torchtitan --config "{" ".join([*asked, *words])}" {" ".join(flags)}'
    )


def plan_report(config: RunConfig, machine: Machine, plans: Sequence[MeshPlan]) -> dict[str, Any]:
    """Everything printed, as plain JSON."""
    rows = [{**asdict(p), "parallel": p.parallel.model_dump(), "memory": p.memory} for p in plans]
    return {"config": config.model_dump(mode="json"), "machine": asdict(machine), "plans": rows}


def scale_tables(models: Mapping[str, RunConfig], machine: Machine) -> Iterator[str]:
    """Lines of Markdown: the fastest mesh of each model for 8 to 4096 devices, also with torchtitan's axes if faster.

    The step stays the same; where there are more devices than micro-batches, these become smaller. `share` is the speed
    of a device beside that of 8.
    """
    head = ("GPUs", "model", "data × shard × pipeline", "tensor × context", "GiB", "sent GiB", "slowest", "bubble",
            "step ms", "tokens/s", "share")  # fmt: skip
    yield f"| {' | '.join(head)} |"
    yield f"|---:|{'---|' * 3}{'---:|' * (len(head) - 4)}"
    for name, config in models.items():
        first: float | None = None
        for gpus in (8, 64, 512, 4096):
            sequences = config.train.accumulate * config.train.micro_batch
            micro = min(config.train.micro_batch, max(1, sequences // gpus))
            sized = config.override([f"train.micro_batch={micro}", f"train.accumulate={sequences // micro}"])
            plans = plan(sized, gpus, machine, engines=True)
            best = next((p for p in plans if p.tensor * p.context == 1), None)  # none if micro-batches are too few
            for p in (best, plans[0]) if best not in (None, plans[0]) else plans[:1]:
                speed = sized.tokens_per_step / p.seconds
                first = first or speed / gpus
                yield f"| {' | '.join(_scale_cells(p, name, speed, speed / gpus / first))} |"


def _scale_cells(p: MeshPlan, name: str, speed: float, share: float) -> list[str]:
    stages = f", {p.parallel.stages} stages" if p.parallel.stages_per_rank > 1 else ""
    return [
        str(p.ranks), name, f"{p.parallel.data} × {p.parallel.shard} × {p.parallel.pipeline}{stages}",
        f"{p.tensor} × {p.context}", f"{p.memory / GIB:.1f}" + " (too large)" * (not p.fits),
        f"{p.sent.total / GIB:.2f}", f"{p.slowest:.2f}", f"{p.bubble:.0%}", f"{p.seconds * 1e3:,.0f}",
        f"{speed:,.0f}", f"{share:.0%}",
    ]  # fmt: skip
