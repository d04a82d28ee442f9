"""Bytes that a rank sends in a step, by what they are for: counted from the equations, by ring collectives.

- layers: FSDP2 gathers a unit in bf16 for the forward pass and again for the backward, and reduces its gradients in
  fp32, for every micro-batch.
- root: the outermost FSDP2 group (embedding, head, vectors, topology) is gathered and reduced once per step, in fp32.
- gradients: fp32, once per step, summed over the copies of the model.
- muon: bf16 directions to the owners of matrices and updates back, then updates to the other copies.
- stages: what crosses between stages, forward and backward.
- tensor: with sequence parallelism every sublayer gathers its input and reduces its output, [tokens, C] in bf16, and
  the same for the gradients; embedding and head once each.
- tokens, experts: with `parallel.experts`, what `plan_experts` counts. The layers are then gathered without experts.
- context: ring attention hands keys and values round, forward and again backward, with their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import torch

from residua.bench.plan_division import Division
from residua.bench.plan_experts import divided_parameters, expert_traffic
from residua.config.model import head_dim
from residua.config.run import SMALLEST_UNIT, Muon, RunConfig
from residua.distributed.pipeline import transport
from residua.distributed.pipeline.shares import Share, boundaries_of, crossing
from residua.distributed.pipeline.transport import plan_routes
from residua.model.topology.base import Items


@dataclass(frozen=True)
class Sent:
    """Bytes of the fullest rank in a step, and how many collectives they are."""

    layers: float
    root: float
    gradients: float
    muon_shards: float
    muon_copies: float
    stages: float
    tensor: float
    context: float
    tokens: float
    experts: float
    units: int
    tensor_collectives: float
    context_collectives: float
    token_exchanges: float

    @property
    def weights(self) -> float:
        return self.layers + self.root + self.experts

    @property
    def muon(self) -> float:
        return self.muon_shards + self.muon_copies

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.muon + self.stages + self.tensor + self.context + self.tokens


def sent_by(d: Division) -> Sent:
    """What the fullest rank of a division sends."""
    parallel, t = d.parallel, d.tensor
    shard, copies = parallel.shard * d.context, parallel.data
    matrices, root = (max(sizes) / t for sizes in zip(*held_parameters(d), strict=True))
    others = (shard - 1) / shard
    places = max(sum(len(share.sublayers) for share in d.of_rank(rank)) for rank in range(parallel.pipeline))
    divided = divided_parameters(d.config, places / 2) / t
    slices = parallel.slices if divided else shard
    muon = 1 / shard if uses_muon(d.config) else 0.0
    exchange = (matrices - divided) * others + divided * (slices - 1) / slices
    travelling = expert_traffic(d.config, places / 2, d.tokens / t, d.micro)

    width, tokens = d.config.model.width, d.tokens
    exchanged = 2 * tokens * width * (t - 1) / t
    passes = 4 * (places + 1) * d.micro if t > 1 else 0
    rounds = 3 * _softmax_layers(d) * (d.context - 1) * d.micro
    return Sent(
        layers=(2 + 2 + 4) * (matrices - divided) * others * d.micro,
        root=(4 + 4) * root * others,
        gradients=2 * 4 * (matrices + root) / shard * (copies - 1) / copies,
        muon_shards=2 * 2 * exchange * muon / copies,
        muon_copies=2 * matrices * muon * (copies - 1) / copies,
        stages=2 * d.micro * sum(d.hops) / parallel.pipeline / t / d.context,
        tensor=exchanged * passes,
        context=rounds * 2 * 2 * tokens * _key_width(d.config) / t,
        tokens=travelling.tokens,
        experts=travelling.weights,
        units=ceil((matrices - divided) * t / unit_size(d)) if matrices else 0,
        tensor_collectives=float(passes),
        context_collectives=float(rounds),
        token_exchanges=travelling.exchanges,
    )


def held_parameters(d: Division) -> list[tuple[float, float]]:
    """For each rank of the pipeline: parameters of its layers' matrices, and those of the outermost group."""
    size, model, stages = d.size, d.config.model, d.parallel.pipeline
    matrices = (size.attention + size.ffn) / model.sublayers
    vectors = (size.norms + size.anchors) / model.sublayers
    head = size.head or size.embedding
    found = []
    for rank in range(stages):
        shares = d.of_rank(rank)
        places = sum(len(share.sublayers) for share in shares)
        heads = any(share.head for share in shares)
        ends = size.embedding * (rank == 0) + head * heads
        if stages == 1 and not size.head:
            ends = size.embedding  # tied: one matrix
        found.append((matrices * places, vectors * places + ends + size.depth))
    return found


def unit_size(d: Division) -> float:
    """Parameters of a unit that FSDP2 gathers: as many layers as have `SMALLEST_UNIT` together."""
    layer = (d.size.attention + d.size.ffn) / d.config.model.layers - divided_parameters(d.config, 1)
    return layer * min(ceil(SMALLEST_UNIT / layer), d.config.model.layers / d.parallel.pipeline)


def uses_muon(config: RunConfig) -> bool:
    """Whether the hidden matrices are Muon's."""
    return isinstance(config.train.optimizer, Muon)


def crossing_after(config: RunConfig) -> dict[int, Items]:
    """What would cross after every sublayer, in bf16."""
    ends = list(range(config.model.sublayers))
    shape = _shape(config)
    return dict(zip(ends, crossing(config.model, ends, shape, torch.bfloat16, config.parallel.anchors), strict=True))


def hop_bytes(config: RunConfig, shares: Sequence[Share], known: Mapping[int, Items]) -> list[float]:
    """Bytes of each hop for one micro-batch and direction, as the stages would send them; 0 if there is no hop."""
    parallel = config.parallel
    if parallel.pipeline == 1:
        return [0.0]
    crossed = boundaries_of(config.model, shares, _shape(config), torch.bfloat16, parallel.anchors, known)
    routes = plan_routes([list(items) for items in crossed], parallel.pipeline, parallel.transport)
    return [float(size) for size in transport.hop_bytes(crossed, routes)]


def _shape(config: RunConfig) -> tuple[int, int, int]:
    return config.train.micro_batch, config.sequence, config.model.width


def _key_width(config: RunConfig) -> float:
    """heads · head_dim of the keys of a softmax layer."""
    attention = config.model.softmax
    return 0.0 if attention is None else (attention.kv_heads or attention.heads) * head_dim(config.model)


def _softmax_layers(d: Division) -> float:
    layers = 0 if d.config.model.softmax is None else len(d.config.model.softmax_layers)
    return layers / d.parallel.pipeline
