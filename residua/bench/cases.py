"""What `residua bench ops` times: each operator at one shape, with the least bytes and arithmetic it needs.

Bytes count what an operator must read from memory once and write once. A depth path counts its junctions one by one
(`Costs.floor`), each reading its state from memory and writing it back, because a sublayer runs in between; kernels
that evaluate several reads together can move less. Backward, every tensor that forward read is still stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from residua import ops
from residua.config import choices
from residua.model.topology import build_topology
from residua.model.topology.facts import Rows, read_rows, stream_rows
from residua.ops.expert_ffn.reference import ACTIVATIONS, GATED
from residua.ops.expert_slots import combine, dispatch, slots_of
from residua.ops.grouped_linear import grouped_product
from residua.ops.hyper_connection import manifold_weights

Function = Callable[..., Sequence[Tensor]]

GATED_NORM = Rows(2, 3)
"""x → y; x, dy → dx."""
ADD_NORM = Rows(4, 4)
"""x, y → x + y, its norm; x + y and the gradients of both → the gradient of x, which is also y's."""
MIX = Rows(3, 5)
"""The projection and its anchor → the mix; both and the mix's gradient → their gradients."""
DELTA = Rows(4, 7)
"""q, k, v → o; those and do → their gradients. The gates are a hundredth of that."""
CHANNEL_DELTA = Rows(6, 11)
"""The same with log decays in float32, one per channel, and their gradients."""


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

    `forward_bytes` and `backward_bytes` are the least that can be moved, `flops` the arithmetic of both passes where
    that is the limit and not memory. If a depth path consists of reads, `by_reads` builds the same path from another
    function for each read, called as `depth_attention` is. `peers` are other ways to compute it, for these inputs.
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
    """The cases by name; their tensors are made when one is called."""
    made: dict[str, Callable[[Shape, torch.device], Case]] = {
        "multi_gate": _multi_gate,
        "gated_norm": _gated_norm,
        "add_norm": _add_norm,
        "depth_attention": _depth_attention,
        "mix_projection": _mix_projection,
        "mix_heads": _mix_heads,
        "manifold_hyper": _manifold_hyper,
        "gated_delta": partial(_gated_delta, length=1024),
        "gated_delta_long": partial(_gated_delta, length=8192),
        "kimi_delta": _kimi_delta,
        "linear_cross_entropy": partial(_cross_entropy, "linear_cross_entropy"),
        "training_cross_entropy": partial(_cross_entropy, "training_cross_entropy"),
        "route": _route,
        "expert_ffn": partial(_expert_ffn, "relu2"),
        "expert_ffn_swiglu": partial(_expert_ffn, "swiglu"),
    }
    return {name: partial(make, shape, device) for name, make in made.items()}


def depth_paths(shape: Shape, device: torch.device) -> dict[str, Callable[[], Case]]:
    """All of a model's depth and nothing else: every junction of `sublayers` sublayers, whose outputs are given."""
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


def _multi_gate(shape: Shape, device: torch.device) -> Case:
    n = shape.streams
    streams, update = _random(shape, device, n), _random(shape, device)
    weights = (_vector(shape, device), torch.randn(n + 1, device=device), _vector(shape, device))
    moved = _bytes(stream_rows(n), shape)
    return Case(f"multi_gate, {n} streams", ops.multi_gate, (streams, update, *weights), *moved)


def _gated_norm(shape: Shape, device: torch.device) -> Case:
    x, weight = _random(shape, device), _vector(shape, device)
    down = torch.randn(shape.rank, shape.width, device=device) / shape.width**0.5
    up = torch.randn(shape.width, shape.rank, device=device)
    return Case(
        f"gated_norm, rank {shape.rank}",
        lambda *inputs: [ops.gated_norm(*inputs)],
        (x, weight, down, up),
        *_bytes(GATED_NORM, shape),
    )


def _add_norm(shape: Shape, device: torch.device) -> Case:
    inputs = (_random(shape, device), _random(shape, device), _vector(shape, device))
    return Case("add_norm", ops.add_norm, inputs, *_bytes(ADD_NORM, shape))


