"""The costs of a division for each rank, counted from the equations: memory, bytes sent, traffic of junctions.

Memory per rank: states + gathered weights + activations. States: fp32 weights and gradients, Muon's momentum or AdamW's
two moments, a bf16 copy of the weights unless they are sharded. Activations per token are counted in two-byte elements
that the backward pass reads: per attention 2C + 2(q + k) + v + q, per feed-forward 2C and each hidden tensor, per
junction the topology's figure, and once the logits and six widths around the head. A stage holds the activations of
every micro-batch in flight, and the tensors it received for them.

Host memory per node: while a checkpoint is written, copies of its ranks' weights and optimizer states; while the model
is built, one layer or the embedding for each rank. Python, CUDA and the system's file cache are not counted.

Bytes that a rank sends in a step, by ring collectives:

- layers: FSDP2 gathers a unit in bf16 for the forward pass and again for the backward, and reduces its gradients in
  fp32, for every micro-batch.
- root: the outermost FSDP2 group (embedding, head, vectors, topology) is gathered and reduced once per step, in fp32.
- gradients: fp32, once per step, summed over the copies of the model.
- muon: bf16 directions to the owners of matrices, updates back, then updates to the other copies.
- stages: the tensors between stages, forward and backward.
- tensor: with sequence parallelism every sublayer gathers its input and reduces its output, [tokens, C] in bf16, and
  does the same for the gradients; embedding and head do so once each.
- context: ring attention passes keys and values around in the forward pass, and again, with their gradients, in the
  backward pass.
- tokens, experts: with `parallel.experts` the experts' matrices are not gathered with their layer. The shard / experts
  ranks that have the same experts gather these in bf16 for the forward pass, again for the backward, and reduce their
  gradients in fp32. Each of a token's `top_k` rows of C elements is sent in bf16 to the rank of its expert, unless it
  is already there, and the result is sent back. In the backward pass the gradients travel likewise; with recomputation
  the rows travel once more. Nothing overlaps these. Experts are assumed to be equally loaded.

Junctions: a topology states how many rows of C two-byte elements they move (`Topology.costs`) and the share of the
bandwidth they reach. The measured rate of an additive model's step includes its additions, so their rows are
subtracted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import torch

from residua.config.choices import SoftmaxAttention
from residua.config.model import ModelConfig
from residua.config.run import SMALLEST_UNIT, Muon, ParallelConfig, RunConfig
from residua.distributed.pipeline import transport
from residua.distributed.pipeline.shares import Share, boundaries_of, crossing
from residua.distributed.pipeline.transport import plan_routes
from residua.model.size import Size, Work
from residua.model.topology import build_topology
from residua.model.topology.base import Items
from residua.model.topology.facts import ADDED_IN_NORM, Costs


@dataclass(frozen=True)
class Facts:
    """Facts that all divisions of a run share.

    depth: bytes that junctions move per token when the model is not cut. per_layer, once: elements stored per token for
    the backward pass (`activation_widths`). crossing: the elements that would cross a cut after each sublayer.
    """

    size: Size
    work: Work
    depth: float
    per_layer: float
    once: float
    crossing: Mapping[int, Items]


@dataclass(frozen=True)
class Division:
    """A divided run: its `parallel` table, and the axes that only torchtitan has.

    `shares` are those of the stages, `hops` the bytes between them per micro-batch and direction, in bf16.
    """

    config: RunConfig
    facts: Facts
    shares: Sequence[Share]
    hops: Sequence[float]
    tensor: int = 1
    context: int = 1

    @property
    def size(self) -> Size:
        return self.facts.size

    @property
    def work(self) -> Work:
        return self.facts.work

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def ranks(self) -> int:
        return self.parallel.ranks * self.tensor * self.context

    @property
    def micro(self) -> int:
        """Micro-batches per pipeline and step."""
        return self.config.train.accumulate // self.parallel.batch_ranks

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank, before tensor parallelism divides them."""
        return self.config.train.micro_batch * self.config.sequence / self.context

    def of_rank(self, rank: int) -> Sequence[Share]:
        """The stages of a rank of the pipeline."""
        return self.shares[rank :: self.parallel.pipeline]


@dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    states: float
    activations: float
    gathered: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.gathered


