"""The cases of `offline.py`: operators called as a model calls them, on CPU tensors of zeros."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from residua import ops
from residua.ops import inference, optimizer_update
from residua.ops._runtime.cases import example_cases
from residua.ops.delta_rule import gated_delta_step
from residua.ops.depth_attention import source_gradients
from residua.ops.depth_attention.plan import ReadPlan
from residua.ops.fp8_codes import launch as fp8_codes
from residua.ops.hyper_connection import manifold_weights
from residua.ops.hyper_connection.launch import step, step_backward
from residua.ops.inference.reference import GATED
from residua.ops.linear_cross_entropy.fp8 import fp8_cross_entropy as fp8_head
from residua.ops.low_precision.fp8 import Scales
from residua.ops.mix_projection.reference import Mixing
from residua.ops.multi_gate.launch import backward, forward
from residua.ops.squared_relu import launch
from residua.ops.whole_layers import launch as whole_layers

Case = tuple[str, Callable[[], Any]]
BF16, FP32 = torch.bfloat16, torch.float32


def draw(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def both(outputs: Any) -> None:
    """The backward pass from every output."""
    flat = [y for y in (outputs if isinstance(outputs, tuple | list) else [outputs]) if y.requires_grad]
    torch.autograd.backward(flat, [torch.zeros_like(y) for y in flat])


def add_norm(dtype: torch.dtype, width: int, tokens: int = 3) -> None:
    h, y = (draw(tokens, width, dtype=dtype) for _ in range(2))
    both(ops.add_norm(h, y, draw(width)))
    both(ops.rms_norm(h, draw(width)))
    both(ops.rms_norm(h, draw(width), affine=draw(width)))
    weight, row = torch.zeros(width), h.detach()
    _, rstd, added = torch.ops.residua.rms_norm(row, weight, 1e-6, row, weight)
    torch.ops.residua.rms_norm_backward(row, added, weight, rstd, row, weight)
    torch.ops.residua.rms_norm_backward(y.detach(), h.detach(), torch.zeros(width), torch.zeros(tokens), dotted=True)


def transpose_codes(rows: int, columns: int) -> None:
    pair = (torch.zeros(shape, dtype=torch.float8_e4m3fn) for shape in ((rows, columns), (columns, rows)))
    fp8_codes.transpose_codes([tuple(pair)])


def hyper_step(dtype: torch.dtype, width: int, n: int, norm: str, used: int, tokens: int, per_token: bool) -> None:
    """The gradient comes through the first `used` of h, X' and z."""
    rows, columns = {"all": (n * n + 2 * n, n * width), "each": (n + 2, width), "none": (0, 0)}[norm]
    lead = (tokens,) if per_token else ()
    weights = {"post": draw(*lead, n), "mix": draw(*lead, n, n), "bias": draw(n)}
    weights |= {"scale": draw(), "phi": draw(rows, columns)} if rows else {}
    made = ops.hyper_step(draw(tokens, n, width, dtype=dtype), draw(tokens, width, dtype=dtype), **weights, norm=norm)
    both(made[:used])


def single_pass_step(dtype: torch.dtype, width: int, n: int, used: int, tokens: int = 40) -> None:
    weights = (draw(tokens, n), draw(tokens, n, n), draw(tokens, n), draw(n + 2, width))
    made = ops.single_pass_step(draw(tokens, n, width, dtype=dtype), draw(tokens, width, dtype=dtype), *weights)
    both(made[:used])


@torch.no_grad()
def hyper_step_normed(dtype: torch.dtype, width: int, n: int, norm: str, used: int, tokens: int = 40) -> None:
    """As `hyper_step`, with the norm after it."""
    rows, columns = {"all": (n * n + 2 * n, n * width), "each": (n + 2, width)}[norm]
    streams, update = draw(tokens, n, width, dtype=dtype), draw(tokens, width, dtype=dtype)
    post, mix, bias = draw(tokens, n), draw(tokens, n * n), draw(n)
    scale, phi, gain = draw(), draw(rows, columns), draw(width)
    after, x, z, rstd, pre, stats = step(streams, update, post, mix, bias, scale, phi, norm, 1e-6, gain, 1e-6)
    given = (x, after if used > 1 else None, z if used > 2 else None)
    step_backward(*given, streams, update, post, mix, scale, phi, z, rstd, pre, norm, gain, stats)


