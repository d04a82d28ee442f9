"""Facts about a topology for tools: the cost of its junctions, names of its sources, parts that can be ablated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from residua import ops
from residua.model import taps
from residua.model.context import Input, flat_reads

if TYPE_CHECKING:
    from residua.model.topology.base import State, Topology

Read = Callable[..., Sequence[Tensor]]
"""query [C], gain [C] and the sources in; [h] out."""
Junctions = Callable[..., Sequence[Tensor]]
"""The embedding and all sublayers' outputs in; the inputs of all later readers out."""


class Rows(NamedTuple):
    """Rows of C elements that the forward and the backward pass read or write."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Costs:
    """The cost of all junctions of a topology in training.

    floor: the least that they move, each reading its state from memory and writing it back. step: the rows that they
    move in a training step. kept_widths: widths that a junction keeps for the backward pass, besides the next
    sublayer's input. junctions: the rows of each in a pipeline's stages; None if all have the same share of `step`.
    bandwidth_share: of the copy bandwidth that they reach in a step; the default where none was measured. by_reads:
    makes junctions that call a given `Read`, to time other kernels; None if there are no such reads.
    """

    floor: Callable[[], Rows]
    step: float
    kept_widths: float
    junctions: Sequence[float] | None = None
    bandwidth_share: float = 0.7
    by_reads: Callable[[Read], Junctions] | None = None

    def in_stages(self, sublayers: int) -> Sequence[float]:
        """The rows that the junction after each sublayer moves in a pipeline's stages."""
        return [self.step / sublayers] * sublayers if self.junctions is None else self.junctions


def add_rows(parts: Iterable[Rows]) -> Rows:
    """The rows of several junctions together."""
    forward, backward = zip(*parts, strict=True)
    return Rows(sum(forward), sum(backward))


ADDITION = Rows(3, 3)
"""h, y → h'; dh and the gradient of h' → the gradient of h, which is also y's."""
ADDED_IN_NORM = 3
"""Rows of an addition that the next norm does: the sum read and written forward, one more gradient read backward."""


def stream_rows(n: int) -> Rows:
    """A junction of n streams: s, f → s', h (2n + 2); s, f, ds', dh → ds, df (3n + 3)."""
    return Rows(2 * n + 2, 3 * n + 3)


def pool_rows(n: int) -> Rows:
    """A read of n streams that do not change: s → h; s, ds, dh → ds, with the read's gradient added."""
    return Rows(n + 1, 3 * n + 1)


def read_rows(sources: int) -> Rows:
    """One read of some sources: v → h; v, dh → dv."""
    return Rows(sources + 1, 2 * sources + 1)


def trace_rows(topology: nn.Module, sublayers: int, width: int) -> Rows:
    """The rows of a topology that declares none, found by running it on tensors without memory.

    A junction reads the state and y once, and writes once what is new in the next state and input. Backward it reads
    the same tensors and the gradients of what it wrote, and writes the gradients of what it read.
    """
    shapes: Any = deepcopy(topology).to("meta")
    parts = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        traced = shapes.to_empty(device="cpu")
        x = torch.empty(1, 1, width)
        ids = (torch.zeros(1, 1, dtype=torch.int64),) if traced.reads_tokens else ()
        _, state = traced.open(x, *ids)
        for k in range(sublayers):
            y = torch.empty_like(x)
            read = {id(tensor): tensor for tensor in (*state, y)}
            h, state = traced.step(k, y, state, *ids)
            written = {id(tensor): tensor for tensor in (*flat_reads(h), *state) if id(tensor) not in read}
            taken, made = (sum(t.numel() for t in tensors.values()) / width for tensors in (read, written))
            parts.append(Rows(taken + made, 2 * taken + made))
    return add_rows(parts)


@dataclass(frozen=True)
class SourceNames:
    """Names for diagnoses of the sources that a reader weights.

    one_stream: whether a sublayer's input is the one residual stream, and not a mixture of several. source: the name of
    the source that a reader's depth weight belongs to. initial: the only source that a reader of an untrained model
    reads; None if it reads all equally. block_of_reader: the block that sublayer `reader` is in; None if depth weights
    have no view by block. block_of_source: the block that a reader's source belongs to, or "embedding".
    """

    one_stream: bool = True
    source: Callable[[int, int], str] = lambda reader, source: f"source {source}"
    initial: Callable[[int], int | None] = lambda reader: None
    block_of_reader: Callable[[int], str] | None = None
    block_of_source: Callable[[int, int], str] | None = None


