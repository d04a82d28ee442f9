"""A model for decoding whose junctions also apply the next norm, and whose heads go straight into the cache.

Each is one kernel. The rewritten model shares every parameter. Its topology hands each sublayer an input that is
already normed (`Topology.fused`), and the sublayers norm nothing: the forward pass is the same, and so are the results
but for rounding. Junctions prepare parameters here once, so change no weight afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from residua.model.anchors import mix_values
from residua.model.attention import SoftmaxAttention
from residua.model.body import Body
from residua.model.cache import Now
from residua.model.context import Anchors, Context
from residua.model.decoder import Decoder, Sublayer
from residua.model.ffn import FeedForward
from residua.model.norm import Norm, RMSNorm
from residua.model.projection import is_watched
from residua.model.topology.base import Topology
from residua.ops import decode
from residua.ops.mix_projection.reference import Mixing


class FusedAttention(Body):
    """Softmax attention of one token per row: project → into the cache → attend → gate → out.

    `context.rotary` is the table of all positions (`FusedDecoder`).
    """

    def __init__(self, attention: SoftmaxAttention) -> None:
        super().__init__()
        self.attention = attention
        self.heads = attention.rows[0] // attention.head_width["q"]
        self.gains = attention.qk_norm.gains

    def forward(self, x: Tensor, anchors: Anchors, context: Context) -> tuple[Tensor, Anchors]:
        now, cache, attention = context.now, context.cache, self.attention
        assert now is not None and now.until is not None and context.rotary is not None
        projected = attention.project(x)
        mixing, anchors = mix_values(attention.mix, attention.own_values(projected), anchors)
        if mixing is not None:
            mixing = Mixing(mixing.anchor[:, 0], mixing.anchor_scale, mixing.scale)
        projected, (cos, sin) = projected[:, 0], context.rotary[attention.table]
        q = decode.enter_cache(projected, self.heads, self.gains, cos, sin, cache.keys, cache.values, now.until, mixing)
        y = decode.decode_attention(q, cache.keys, cache.values, now.until, attention.sink)
        if "g" in attention.head_width:
            width = attention.head_width["g"]
            y = y * torch.sigmoid(projected[:, -self.heads * width :].unflatten(-1, (self.heads, width)))
        return attention.out(y.flatten(1))[:, None], anchors


class FusedFFN(Sublayer):
    """A feed-forward sublayer whose activation, gate included, is one kernel."""

    def __init__(self, norm: nn.Module, body: FeedForward, after: nn.Module | None) -> None:
        super().__init__(norm, body, after)
        self.entry, self.out, self.kind = body.entry, body.out, cast(str, body.activation)

    def forward(self, h: Tensor, anchors: Anchors, context: Context) -> tuple[Any, ...]:
        y = self.out(decode.activate(self.entry(self.norm(h)).flatten(0, 1), self.kind)).view_as(h)
        return y if self.after is None else self.after(y), anchors


class FusedDecoder(Decoder):
    """A decoder that looks rotary angles up in a table of all positions instead of computing them in every step."""

    table: tuple[Tensor, ...]

    def _rotary(self, tokens: Tensor, now: Now | None = None, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.table


def fuse(model: Decoder, positions: int) -> Decoder:
    """The model rewritten for steps of one token per row, up to `positions`; parts without a fused form stay."""
    rewritten = copy(model)
    rewritten._modules = dict(model._modules)
    sublayers = [cast(Sublayer, sublayer) for sublayer in model.sublayers]
    norms: list[nn.Module] = [*(sublayer.norm for sublayer in sublayers), model.norm]
    topology = fused_topology(model.topology, norms)
    if topology is not None and getattr(topology, "by_junction", False):
        norms = [nn.Identity() for _ in norms]
        rewritten.topology, rewritten.norm = topology, cast(Norm, norms[-1])
    bodies = [sublayer.body for sublayer in sublayers]
    plain = [getattr(body, "plain_heads", None) for body in bodies]
    if True in plain and False not in plain:
        bodies = [
            FusedAttention(cast(SoftmaxAttention, body)) if heads else body
            for body, heads in zip(bodies, plain, strict=True)
        ]
        rewritten.__class__ = FusedDecoder
        every = torch.zeros(1, positions, dtype=torch.int64, device=model.embed.weight.device)
        cast(FusedDecoder, rewritten).table = cast("tuple[Tensor, ...]", model._rotary(every))
    afters = [sublayer.after for sublayer in sublayers]
    rewritten.sublayers = nn.ModuleList(_sublayer(*parts) for parts in zip(norms[:-1], bodies, afters, strict=True))
    return rewritten.eval()


def _sublayer(norm: nn.Module, body: Body, after: nn.Module | None) -> Sublayer:
    fusable = getattr(body, "activation", None) is not None and not is_watched(body)
    return FusedFFN(norm, cast(FeedForward, body), after) if fusable else Sublayer(norm, body, after)


def fused_topology(topology: Topology, norms: Sequence[nn.Module]) -> Topology | None:
    """A topology whose junctions norm as well; None if the topology or a norm has no such form."""
    if all(getattr(norm, "plain_rms", False) for norm in norms):
        return topology.fused(cast("Sequence[RMSNorm]", norms))
    return None
