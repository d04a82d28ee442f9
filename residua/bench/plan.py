"""Estimates memory and bytes per rank, and the time of a step, for every way to divide a run among N devices.

Ranks with neighbouring numbers are in one node. The axes, from the inside out: tensor, context, shard, data, pipeline.
`residua train` runs data, shard and pipeline, and divides experts among shard ranks; tensor and context parallelism
need torchtitan (docs/torchtitan.md).

The time of a step is the sum of:

- the computation of the slowest rank of the pipeline at the rate it reaches, with the traffic of its junctions;
- the pipeline's bubble;
- gathers and reductions of layers, where they take longer than the computation they overlap;
- communication that overlaps nothing: the outermost FSDP group, the copies' gradients, Muon's exchange, the exchanges
  of tensor and context parallelism and of divided experts, and one hop through the pipeline per direction.

`plan_costs` counts memory and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from residua.bench import plan_costs
from residua.bench.plan_costs import Division, Facts, Memory, Sent
from residua.config.run import ParallelConfig, RunConfig, check_mesh
from residua.config.settings import ConfigError
from residua.distributed.pipeline.shares import Share, head_work, shares_of, work_of
from residua.errors import UserError
from residua.model.size import FLOPS_PER_BYTE, measure
from residua.reading import counted
from residua.report.terminal import new_table

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """A device, its links and its node.

    memory: bytes of a device. flops: FLOP/s that an additive model's step reaches. link, between: bytes/s that a device
    sends within its node and to other nodes. bandwidth: bytes/s of a copy in its memory, reads plus writes (measured on
    an H200). node: devices in a node. latency: seconds until a message arrives. host: bytes of a node's memory.
    """

    memory: float
    flops: float
    link: float
    between: float = 50e9
    bandwidth: float = 4.25e12
    node: int = 8
    latency: float = 1e-5
    host: float = 2000 * GIB

    def group(self, size: int, stride: int) -> Group:
        """The group of `size` ranks whose numbers are `stride` apart."""
        nodes = max(1, size * stride // self.node)
        return Group(self, size, 1 if size * stride <= self.node else min(size, nodes))


@dataclass(frozen=True)
class Group:
    """A group of communicating ranks, and the number of nodes they are on."""

    machine: Machine
    size: int
    nodes: int

    def ring(self, sent: float, collectives: float = 1.0) -> float:
        """Seconds of ring collectives in which each rank sends `sent` bytes.

        The ranks of one node send to the next node over all their network cards at once. A collective over k nodes
        takes k latencies.
        """
        if self.size == 1:
            return 0.0
        here = self.size / self.nodes
        rate = self.machine.link if self.nodes == 1 else min(self.machine.link, here * self.machine.between)
        return sent / rate + collectives * self.nodes * self.machine.latency

    def exchange(self, sent: float, collectives: float = 1.0) -> float:
        """Seconds of all-to-alls in which each rank sends `sent` bytes, divided among all others."""
        if self.size == 1:
            return 0.0
        leaving = sent * (1 - 1 / self.nodes)
        rates = max((sent - leaving) / self.machine.link, leaving / self.machine.between)
        return rates + collectives * self.machine.latency

    def hop(self, sent: float) -> float:
        """Seconds to send `sent` bytes to the next rank."""
        return sent / (self.machine.link if self.nodes == 1 else self.machine.between) + self.machine.latency


@dataclass(frozen=True)
class MeshPlan:
    """One way to divide a run. Bytes are per rank and step, `seconds` per step.

    `memory` is that of the fullest rank, `host` that of a node. `slowest` is the ratio of the slowest pipeline rank's
    work to the mean. `depth` is the part of `seconds` that junctions add to those of an additive model.
    """

    parallel: ParallelConfig
    tensor: int
    context: int
    held: Memory
    host: float
    sent: Sent
    slowest: float
    bubble: float
    depth: float
    seconds: float
    fits: bool

    @property
    def ranks(self) -> int:
        return self.parallel.ranks * self.tensor * self.context

    @property
    def memory(self) -> float:
        return self.held.total


def plan(config: RunConfig, gpus: int, machine: Machine, *, engines: bool = False) -> list[MeshPlan]:
    """Every division of the run among `gpus` devices that its configuration allows, fastest that fits first.

    `engines` adds tensor and context parallelism, which need torchtitan.
    """
    facts = _facts(config, alone=gpus == 1)
    # many divisions have the same stages
    dealt: dict[int, list[Share]] = {}
    crossed: dict[tuple[int, int], list[float]] = {}
    plans = []
    for tensor, context in _inner(config, gpus, machine) if engines else [(1, 1)]:
        for divided in _divisions(config, gpus // (tensor * context), experts=tensor * context == 1):
            ranks, stages = divided.parallel.pipeline, divided.parallel.stages
            shares = dealt[stages] = dealt.get(stages) or shares_of(divided, facts.work)
            if (ranks, stages) not in crossed:
                crossed[ranks, stages] = plan_costs.hop_bytes(divided, shares, facts.crossing)
            hops = crossed[ranks, stages]
            plans.append(_plan(Division(divided, facts, shares, hops, tensor, context), machine))
    if not plans:
        raise ConfigError(
            f"no mesh of {gpus} GPUs divides train.accumulate = {config.train.accumulate} micro-batches and "
            f"{config.model.layers} layers: use a number of GPUs that divides train.accumulate, or change "
            "train.accumulate."
        )
    return sorted(plans, key=lambda p: (not p.fits, p.seconds))


def _facts(config: RunConfig, *, alone: bool) -> Facts:
    size = measure(config.model.model_copy(update={"context": config.sequence}))
    crossed = {} if alone else plan_costs.crossing_after(config)
    return Facts(
        size, work_of(config), plan_costs.depth_bytes(config.model), *plan_costs.activation_widths(config), crossed
    )


def _inner(config: RunConfig, gpus: int, machine: Machine) -> Iterator[tuple[int, int]]:
    """Sizes of tensor × context: tensor parallelism stays inside a node and keeps heads whole."""
    attention = config.model.softmax
    heads = 1 if attention is None else attention.kv_heads or attention.heads
    for tensor in _divisors(machine.node):
        for context in _divisors(gpus // tensor) if gpus % tensor == 0 and heads % tensor == 0 else ():
            long = config.sequence % (2 * context) == 0 and config.sequence // context >= 1024
            if context == 1 or (context <= 16 and long):
                yield tensor, context


def _divisions(config: RunConfig, gpus: int, *, experts: bool) -> Iterator[RunConfig]:
    """All data × shard × pipeline = gpus; pipelines with one stage per rank and, where allowed, with two.

    `experts`: for mixtures, also with the experts divided among 2 or more of the shard ranks.
    """
    settings = config.parallel.model_dump()
    for pipeline in _divisors(gpus):
        for shard in _divisors(gpus // pipeline):
            axes = {"data": gpus // pipeline // shard, "shard": shard, "pipeline": pipeline}
            kinds: list[dict[str, Any]] = [{"schedule": "1f1b", "stages_per_rank": 1}]
            if pipeline > 1:
                kinds.append({"schedule": "interleaved", "stages_per_rank": 2})
            groups = _divisors(shard) if experts and config.model.ffn.mixture else [1]
            for kind in [{**kind, "experts": group} for kind in kinds for group in groups]:
                try:
                    divided = config.model_copy(update={"parallel": ParallelConfig(**{**settings, **axes, **kind})})
                    check_mesh(divided)
                    yield divided
                except (UserError, ValidationError):
                    continue


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _plan(d: Division, machine: Machine) -> MeshPlan:
    parallel = d.parallel
    inner = d.tensor * d.context
    tensor, context = machine.group(d.tensor, 1), machine.group(d.context, d.tensor)
    shard = machine.group(parallel.shard * d.context, d.tensor)
    copies = machine.group(parallel.data, inner * parallel.shard)
    stages = machine.group(parallel.pipeline, inner * parallel.batch_ranks)
    experts, slices = machine.group(parallel.experts, parallel.slices), machine.group(parallel.slices, 1)

    sent = plan_costs.sent_by(d)
    compute, depth, slowest = _computation(d, machine)
    bubble = (parallel.pipeline - 1) / (d.micro * parallel.stages_per_rank + parallel.pipeline - 1)
    layers = shard.ring(sent.layers, 3 * sent.units * d.micro)
    bare = (
        shard.ring(sent.root, 2)
        + copies.ring(sent.gradients, sent.units + 1)
        + shard.exchange(sent.muon_shards, 2)
        + copies.ring(sent.muon_copies)
        + tensor.ring(sent.tensor, sent.tensor_collectives)
        + context.ring(sent.context, sent.context_collectives)
        + experts.exchange(sent.tokens, sent.token_exchanges)
        + slices.ring(sent.experts, sent.token_exchanges)
        + (2 * stages.hop(max(d.hops) / inner) if parallel.pipeline > 1 else 0.0)
    )
    memory = max((plan_costs.memory_of(d, rank) for rank in range(parallel.pipeline)), key=lambda m: m.total)
    host = plan_costs.host_bytes(d, machine.node)
    return MeshPlan(
        parallel, d.tensor, d.context, memory, host, sent, slowest, bubble, depth,
        seconds=compute / (1 - bubble) + max(0.0, layers - compute) + bare,
        fits=memory.total <= machine.memory and host <= machine.host,
    )  # fmt: skip


def _computation(d: Division, machine: Machine) -> tuple[float, float, float]:
    """Seconds of the slowest rank, the part of them that junctions take, and the ratio of its work to the mean."""
    tokens = d.tokens * d.micro / d.tensor
    if d.parallel.pipeline == 1:
        depth = d.facts.depth * tokens / machine.bandwidth
        return d.size.flops_per_token * tokens / machine.flops + depth, depth, 1.0
    times = []
    for rank in range(d.parallel.pipeline):
        shares = d.of_rank(rank)
        places = [k for share in shares for k in share.sublayers]
        moved = sum(d.work.moved[k] for k in places)
        flops = sum(d.work.sublayers[k] for k in places) - FLOPS_PER_BYTE * moved
        flops += d.work.embedding * (rank == 0) + sum(head_work(d.work, share) for share in shares)
        depth = moved * tokens / machine.bandwidth
        times.append((flops * tokens / machine.flops + depth, depth))
    slowest = max(times)
    return *slowest, slowest[0] * len(times) / sum(seconds for seconds, _ in times)


MIB = 2**20


def print_plans(
    console: Console, preset: Sequence[str], config: RunConfig, machine: Machine, plans: Sequence[MeshPlan], rows: int
) -> None:
    """Print the first `rows` meshes, and the command for the first one; `preset` holds its name and the changes."""
    batches = counted(config.train.accumulate, "micro-batch", "micro-batches")
    console.print(
        f"one step: {config.tokens_per_step} tokens in {batches} of {config.train.micro_batch} × {config.sequence}; "
        f"a device has {machine.memory / GIB:.0f} GiB, reaches {machine.flops / 1e12:.0f} TFLOP/s in an additive step, "
        f"copies {machine.bandwidth / 1e9:.0f} GB/s, sends {machine.link / 1e9:.0f} to the {machine.node} of its node "
        f"and {machine.between / 1e9:.0f} to others, {machine.latency * 1e6:.0f} µs a message",
        soft_wrap=True,
    )
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
        console.print(f"and {len(plans) - rows} more: show them with --rows")
    anchors = config.model.anchors
    if anchors.mixed and not config.model.borrowed:
        console.print(f"step ms leaves out the bytes that anchors.kind = '{anchors.kind}' moves", soft_wrap=True)
    console.print(_next(plans[0], preset, machine), soft_wrap=True, markup=False)


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


def _next(p: MeshPlan, preset: Sequence[str], machine: Machine) -> str:
    if not p.fits:
        return "No mesh fits: lower train.micro_batch and raise train.accumulate, or set train.recompute=sublayers."
    nodes = ceil(p.ranks / machine.node)
    where = "on one machine" if nodes == 1 else f"on each of {nodes} nodes, where HOST is one of them (docs/scale.md)"
    return f"Next, {where}: {command(p, preset, nodes)}"


def command(p: MeshPlan, preset: Sequence[str], nodes: int) -> str:
    """The command that starts a run on this mesh."""
    parallel = p.parallel
    words = [
        f"parallel.data={parallel.data}", f"parallel.shard={parallel.shard}", f"parallel.pipeline={parallel.pipeline}"
    ]  # fmt: skip
    if parallel.experts > 1:
        words.append(f"parallel.experts={parallel.experts}")
    if parallel.stages_per_rank > 1:
        words += ["parallel.schedule=interleaved", f"parallel.stages_per_rank={parallel.stages_per_rank}"]
    if p.tensor * p.context == 1:
        return f"{parallel.command_on(nodes)} {' '.join([*preset, *words])}"
    launch = parallel.model_copy(update={"data": p.ranks, "shard": 1, "pipeline": 1}).command_on(nodes)
    degrees = {"tensor": p.tensor, "context": p.context}
    flags = [f"--parallelism.{axis}_parallel_degree {degree}" for axis, degree in degrees.items() if degree > 1]
    engine = launch.replace("--no-python residua train", "-m torchtitan.train")
    return (
        f'{engine} --module residua.integrations.torchtitan --config "{" ".join([*preset, *words])}" {" ".join(flags)}'
    )


def plan_report(config: RunConfig, machine: Machine, plans: Sequence[MeshPlan]) -> dict[str, Any]:
    """The printed content as plain JSON."""
    rows = [{**asdict(p), "parallel": p.parallel.model_dump(), "memory": p.memory} for p in plans]
    return {"config": config.model_dump(mode="json"), "machine": asdict(machine), "plans": rows}
