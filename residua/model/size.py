"""How large a model is and what a token costs, without making it: it is built on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from residua.model.choices import SoftmaxAttention
from residua.model.config import ModelConfig, head_dim
from residua.model.decoder import Decoder, Sublayer, build


@dataclass(frozen=True)
class Size:
    """Parameter counts by what they are for; they add up to `parameters`.

    `head` is the head's own matrix, 0 when tied. `depth` is the topology's, `anchors` the anchor projections, their
    norms and the λ of every layer.
    """

    parameters: int
    embedding: int
    head: int
    attention: int
    ffn: int
    norms: int
    depth: int
    anchors: int
    flops_per_token: int

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with: all but the embedding, and the head even when tied."""
        return self.parameters - self.embedding + (self.embedding if self.head == 0 else 0)


def measure(config: ModelConfig) -> Size:
    """Count parameters and training FLOPs per token."""
    with torch.device("meta"), _shapes_only():
        return size_of(build(config))


@contextmanager
def _shapes_only() -> Iterator[None]:
    """Leave parameters unfilled: a count needs their shapes, and filling meta tensors is what would take the time."""
    fills = {name: getattr(nn.init, name) for name in ("normal_", "zeros_", "ones_", "constant_", "eye_")}
    for name in fills:
        setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    try:
        yield
    finally:
        for name, fill in fills.items():
            setattr(nn.init, name, fill)


def size_of(model: Decoder) -> Size:
    """The size of a model at hand.

    Training FLOPs per token = 6 × (parameters without the embedding, with the head) + 6 × layers × heads·head_dim ×
    context: two per multiply-add, three products (forward, two backward), half of the attention matrix being masked.
    """
    config = model.config
    sublayers = cast(list[Sublayer], list(model.sublayers))
    mixes = sum(_count(m) for n, m in model.named_modules() if n.endswith(".body.mix"))
    total = _count(model)
    embedding = _count(model.embed)
    head = _count(model.unembed) if model.unembed is not None else 0
    size = Size(
        parameters=total,
        embedding=embedding,
        head=head,
        attention=sum(_count(s.body) for s in sublayers[::2]) - mixes,
        ffn=sum(_count(s.body) for s in sublayers[1::2]),
        norms=sum(_count(s.norm) for s in sublayers) + _count(model.norm),
        depth=_count(model.topology),
        anchors=_count(model.anchors) + mixes,
        flops_per_token=0,
    )
    flops = 6 * size.active + 6 * config.layers * _attention_width(config) * config.context
    return replace(size, flops_per_token=flops)


def _attention_width(config: ModelConfig) -> int:
    """heads · head_dim of softmax attention; linear attention's state is in its projections' count."""
    attention = config.attention
    return attention.heads * head_dim(config) if isinstance(attention, SoftmaxAttention) else 0


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
