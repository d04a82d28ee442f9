"""The units that FSDP2 gathers: a few transformer layers and the junctions after their sublayers, as one module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from residua.config.run import SMALLEST_UNIT
from residua.model.context import Anchors, Context, Input, flat_reads, one_read
from residua.model.moe import Routing
from residua.model.topology.base import State
from residua.train.compile.rewrites import allow_recompiling, compile_rewritten, with_own_code

if TYPE_CHECKING:
    from residua.model.decoder import Decoder
    from residua.model.topology import Topology
    from residua.train.timing import Stopwatch


def divide(sublayers: Sequence[nn.Module]) -> list[range]:
    """The sublayers of each unit: the fewest pairs that reach `SMALLEST_UNIT` parameters; the last may have fewer."""
    count = len(sublayers)
    units, first = [], 0
    for end in [*range(2, count, 2), *([count] if count else [])]:
        gathered = [p for sublayer in sublayers[first:end] for p in sublayer.parameters()]
        size = sum(p.numel() for p in gathered if not isinstance(p, DTensor))  # divided experts are not gathered here
        if size >= SMALLEST_UNIT or end == count:
            units.append(range(first, end))
            first = end
    return units


class Carried:
    """Hides the state of the topology from FSDP2's hooks, which would treat its tensors as inputs of the unit.

    The hooks look into tuples and dataclasses, so this is neither. In most topologies the input h of the unit is one of
    the state's tensors, and the hooks replace h with another tensor. So the state holds the index of a read in place of
    its tensor, and the unit puts the new tensor there. Otherwise h would be read from two tensors, and their gradients
    would be added.
    """

    def __init__(self, h: Input, state: State) -> None:
        reads = flat_reads(h)
        places = ([i for i, read in enumerate(reads) if read is tensor] for tensor in state)
        self.state = tuple(place[0] if place else tensor for place, tensor in zip(places, state, strict=True))

    def with_input(self, h: Input) -> State:
        reads = flat_reads(h)
        return tuple(reads[held] if isinstance(held, int) else held for held in self.state)


class Unit(nn.Module):
    """Sublayers k, k+1 … of a decoder, each with the junction after it, except the last unless `closed`."""

    def __init__(self, first: int, sublayers: Sequence[nn.Module], topology: Topology, *, closed: bool = True) -> None:
        super().__init__()
        self.first, self.sublayers, self.closed = first, nn.ModuleList(sublayers), closed
        self._shared = (topology,)  # in a tuple, so that its parameters belong to no unit
        self.run = self._run
        self.watch: Stopwatch | None = None

    def forward(self, h: Input, anchors: Anchors, context: Context, carried: Carried) -> tuple[Any, ...]:
        """The next unit's input (the last output if not `closed`), the anchors, and routing if there was any."""
        with nullcontext() if self.watch is None else self.watch.measure():
            h, state, anchors, routed = self.run(h, carried.with_input(h), anchors, context)
        carried.state = state
        return h, anchors, *routed

    def compile_parts(self) -> None:
        """Compile sublayers and junctions together; if the state is bound to this process, only the sublayers."""
        allow_recompiling(self.first + len(self.sublayers))
        if self._shared[0].boundary().plain:
            self.run = compile_apart(self._run)
            return
        for sublayer in self.sublayers:
            sublayer.forward = compile_apart(sublayer.forward)

    def _run(
        self, h: Input, state: State, anchors: Anchors, context: Context
    ) -> tuple[Input, State, Anchors, list[Routing]]:
        routed: list[Routing] = []
        (topology,) = self._shared
        last = len(self.sublayers) - 1
        for i, sublayer in enumerate(self.sublayers):
            y, anchors, *routing = sublayer(h, anchors, context)
            routed += routing
            if i == last and not self.closed:
                return y, state, anchors, routed
            h, state = topology.step(self.first + i, y, state, *context.ids_for(topology))
        return h, state, anchors, routed


def pass_through(
    units: Iterable[nn.Module], h: Input, state: State, anchors: Anchors, context: Context
) -> tuple[Any, State, Anchors, list[Routing]]:
    """Call the units in order; returns h, state and anchors after the last, and the routing of mixtures of experts."""
    routed: list[Routing] = []
    for unit in units:
        carried = Carried(h, state)
        h, anchors, *routing = unit(h, anchors, context, carried)
        state = carried.with_input(h)
        routed += routing
    return h, state, anchors, routed


def compile_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a method of one of many similar objects without counting them as recompilations of each other."""

    def call(*args: Any) -> Any:
        return function(*args)

    return compile_rewritten(with_own_code(call))


class LayeredLosses(nn.Module):
    """`Decoder.routed_losses`, one unit at a time; holds what all layers share."""

    def __init__(self, model: Decoder, z_loss: float) -> None:
        super().__init__()
        sublayers = list(model.sublayers)
        parts = divide(sublayers)
        self.units = nn.ModuleList(Unit(k.start, sublayers[k.start : k.stop], model.topology) for k in parts)
        self.model, self.z_loss = model, z_loss
        self.begin, self.end = self._begin, self._end

    def forward(
        self, tokens: Tensor, targets: Tensor, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        h, state, anchors, rotary = self.begin(tokens, segments, positions)
        context = self.model._context(rotary, segments, positions=positions)._replace(tokens=self.model.ids_of(tokens))
        h, _, _, routed = pass_through(self.units, h, state, anchors, context)
        cross_entropy, z = self.end(one_read(h), targets)
        return cross_entropy, z, Routing.stack(routed) if routed else None

    def compile_parts(self) -> None:
        """Compile between gathers: each unit, the code before the first unit, and the code after the last."""
        for unit in self.units:
            unit.compile_parts()  # type: ignore[operator]
        if self.model.topology.boundary().plain:
            self.begin = compile_rewritten(self._begin)
        self.end = compile_rewritten(self._end)

    def _begin(
        self, tokens: Tensor, segments: Tensor | None, positions: Tensor | None
    ) -> tuple[Input, State, Anchors, tuple[Tensor, ...] | None]:
        x = self.model._embedded(tokens, segments, positions=positions)
        context = Context(None, None, tokens=self.model.ids_of(tokens))
        h, state = self.model.topology.open(x, *context.ids_for(self.model.topology))
        return h, state, self.model.anchors.open(x, context), self.model._rotary(tokens, positions=positions)

    def _end(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.training_losses(self.model.norm(h), targets, self.z_loss)
