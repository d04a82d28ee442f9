"""Estimates, for every way to divide a run among N devices, memory and bytes per rank and the time of a step.

Memory per rank is states + gathered weights + activations. States: fp32 weights and gradients, Muon's momentum or
AdamW's two moments, a bf16 copy of the weights. Activations per token are counted in widths of two bytes, from what the
backward pass reads: per attention 2C + 2(q + k) + v + q, per feed-forward 2C and each hidden tensor, per junction what
the topology states, and once the logits and six widths around the head. A stage holds those of every micro-batch in
flight.

Bytes are what a rank sends in a step by ring collectives. Time is the sum of: computation at the rate it reaches,
traffic of the junctions (`plan_depth`), the pipeline's bubble, gathers and reductions as far as they take longer than
the computation they overlap, and what overlaps nothing: Muon's exchange, the copies' gradients, and one hop through
the pipeline per direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from residua.bench.plan_depth import depth_bytes, kept_widths
from residua.config.model import ModelConfig, head_dim
from residua.config.run import SMALLEST_UNIT, Muon, ParallelConfig, RunConfig
from residua.config.settings import ConfigError
from residua.distributed.pipeline.deal import Share, shares_of
from residua.model.size import Size, measure

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """A device and its links: bytes of memory, the FLOP/s that an additive model's step reaches, the bytes/s that one
    device sends to others, and the bytes/s that a copy in its memory reads and writes together (an H200's, measured).
    """

    memory: float
    flops: float
    link: float
    bandwidth: float = 4.25e12


@dataclass(frozen=True)
class MeshPlan:
    """One way to divide a run. Bytes are a rank's in one step, `memory` the fullest rank's, `seconds` a step's.

    `depth` is the part of `seconds` that the junctions take beyond an additive model's.
    """

    parallel: ParallelConfig
    states: float
    activations: float
    gathered: float
    gradient_bytes: float
    weight_bytes: float
    muon_bytes: float
    stage_bytes: float
    bubble: float
    depth: float
    seconds: float
    fits: bool

    @property
    def memory(self) -> float:
        return self.states + self.activations + self.gathered


def plan(config: RunConfig, gpus: int, machine: Machine) -> list[MeshPlan]:
    """Every division of the run among `gpus` devices that its configuration allows, the fastest that fits first."""
    size = measure(config.model.model_copy(update={"context": config.sequence}))
    plans = [_plan(config, parallel, size, machine) for parallel in _divisions(config, gpus)]
    if not plans:
        raise ConfigError(
            f"no mesh of {gpus} GPUs divides train.accumulate = {config.train.accumulate} micro-batches and "
            f"{config.model.layers} layers: use a number of GPUs that divides train.accumulate, or change it."
        )
    return sorted(plans, key=lambda p: (not p.fits, p.seconds))


def _divisions(config: RunConfig, gpus: int) -> Iterator[ParallelConfig]:
    """data × shard × pipeline = gpus, each pipeline with one and with two stages per rank, where it is allowed."""
    given = config.parallel.model_dump()
    for pipeline in _divisors(gpus):
        for shard in _divisors(gpus // pipeline):
            axes = {"data": gpus // pipeline // shard, "shard": shard, "pipeline": pipeline}
            kinds: list[dict[str, Any]] = [{"schedule": "1f1b", "stages_per_rank": 1}]
            if pipeline > 1:
                kinds.append({"schedule": "interleaved", "stages_per_rank": 2})
            for kind in kinds:
                try:
                    whole = config.model_dump(exclude_none=True) | {"parallel": {**given, **axes, **kind}}
                    yield RunConfig(**whole).parallel
                except ConfigError:
                    continue


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _plan(config: RunConfig, parallel: ParallelConfig, size: Size, machine: Machine) -> MeshPlan:
    shard, copies, stages = parallel.shard, parallel.data, parallel.pipeline
    micro = config.train.accumulate // parallel.batch_ranks
    tokens = config.train.micro_batch * config.sequence

    layers, ends = _by_place(size)
    deepest = layers / stages + ends + size.depth
    matrices = (size.attention + size.ffn) / stages
    divided = config.model_copy(update={"parallel": parallel})
    hops = _hop_bytes(divided, shares_of(divided)) if stages > 1 else [0.0]

    # per micro-batch: bf16 weights for the forward pass and again for the backward, fp32 gradients reduced
    weight_bytes = (2 + 2 + 4) * deepest * (shard - 1) / shard * micro
    gradient_bytes = 2 * 4 * deepest / shard * (copies - 1) / copies
    # bf16 directions to their owners and updates back, then updates to the other copies
    exchanged = 2 * 2 * (shard - 1) / shard / copies + 2 * (copies - 1) / copies
    muon_bytes = exchanged * matrices / shard if _uses_muon(config) else 0.0
    stage_bytes = 2 * micro * sum(hops) / stages

    depth = depth_bytes(config.model, pipelined=stages > 1) * tokens * micro / stages / machine.bandwidth
    compute = size.flops_per_token * tokens * micro / stages / machine.flops + depth
    bubble = (stages - 1) / (micro * parallel.stages_per_rank + stages - 1)
    hidden = max(0.0, weight_bytes / machine.link - compute)
    bare = (gradient_bytes + muon_bytes + 2 * max(hops)) / machine.link
    states, activations, gathered = _memory(config, parallel, size, micro, tokens, deepest)
    return MeshPlan(
        parallel, states, activations, gathered, gradient_bytes, weight_bytes, muon_bytes, stage_bytes, bubble, depth,
        seconds=compute / (1 - bubble) + hidden + bare,
        fits=states + activations + gathered <= machine.memory,
    )  # fmt: skip


def _by_place(size: Size) -> tuple[float, float]:
    """Parameters of all layers together, and those of the fuller end of the depth."""
    layers = size.attention + size.ffn + size.norms + size.anchors
    return layers, max(size.embedding, size.head)


def _memory(
    config: RunConfig, parallel: ParallelConfig, size: Size, micro: int, tokens: int, held: float
) -> tuple[float, float, float]:
    if parallel.pipeline == 1:
        held = size.parameters
    matrices = (size.attention + size.ffn) / parallel.pipeline
    per_matrix = 4 if _uses_muon(config) else 8
    states = (8 * held + per_matrix * matrices + 8 * (held - matrices)) / parallel.shard
    copies = 2 * held if parallel.shard == 1 else 0.0
    gathered = 0.0
    if parallel.shard > 1:
        layer = (size.attention + size.ffn) / config.model.layers
        unit = layer * min(ceil(SMALLEST_UNIT / layer), config.model.layers / parallel.pipeline)
        shared = held - (size.attention + size.ffn + size.norms + size.anchors) / parallel.pipeline
        # the unit that computes, the next one that is being gathered, their gradients; embedding and head in fp32
        gathered = (2 + 2 + 4) * unit + (4 + 4) * max(0.0, shared)
    per_layer, once = activation_widths(config)
    in_flight = _in_flight(parallel, micro)
    activations = 2 * tokens * (per_layer * config.model.layers / parallel.pipeline * in_flight + once)
    return states + copies, activations, gathered


def _in_flight(parallel: ParallelConfig, micro: int) -> float:
    """Micro-batches whose activations the first rank holds at once, in units of all its layers."""
    ranks, each = parallel.pipeline, parallel.stages_per_rank
    if parallel.schedule == "gpipe":
        return micro
    chunks = ranks if each == 1 else (each - 1) * ranks + 2 * (ranks - 1) + 1
    return min(float(micro), chunks / each)


def activation_widths(config: RunConfig) -> tuple[float, float]:
    """Elements kept per token: for one layer, and once for the embedding, the last norm and the head."""
    model, width = config.model, config.model.width
    depth = 2 * kept_widths(model) * width
    if config.train.recompute == "sublayers":
        layer = 2 * width + depth
    else:
        ffn = sum(model.ffn.at(n).kept(width) for n in range(model.layers)) / model.layers
        layer = _attention(model) + ffn + 2 * model.norm.kept_widths * width + depth
    return layer, model.vocab_size + 6 * width


def _attention(model: ModelConfig) -> float:
    attention, width = model.softmax, model.width
    if attention is None:
        return 10.0 * width
    q = attention.heads * head_dim(model)
    kv = (attention.kv_heads or attention.heads) * head_dim(model)
    gate = {"none": 0, "headwise": q, "elementwise": 3 * q}[attention.gate]
    mixed = 2 * q + 2 * kv if model.anchors.mixed else 0
    return 2 * width + 2 * (q + kv) + kv + q + gate + mixed


def _uses_muon(config: RunConfig) -> bool:
    return isinstance(config.train.optimizer, Muon)


def _hop_bytes(config: RunConfig, shares: Sequence[Share]) -> list[float]:
    """Bytes of each hop for one micro-batch and direction, in bf16, as the stages would send them."""
    import torch

    from residua.distributed.pipeline.stage_boundary import boundaries_of
    from residua.distributed.pipeline.traffic import hop_bytes
    from residua.distributed.pipeline.transport import plan_routes

    shape = (config.train.micro_batch, config.sequence, config.model.width)
    parallel = config.parallel
    crossed = boundaries_of(config.model, shares, shape, torch.bfloat16, parallel.anchors)
    routes = plan_routes([list(items) for items in crossed], parallel.pipeline, parallel.transport)
    return [float(size) for size in hop_bytes(crossed, routes)]
