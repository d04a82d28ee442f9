"""A decoding step whose layers are one launch (`ops/whole_layers`), for what it serves: docs/whole-layers.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from residua.model.anchors import Write
from residua.model.attention import SoftmaxAttention
from residua.model.cache import KeyValueCache
from residua.model.decoder import Decoder, Embedding
from residua.model.ffn import FeedForward
from residua.model.inference import bare_attention, bare_ffn, inference_topology
from residua.model.norm import RMSNorm
from residua.model.projection import is_watched
from residua.ops.whole_layers import launch
from residua.ops.whole_layers.launch import Junctions, Layer, Layers, Shape, Vectors

if TYPE_CHECKING:
    from residua.model.cache import Cache


def whole_step(model: Decoder, cache: Cache) -> Callable[[Tensor], Tensor] | None:
    """The step of a model on a static cache; None where the kernels do not serve it."""
    layers = build_layers(model, cache)
    if layers is None:
        return None

    def step(tokens: Tensor) -> Tensor:
        torch.index_select(model.embed.weight, 0, tokens, out=layers.y)
        if model.embed.embed_scale != 1:
            layers.y.mul_(model.embed.embed_scale)
        logits = model.logits(layers(cache.lengths))
        cache.advance(1)
        return logits

    return step


def build_layers(model: Decoder, cache: Cache) -> Layers | None:
    """The model's layers for one cache; None if the kernels do not serve them. Change no weight afterwards."""
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
    if not _mixed_with_first(attentions) and not all(attention.mix.plain for attention in attentions):
        return None
    pairs = list(zip(attentions, ffns, strict=True))
    shapes = {_shape(*pair, junctions, norm.eps) for pair in pairs for norm in norms}
    layers = [_layer(*pair, cast(KeyValueCache, part)) for pair, part in zip(pairs, cache.sublayers[::2], strict=True)]
    alike = len(shapes) == 1 and len({(a.qk_norm.gains is None, a.table.start) for a in attentions}) == 1
    if not alike or model.embed.weight.dtype != layers[0].keys.dtype:
        return None
    shape = shapes.pop()
    if not launch.serves(shape, layers):
        return None
    every = torch.zeros(1, cache.capacity, dtype=torch.int64, device=model.embed.weight.device)
    table = cast("tuple[Tensor, ...]", model._rotary(every))[attentions[0].table]
    return Layers(shape, layers, _vectors(norms, junctions, attentions, table))


def _mixed_with_first(attentions: Sequence[SoftmaxAttention]) -> bool:
    """Whether all layers mix their values with those of the first."""
    first, *others = (attention.mix for attention in attentions)
    return isinstance(first, Write) and all(mix.value_scales() is not None for mix in others)


def _shape(attention: SoftmaxAttention, ffn: FeedForward, junctions: Junctions, eps: float) -> Shape:
    heads, head_dim = attention.query_heads
    width, hidden = ffn.out.weight.shape
    kv_heads = attention.rows[1] // attention.head_width["k"]
    joined = (junctions.kind, junctions.streams, junctions.size, junctions.competitive)
    return Shape(width, heads, kv_heads, head_dim, hidden, cast(str, ffn.activation), eps, *joined)


def _layer(attention: SoftmaxAttention, ffn: FeedForward, cache: KeyValueCache) -> Layer:
    project, out = attention.project.weight.detach(), attention.out.weight.detach()
    return Layer(project, out, ffn.entry.weight.detach(), ffn.out.weight.detach(), cache.keys, cache.values)


@torch.no_grad()
def _vectors(
    norms: Sequence[RMSNorm], joined: Junctions, attentions: Sequence[SoftmaxAttention], table: tuple[Tensor, ...]
) -> Vectors:
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
    return Vectors(junctions, biases, gains, cos.contiguous(), sin.contiguous(), _mixing(attentions))


def _mixing(attentions: Sequence[SoftmaxAttention]) -> Tensor | None:
    """λ1 and λ2 of every layer, 0 and 1 of the first; None if nothing is mixed."""
    if attentions[0].mix.plain:
        return None
    heads = attentions[0].mix.sections["v"]
    one = attentions[0].project.weight.new_ones(heads, dtype=torch.float32)
    scales = [torch.stack((torch.zeros_like(one), one))]
    for attention in attentions[1:]:
        layer_scales = cast("tuple[Tensor, Tensor]", attention.mix.value_scales())
        scales.append(torch.stack([scale.float() for scale in layer_scales]))
    return torch.stack(scales)
