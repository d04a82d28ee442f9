"""Estimates, for every way to divide a run among N devices, memory and bytes per rank and the time of a step.

Ranks with neighbouring numbers are in one node. The axes, from the inside out: tensor, context, shard, data, pipeline.
`residua train` runs data, shard and pipeline, and divides experts among shard ranks; tensor and context parallelism are
torchtitan's (docs/torchtitan.md).

Time of a step is the sum of: the computation of the slowest rank of the pipeline at the rate it reaches, with the
traffic of its junctions; the pipeline's bubble; gathers and reductions of layers as far as they take longer than the
computation they overlap; and what overlaps nothing: the outermost FSDP group, the copies' gradients, Muon's exchange,
the exchanges of tensor and context parallelism and of divided experts, and one hop through the pipeline per direction.
`plan_memory` counts memory, `plan_traffic` and `plan_experts` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from residua.bench.plan_depth import depth_bytes
from residua.bench.plan_division import Division, Facts
from residua.bench.plan_machine import GIB as GIB
from residua.bench.plan_machine import Machine as Machine
from residua.bench.plan_memory import Memory, activation_widths, host_bytes, memory_of
from residua.bench.plan_traffic import Sent, crossing_after, hop_bytes, sent_by
from residua.config.run import ParallelConfig, RunConfig, check_mesh
from residua.config.settings import ConfigError
from residua.distributed.pipeline.shares import Share, head_work, shares_of, work_of
from residua.errors import UserError
from residua.model.size import FLOPS_PER_BYTE, measure


@dataclass(frozen=True)
class MeshPlan:
    """One way to divide a run. Bytes are those of a rank in one step, `seconds` a step's.

    `memory` is the fullest rank's, `host` a node's. `slowest` is the work of the slowest rank of a pipeline over the
    mean. `depth` is the part of `seconds` that the junctions take beyond an additive model's.
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
    """Every division of the run among `gpus` devices that its configuration allows, the fastest that fits first.

    With `engines`, also tensor and context parallelism, which torchtitan runs.
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
            hops = crossed[ranks, stages] = crossed.get((ranks, stages)) or hop_bytes(divided, shares, facts.crossing)
            plans.append(_plan(Division(divided, facts, shares, hops, tensor, context), machine))
    if not plans:
        raise ConfigError(
            f"no mesh of {gpus} GPUs divides train.accumulate = {config.train.accumulate} micro-batches and "
            f"{config.model.layers} layers: use a number of GPUs that divides train.accumulate, or change it."
        )
    return sorted(plans, key=lambda p: (not p.fits, p.seconds))


def _facts(config: RunConfig, *, alone: bool) -> Facts:
    size = measure(config.model.model_copy(update={"context": config.sequence}))
    crossed = {} if alone else crossing_after(config)
    return Facts(size, work_of(config), depth_bytes(config.model), *activation_widths(config), crossed)


def _inner(config: RunConfig, gpus: int, machine: Machine) -> Iterator[tuple[int, int]]:
    """Sizes of tensor × context: tensor parallelism inside a node, in parts that have whole heads."""
    attention = config.model.softmax
    heads = 1 if attention is None else attention.kv_heads or attention.heads
    for tensor in _divisors(machine.node):
        for context in _divisors(gpus // tensor) if gpus % tensor == 0 and heads % tensor == 0 else ():
            long = config.sequence % (2 * context) == 0 and config.sequence // context >= 1024
            if context == 1 or (context <= 16 and long):
                yield tensor, context


def _divisions(config: RunConfig, gpus: int, *, experts: bool) -> Iterator[RunConfig]:
    """data × shard × pipeline = gpus, each pipeline with one and with two stages per rank, where it is allowed.

    `experts`: of mixtures, each also with its experts divided among 2 and more of the shard ranks.
    """
    given = config.parallel.model_dump()
    for pipeline in _divisors(gpus):
        for shard in _divisors(gpus // pipeline):
            axes = {"data": gpus // pipeline // shard, "shard": shard, "pipeline": pipeline}
            kinds: list[dict[str, Any]] = [{"schedule": "1f1b", "stages_per_rank": 1}]
            if pipeline > 1:
                kinds.append({"schedule": "interleaved", "stages_per_rank": 2})
            groups = _divisors(shard) if experts and config.model.ffn.mixture else [1]
            for kind in [{**kind, "experts": group} for kind in kinds for group in groups]:
                try:
                    divided = config.model_copy(update={"parallel": ParallelConfig(**{**given, **axes, **kind})})
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

    sent = sent_by(d)
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
    held = max((memory_of(d, rank) for rank in range(parallel.pipeline)), key=lambda m: m.total)
    host = host_bytes(d, machine.node)
    return MeshPlan(
        parallel, d.tensor, d.context, held, host, sent, slowest, bubble, depth,
        seconds=compute / (1 - bubble) + max(0.0, layers - compute) + bare,
        fits=held.total <= machine.memory and host <= machine.host,
    )  # fmt: skip


def _computation(d: Division, machine: Machine) -> tuple[float, float, float]:
    """Seconds of the slowest rank, the part of them that junctions take, and its work over the mean."""
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
