"""A model's parameters and FLOPs per token, counted on the meta device without allocating memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from residua.config.model import ModelConfig
from residua.machine import TooLarge, require_memory
from residua.model.anchors import Unmixed
from residua.model.body import Sublayer
from residua.model.decoder import Decoder, build
from residua.model.moe import MoE, mixtures
from residua.model.topology.facts import ADDED_IN_NORM

FLOPS_PER_BYTE = 500e12 / 4.25e12
"""FLOPs that an additive step computes in the time a memory copy moves one byte, both measured on an H200."""


@dataclass(frozen=True)
class Size:
    """Parameter counts by purpose; they add up to `parameters`.

    `embedding` includes learned positions. `head` is the head's own matrix, 0 when tied. `depth` counts the topology,
    `anchors` the anchor projections, their norms and the λ of every layer. `idle` is the part of `ffn` in experts that
    a token does not use. `tables` is the part of `depth` and `anchors`, and of `embedding` with a tied head, that
    tokens look up without a product.
    """

    parameters: int
    embedding: int
    head: int
    attention: int
    ffn: int
    norms: int
    depth: int
    anchors: int
    idle: int
    flops_per_token: int
    tables: int = 0

    @property
    def active(self) -> int:
        """Parameters that enter a token's products: the visited experts and the head, but no embedding."""
        return self.parameters - self.idle - self.tables - (self.embedding if self.head else 0)


def measure(config: ModelConfig) -> Size:
    """Count parameters and training FLOPs per token."""
    return size_of(shapes(config))


def shapes(config: ModelConfig) -> Decoder:
    """Build the model on the meta device, without memory."""
    try:
        with torch.device("meta"), shapes_only():
            return build(config)
    except RuntimeError as error:
        if "overflow" not in str(error) and "size" not in str(error):
            raise
        raise TooLarge("the model is too large for any machine: lower its width, layers or vocabulary.") from None


def build_if_it_fits(config: ModelConfig, source: object) -> Decoder:
    """Build a model on the CPU, or refuse first if its float32 weights need more memory than is free."""
    require_room(shapes(config), source)
    return build(config)


def require_room(model: Decoder, source: object) -> None:
    """Refuse a model whose float32 weights need more memory than is free; it may be on the meta device."""
    parameters = _count(model)
    advice = "end other programs, or use a machine with more memory"
    require_memory(f"{source}: the model has {parameters:,} parameters and needs", 4 * parameters, advice)


FILLS = ("normal_", "zeros_", "ones_", "constant_", "eye_")


@contextmanager
def shapes_only(names: Sequence[str] = FILLS) -> Iterator[None]:
    """Leave parameters unfilled: a count needs only shapes, and filling meta tensors would take most of the time.

    `names` are the functions of `nn.init` that do nothing inside the block.
    """
    fills = {name: getattr(nn.init, name) for name in names}
    for name in fills:
        setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    try:
        yield
    finally:
        for name, fill in fills.items():
            setattr(nn.init, name, fill)


def size_of(model: Decoder) -> Size:
    """The size of a model that is already built.

    Training FLOPs per token = 6 × active parameters + 6 × softmax layers × heads·head_dim × context: two per
    multiply-add, three products (forward, two backward), half of the attention matrix masked. Heads whose keys and
    values differ in width count with the mean of both. A layer counts as often as it runs. Mixtures of sources, streams
    and heads of several layers add 6 × their mixing products, since a weight there multiplies many channels.
    """
    config = model.config
    sublayers = cast(list[Sublayer], list(model.sublayers))
    mixes = sum(_count(mix) for mix in _mixes(model))
    total = _count(model)
    places = 0 if model.places is None else _count(model.places)
    embedding = _count(model.embed) + places
    head = _count(model.unembed) if model.unembed is not None else 0
    size = Size(
        parameters=total,
        embedding=embedding,
        head=head,
        attention=sum(_count(s.body) for s in sublayers[::2]) - mixes,
        ffn=sum(_count(s.body) for s in sublayers[1::2]),
        norms=sum(_count(s) - _count(s.body) for s in sublayers) + _count(model.norm),
        depth=_count(model.topology),
        anchors=_count(model.anchors) + mixes,
        idle=sum(_idle(mixture) for mixture in mixtures(model)),
        flops_per_token=0,
        tables=sum(_table(part) for part in (model.sublayers, model.anchors, model.topology)) + (0 if head else places),
    )
    attended = sum(config.mixers[layer].score_width(config.width) for layer in config.executed)
    runs, once = ([_count(s) - _table(s) for s in some] for some in (model.executions, sublayers))
    again = sum(runs) - sum(once)  # of layers that run several times
    junctions = model.topology.costs(config.sublayers, config.width)
    mixing = junctions.products + sum(mix.mixing_products() for mix in _mixes(model))
    flops = 6 * (size.active + again + mixing) + round(6 * attended * config.context)
    return replace(size, flops_per_token=flops)


@dataclass(frozen=True)
class Work:
    """The cost of each place along depth in a training step, in FLOPs per token, for dividing pipelines into stages.

    `embedding` includes anchors made from it, `head` the final norm. A sublayer includes the junction after it, whose
    bytes beyond those of an addition, `moved`, count as the FLOPs that a device computes in the same time.
    """

    embedding: float
    sublayers: tuple[float, ...]
    head: float
    moved: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return self.embedding + sum(self.sublayers) + self.head


def measure_work(config: ModelConfig) -> Work:
    """Count the work of a model in the stages of a pipeline, for sequences as long as its context."""
    model = shapes(config)
    moved = _junction_bytes(model)
    products = model.topology.costs(config.sublayers, config.width).products
    junction = (_count(model.topology) + products) / config.sublayers
    sublayers = []
    for k, sublayer in enumerate(model.sublayers):
        active = _count(sublayer) - _table(sublayer) - sum(_idle(mixture) for mixture in mixtures(sublayer))
        active += sum(mix.mixing_products() for mix in _mixes(sublayer))
        attended = 0 if k % 2 else config.mixers[k // 2].score_width(config.width)
        sublayers.append(6 * (active + junction + attended * config.context))
    head = model.embed if model.unembed is None else model.unembed
    executed = tuple(sublayers[j] + FLOPS_PER_BYTE * moved[k] for k, j in enumerate(model.order))
    return Work(6.0 * _count(model.anchors), executed, 6.0 * (_count(head) + _count(model.norm)), moved)


def _mixes(part: nn.Module) -> Iterator[Unmixed]:
    """The modules with which softmax layers mix or write anchors."""
    return (module for module in part.modules() if isinstance(module, Unmixed))


def _junction_bytes(model: Decoder) -> tuple[float, ...]:
    """Bytes that each junction moves beyond an addition, divided by the share of the bandwidth that it reaches."""
    sublayers, width = model.config.sublayers, model.config.width
    costs = model.topology.costs(sublayers, width)
    rows = costs.in_stages(sublayers)
    return tuple(2 * width * max(0.0, row - ADDED_IN_NORM) / costs.bandwidth_share for row in rows)


def _idle(mixture: MoE) -> int:
    """The number of parameters in experts that a token does not visit."""
    return _count(mixture.experts) // mixture.count * (mixture.count - mixture.router.top_k)


def _table(part: nn.Module) -> int:
    """The number of parameters in a part's lookup tables."""
    return sum(_count(module) for module in part.modules() if isinstance(module, nn.Embedding))


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