def sinkhorn(n: int, iterations: int, tokens: int = 5) -> None:
    both(ops.sinkhorn(draw(tokens, n, n), iterations))


def write_weights(n: int, iterations: int, used: int = 2, tokens: int = 40) -> None:
    """The gradient comes through the first `used` of post and mix."""
    size = n * n + 2 * n
    both(manifold_weights(draw(tokens, size), draw(3), draw(size), n, iterations)[:used])


def gated_norm(dtype: torch.dtype, width: int, rank: int, tokens: int = 70) -> None:
    both(ops.gated_norm(draw(tokens, width, dtype=dtype), draw(width), draw(rank, width), draw(width, rank)))


@torch.no_grad()
def gated_norm_added(dtype: torch.dtype, width: int, rank: int, tokens: int = 70) -> None:
    """With the additions next to it, as the rewritten graph of a compiled step calls it."""
    x, weights = torch.zeros(tokens, width, dtype=dtype), (draw(width), draw(rank, width), draw(width, rank))
    _, *saved, added = torch.ops.residua.gated_norm(x, *weights, 1e-6, x)
    torch.ops.residua.gated_norm_backward(x, added, *weights, *saved, x)


def norm_rotate(dtype: torch.dtype, width: int, heads: int = 3, length: int = 4) -> None:
    table = (torch.zeros(length, width // 2), torch.zeros(length, width // 2))
    both(ops.norm_rotate(draw(2, length, heads, width, dtype=dtype), draw(width), *table))


@torch.no_grad()
def packed_heads(dtype: torch.dtype, width: int, heads: int, kv_heads: int, length: int = 4) -> None:
    """The gradient of a projection, as the rewritten graph of a compiled step calls it."""
    q, k = (torch.zeros(2, length, n, width, dtype=dtype) for n in (heads, kv_heads))
    table = (torch.zeros(length, width // 2), torch.zeros(length, width // 2))
    torch.ops.residua.packed_heads_backward(q, k, k, q, k, torch.zeros(width), torch.zeros(width), *table, 1e-6, 1e-6)


def mix_heads(
    dtype: torch.dtype, width: int, heads: int, gamma: bool, normed: bool, anchors: str, length: int = 4
) -> None:
    sections = {s: (heads, width) for s in "qkvg"}
    table = (torch.zeros(length, (width + 1) // 2), torch.zeros(length, (width + 1) // 2))
    scales = [{s: draw(heads, width) for s in anchors} for _ in range(2)]
    made, passed = ops.mix_heads(
        draw(2, length, 4 * heads * width, dtype=dtype), sections,
        {s: draw(2, length, heads, width, dtype=dtype) for s in anchors}, *scales, table,
        gains=(draw(width), draw(width)) if normed else None,
        gamma=draw(2, length, 2 * len(anchors), dtype=dtype) if gamma else None,
    )  # fmt: skip
    torch.autograd.backward([made["q"]], [torch.zeros_like(made["q"])], retain_graph=True)
    both((*made.values(), *passed))


def mix_shared(
    dtype: torch.dtype, width: int, heads: int, normed: bool, anchors: str, layers: int, dynamic: bool, length: int = 4
) -> None:
    """Layers whose anchors have their gradient in one pass."""
    from residua.ops.mix_projection import anchor_gradients

    sections = {s: (heads, width) for s in "qkvg"}
    table = (torch.zeros(length, (width + 1) // 2), torch.zeros(length, (width + 1) // 2))
    named = {s: draw(2, length, heads, width, dtype=dtype) for s in anchors}
    scales = [{s: draw(heads, width) for s in anchors} for _ in range(layers)]
    gains = (draw(width), draw(width)) if normed else None
    source, anchor_gains = None, None
    if normed:
        source = draw(2, length, len(anchors) * heads * width, dtype=dtype)
        anchor_gains = {s: draw(width) for s in anchors}
    handles = anchor_gradients.share(named, scales, sections, source=source, gains=anchor_gains, hidden=16 * dynamic)
    made: list[torch.Tensor] = []
    for own, handle in zip(scales, handles, strict=True):
        x, weight = draw(2, length, 16, dtype=dtype), draw(4 * heads * width + 16 * dynamic, 16, dtype=dtype)
        network = (draw(2 * len(anchors), 16), draw(2 * len(anchors))) if dynamic else None
        found, gate = anchor_gradients.mix_heads(
            x, weight, handle, sections, named, own, table, gains=gains, network=network
        )
        made += (*found.values(), gate.apply(draw(2, length, heads, width, dtype=dtype)))
    both(made)


def mix_projection(dtype: torch.dtype, width: int, heads: int, normed: bool, tokens: int = 5) -> None:
    x, anchor = (draw(tokens, heads, width, dtype=dtype) for _ in range(2))
    both(ops.mix_projection(x, anchor, draw(heads, width), draw(heads), norm_weight=draw(width) if normed else None))


def multi_gate(dtype: torch.dtype, width: int, n: int, competitive: bool, apart: bool, tokens: int = 5) -> None:
    """Two junctions of a segment, the streams one tensor or n; backward recomputes the streams of the second."""
    streams = [draw(tokens, width, dtype=dtype) for _ in range(n)] if apart else [draw(tokens, n, width, dtype=dtype)]
    state, read = tuple(streams), []
    for _ in range(2):
        weights = draw(width), draw(n + competitive), draw(width)
        h, state = ops.multi_gate_chain(state, draw(tokens, width, dtype=dtype), *weights, competitive=competitive)
        read.append(h)
    both((*read, state[0]) if apart else read)


@torch.no_grad()
def multi_gate_normed(dtype: torch.dtype, width: int, n: int, competitive: bool, apart: bool, tokens: int = 5) -> None:
    """As `multi_gate`, each junction with the norm after it; the last passes no gradient of its streams on."""
    streams = [draw(tokens, width, dtype=dtype) for _ in range(n)] if apart else [draw(tokens, n, width, dtype=dtype)]
    gate_query, bias, pool_query, gain = draw(width), draw(n + competitive), draw(width), draw(width)
    given, updates, stats = streams, [], []
    for junctions in range(2):
        updates.append(draw(tokens, width, dtype=dtype))
        weights, settings = (gate_query, bias, pool_query), (competitive, 1e-6, gain, 1e-6)
        x, after, kept, hidden = forward(given, updates[-1], *weights, *settings)
        stats.append(kept)
        g_after = [] if junctions else [after]
        queries = (gate_query, pool_query)
        backward(x, g_after, streams, updates, stats, *queries, apart, competitive, 1e-6, gain, hidden)
        given = [after]


def multi_gate_inverted(dtype: torch.dtype, width: int, n: int, tokens: int = 5) -> None:
    state, read = (draw(tokens, n, width, dtype=dtype),), []
    for last in (False, True):
        weights = draw(width), draw(n + 1), draw(width)
        h, state = ops.multi_gate_inverted(state, draw(tokens, width, dtype=dtype), *weights, last=last)
        read.append(h)
    both((*read, state[0]))


def delta_rule(channels: bool, dtype: torch.dtype, width: int, key_heads: int, packed: bool, length: int = 70) -> None:
    """With a decay per channel or per head; documents and a state to continue, or neither."""
    rule = ops.kimi_delta if channels else ops.gated_delta
    q, k = (draw(2, length, key_heads, width, dtype=dtype) for _ in range(2))
    v, gates = draw(2, length, 2, width, dtype=dtype), (draw(2, length, 2, *[width] * channels), draw(2, length, 2))
    segments, state = (torch.zeros(2, length), draw(2, 2, width, width)) if packed else (None, None)
    o, last = rule(q, k, v, *gates, segments=segments, state=state)
    both((o, last) if packed else o)
    with torch.no_grad():
        rule(q, k, v, *gates)
        if not channels:
            gated_delta_step(*(x[:, 0] for x in (q, k, v, *gates)), torch.zeros(2, 2, width, width))


def convolve_heads(dtype: torch.dtype, width: int, taps: int, packed: bool, length: int = 70) -> None:
    """With the output norm and gate, which read its output."""
    segments = torch.zeros(2, length) if packed else None
    made = ops.convolve_heads(draw(2, length, 6 * width, dtype=dtype), draw(taps, 4 * width), 1, 2, segments=segments)
    y = ops.gated_output(made[2], made[3], draw(width))
    both((*made[:2], y))


def delta_mixer(dtype: torch.dtype, width: int, key_heads: int, length: int = 70) -> None:
    projected, gates = draw(2, length, (2 * key_heads + 4) * width, dtype=dtype), [draw(2, length, 2) for _ in range(2)]
    both(ops.delta_mixer(projected, *gates, draw(4, (2 * key_heads + 2) * width), draw(width), key_heads)[0])


def pool_streams(dtype: torch.dtype, width: int, n: int, tokens: int = 5) -> None:
    both(ops.pool_streams([draw(tokens, width, dtype=dtype) for _ in range(n)], draw(width))[0])
    h, after = ops.pool_streams([draw(tokens, width, dtype=dtype) for _ in range(n)], draw(width))
    both((h, *after))


def depth_attention(dtype: torch.dtype, width: int, count: int = 3, tokens: int = 5) -> None:
    both(ops.depth_attention([draw(tokens, width, dtype=dtype) for _ in range(count)], draw(width)))


def depth_walk(dtype: torch.dtype, width: int, sublayers: int, block: int, tokens: int = 5) -> None:
    """All reads of a model with blocks of `block` sublayers; 1 is Full."""
    # the embedding, the finished blocks' sums, and the running one
    sees = [[0, *range(block, k + 1, block), k + 1] for k in range(sublayers)]
    plan = ReadPlan(sees, [False, *(k % block > 0 for k in range(sublayers))])
    queries, x = draw(sublayers, width), draw(tokens, width, dtype=dtype)
    state, read = source_gradients.open(plan, x, queries), []
    for k in range(sublayers):
        h, state = source_gradients.step(plan, k, draw(tokens, width, dtype=dtype), state)
        read.append(h)
    both(read)


@torch.no_grad()
def squared_relu(width: int, hidden: int, plan: str, tokens: int = 300) -> None:
    """Only the two fused products: the others would take minutes on a CPU."""
    forward, backward = (
        (launch.FORWARD, launch.BACKWARD) if plan == "chosen" else (launch.FLAT_FORWARD, launch.FLAT_BACKWARD)
    )
    x, a = torch.zeros(tokens, width, dtype=BF16), torch.zeros(tokens, hidden, dtype=BF16)
    forward.launch(x, torch.zeros(hidden, width, dtype=BF16), None, a)
    backward.launch(x, torch.zeros(width, hidden, dtype=BF16), a, a)


def expert_routing(dtype: torch.dtype, width: int, experts: int, top_k: int, score: str, tokens: int = 70) -> None:
    bias = torch.zeros(experts) if score == "sigmoid" else None
    routed = ops.route(draw(tokens, width, dtype=dtype), draw(experts, width), top_k, score=score, bias=bias)
    both((routed.weights, routed.probability, routed.z))


def expert_ffn(dtype: torch.dtype, width: int, hidden: int, experts: int, activation: str, tokens: int, k: int) -> None:
    """Of tokens, or with k = 0 of rows that are sorted already."""
    rows = 2 * hidden if activation in ("swiglu", "glu", "geglu") else hidden
    matrices = draw(experts, rows, width, dtype=dtype), draw(experts, width, hidden, dtype=dtype)
    order = {"order": torch.zeros(tokens * k, dtype=torch.int32), "weights": draw(tokens, k)} if k else {}
    x, ends = draw(tokens, width, dtype=dtype), torch.zeros(experts, dtype=torch.int32)
    both(ops.expert_ffn(x, *matrices, ends, activation, **order))


def linear_cross_entropy(dtype: torch.dtype, vocabulary: int) -> None:
    hidden, targets = draw(3, 16, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    both(ops.linear_cross_entropy(hidden, draw(vocabulary, 16), targets))
    both(ops.training_cross_entropy(hidden, draw(vocabulary, 16), targets)[:1])
    with torch.no_grad():
        ops.linear_cross_entropy(hidden, draw(vocabulary, 16), targets)


def fp8_cross_entropy(dtype: torch.dtype, vocabulary: int) -> None:
    """The softmax that also writes codes."""
    scales = Scales(*torch.ones(4).unbind())
    both(fp8_head(draw(3, 16, dtype=dtype), draw(vocabulary, 16), torch.zeros(3, dtype=torch.int64), scales)[:1])


@torch.no_grad()
def descend(weight: torch.dtype, gradient: torch.dtype, direction: torch.dtype) -> None:
    shape = (33, 64)
    momentum = [torch.zeros(shape) for _ in range(2)]
    gradients = [torch.zeros(shape, dtype=gradient) for _ in range(2)]
    updates = optimizer_update.momentum_directions(momentum, gradients, 0.9, direction)
    for number in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        optimizer_update.adam_directions(momentum, [m.clone() for m in momentum], gradients, (0.9, 0.95), number)
        for rule in (optimizer_update.cautious_descent, optimizer_update.plain_descent):
            rule([torch.zeros(shape, dtype=weight) for _ in range(2)], updates, number, number)


@torch.no_grad()
def symmetric_product(dtype: torch.dtype, m: int, k: int) -> None:
    """Of wide and of tall matrices, without and with an addition."""
    x, c = torch.zeros(2, m, k, dtype=dtype), torch.zeros(2, m, m, dtype=dtype)
    ops.symmetric_product(x)
    ops.symmetric_product(torch.zeros(2, k, m, dtype=dtype).mT, c, alpha=0.5, beta=-2.0, gamma=3.0)


@torch.no_grad()
def decode_junctions(dtype: torch.dtype, width: int, count: int, n: int, rows: int = 3) -> None:
    y, base = (torch.zeros(rows, width, dtype=dtype) for _ in range(2))
    weight, queries = torch.zeros(width), torch.zeros(3, width)
    inference.add_norm(base, y, weight)
    for start in (None, base):
        _, _, *finished = inference.read_sources([y] * count, y, start, queries, weight)
        inference.read_partial(tuple(part[0] for part in finished), y, start, queries[0], weight)
    for competitive in (False, True):
        bias = torch.zeros(n + competitive)
        inference.gate_norm(inference.Streams((y,) * n), y, weight, bias, weight, weight, competitive=competitive)


@torch.no_grad()
def decode_activations(dtype: torch.dtype, hidden: int, rows: int = 3) -> None:
    for kind in ("relu2", "gelu", "swiglu", "glu"):
        inference.activate(torch.zeros(rows, 2 * hidden, dtype=dtype), kind)


@torch.no_grad()
def decode_heads(dtype: torch.dtype, width: int, slots: int, batch: int, heads: int, kv_heads: int) -> None:
    """One share of the slots if they are few or heads are many; otherwise up to 16, which the last program merges."""
    keys, values = (torch.zeros(batch, slots, kv_heads, width, dtype=dtype) for _ in range(2))
    projected = torch.zeros(batch, 1, (heads + 2 * kv_heads) * width, dtype=dtype)
    table = (torch.zeros(slots, width // 2), torch.zeros(slots, width // 2))
    until = torch.zeros(batch, dtype=torch.int64)
    for gains in (None, (torch.zeros(width), torch.zeros(width))):
        q = inference.enter_cache(projected, heads, gains, *table, keys, values, until)
    scale = torch.zeros(kv_heads, 1).expand(kv_heads, width)
    inference.enter_cache(projected, heads, None, *table, keys, values, until, Mixing(keys[:, :1], scale, scale))
    for sink in (None, torch.zeros(heads)):
        inference.decode_attention(q[:, 0], keys, values, until, sink)


@torch.no_grad()
def decode_layers(
    dtype: torch.dtype, width: int, kind: str, junction: str, rows: int, whole: bool = True, size: int = 4,
    mixed: str = "", network: int = 0,
) -> None:  # fmt: skip
    """Two layers in one launch, or a launch for each phase; heads of 128, or of 8 in narrow models.

    Gated kinds have their values mixed, unless `mixed` says otherwise; then heads have gates too.
    """
    head_dim = 128 if width >= 512 else 8
    heads, gated = width // head_dim, kind in GATED
    hidden = (2 if gated else 4) * width
    shape = whole_layers.Shape(
        width, heads, heads, head_dim, hidden, kind, 1e-6, junction, 4 if junction == "gate" else 1, size,
        gate=head_dim if mixed else 0, mixed=mixed or ("values" if gated else "none"), network=network,
    )  # fmt: skip
    matrices = ((shape.projected, width), (width, width), (hidden * (1 + gated), width), (width, hidden))
    keys = torch.zeros(rows, 40, heads, head_dim, dtype=dtype)
    down = torch.zeros(network, width, dtype=dtype) if network else None
    layer = whole_layers.Layer(*(torch.zeros(size, dtype=dtype) for size in matrices), keys, keys, down)
    gains = torch.zeros(2, 2, head_dim) if gated else None
    table = torch.zeros(40, head_dim // 2)
    mixing = None if shape.mixed == "none" else torch.zeros(2, 2 * shape.anchored + 8 * (network + 1))
    vectors = whole_layers.Vectors(torch.zeros(5, 3, width), torch.zeros(5, 5), gains, table, table, mixing)
    assert whole_layers.serves(shape, [layer])
    layers, lengths = whole_layers.Layers(shape, [layer] * 2, vectors), torch.zeros(rows, dtype=torch.int64)
    layers(lengths) if whole else layers.in_phases(lengths)


@torch.no_grad()
def prefill_heads(dtype: torch.dtype, width: int, heads: int, kv_heads: int, length: int = 40) -> None:
    """Heads that are passed to attention, and heads that also enter a cache."""
    projected = torch.zeros(2, length, (heads + 2 * kv_heads) * width, dtype=dtype)
    keys, values = (torch.zeros(2, length + 3, kv_heads, width, dtype=dtype)[:, :length] for _ in range(2))
    table = (torch.zeros(length, width // 2), torch.zeros(length, width // 2))
    for gains in (None, (torch.zeros(width), torch.zeros(width))):
        inference.turn_heads(projected, heads, kv_heads, gains, *table)
        inference.enter_cache(projected, heads, gains, *table, keys, values)
    scale = torch.zeros(kv_heads, 1).expand(kv_heads, width)
    inference.enter_cache(projected, heads, None, *table, keys, values, None, Mixing(keys, scale, scale))


@torch.no_grad()
def prefill_junctions(dtype: torch.dtype, width: int, n: int, tokens: int = 40) -> None:
    y, weight = torch.zeros(tokens, width, dtype=dtype), torch.zeros(width)
    for base in (None, y):
        inference.read_norm([y], [torch.zeros(2, 48)], [1], y, base, weight, weight)
    for competitive in (False, True):
        bias, held = torch.zeros(n + competitive), inference.Streams((y,) * n)
        for store in (False, True):
            setting = {"store": store, "competitive": competitive}
            _, held = inference.gate_norm(held, y, weight, bias, weight, weight, **setting)


def case(operator: Callable[..., None], *arguments: Any) -> Case:
    return f"{operator.__name__}({', '.join(map(str, arguments))})", lambda: operator(*arguments)


def small_cases() -> Iterator[Case]:
    """The cases that operators declare, then every other kernel, switch and dtype, but not every combination."""
    for name, operator, example in example_cases(torch.device("cpu"), BF16):
        if example.is_fused(operator):
            yield name, partial(example.results, operator)
    yield case(add_norm, BF16, 33)
    yield case(transpose_codes, 2048, 6144)
    yield case(hyper_step, BF16, 768, 4, "all", 3, 40, True)
    yield case(hyper_step, FP32, 33, 2, "each", 1, 1, True)
    yield case(hyper_step, BF16, 33, 2, "none", 2, 40, False)
    yield case(single_pass_step, BF16, 768, 4, 3)
    yield case(single_pass_step, FP32, 33, 2, 1, 1)
    yield case(hyper_step_normed, BF16, 768, 4, "all", 3)
    yield case(hyper_step_normed, FP32, 33, 2, "each", 1, 1)
    yield case(gated_norm, BF16, 768, 16)
    yield case(gated_norm_added, BF16, 768, 16)
    yield case(gated_norm, FP32, 33, 4)
    yield case(delta_rule, False, BF16, 128, 2, False)
    yield case(delta_rule, False, BF16, 32, 1, True)
    yield case(convolve_heads, BF16, 128, 4, False)
    yield case(convolve_heads, FP32, 16, 3, True)
    yield case(delta_mixer, BF16, 128, 1)
    yield case(packed_heads, BF16, 128, 6, 6)
    yield case(mix_heads, BF16, 64, 2, True, True, "qv")
    yield case(mix_shared, BF16, 128, 6, True, "qkvg", 12, True)
    yield case(mix_projection, FP32, 33, 1, True, 1)
    yield case(multi_gate, BF16, 256, 4, True, False)
    yield case(multi_gate, FP32, 33, 3, False, True, 1)
    yield case(multi_gate_normed, BF16, 256, 4, True, False)
    yield case(multi_gate_normed, FP32, 33, 3, False, True, 1)
    yield case(multi_gate_inverted, FP32, 33, 2)
    yield case(depth_walk, BF16, 768, 6, 1)
    yield case(depth_walk, FP32, 33, 9, 3)
    yield case(delta_rule, True, BF16, 128, 2, False)
    yield case(delta_rule, True, BF16, 32, 1, True)
    yield case(expert_routing, BF16, 512, 16, 3, "softmax")
    yield case(expert_routing, FP32, 40, 20, 2, "sigmoid")
    yield case(expert_ffn, BF16, 512, 512, 16, "relu2", 2048, 3)
    yield case(expert_ffn, BF16, 264, 136, 8, "swiglu", 2048, 2)
    yield case(expert_ffn, FP32, 40, 24, 3, "gelu", 7, 0)
    yield case(linear_cross_entropy, BF16, 50_304)
    yield case(fp8_cross_entropy, BF16, 50_304)
    yield case(squared_relu, 768, 3072, "chosen")
    yield case(squared_relu, 768, 3072, "flat")
    yield case(descend, FP32, BF16, BF16)
    yield case(decode_junctions, BF16, 768, 3, 4)
    yield case(decode_junctions, FP32, 33, 9, 3, 1)
    yield case(decode_junctions, BF16, 768, 0, 9)
    yield case(decode_activations, BF16, 768)
    yield case(decode_activations, FP32, 33, 1)
    yield case(decode_heads, BF16, 64, 512, 2, 4, 2)
    yield case(decode_heads, FP32, 64, 40, 3, 4, 4)
    yield case(decode_layers, BF16, 72, "relu2", "sum", 1)
    yield case(decode_layers, BF16, 72, "relu2", "read", 2)
    yield case(decode_layers, BF16, 72, "swiglu", "sum", 2, True, 4, "heads", 16)
    yield case(prefill_heads, BF16, 128, 6, 6)
    yield case(prefill_heads, FP32, 64, 4, 2)
    yield case(prefill_junctions, BF16, 768, 4)
    yield case(prefill_junctions, FP32, 33, 3)


def wide_cases() -> Iterator[Case]:
    """Every choice of launchers that leads to another kernel."""
    widths, dtypes, switch = (33, 768, 1000, 1280, 4096), (BF16, FP32), (False, True)
    for dtype, width in product(dtypes, widths):
        yield case(add_norm, dtype, width)
        yield case(add_norm, dtype, width, 1)
        yield case(depth_attention, dtype, width)
        for rank in (1, 16, 20, 64):
            yield case(gated_norm, dtype, width, rank)
            yield case(gated_norm_added, dtype, width, rank)
        for n, norm, used in product((1, 2, 3, 4), ("all", "each", "none"), (1, 2, 3)):
            yield case(hyper_step, dtype, width, n, norm, used, 1 if n == 3 else 40, n != 2)
        for n, norm, used in product((1, 2, 3, 4), ("all", "each"), (1, 2, 3)):
            yield case(hyper_step_normed, dtype, width, n, norm, used, 1 if n == 3 else 40)
        for n, used in product((1, 2, 3, 4), (1, 2, 3)):
            yield case(single_pass_step, dtype, width, n, used, 1 if n == 3 else 40)
        for n, competitive, apart in product((2, 3, 4, 7, 8, 16), switch, switch):
            yield case(multi_gate, dtype, width, n, competitive, apart and n > 1, 1 if n == 7 else 5)
            yield case(multi_gate_normed, dtype, width, n, competitive, apart, 1 if n == 7 else 5)
        for n in (2, 4, 16):
            yield case(multi_gate_inverted, dtype, width, n)
            yield case(pool_streams, dtype, width, n)
        for sublayers, block in ((3, 1), (6, 1), (9, 3), (8, 4), (20, 5), (40, 1), (72, 1)):
            yield case(depth_walk, dtype, width, sublayers, block)
        yield case(decode_activations, dtype, 4 * width)
        for count, n, rows in ((0, 2, 1), (1, 3, 3), (8, 4, 3), (16, 8, 3), (32, 16, 3)):
            yield case(decode_junctions, dtype, width, count, n, rows)
    for width, junction, (kind, rows) in product((768, 1280), ("sum", "read", "gate"), (("relu2", 1), ("swiglu", 2))):
        yield case(decode_layers, BF16, width, kind, junction, rows)
        yield case(decode_layers, BF16, width, kind, junction, rows, False)
    for width in (768, 1280):
        yield case(decode_layers, BF16, width, "relu2", "read", 1, True, 1)
        for mixed, network in (("none", 0), ("heads", 0), ("heads", 16)):
            yield case(decode_layers, BF16, width, "relu2", "sum", 1, True, 4, mixed, network)
        for count in (64, 128):
            yield case(decode_junctions, BF16, width, count, 2, 1)
    for n, iterations in product((1, 2, 3, 4), (1, 20)):
        yield case(sinkhorn, n, iterations, iterations)
        for used in (1, 2):
            yield case(write_weights, n, iterations, used)
    for dtype, width in product(dtypes, (2, 6, 64, 96, 128, 256)):
        yield case(norm_rotate, dtype, width)
        yield case(norm_rotate, dtype, width, 1, 1)
        yield case(packed_heads, dtype, width, 6, 2)
        for sizes in ((40, 3, 4, 4), (128, 1, 2, 1), (512, 2, 4, 2), (4096, 1, 8, 8), (9000, 64, 8, 1)):
            yield case(decode_heads, dtype, width, *sizes)
    for width, key_heads, packed in product((16, 32, 64, 128), (1, 2), switch):
        for channels in switch:
            yield case(delta_rule, channels, BF16, width, key_heads, packed)
        yield case(delta_mixer, BF16, width, key_heads)
    for dtype, width, taps, packed in product(dtypes, (16, 128, 256), (1, 2, 3, 4), switch):
        yield case(convolve_heads, dtype, width, taps, packed)
    for dtype, width, heads in product(dtypes, (33, 64, 128), (1, 3)):
        for gamma, normed, anchors in product(switch, switch, ("v", "qkvg")):
            yield case(mix_heads, dtype, width, heads, gamma, normed, anchors)
        for normed in switch:
            yield case(mix_projection, dtype, width, heads, normed)
            for anchors, layers, dynamic in product(("v", "qkvg"), (2, 7, 36), switch):
                yield case(mix_shared, dtype, width, heads, normed, anchors, layers, dynamic)
    for dtype, vocabulary in product(dtypes, (33, 1000, 50_304)):
        yield case(linear_cross_entropy, dtype, vocabulary)
        yield case(fp8_cross_entropy, dtype, vocabulary)
    for dtype, experts, top_k in product(dtypes, (2, 16, 64, 100, 256), (1, 8)):
        yield case(expert_routing, dtype, 768, experts, min(top_k, experts), "sigmoid" if experts == 100 else "softmax")
    for dtype, activation, tokens in product(dtypes, ("swiglu", "glu", "geglu", "relu2", "gelu"), (2, 2048)):
        yield case(expert_ffn, dtype, 768, 768, 16, activation, tokens, 3)
        yield case(expert_ffn, dtype, 264, 136, 64, activation, tokens, 8)
        yield case(expert_ffn, dtype, 2048, 384, 128, activation, tokens, 0)
    for dtype, m in product(dtypes, (33, 768, 2048)):
        yield case(symmetric_product, dtype, m, 1280)
    for width, hidden in ((72, 264), (1280, 5120), (2048, 8192)):
        yield case(squared_relu, width, hidden, "chosen")
        yield case(squared_relu, width, hidden, "flat")
    for types in product(dtypes, dtypes, dtypes):
        yield case(descend, *types)
