"""The cases of `residua bench ops`: each operator at one shape, with the minimum of bytes and FLOPs it needs.

Bytes count each required read and write of memory once. A depth path counts its junctions separately (`Costs.floor`):
each reads its state from memory and writes it back, because a sublayer runs in between. Kernels that evaluate several
reads together can move less. In the backward pass, every tensor that the forward pass read is still stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from residua import ops
from residua.config import choices
from residua.model.context import flat_reads
from residua.model.topology import build_topology
from residua.model.topology.facts import Rows, read_rows, stream_rows
from residua.ops._runtime.cases import Draw, Sizes, declared_operators
from residua.ops.expert_ffn.reference import ACTIVATIONS, GATED
from residua.ops.expert_slots import combine, dispatch, slots_of
from residua.ops.grouped_linear import grouped_product
from residua.ops.hyper_connection import manifold_weights

Function = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Shape:
    """One size for all operators. `sources` is for depth attention, `sublayers` for whole depth paths."""

    tokens: int = 32_768
    width: int = 768
    streams: int = 4
    sources: int = 12
    rank: int = 16
    vocabulary: int = 50_304
    experts: int = 16
    top_k: int = 3
    sublayers: int = 24
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """An operator with its inputs; all floating-point inputs get gradients.

    `forward_bytes` and `backward_bytes` are the minimum that must be moved. `flops` counts the arithmetic of both
    passes if that is the limit instead of memory. If a depth path consists of reads, `by_reads` builds the same path
    with another function for each read, which has the arguments of `depth_attention`. `peers` are other implementations
    for these inputs.
    """

    name: str
    function: Function
    inputs: tuple[Tensor, ...]
    forward_bytes: int
    backward_bytes: int
    flops: int = 0
    by_reads: Callable[[Function], Function] | None = None
    peers: dict[str, Function] = field(default_factory=dict)


def operators(shape: Shape, device: torch.device) -> dict[str, Callable[[], Case]]:
    """The cases by name; calling one allocates its tensors."""
    long = _sizes(shape, 8192)
    makers: dict[str, Callable[[Shape, torch.device], Case]] = {
        "multi_gate": partial(_declared, "multi_gate", f"multi_gate, {shape.streams} streams"),
        "gated_norm": partial(_declared, "gated_norm", f"gated_norm, rank {shape.rank}"),
        "add_norm": partial(_declared, "add_norm", "add_norm"),
        "depth_attention": _depth_attention,
        "mix_projection": partial(_declared, "mix_projection", "mix_projection, elementwise"),
        "mix_heads": partial(_declared, "mix_heads", "mix_heads, elementwise"),
        "manifold_hyper": _manifold_hyper,
        "gated_delta": partial(_declared, "gated_delta", f"gated_delta, {_sequences(_sizes(shape))}"),
        "gated_delta_long": partial(_declared, "gated_delta", f"gated_delta, {_sequences(long)}", sizes=long),
        "kimi_delta": partial(_declared, "kimi_delta", f"kimi_delta, {_sequences(_sizes(shape))}"),
        "linear_cross_entropy": partial(_cross_entropy, "linear_cross_entropy"),
        "training_cross_entropy": partial(_cross_entropy, "training_cross_entropy"),
        "route": partial(_declared, "route", f"route, {shape.top_k} of {shape.experts} experts"),
        "expert_ffn": partial(_expert_ffn, "relu2"),
        "expert_ffn_swiglu": partial(_expert_ffn, "swiglu"),
    }
    return {name: partial(make, shape, device) for name, make in makers.items()}


def depth_paths(shape: Shape, device: torch.device) -> dict[str, Callable[[], Case]]:
    """Whole depth paths without the sublayers: every junction of `sublayers` sublayers, with given outputs."""
    blocks = max(1, shape.sublayers // 4)
    configs: dict[str, choices.Topology] = {
        "additive": choices.Additive(),
        "block_attnres, 4 blocks": choices.BlockAttnRes(sublayers_per_block=blocks),
        "full_attnres": choices.FullAttnRes(),
        f"multi_gate, {shape.streams} streams": choices.MultiGate(streams=shape.streams),
        f"mhc, {shape.streams} streams": choices.ManifoldHyper(streams=shape.streams),
    }
    titles = {f"{shape.sublayers} sublayers, {name}": config for name, config in configs.items()}
    return {title: partial(_depth_path, title, config, shape, device) for title, config in titles.items()}


def _sizes(shape: Shape, length: int = 1024) -> Sizes:
    """Heads of 128, in sequences of `length` tokens."""
    heads = shape.width // 128 if shape.width % 128 == 0 else 1
    counts = (shape.streams, shape.sources, shape.rank, shape.vocabulary, shape.experts, shape.top_k)
    return Sizes(shape.tokens, shape.width, heads, min(length, shape.tokens), *counts)


def _sequences(sizes: Sizes) -> str:
    return " × ".join(map(str, sizes.batch))


def _declared(
    operator: str, title: str, shape: Shape, device: torch.device, *, sizes: Sizes | None = None, label: str = ""
) -> Case:
    """A case from the example that an operator declares, at this size; the inputs are its tensors, in order."""
    run = declared_operators()[operator]
    examples = run.cases(Draw(device, shape.dtype, sizes or _sizes(shape), same_everywhere=False))
    example = next(case for case in examples if case.label == label)
    leaves, form = tree_flatten((tuple(example.args), example.settings))
    places = [
        i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not any(x is fixed for fixed in example.fixed)
    ]

    def function(*inputs: Tensor) -> Sequence[Tensor]:
        values = list(leaves)
        for i, x in zip(places, inputs, strict=True):
            values[i] = x
        args, settings = tree_unflatten(values, form)
        results = run(*args, **settings)
        outputs = tree_leaves(results if example.only is None else results[example.only])
        return [y for y in outputs if y.requires_grad] or outputs

    moved = _bytes(Rows(*example.moved), shape) if example.moved else (0, 0)
    return Case(title, function, tuple(leaves[i] for i in places), *moved)


def _depth_attention(shape: Shape, device: torch.device) -> Case:
    sources = [_random(shape, device) for _ in range(shape.sources)]

    def attend(query: Tensor, gain: Tensor, *sources: Tensor) -> Sequence[Tensor]:
        return [ops.depth_attention(sources, query, norm_weight=gain)]

    inputs = (_vector(shape, device), _vector(shape, device), *sources)
    name = f"depth_attention, {shape.sources} sources"
    return Case(name, attend, inputs, *_bytes(read_rows(shape.sources), shape))


def _manifold_hyper(shape: Shape, device: torch.device) -> Case:
    """A junction of mHC: the write, all mixing weights of the next sublayer (20 Sinkhorn iterations), and its read."""
    n = shape.streams
    sizes = (n, n, n * n)
    streams, update = _random(shape, device, n), _random(shape, device)
    post, mix = torch.rand(shape.tokens, n, device=device), torch.rand(shape.tokens, n, n, device=device).softmax(-1)
    phi = torch.randn(sum(sizes), n * shape.width, device=device) / (n * shape.width) ** 0.5
    alpha, bias = torch.ones(3, device=device), torch.randn(sum(sizes), device=device)

    def junction(X: Tensor, y: Tensor, post: Tensor, mix: Tensor, phi: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        h, X, z = ops.hyper_step(X, y, post, mix, b[:n], scale=a[0], phi=phi, norm="all")
        return [h, X, *manifold_weights(z, a, b, n, 20)]

    inputs = (streams, update, post, mix, phi, alpha, bias)
    return Case(f"mhc junction, {n} streams", junction, inputs, *_bytes(stream_rows(n), shape))


def _cross_entropy(name: str, shape: Shape, device: torch.device) -> Case:
    hidden = _random(shape, device)
    weight = torch.randn(shape.vocabulary, shape.width, device=device) / shape.width**0.5
    targets = torch.randint(shape.vocabulary, (shape.tokens,), device=device)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Sequence[Tensor]:
        cross_entropy, z = getattr(ops, name)(hidden, weight, targets, z_loss=1e-5)
        return [cross_entropy + z]

    flops = 6 * shape.tokens * shape.width * shape.vocabulary
    # h, W → a number; h, W → dh, dW
    moved = hidden.nbytes + weight.nbytes
    return Case(f"{name}, {shape.vocabulary}", loss, (hidden, weight, targets), moved, 2 * moved, flops)


def _expert_ffn(activation: str, shape: Shape, device: torch.device) -> Case:
    """Experts as wide as the model, on randomly routed tokens."""
    name = f"expert_ffn, {activation}, {shape.top_k} of {shape.experts} experts"
    case = _declared("expert_ffn", name, shape, device, label=f"routed, {activation}")
    x, up, out, *_ = case.inputs

    def grouped(x: Tensor, up: Tensor, out: Tensor, ends: Tensor, order: Tensor, weights: Tensor) -> Sequence[Tensor]:
        slots = slots_of(order, ends, shape.top_k)
        parts = grouped_product(dispatch(x, slots), up, ends).chunk(2 if activation in GATED else 1, -1)
        return [combine(grouped_product(ACTIVATIONS[activation](*parts), out, ends), weights, slots)]

    peers: dict[str, Function] = {"torch.grouped_mm": grouped}
    if activation == "swiglu" and find_spec("liger_kernel") is not None:
        peers["liger_kernel"] = partial(_liger_experts, shape.top_k)
    flops = 3 * 2 * shape.tokens * shape.top_k * shape.width * (up.shape[1] + out.shape[2])
    # x, W → y; x, dy, W → dx, dW
    weights, moved = up.nbytes + out.nbytes, 2 * x.nbytes
    forward, backward = moved + weights, moved + x.nbytes + 2 * weights
    return replace(case, forward_bytes=forward, backward_bytes=backward, flops=flops, peers=peers)


def _chosen(order: Tensor, ends: Tensor, top_k: int) -> Tensor:
    """The expert of each slot [N, k], from the slots sorted by expert."""
    rows = torch.arange(order.numel(), device=order.device, dtype=ends.dtype)
    experts = torch.empty_like(order)
    experts[order.long()] = torch.searchsorted(ends, rows, right=True).to(order.dtype)
    return experts.view(-1, top_k)


def _liger_experts(
    top_k: int, x: Tensor, up: Tensor, out: Tensor, ends: Tensor, order: Tensor, weights: Tensor
) -> Sequence[Tensor]:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return [LigerFusedMoEFunction.apply(x, up, out, _chosen(order, ends, top_k).int(), weights)]


def _depth_path(name: str, config: choices.Topology, shape: Shape, device: torch.device) -> Case:
    with device:
        topology = build_topology(config, shape.sublayers, shape.width)
    embedding, *outputs = (_random(shape, device)[None] for _ in range(shape.sublayers + 1))

    def path(embedding: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        h, state = topology.open(embedding)
        read: list[Tensor] = []
        for k in range(shape.sublayers):
            h, state = topology.step(k, rest[k], state)
            read.extend(flat_reads(h))
        return read

    costs = topology.costs(shape.sublayers, shape.width)
    moved = _bytes(costs.floor(), shape)
    inputs = (embedding, *outputs, *topology.parameters())
    return Case(name, path, inputs, *moved, by_reads=costs.by_reads)


def _bytes(floor: Rows, shape: Shape) -> tuple[int, int]:
    row = shape.tokens * shape.width * shape.dtype.itemsize
    return int(floor.forward * row), int(floor.backward * row)


def _random(shape: Shape, device: torch.device, *middle: int) -> Tensor:
    return torch.randn(shape.tokens, *middle, shape.width, device=device, dtype=shape.dtype)


def _vector(shape: Shape, device: torch.device) -> Tensor:
    return torch.randn(shape.width, device=device)
