"""What tools can ask a topology: the cost of its junctions, names of its sources, and parts that can be ablated."""

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
"""Takes a query [C], a gain [C] and the sources; returns [h]."""
Junctions = Callable[..., Sequence[Tensor]]
"""Takes the embedding and all sublayers' outputs; returns the inputs of all later readers."""


class Rows(NamedTuple):
    """Rows of C elements that the forward and backward passes read or write."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Costs:
    """The cost of all junctions of a topology in training.

    floor: the fewest rows they can move if each reads its state from memory and writes it back. step: the rows they
    move in a training step; None if they are those of the floor. kept_widths: widths that a junction stores for the
    backward pass, besides the next sublayer's input; None if that is all it writes. junctions: the rows of each in a
    pipeline's stages; None if all have the same share of `step`. bandwidth_share: the share of the copy bandwidth they
    reach in a step; the default if none was measured. by_reads: makes junctions that call a given `Read`, to time other
    kernels; None without such reads. products: multiply-adds per token of a forward pass that mix sources or streams,
    beyond one for each parameter.
    """

    floor: Callable[[], Rows]
    step: float | None = None
    kept_widths: float | None = None
    junctions: Sequence[float] | None = None
    bandwidth_share: float = 0.7
    by_reads: Callable[[Read], Junctions] | None = None
    products: int = 0

    def moved(self) -> float:
        """The rows that all junctions move in a training step."""
        return self.floor().total if self.step is None else self.step

    def kept(self, sublayers: int) -> float:
        """Widths that a junction stores for the backward pass, besides the next sublayer's input."""
        return self.floor().forward / sublayers - 1 if self.kept_widths is None else self.kept_widths

    def in_stages(self, sublayers: int) -> Sequence[float]:
        """The rows that the junction after each sublayer moves in a pipeline's stages."""
        return [self.moved() / sublayers] * sublayers if self.junctions is None else self.junctions


def add_rows(parts: Iterable[Rows]) -> Rows:
    """The total rows of several junctions."""
    forward, backward = zip(*parts, strict=True)
    return Rows(sum(forward), sum(backward))


ADDITION = Rows(3, 3)
"""h, y → h'; dh and the gradient of h' → the gradient of h, which is also y's."""
ADDED_IN_NORM = 3
"""Rows of an addition fused into the next norm: forward reads and writes the sum, backward reads one more gradient."""


def stream_rows(n: int) -> Rows:
    """A junction of n streams: s, f → s', h (2n + 2); s, f, ds', dh → ds, df (3n + 3)."""
    return Rows(2 * n + 2, 3 * n + 3)


def pool_rows(n: int) -> Rows:
    """A read of n unchanged streams: s → h; s, ds, dh → ds, with the read's gradient added."""
    return Rows(n + 1, 3 * n + 1)


def read_rows(sources: int) -> Rows:
    """One read of `sources` sources: v → h; v, dh → dv."""
    return Rows(sources + 1, 2 * sources + 1)


def trace_rows(topology: nn.Module, sublayers: int, width: int) -> Rows:
    """Count the rows of a topology that declares none by running it on tensors without memory.

    Forward, a junction reads the state and y once, and writes each new tensor of the next state and input once.
    Backward, it reads the same inputs and its outputs' gradients, and writes its inputs' gradients.
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
            rows_read, rows_written = (sum(t.numel() for t in tensors.values()) / width for tensors in (read, written))
            parts.append(Rows(rows_read + rows_written, 2 * rows_read + rows_written))
    return add_rows(parts)


@dataclass(frozen=True)
class SourceNames:
    """Names for diagnoses of the sources that a reader weights.

    one_stream: whether a sublayer's input is the one residual stream, not a mixture of several. source: the name of the
    source that a reader's depth weight belongs to. initial: the only source that a reader of an untrained model reads;
    None if it reads all equally. block_of_reader: the block of sublayer `reader`; None if depth weights have no view by
    block. block_of_source: the block of a reader's source, or "embedding".
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
    without_source(positions): hides the source at positions[k] from reader k+1, unless it is the reader's only one.
    weighing_readers: readers whose weights over several sources with_equal_weights(readers) makes equal.
    streams: how many streams without_stream(i) can hide from all sublayers; a hidden stream is still written.
    without_writes(sublayers): these sublayers, whose outputs are zero, write nothing, as if they did not exist. The
    default changes nothing, since a zero output adds nothing to a sum.
    fill_phase: how many of the first sublayers cannot be left out, because their outputs become streams.
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
"""Takes k, the read after sublayer k and the tensors tapped there; returns the read to continue with."""


@contextmanager
def sources_dropped(reads: Sequence[nn.Module], positions: Mapping[int, Collection[int]]) -> Iterator[None]:
    """Hide the sources at positions[k] from reads[k], unless it has no others."""

    def without(dropped: Collection[int]) -> Callable[..., Any]:
        def drop(module: nn.Module, given: tuple[State]) -> tuple[State]:
            seen = given[0]
            return (tuple(source for i, source in enumerate(seen) if i not in dropped) or seen,)

        return drop

    hooks = [reads[k].register_forward_pre_hook(without(dropped)) for k, dropped in positions.items()]
    with taps.hooked(lambda: hooks), ops.backend("reference"):  # the fused path would bypass the read modules
        yield


@contextmanager
def parameters_set(parameters: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change parameters inside the block and restore them after it."""
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
    """Pass every read through `change`."""
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
    """Skip the junctions after these sublayers: the state stays, and the next sublayer gets the same input."""
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