def memory_of(d: Division, rank: int) -> Memory:
    """The memory of a rank of the pipeline."""
    parallel, shard = d.parallel, d.parallel.shard * d.context
    matrices, root = (size / d.tensor for size in held_parameters(d)[rank])
    parameters = matrices + root
    copies = 2 * parameters if shard == 1 else 0.0
    gathered = 0.0
    if shard > 1:
        # the computing unit, the next unit being gathered, their gradients; the outermost group in fp32
        gathered = (2 + 2 + 4) * min(unit_size(d) / d.tensor, matrices) + (4 + 4) * root
        # the experts of one layer that this rank has, and their gradients
        gathered += (2 + 2 + 4) * divided_parameters(d.config, 1) / parallel.experts / d.tensor

    shares = d.of_rank(rank)
    layers = sum(len(share.sublayers) for share in shares) / 2
    head = sum(len(share.head) / share.pieces for share in shares)
    flying = _in_flight(parallel, d.micro, rank)
    received = sum(
        d.hops[number - 1] for number in range(rank or parallel.pipeline, parallel.stages, parallel.pipeline)
    )
    tokens = d.tokens / d.tensor
    activations = 2 * tokens * (d.facts.per_layer * layers * flying + d.facts.once * head)
    activations += received / (d.tensor * d.context) * flying
    return Memory(_states(d, matrices, parameters) / shard + copies, activations, gathered)


def host_bytes(d: Division, node: int) -> float:
    """The host memory of a node: copies of the states for a checkpoint, and the parts that its ranks are building."""
    matrices, root = (max(sizes) / d.tensor for sizes in zip(*held_parameters(d), strict=True))
    # without gradients, which are 4 of the bytes of `_states`
    copied = (_states(d, matrices, matrices + root) - 4 * (matrices + root)) / (d.parallel.shard * d.context)
    if d.parallel.data > 1:
        copied /= d.parallel.data  # of equal copies, one rank writes one
    layer = (d.size.attention + d.size.ffn) / d.config.model.layers
    each: float = copied + 4 * max(layer, d.size.embedding)
    return min(node, d.ranks) * each


def _states(d: Division, matrices: float, parameters: float) -> float:
    per_matrix = 4 if uses_muon(d.config) else 8
    return 8 * parameters + per_matrix * matrices + 8 * (parameters - matrices)


def _in_flight(parallel: ParallelConfig, micro: int, rank: int) -> float:
    """How many micro-batches' activations a rank holds at once, counted over all its layers."""
    ranks, each = parallel.pipeline, parallel.stages_per_rank
    if parallel.schedule == "gpipe":
        return micro
    chunks = ranks - rank if each == 1 else (each - 1) * ranks + 2 * (ranks - 1 - rank) + 1
    return min(float(micro), chunks / each)


def activation_widths(config: RunConfig) -> tuple[float, float]:
    """Elements stored per token: for one layer, and once for the embedding, the final norm and the head."""
    model, width = config.model, config.model.width
    depth = 2 * _costs(model).kept(model.sublayers) * width
    if config.train.recompute == "sublayers":
        layer = 2 * width + depth
    else:
        layer = _attention(model) + model.ffn.kept(width) + 2 * model.norm.kept_widths * width + depth
    return layer, model.vocab_size + 6 * width


def _head_widths(model: ModelConfig, attention: SoftmaxAttention) -> tuple[float, float]:
    """heads · head_dim of the queries and of the keys of a softmax layer, on average."""
    mixers = [attention.at(layer) for layer in model.softmax_layers]
    widths = [(m.heads, m.kv_heads or m.heads, m.turned(model.width)) for m in mixers]
    return sum(q * d for q, _, d in widths) / len(widths), sum(kv * d for _, kv, d in widths) / len(widths)


def _attention(model: ModelConfig) -> float:
    attention, width = model.softmax, model.width
    if attention is None:
        return 10.0 * width
    q, kv = _head_widths(model, attention)
    gate = {"none": 0, "headwise": q, "elementwise": 3 * q}[attention.gate]
    mixed = 2 * q + 2 * kv if model.anchors.mixed and not model.borrowed else 0
    taken = [s for _, pathways in model.borrowed.values() for s in pathways]
    fewer = (2 * taken.count("k") + taken.count("v")) * kv / len(model.softmax_layers)
    return 2 * width + 2 * (q + kv) + kv + q + gate + mixed - fewer


@dataclass(frozen=True)
class Sent:
    """Bytes that the fullest rank sends in a step, and the number of collectives."""

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
    """The bytes that the fullest rank of a division sends."""
    parallel, t = d.parallel, d.tensor
    shard, copies = parallel.shard * d.context, parallel.data
    matrices, root = (max(sizes) / t for sizes in zip(*held_parameters(d), strict=True))
    others = (shard - 1) / shard
    places = max(sum(len(share.sublayers) for share in d.of_rank(rank)) for rank in range(parallel.pipeline))
    divided = divided_parameters(d.config, places / 2) / t
    slices = parallel.slices if divided else shard
    muon = 1 / shard if uses_muon(d.config) else 0.0
    exchange = (matrices - divided) * others + divided * (slices - 1) / slices

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
        units=ceil((matrices - divided) * t / unit_size(d)) if matrices else 0,
        tensor_collectives=float(passes),
        context_collectives=float(rounds),
        **expert_traffic(d.config, places / 2, d.tokens / t, d.micro),
    )


