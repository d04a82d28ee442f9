"""The depth protocol: `open` and `step` are all a model calls; the rest are facts that tools ask a topology for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from residua.model.init_fidelity import InitFidelity, take_parameters
from residua.model.topology.facts import Rows, trace_rows
from residua.model.topology.reentrant import keeps_gradients

if TYPE_CHECKING:
    from residua.model.norm import RMSNorm

State = tuple[Tensor, ...]
"""Tensors only: compilation, activation checkpointing and pipeline stages carry it."""

Items = dict[str, Tensor]
"""Tensors that cross a stage boundary, by name, in the order they are sent."""

Read = Callable[..., Sequence[Tensor]]
"""query [C], gain [C] and the sources in; [h] out."""
Junctions = Callable[..., Sequence[Tensor]]
"""The embedding and all sublayers' outputs in; the inputs of all later readers out."""


class Topology(nn.Module):
    """How sublayers talk along depth. One per model; owns the parameters of its junctions.

    `open` and `step` are pure functions of their tensors and token-local: what happens at one position depends on
    that position alone, so decoding needs no depth cache. Every other method has a default that is right for any
    topology; override one where you know better.

    Readers count what reads the depth state: reader k is sublayer k, the last reader is the final norm. The junction
    after sublayer k makes the input of reader k+1.
    """

    output_gain = 1.0
    """Factor on the initial std of every sublayer's output projection."""

    one_stream = True
    """Whether a sublayer's input is the one residual stream, and not a mixture of several."""

    bandwidth_share = 0.7
    """Share of the copy bandwidth that the junctions reach in a training step; the default where none was measured."""

    kept: tuple[int, ...] = ()
    """Sublayers after which the junction keeps what its backward pass would recover inexactly (`needs_keeping`)."""

    def __init_subclass__(cls, **keys: Any) -> None:
        super().__init_subclass__(**keys)
        for name in ("open", "step"):
            if name in vars(cls):
                setattr(cls, name, keeps_gradients(vars(cls)[name]))

    @abstractmethod
    def open(self, x: Tensor) -> tuple[Tensor, State]:
        """Turn the embedding [B, T, C] into the first sublayer's input and the state."""

    @abstractmethod
    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        """Turn the output of sublayer k into the input of sublayer k+1 (after the last: of the final norm)."""

    adds = False
    """Whether every reader gets the sum of the embedding and all outputs so far, so that others can start as it."""

    def begin_as_sum(self) -> InitFidelity:
        """Start as a model that adds up its outputs, by changing parameters in place.

        EXACTLY: every reader gets the sum of the embedding and all outputs so far. UP_TO_EPS: a positive multiple of
        it, `sum_factors`, which a norm in front of every reader takes out. By default the topology starts as in a new
        model.
        """
        return InitFidelity.NOT

    def begin_as(self, old: Topology) -> InitFidelity:
        """Start as a topology of the same kind with other settings, by changing parameters in place.

        By default it takes the other's parameters, if they fit, and the function is not kept.
        """
        take_parameters(self, old)
        return InitFidelity.NOT

    def sum_factors(self, sublayers: int) -> Sequence[float]:
        """After `begin_as_sum`, the factors on the sum that readers 0, 1, … get; 1 if it is not UP_TO_EPS."""
        return [1.0] * (sublayers + 1)

    def boundary(self) -> Boundary:
        """How the state crosses from one pipeline stage to the next."""
        return Boundary(self)

    def recovery(self, k: int, beta: Tensor) -> Tensor | None:
        """By how much the backward pass amplifies rounding when it recovers what the junction after sublayer k read.

        `beta` [B, T, n] are the junction's write gates. None if it recovers nothing, or exactly.
        """
        return None

    def needs_keeping(self, recovery: Mapping[int, float], epsilon: float) -> Sequence[int]:
        """Sublayers to add to `kept`, by the `recovery` of each junction; `epsilon` is the rounding of the streams."""
        return ()

    def fused(self, norms: Sequence[RMSNorm]) -> Topology | None:
        """The same topology with norms[k] applied to the input of reader k, for decoding; None if there is none.

        All `norms` are plain RMSNorms. Parameters may be prepared once: they do not change afterwards.
        """
        return None

    def normed(self, norms: Sequence[RMSNorm]) -> Topology | None:
        """As `fused`, but for whole sequences without gradients (`normed.py`)."""
        return None

    def floor(self, sublayers: int, width: int) -> Rows:
        """The least that all junctions move, each reading its state from memory and writing it back."""
        return trace_rows(self, sublayers, width)

    def step_rows(self, sublayers: int, width: int, *, pipelined: bool = False) -> float:
        """Rows that the junctions move in a training step, on one rank or in a pipeline's stages."""
        return self.floor(sublayers, width).total

    def junction_rows(self, sublayers: int, width: int, *, pipelined: bool = False) -> Sequence[float]:
        """`step_rows` of each junction; by default all have the same."""
        return [self.step_rows(sublayers, width, pipelined=pipelined) / sublayers] * sublayers

    def kept_widths(self, sublayers: int, width: int) -> float:
        """Widths that a junction keeps for the backward pass, besides the next sublayer's input."""
        return self.floor(sublayers, width).forward / sublayers - 1

    @property
    def blocks(self) -> float | None:
        """Blocks in the traffic formulas of Attention Residuals; None if they do not apply."""
        return None

    def by_reads(self) -> Callable[[Read], Junctions] | None:
        """Makes junctions that call `read` for each read, to time other kernels; None if there are no such reads."""
        return None

    def source_name(self, reader: int, source: int, sublayers: Sequence[str]) -> str:
        """What the source-th of the reader's depth weights belongs to; `sublayers` are the names of those."""
        return f"source {source}"

    def initial_source(self, reader: int) -> int | None:
        """The only source that an untrained model reads; None if it reads all alike."""
        return None

    def block_of_reader(self, reader: int) -> str | None:
        """The name of the block that sublayer `reader` is in; None if depth weights have no view by block."""
        return None

    def block_of_source(self, reader: int, source: int) -> str:
        """The name of the block that the source-th of the reader's depth weights belongs to, or "embedding"."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks")

    def sources_seen(self) -> Sequence[Sequence[int]]:
        """For readers 1, 2, …, the numbers of the sources they see; empty if no source can be removed."""
        return ()

    def without_source(self, positions: Mapping[int, int]) -> AbstractContextManager[Any]:
        """A context in which reader k+1 does not see its source at positions[k]; an only source stays."""
        raise NotImplementedError(f"{type(self).__name__} has no sources to remove")

    def weighing_readers(self) -> Sequence[int]:
        """Readers whose weights over several sources can be made equal."""
        return ()

    def with_equal_weights(self, readers: Sequence[int]) -> AbstractContextManager[Any]:
        """A context in which these readers weigh all their sources alike."""
        raise NotImplementedError(f"{type(self).__name__} has no weights to make equal")

    def stream_count(self) -> int:
        """Streams that can be hidden from all readers; 0 if none can."""
        return 0

    def without_stream(self, stream: int) -> AbstractContextManager[Any]:
        """A context in which no sublayer reads this stream; it is still written."""
        raise NotImplementedError(f"{type(self).__name__} has no streams to hide")

    def without_writes(self, sublayers: Sequence[int]) -> AbstractContextManager[Any]:
        """A context in which these sublayers, whose outputs are zero, write nothing, as if they did not exist.

        By default it changes nothing: an output of zero adds nothing to a sum.
        """
        return nullcontext()

    def fill_phase(self) -> int:
        """How many sublayers, from the first, cannot be left out: their outputs become streams."""
        return 0


class Boundary:
    """How a model is cut along depth: the names and tensors that cross from one slice of sublayers to the next.

    Every tensor that crosses has a name of its own. A tensor that no longer changes keeps its name at all later
    boundaries (a finished block of Attention Residuals, the embedding), so a rank knows that it already has it.

    This default sends the whole state, and the next sublayer's input unless it is the state.
    """

    plain = True
    """Whether the state inside a slice consists of ordinary tensors, to which only gradients come back."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """Turn the embedding into the first sublayer's input and a state that can be cut."""
        return self.topology.open(x)

    def after(self, k: int, y: Tensor, state: State) -> State:
        """The state after sublayer k, without what is computed only for the next input."""
        return self.topology.step(k, y, state)[1]

    def close(self, k: int, y: Tensor, state: State) -> Items:
        """End a slice: turn the output y of its last sublayer k into what crosses."""
        h, state = self._end(k, y, state)
        items = {f"state.{k}.{i}": tensor for i, tensor in enumerate(self._plain(state))}
        return items if h is state[0] else {f"input.{k}": h, **items}

    def enter(self, k: int, items: Items) -> tuple[Tensor, State]:
        """Begin the next slice: the input of sublayer k+1, and the state."""
        state = tuple(tensor for name, tensor in items.items() if name.startswith("state."))
        return items.get(f"input.{k}", state[0]), state

    def embedding(self) -> str | None:
        """The name under which the embedding crosses anyway."""
        return None

    def _end(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        return self.topology.step(k, y, state)

    def _plain(self, state: State) -> State:
        return state