def _unsupported(*_: object) -> AbstractContextManager[Any]:
    raise NotImplementedError("the topology declares nothing that can be removed this way")


@dataclass(frozen=True)
class Ablations:
    """The parts that `diagnose` can ablate; each context lasts for a `with` block.

    sources: for readers 1, 2, …, the numbers of the sources they see; empty if no source can be removed.
    without_source(positions): reader k+1 does not see its source at positions[k]; an only source stays.
    weighing_readers: readers whose weights over several sources with_equal_weights(readers) makes equal.
    streams: how many without_stream(i) can hide from all sublayers; a hidden one is still written.
    without_writes(sublayers): these sublayers, whose outputs are zero, write nothing, as if they did not exist. By
    default it changes nothing: an output of zero adds nothing to a sum.
    fill_phase: how many sublayers, from the first, cannot be left out: their outputs become streams.
    """

    sources: Sequence[Sequence[int]] = ()
    without_source: Callable[[Mapping[int, int]], AbstractContextManager[Any]] = _unsupported
    weighing_readers: Sequence[int] = ()
    with_equal_weights: Callable[[Sequence[int]], AbstractContextManager[Any]] = _unsupported
    streams: int = 0
    without_stream: Callable[[int], AbstractContextManager[Any]] = _unsupported
    without_writes: Callable[[Sequence[int]], AbstractContextManager[Any]] = lambda sublayers: nullcontext()
    fill_phase: int = 0


Change = Callable[[int, Tensor, dict[str, Tensor]], Tensor]
"""Turns the read after sublayer k, and what was tapped there, into the read to continue with."""


@contextmanager
def sources_dropped(reads: Sequence[nn.Module], positions: Mapping[int, Collection[int]]) -> Iterator[None]:
    """reads[k] does not see its sources at positions[k], unless it has no others."""

    def without(dropped: Collection[int]) -> Callable[..., Any]:
        def drop(module: nn.Module, given: tuple[State]) -> tuple[State]:
            seen = given[0]
            return (tuple(source for i, source in enumerate(seen) if i not in dropped) or seen,)

        return drop

    handles = [reads[k].register_forward_pre_hook(without(dropped)) for k, dropped in positions.items()]
    try:
        with ops.backend("reference"):  # the fused path does not call the reads
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def parameters_set(parameters: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Parameters are changed inside the block and restored after it."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(change(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)


@contextmanager
def reads_changed(topology: Topology, change: Change) -> Iterator[None]:
    """Every read goes through `change`."""
    plain = topology.step

    def step(k: int, y: Tensor, state: State, *ids: Tensor) -> tuple[Tensor, State]:
        with taps.record() as seen:
            h, after = plain(k, y, state, *ids)
        assert isinstance(h, Tensor), "separate reads for Q, K and V cannot be changed this way"
        return change(k, h, seen), after

    object.__setattr__(topology, "step", step)
    try:
        yield
    finally:
        object.__delattr__(topology, "step")


@contextmanager
def junctions_skipped(topology: Topology, sublayers: Collection[int]) -> Iterator[None]:
    """The junctions after these sublayers do nothing: the state stays, and the next sublayer gets what they read."""
    plain_open, plain_step = topology.open, topology.step
    read: list[Input] = []

    def noted(h: Input, state: State) -> tuple[Input, State]:
        read[:] = [h]
        return h, state

    def open_(x: Tensor, *ids: Tensor) -> tuple[Input, State]:
        return noted(*plain_open(x, *ids))

    def step(k: int, y: Tensor, state: State, *ids: Tensor) -> tuple[Input, State]:
        return (read[0], state) if k in sublayers else noted(*plain_step(k, y, state, *ids))

    object.__setattr__(topology, "open", open_)
    object.__setattr__(topology, "step", step)
    try:
        yield
    finally:
        object.__delattr__(topology, "open")
        object.__delattr__(topology, "step")