def held_parameters(d: Division) -> list[tuple[float, float]]:
    """For each rank of the pipeline, the parameters in its layers' matrices and in the outermost group."""
    size, model, stages = d.size, d.config.model, d.parallel.pipeline
    matrices = (size.attention + size.ffn) / model.sublayers
    vectors = (size.norms + size.anchors) / model.sublayers
    head = size.head or size.embedding
    counts = []
    for rank in range(stages):
        shares = d.of_rank(rank)
        places = sum(len(share.sublayers) for share in shares)
        heads = any(share.head for share in shares)
        ends = size.embedding * (rank == 0) + head * heads
        if stages == 1 and not size.head:
            ends = size.embedding  # tied: one matrix
        counts.append((matrices * places, vectors * places + ends + size.depth))
    return counts


def unit_size(d: Division) -> float:
    """Parameters of a unit that FSDP2 gathers: the fewest layers that reach `SMALLEST_UNIT` together."""
    layer = (d.size.attention + d.size.ffn) / d.config.model.layers - divided_parameters(d.config, 1)
    return layer * min(ceil(SMALLEST_UNIT / layer), d.config.model.layers / d.parallel.pipeline)


def uses_muon(config: RunConfig) -> bool:
    """Whether Muon updates the hidden matrices."""
    return isinstance(config.train.optimizer, Muon)


def crossing_after(config: RunConfig) -> dict[int, Items]:
    """The tensors that would cross a cut after each sublayer, in bf16."""
    ends = list(range(config.model.sublayers))
    shape = _shape(config)
    return dict(zip(ends, crossing(config.model, ends, shape, torch.bfloat16, config.parallel.anchors), strict=True))


def hop_bytes(config: RunConfig, shares: Sequence[Share], known: Mapping[int, Items]) -> list[float]:
    """Bytes that stages send over each hop per micro-batch and direction; 0 if there is no hop."""
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
    return 0.0 if attention is None else _head_widths(config.model, attention)[1]


def _softmax_layers(d: Division) -> float:
    layers = 0 if d.config.model.softmax is None else len(d.config.model.softmax_layers)
    return layers / d.parallel.pipeline


def divided_parameters(config: RunConfig, layers: float) -> float:
    """The expert parameters in `layers` layers that are divided among ranks and not gathered with their layer."""
    model, ffn = config.model, config.model.ffn
    if config.parallel.experts == 1:
        return 0.0
    matrices = 3 if ffn.gated else 2
    return float(ffn.mixtures(model.layers) * ffn.experts * matrices * ffn.hidden * model.width) * layers / model.layers


def expert_traffic(config: RunConfig, layers: float, tokens: float, micro: int) -> dict[str, float]:
    """Bytes and exchanges of a rank with `layers` layers, for `micro` micro-batches of `tokens` tokens, as in Sent."""
    ffn, parallel = config.model.ffn, config.parallel
    if parallel.experts == 1:
        return dict.fromkeys(("tokens", "experts", "token_exchanges"), 0.0)
    share = layers / config.model.layers  # share of the whole model
    mixtures = ffn.mixtures(config.model.layers) * share
    recomputed = config.train.recompute == "sublayers"
    trips = 6 if recomputed else 4
    rows = tokens * ffn.top_k * (parallel.experts - 1) / parallel.experts
    gathered = divided_parameters(config, layers) / parallel.experts
    return {
        "tokens": trips * 2 * config.model.width * rows * mixtures * micro,
        "experts": (2 + 2 + 4) * gathered * (parallel.slices - 1) / parallel.slices * micro,
        "token_exchanges": (trips + (2 if recomputed else 1)) * mixtures * micro,
    }


def depth_bytes(model: ModelConfig) -> float:
    """Bytes per token that all junctions move beyond those of an additive model, forward and backward.

    Bytes of junctions that reach less than the full bandwidth are scaled up.
    """
    costs = _costs(model)
    beyond = max(0.0, costs.moved() - ADDED_IN_NORM * model.sublayers)
    return 2 * model.width * beyond / costs.bandwidth_share


def _costs(model: ModelConfig) -> Costs:
    with torch.device("meta"):
        topology = build_topology(model.topology, model.sublayers, model.width)
    return topology.costs(model.sublayers, model.width)
