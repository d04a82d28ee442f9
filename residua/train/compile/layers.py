"""Sublayers compiled once for all that are alike: the time to the first step does not grow with depth.

`torch.compile` takes about a second for each layer of a graph that holds the whole model. Here the graph holds one
sublayer as a function of its weights; those of the same structure share it, and what lies between them, the topology's
junctions on their own kernels, runs as it does without a compiler. What is lost are the rewrites that reach from one
sublayer into the next, and hooks on modules inside a sublayer, which are silent; those on a sublayer itself run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.func import functional_call

from residua.model import taps
from residua.train.compile.rewrites import allow_recompiling, compile_rewritten, with_own_code
from residua.train.compile.working_copies import Entry, WorkingCopies, adding_up

if TYPE_CHECKING:
    from residua.model.decoder import Decoder


class LayeredCopies(WorkingCopies):
    """Working copies of which those of sublayers add up their gradients within the sublayer's compiled code."""

    active: ClassVar[LayeredCopies | None] = None
    """Those that the model is now called on."""

    def run(self, module: nn.Module, prefix: str, *args: Any, **settings: Any) -> Any:
        before, LayeredCopies.active = LayeredCopies.active, self
        try:
            return super().run(module, prefix, *args, **settings)
        finally:
            LayeredCopies.active = before

    def _placed(self, name: str, copy: Tensor, total: Tensor) -> Tensor:
        return copy if name.startswith("sublayers.") else super()._placed(name, copy, total)

    @property
    def origin(self) -> Tensor | None:
        """What autograd sees as the origin of the copies."""
        return self._origin

    def totals(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Where the gradient of each of these adds up, None for one that is no copy."""
        return [self._totals.get(id(weight)) for weight in weights]

    @cached_property
    def _totals(self) -> dict[int, Tensor]:
        return dict(zip(map(id, self._copies), self._gradients, strict=True))


class SharedForward:
    """The forward pass of a sublayer on code that it shares, and on whatever tensors it holds when it is called.

    Taps are named after the layer, which shared code does not know: while they are recorded, the sublayer runs as it
    is written. So does a copy or a pickle of it, on weights of its own: what is copied of this is what it replaced.
    """

    def __init__(self, code: Callable[..., Any], sublayer: nn.Module) -> None:
        self.plain = _plain(sublayer)
        self._code, self._sublayer, self._places = code, sublayer, _places(sublayer)

    def __call__(self, *args: Any) -> Any:
        copies = LayeredCopies.active
        tensors = [holder[key] for _, holder, key in self._places]
        totals = [None] * len(tensors) if copies is None else copies.totals(tensors)
        origin = None if copies is None else copies.origin
        if not taps.recording():
            return self._code(origin, tensors, totals, *args)
        weights = _weights([f"model.{name}" for name, _, _ in self._places], origin, tensors, totals)
        return functional_call(Entry(self._sublayer, self.plain), weights, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.plain,)


def _itself(x: Any) -> Any:
    return x


def _plain(sublayer: nn.Module) -> Callable[..., Any]:
    """The sublayer's forward pass on no shared code."""
    forward = sublayer.forward
    return forward.plain if isinstance(forward, SharedForward) else forward


def compile_sublayers(model: Decoder) -> None:
    """Let every sublayer run on compiled code, from outside; it keeps its weights, and its place in the model."""
    allow_recompiling(len(model.sublayers))
    shared: dict[str, Callable[..., Any]] = {}
    for sublayer in model.sublayers:
        kind = structure(sublayer)
        if kind not in shared:
            shared[kind] = _compile(sublayer)
        sublayer.forward = SharedForward(shared[kind], sublayer)


def structure(module: nn.Module) -> str:
    """All that decides what a module computes but its weights: equal for modules that can share compiled code.

    Its own `forward`, if it was given another one, is taken to be the same way round each sublayer.
    """
    parts = []
    for name, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if k not in _IGNORED and (name or k != "forward")}
        tensors = [(k, t if t is None else (tuple(t.shape), t.dtype, t.requires_grad)) for k, t in _own(part)]
        parts.append(f"{name}: {type(part).__qualname__} {own} {tensors}")
    return "\n".join(parts)


_IGNORED = frozenset(vars(nn.Module())) | {"layer"}
"""Bookkeeping, and a number that is part of names alone."""


def _own(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [*module._parameters.items(), *module._buffers.items()]


def _places(module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Where each weight and buffer is: its name, and the dictionary and key that hold it."""
    found = []
    for prefix, part in module.named_modules():
        for holder in (part._parameters, part._buffers):
            found += [(f"{prefix}.{k}" if prefix else k, holder, k) for k, t in holder.items() if t is not None]
    return found


def _compile(sublayer: nn.Module) -> Callable[..., Any]:
    """The sublayer as a function of its weights, compiled; the gradients of some add up in buffers."""
    template = _template(sublayer)
    names = [name for name, _, _ in _places(template)]

    def run(origin: Tensor | None, tensors: Sequence[Tensor], totals: Sequence[Tensor | None], *args: Any) -> Any:
        return functional_call(template, _weights(names, origin, tensors, totals), args)

    return compile_rewritten(with_own_code(run))


def _template(sublayer: nn.Module) -> nn.Module:
    """The sublayer without memory, and without hooks, which are those of one sublayer."""
    hooks = [v for part in sublayer.modules() for k, v in vars(part).items() if "_hooks" in k and isinstance(v, dict)]
    return deepcopy(sublayer, {id(v): type(v)() for v in hooks}).to("meta")


def _weights(
    names: Sequence[str], origin: Tensor | None, tensors: Sequence[Tensor], totals: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """What a sublayer is called on: where there is a total, the gradient is added to it."""
    return {
        name: tensor if total is None else adding_up(origin, tensor, total)
        for name, tensor, total in zip(names, tensors, totals, strict=True)
    }
