"""A decoding step that runs all layers in one launch (`ops/whole_layers`); supported models: docs/whole-layers.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from residua import ops
from residua.model.anchor_source import ExoSource
from residua.model.anchors import Write
from residua.model.attention import SoftmaxAttention
from residua.model.cache import KeyValueCache
from residua.model.decoder import Decoder
from residua.model.ffn import FeedForward
from residua.model.inference import bare_attention, bare_ffn, inference_topology
from residua.model.norm import RMSNorm
from residua.model.projection import Embedding, is_watched
from residua.ops.whole_layers import launch
from residua.ops.whole_layers.launch import Junctions, Layer, Layers, Shape, Vectors

if TYPE_CHECKING:
    from residua.model.cache import Cache


def whole_step(model: Decoder, cache: Cache) -> Callable[[Tensor], Tensor] | None:
    """The step of a model on a static cache; None if the kernels do not support it."""
    layers = build_layers(model, cache)
    if layers is None:
        return None
    open_anchors = None
    if isinstance(model.anchors, ExoSource):
        open_anchors = _opening(model.anchors, cast(SoftmaxAttention, model.executions[0].body), layers)

    def step(tokens: Tensor) -> Tensor:
        torch.index_select(model.embed.weight, 0, tokens, out=layers.y)
        if model.embed.embed_scale != 1:
            layers.y.mul_(model.embed.embed_scale)
        if open_anchors is not None:
            open_anchors()
        logits = model.logits(layers(cache.lengths))
        cache.advance(1)
        return logits

    return step


def build_layers(model: Decoder, cache: Cache) -> Layers | None:
    """The model's layers for one cache; None if the kernels do not support them. Do not change weights afterwards."""
    sublayers = model.executions
    bodies = [sublayer.body for sublayer in sublayers]
    watched = any(map(is_watched, (model.embed, *sublayers, *bodies)))
    plain_embedding = type(model.embed) is Embedding and not model.token_readers and model.places is None
    if watched or not plain_embedding or any(s.after is not None for s in sublayers):
        return None
    attentions = [body for body in map(bare_attention, bodies[::2]) if body is not None]
    ffns = [body for body in map(bare_ffn, bodies[1::2]) if body is not None]
    if len(attentions) + len(ffns) < len(bodies):
        return None
    topology = inference_topology(model)
    if topology is None or topology.whole_layers is None:
        return None
    norms, junctions = topology.norms, topology.whole_layers
    mixed = _mixed(model, attentions)
    if mixed is None:
        return None
    pairs = list(zip(attentions, ffns, strict=True))
    shapes = {_shape(*pair, junctions, norm.eps, mixed) for pair in pairs for norm in norms}
    layers = [_layer(*pair, cast(KeyValueCache, part)) for pair, part in zip(pairs, cache.sublayers[::2], strict=True)]
    alike = len(shapes) == 1 and len({(a.qk_norm.gains is None, a.table.start) for a in attentions}) == 1
    if not alike or model.embed.weight.dtype != layers[0].keys.dtype:
        return None
    shape = shapes.pop()
    if not launch.serves(shape, layers):
        return None
    every = torch.zeros(1, cache.capacity, dtype=torch.int64, device=model.embed.weight.device)
    table = cast("tuple[Tensor, ...]", model._rotary(every))[attentions[0].table]
    gains = dict(model.anchors.norm.gains.items()) if isinstance(model.anchors, ExoSource) else {}
    mixing = None if mixed == "none" else torch.stack([_mixing(a, mixed, gains) for a in attentions])
    return Layers(shape, layers, _vectors(norms, junctions, attentions, table, mixing))


def _mixed(model: Decoder, attentions: Sequence[SoftmaxAttention]) -> str | None:
    """`Shape.mixed` of a model; None if the kernels do not support its mixture."""
    mixes = [attention.mix for attention in attentions]
    if all(mix.plain for mix in mixes):
        return "none"
    with_first = isinstance(mixes[0], Write) and all(mix.scales_of("v") is not None for mix in mixes[1:])
    if with_first and all(mix.only_values for mix in mixes):
        return "values"
    source = model.anchors
    exogenous = type(source) is ExoSource and not is_watched(source.norm)
    return "heads" if exogenous and all(mix.in_kernels for mix in mixes) else None


