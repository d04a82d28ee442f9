"""Sublayers compiled once for all that are alike: the time to the first step does not grow with depth.

`torch.compile` takes about a second for each layer of a graph that holds the whole model. Here the graph holds one
sublayer as a function of its weights; those of the same structure share it, and what lies between them, the topology's
junctions on their own kernels, runs as it does without a compiler. What is lost are the rewrites that reach from one
sublayer into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.func import functional_call

from residua.train.copies import WorkingCopies, adding_up
from residua.train.rewrites import compile_rewritten

if TYPE_CHECKING:
    from residua.model.decoder import Decoder


class LayeredCopies(WorkingCopies):
    """Working copies of which those of sublayers add up their gradients within the sublayer's compiled code."""

    def run(self, module: nn.Module, prefix: str, *args: Any, **settings: Any) -> Any:
        pairs = zip(self._masters, self._copies, self._gradients, strict=True)
        weights = {
            prefix + name: copy if name.startswith("sublayers.") else adding_up(self._origin, copy, total)
            for name, copy, total in pairs
        }
        return functional_call(module, weights, args, settings)

    @property
    def origin(self) -> Tensor | None:
        """What autograd sees as the origin of the copies."""
        return self._origin

    def buffers(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Where the gradient of each of these adds up, None for one that is no copy."""
        return [self._totals.get(id(weight)) for weight in weights]

    @cached_property
    def _totals(self) -> dict[int, Tensor]:
        return dict(zip(map(id, self._copies), self._gradients, strict=True))


def compile_sublayers(model: Decoder, copies: LayeredCopies | None) -> None:
    """Let every sublayer run on compiled code, from outside; it keeps its weights, and its place in the model."""
    shared: dict[str, Callable[..., Any]] = {}
    for sublayer in model.sublayers:
        kind = structure(sublayer)
        if kind not in shared:
            shared[kind] = _compile(sublayer)
        sublayer.forward = _on(shared[kind], sublayer, copies)


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
    template = deepcopy(sublayer).to("meta")
    names = [name for name, _, _ in _places(template)]

    def run(origin: Tensor | None, tensors: Sequence[Tensor], totals: Sequence[Tensor | None], *args: Any) -> Any:
        weights = {
            name: tensor if total is None else adding_up(origin, tensor, total)
            for name, tensor, total in zip(names, tensors, totals, strict=True)
        }
        return functional_call(template, weights, args)

    run.__code__ = run.__code__.replace()  # compiled code is kept, and counted, with the code it is of
    return compile_rewritten(run)


def _on(run: Callable[..., Any], sublayer: nn.Module, copies: LayeredCopies | None) -> Callable[..., Any]:
    """A forward pass on whatever tensors the sublayer holds when it is called."""
    places = [(holder, key) for _, holder, key in _places(sublayer)]

    def forward(*args: Any) -> Any:
        tensors = [holder[key] for holder, key in places]
        if copies is None:
            return run(None, tensors, [None] * len(tensors), *args)
        return run(copies.origin, tensors, copies.buffers(tensors), *args)

    return forward
