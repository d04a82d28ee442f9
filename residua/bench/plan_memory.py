"""Memory of a rank and of a node, counted.

Per rank: states + gathered weights + activations. States: fp32 weights and gradients, Muon's momentum or AdamW's two
moments, a bf16 copy of the weights unless they are sharded. Activations per token are counted in widths of two bytes,
from what the backward pass reads: per attention 2C + 2(q + k) + v + q, per feed-forward 2C and each hidden tensor, per
junction what the topology states, and once the logits and six widths around the head. A stage holds those of every
micro-batch in flight, and what it received for them.

Per node, in host memory: while a checkpoint is written, the copies of weights and optimizer states of its ranks; while
the model is built, one layer or the embedding for each rank. Python, CUDA and the files that the system caches are not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from residua.bench.plan_depth import kept_widths
from residua.bench.plan_division import Division
from residua.bench.plan_experts import divided_parameters
from residua.bench.plan_traffic import held_parameters, unit_size, uses_muon
from residua.config.model import ModelConfig, head_dim
from residua.config.run import ParallelConfig, RunConfig


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
    held = matrices + root
    copies = 2 * held if shard == 1 else 0.0
    gathered = 0.0
    if shard > 1:
        # the unit that computes, the next one that is being gathered, their gradients; the outermost group in fp32
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
    return Memory(_states(d, matrices, held) / shard + copies, activations, gathered)


def host_bytes(d: Division, node: int) -> float:
    """The host memory of a node: copies of the states for a checkpoint, and what each rank builds at a time."""
    matrices, root = (max(sizes) / d.tensor for sizes in zip(*held_parameters(d), strict=True))
    # without gradients, which are 4 of the bytes of `_states`
    copied = (_states(d, matrices, matrices + root) - 4 * (matrices + root)) / (d.parallel.shard * d.context)
    if d.parallel.data > 1:
        copied /= d.parallel.data  # equal copies are written once, by one rank each
    layer = (d.size.attention + d.size.ffn) / d.config.model.layers
    each: float = copied + 4 * max(layer, d.size.embedding)
    return min(node, d.ranks) * each


def _states(d: Division, matrices: float, held: float) -> float:
    per_matrix = 4 if uses_muon(d.config) else 8
    return 8 * held + per_matrix * matrices + 8 * (held - matrices)


def _in_flight(parallel: ParallelConfig, micro: int, rank: int) -> float:
    """Micro-batches whose activations a rank holds at once, in units of all its layers."""
    ranks, each = parallel.pipeline, parallel.stages_per_rank
    if parallel.schedule == "gpipe":
        return micro
    chunks = ranks - rank if each == 1 else (each - 1) * ranks + 2 * (ranks - 1 - rank) + 1
    return min(float(micro), chunks / each)


def activation_widths(config: RunConfig) -> tuple[float, float]:
    """Elements kept per token: for one layer, and once for the embedding, the last norm and the head."""
    model, width = config.model, config.model.width
    depth = 2 * kept_widths(model) * width
    if config.train.recompute == "sublayers":
        layer = 2 * width + depth
    else:
        layer = _attention(model) + model.ffn.kept(width) + 2 * model.norm.kept_widths * width + depth
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
