"""Ablations of depth routing: a source nobody reads, a stream nobody reads, weights made uniform.

Routing mass is not importance; these measure it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from residua import ops
from residua.diagnose.interventions import parameters_set
from residua.diagnose.observe import Ablation
from residua.model import taps
from residua.model.topology import State, Topology
from residua.model.topology.attnres import BlockAttnRes, Read
from residua.model.topology.dense import DenseFormer
from residua.model.topology.hyper import Streams
from residua.model.topology.multigate import MultiGate, Pool
from residua.ops._runtime.numeric import wide


def sources(topology: Topology, name: Callable[[int, int], str]) -> list[Ablation]:
    """Attention Residuals: each source taken out of the softmax of every reader; a reader's only source stays."""
    if not isinstance(topology, BlockAttnRes):
        return []
    named: dict[str, dict[int, int]] = {}
    for k, seen in enumerate(topology.plan.sees):
        for position in range(len(seen)):
            named.setdefault(name(k + 1, position), {})[k] = position
    return [
        Ablation("source", index, label, partial(_without_source, topology, where))
        for index, (label, where) in enumerate(named.items())
    ]


@contextmanager
def _without_source(topology: BlockAttnRes, where: dict[int, int]) -> Iterator[None]:
    """`where` is the position of the source among those of each read that sees it."""

    def without(position: int) -> Callable[..., Any]:
        def drop(module: nn.Module, given: tuple[State]) -> tuple[State]:
            seen = given[0]
            return (seen[:position] + seen[position + 1 :] if len(seen) > 1 else seen,)

        return drop

    handles = [topology.reads[k].register_forward_pre_hook(without(position)) for k, position in where.items()]
    try:
        with ops.backend("reference"):  # the fused path does not call the reads
            yield
    finally:
        for handle in handles:
            handle.remove()


def uniform(topology: Topology) -> list[Ablation]:
    """Each reader's weights made equal, and then all of them at once."""
    readers, equal = _equalizer(topology)
    made = [
        Ablation("uniform", reader, f"uniform weights at reader {reader}", partial(equal, (reader,)))
        for reader in readers
    ]
    if len(readers) > 1:
        made.append(Ablation("uniform", -1, "uniform weights at every reader", partial(equal, readers)))
    return made


def _equalizer(topology: Topology) -> tuple[tuple[int, ...], Callable[[Sequence[int]], AbstractContextManager[None]]]:
    """The readers that choose among several sources, and a context in which some of them no longer do."""
    if isinstance(topology, Streams):
        # The first reader's streams are copies of each other, and the exit sums them up.
        return tuple(range(1, topology.last + 1)), lambda some: _reads_changed(topology, partial(_equal_read, some))
    parameters = _weight_parameters(topology)
    change = _averaged if isinstance(topology, DenseFormer) else torch.zeros_like
    return tuple(parameters), lambda some: parameters_set([parameters[reader] for reader in some], change)


def _equal_read(readers: Sequence[int], k: int, h: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """Hyper-connections: pre_i becomes the mean of pre for the token, so that their sum is kept."""
    if k + 1 not in readers:
        return h
    share = wide(seen[f"depth.{k + 1}.pre"]).mean(-1, keepdim=True)
    return (share * wide(seen[f"depth.{k}.streams"]).sum(-2)).to(h.dtype)


def _averaged(weights: Tensor) -> Tensor:
    return weights.mean().expand_as(weights)


def _weight_parameters(topology: Topology) -> dict[int, nn.Parameter]:
    """By reader, what decides its depth weights: a query [C], which at zero scores all sources alike, or α itself."""
    if isinstance(topology, BlockAttnRes):
        return {k + 1: cast(Read, read).query for k, read in enumerate(topology.reads)}
    if isinstance(topology, MultiGate):
        return {k + 1: cast(Pool, pool).query for k, pool in enumerate(topology.pools)}
    if isinstance(topology, DenseFormer):
        return {2 * int(layer): alpha for layer, alpha in topology.alphas.items()}
    return {}


def streams(topology: Topology) -> list[Ablation]:
    """Multi-stream models: no sublayer reads this stream; it is still written."""
    if not isinstance(topology, MultiGate | Streams):
        return []
    count = topology.fill + 1 if isinstance(topology, MultiGate) else topology.streams
    return [
        Ablation("stream", i, f"stream {i}", partial(_reads_changed, topology, partial(_unread, topology, i)))
        for i in range(count)
    ]


@contextmanager
def _reads_changed(topology: Topology, change: Callable[[int, Tensor, dict[str, Tensor]], Tensor]) -> Iterator[None]:
    """`change` makes of the read after sublayer k, and of what was tapped there, the one to go on with."""
    plain = topology.step

    def step(k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        with taps.record() as seen:
            h, after = plain(k, y, state)
        return change(k, h, seen), after

    object.__setattr__(topology, "step", step)
    try:
        yield
    finally:
        object.__delattr__(topology, "step")


def _unread(topology: MultiGate | Streams, index: int, k: int, h: Tensor, seen: dict[str, Tensor]) -> Tensor:
    if index >= seen[f"depth.{k}.streams"].shape[-2]:
        return h
    contribution, mass = _contribution(topology, k, index, seen)
    return (h - contribution) / (1 - mass)


def _contribution(
    topology: MultiGate | Streams, k: int, index: int, seen: dict[str, Tensor]
) -> tuple[Tensor, Tensor | float]:
    """What the stream gives to the read after sublayer k, and the share of a softmax that goes with it."""
    stream = seen[f"depth.{k}.streams"][..., index, :]
    if isinstance(topology, MultiGate):
        weight = seen[f"depth.{k}.weights"][..., index, None].to(stream.dtype)
        return weight * stream, weight.clamp(max=1 - 1e-6)
    pre = seen.get(f"depth.{k + 1}.pre")
    return (stream if pre is None else pre[..., index, None].to(stream.dtype) * stream), 0.0