def _depth_attention(shape: Shape, device: torch.device) -> Case:
    sources = [_random(shape, device) for _ in range(shape.sources)]

    def attend(query: Tensor, gain: Tensor, *sources: Tensor) -> Sequence[Tensor]:
        return [ops.depth_attention(sources, query, norm_weight=gain)]

    inputs = (_vector(shape, device), _vector(shape, device), *sources)
    name = f"depth_attention, {shape.sources} sources"
    return Case(name, attend, inputs, *_bytes(read_rows(shape.sources), shape))


def _mix_projection(shape: Shape, device: torch.device) -> Case:
    head = 128 if shape.width % 128 == 0 else shape.width
    heads = shape.width // head
    current, anchor = (_random(shape, device).view(shape.tokens, heads, head) for _ in range(2))
    scales = [torch.randn(heads, head, device=device) for _ in range(2)]
    gain = torch.randn(head, device=device)

    def mix(current: Tensor, anchor: Tensor, own: Tensor, other: Tensor, gain: Tensor) -> Sequence[Tensor]:
        return [ops.mix_projection(current, anchor, own, other, norm_weight=gain)]

    inputs = (current, anchor, *scales, gain)
    return Case("mix_projection, elementwise", mix, inputs, *_bytes(MIX, shape))


def _mix_heads(shape: Shape, device: torch.device) -> Case:
    """All that an ExoFormer layer does between its projection and its attention."""
    head = 128 if shape.width % 128 == 0 else shape.width
    sections = dict.fromkeys("qkvg", (shape.width // head, head))
    size = (max(1, shape.tokens // 1024), min(shape.tokens, 1024))
    projected = torch.randn(*size, 4 * shape.width, device=device, dtype=shape.dtype)
    anchors = [torch.randn(*size, *sections["q"], device=device, dtype=shape.dtype) for _ in sections]
    weights = [torch.randn(sections["q"], device=device) for _ in range(8)] + [
        torch.ones(head, device=device) for _ in range(2)
    ]
    angles = torch.arange(size[1], device=device)[:, None] / torch.arange(1, head // 2 + 1, device=device)
    table = angles.cos(), angles.sin()

    def mix(projected: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        anchors, other, own = (dict(zip(sections, rest[i : i + 4], strict=True)) for i in (0, 4, 8))
        heads, _ = ops.mix_heads(projected, sections, anchors, other, own, table, gains=(rest[12], rest[13]))
        return list(heads.values())

    inputs = (projected, *anchors, *weights)
    forward, backward = (int(rows) * projected.nbytes for rows in MIX)
    return Case("mix_heads, elementwise", mix, inputs, forward, backward)


def _manifold_hyper(shape: Shape, device: torch.device) -> Case:
    """A junction of mHC: the write, all weights of the next sublayer with 20 Sinkhorn iterations, and its read."""
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


def _kimi_delta(shape: Shape, device: torch.device) -> Case:
    """As `_gated_delta` at 1,024 tokens, with a decay per channel."""
    plain = _gated_delta(shape, device, 1024)
    q, k, v, _, share = plain.inputs

    def rule(*inputs: Tensor) -> Sequence[Tensor]:
        return [ops.kimi_delta(*inputs)[0]]

    inputs = (q, k, v, -torch.rand(q.shape, device=device) / 8, share)
    return Case(plain.name.replace("gated", "kimi"), rule, inputs, *_bytes(CHANNEL_DELTA, shape))


def _gated_delta(shape: Shape, device: torch.device, length: int) -> Case:
    """Heads of 128, in sequences of `length` tokens."""
    length, heads = min(length, shape.tokens), max(1, shape.width // 128)
    lead = (shape.tokens // length, length, heads)
    q, k, v = (torch.randn(*lead, shape.width // heads, device=device) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1).to(shape.dtype) for x in (q, k))
    decay, share = -torch.rand(lead, device=device) / 8, torch.rand(lead, device=device)

    def rule(*inputs: Tensor) -> Sequence[Tensor]:
        return [ops.gated_delta(*inputs)[0]]

    inputs = (q, k, v.to(shape.dtype), decay, share)
    return Case(f"gated_delta, {lead[0]} × {length}", rule, inputs, *_bytes(DELTA, shape))


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


def _route(shape: Shape, device: torch.device) -> Case:
    x, weight = _random(shape, device), torch.randn(shape.experts, shape.width, device=device) / shape.width**0.5

    def route(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
        routed = ops.route(x, weight, shape.top_k)
        return [routed.weights, routed.probability, routed.z]

    # x; x → dx: logits and choices are few
    name = f"route, {shape.top_k} of {shape.experts} experts"
    return Case(name, route, (x, weight), x.nbytes, 2 * x.nbytes)


def _expert_ffn(activation: str, shape: Shape, device: torch.device) -> Case:
    """Experts as wide as the model, on tokens that were routed at random."""
    x, hidden = _random(shape, device), shape.width
    up_rows = 2 * hidden if activation in GATED else hidden
    up, out = (
        torch.randn(shape.experts, *matrix, device=device, dtype=shape.dtype) / shape.width**0.5
        for matrix in ((up_rows, shape.width), (shape.width, hidden))
    )
    router = torch.randn(shape.experts, shape.width, device=device) / shape.width**0.5
    routed = ops.route(x, router, shape.top_k)

    def experts(x: Tensor, up: Tensor, out: Tensor, weights: Tensor) -> Sequence[Tensor]:
        return [ops.expert_ffn(x, up, out, routed.ends, activation, order=routed.order, weights=weights)]

    def grouped(x: Tensor, up: Tensor, out: Tensor, weights: Tensor) -> Sequence[Tensor]:
        slots = slots_of(routed.order, routed.ends, shape.top_k)
        parts = grouped_product(dispatch(x, slots), up, routed.ends).chunk(2 if activation in GATED else 1, -1)
        return [combine(grouped_product(ACTIVATIONS[activation](*parts), out, routed.ends), weights, slots)]

    peers = {"torch.grouped_mm": grouped}
    if activation == "swiglu" and find_spec("liger_kernel") is not None:
        peers["liger_kernel"] = partial(_liger_experts, _chosen(routed.order, routed.ends, shape.top_k))
    flops = 3 * 2 * shape.tokens * shape.top_k * shape.width * (up_rows + hidden)
    # x, W → y; x, dy, W → dx, dW
    weights, moved = up.nbytes + out.nbytes, 2 * x.nbytes
    name = f"expert_ffn, {activation}, {shape.top_k} of {shape.experts} experts"
    inputs = (x, up, out, routed.weights)
    return Case(name, experts, inputs, moved + weights, moved + x.nbytes + 2 * weights, flops, peers=peers)


def _chosen(order: Tensor, ends: Tensor, top_k: int) -> Tensor:
    """[N, k]: the expert of each slot, from the slots sorted by expert."""
    rows = torch.arange(order.numel(), device=order.device, dtype=ends.dtype)
    experts = torch.empty_like(order)
    experts[order.long()] = torch.searchsorted(ends, rows, right=True).to(order.dtype)
    return experts.view(-1, top_k)


def _liger_experts(chosen: Tensor, x: Tensor, up: Tensor, out: Tensor, weights: Tensor) -> Sequence[Tensor]:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return [LigerFusedMoEFunction.apply(x, up, out, chosen.int(), weights)]


def _depth_path(name: str, config: choices.Topology, shape: Shape, device: torch.device) -> Case:
    with device:
        topology = build_topology(config, shape.sublayers, shape.width)
    embedding, *outputs = (_random(shape, device)[None] for _ in range(shape.sublayers + 1))

    def path(embedding: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        h, state = topology.open(embedding)
        read = []
        for k in range(shape.sublayers):
            h, state = topology.step(k, rest[k], state)
            read.append(h)
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