def _opening(source: ExoSource, attention: SoftmaxAttention, layers: Layers) -> Callable[[], None]:
    """Returns a function that writes the anchors of `layers.y` to `layers.anchor`, normed; `_mixing` adds gains."""
    every = torch.arange(layers.shape.projected, device=layers.y.device).split(attention.rows)
    places = dict(zip(attention.head_width, every, strict=True))
    columns = torch.cat([places[s] for s in source.pathways])
    normed = torch.cat([torch.full_like(places[s], s in source.norm.gains, dtype=torch.bool) for s in source.pathways])
    one = layers.vectors.junctions.new_ones(layers.shape.head_dim)

    def open_anchors() -> None:
        projected = source.project(layers.y)
        heads = ops.rms_norm(projected.unflatten(-1, (-1, len(one))), one).flatten(1)
        layers.anchor.index_copy_(1, columns, torch.where(normed, heads, projected))

    return open_anchors


@torch.no_grad()
def _mixing(attention: SoftmaxAttention, mixed: str, gains: Mapping[str, Tensor]) -> Tensor:
    """A layer's row of `Vectors.mixing`: λ1 times the anchors' gains, λ2, and the rows of W2 and b if there are γ.

    Unmixed heads have λ1 = 0 and a λ2 that leaves them unchanged, with γ = ½ if there are γ.
    """
    mix, like = attention.mix, attention.project.weight
    names, first, second = list(mix.sections), [], []
    for s in names if mixed == "heads" else ("v",):
        zero = like.new_zeros(mix.sections[s], dtype=torch.float32)
        anchored, current = mix.scales_of(s) or (zero, zero + mix.WHOLE)
        first.append((anchored.float() * gains.get(s, 1.0)).flatten())
        second.append((zero + current).flatten())
    if mix.network is None:
        return torch.cat([*first, *second])
    weight, bias = mix.network
    rows = like.new_zeros(8, weight.shape[1] + 1, dtype=torch.float32)
    for s, pair in zip(mix.pathways, torch.cat([weight, bias[:, None]], 1).split(2), strict=True):
        rows[2 * names.index(s) :][:2] = pair
    return torch.cat([*first, *second, rows.flatten()])


def _shape(attention: SoftmaxAttention, ffn: FeedForward, junctions: Junctions, eps: float, mixed: str) -> Shape:
    heads, head_dim = attention.query_heads
    width, hidden = ffn.out.weight.shape
    kv_heads = attention.rows[1] // attention.head_width["k"]
    joined = (junctions.kind, junctions.streams, junctions.size, junctions.competitive)
    network = 0 if attention.mix.network is None else attention.mix.network[0].shape[1]
    anchored = (attention.head_width.get("g", 0), mixed, network)
    return Shape(width, heads, kv_heads, head_dim, hidden, cast(str, ffn.activation), eps, *joined, *anchored)


def _layer(attention: SoftmaxAttention, ffn: FeedForward, cache: KeyValueCache) -> Layer:
    project, out = attention.project.weight.detach(), attention.out.weight.detach()
    network = next((part.weight.detach() for part in attention.mix.projections), None)
    return Layer(project, out, ffn.entry.weight.detach(), ffn.out.weight.detach(), cache.keys, cache.values, network)


@torch.no_grad()
def _vectors(
    norms: Sequence[RMSNorm], joined: Junctions, attentions: Sequence[SoftmaxAttention], table: tuple[Tensor, ...],
    mixing: Tensor | None,
) -> Vectors:  # fmt: skip
    gain = norms[0].weight
    junctions = gain.new_zeros(len(norms), 3, len(gain), dtype=torch.float32)
    biases = junctions.new_zeros(len(norms), joined.streams + 1)
    junctions[:, 0] = torch.stack([norm.weight.float() for norm in norms])
    if joined.queries:
        junctions[1:, 1] = torch.stack([query.float() for query in joined.queries])
    for j, (query, bias) in enumerate(joined.gates, joined.streams):
        junctions[j, 2], biases[j, : len(bias)] = query, bias
    pairs = [pair for a in attentions if (pair := a.qk_norm.gains) is not None]
    gains = torch.stack([torch.stack(pair).float() for pair in pairs]) if pairs else None
    cos, sin = table
    return Vectors(junctions, biases, gains, cos.contiguous(), sin.contiguous(), mixing)
