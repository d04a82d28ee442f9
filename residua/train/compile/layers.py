"""Compiles sublayer by sublayer (`train.compile = "layers"`), so the time to the first step does not grow with depth.

`torch.compile` takes about a second per layer if one graph holds the whole model. Here a graph holds one sublayer as a
function of its weights, and sublayers with the same structure share it. Between sublayers, the topology's junctions run
eagerly with their own kernels. The cost: rewrites that span two sublayers are lost, and hooks on modules inside a
sublayer do not run (hooks on the sublayer itself do).
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
from residua.train.compile.working_copies import WorkingCopies, adding_up

if TYPE_CHECKING:
    from residua.model.decoder import Decoder


class LayeredCopies(WorkingCopies):
    """Working copies for compiled sublayers, whose compiled code sums the copies' gradients."""

    active: ClassVar[LayeredCopies | None] = None
    """The copies that the current call of the model uses."""

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
        """The tensor that makes autograd run the backward pass of the copies."""
        return self._origin

    def totals(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient buffer of each weight, None for a weight that is not a copy."""
        return [self._totals.get(id(weight)) for weight in weights]

    @cached_property
    def _totals(self) -> dict[int, Tensor]:
        return dict(zip(map(id, self._copies), self._gradients, strict=True))


class SharedForward:
    """The forward pass of a sublayer: calls the shared code with the sublayer's current tensors.

    Names of taps contain the layer, which shared code does not know, so the sublayer runs eagerly while taps are
    recorded. A copy or pickle of the sublayer gets the original forward pass, and runs eagerly on its own weights.
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
        return functional_call(_Plain(self._sublayer, self.plain), weights, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.plain,)


class _Plain(nn.Module):
    """A sublayer with its original forward pass, as a module whose weights `functional_call` can replace."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, *args: Any) -> Any:
        return self._forward(*args)


def _itself(x: Any) -> Any:
    return x


def _plain(sublayer: nn.Module) -> Callable[..., Any]:
    """The sublayer's original forward pass."""
    forward = sublayer.forward
    return forward.plain if isinstance(forward, SharedForward) else forward


def compile_sublayers(model: Decoder) -> None:
    """Replace the forward pass of every sublayer with compiled code; modules, weights and names are unchanged."""
    allow_recompiling(len(model.sublayers))
    model.anchors.shares_gradient = False
    shared: dict[str, Callable[..., Any]] = {}
    for sublayer in model.sublayers:
        kind = structure(sublayer)
        if kind not in shared:
            shared[kind] = _compile(sublayer)
        sublayer.forward = SharedForward(shared[kind], sublayer)


def structure(module: nn.Module) -> str:
    """A description of a module's computation without the weight values; equal if modules can share compiled code.

    A replaced `forward` (activation checkpointing) is not compared; it is assumed to be the same for all sublayers.
    """
    parts = []
    for name, part in module.named_modules():
        attributes = {k: v for k, v in vars(part).items() if k not in _IGNORED and (name or k != "forward")}
        tensors = [(k, t if t is None else (tuple(t.shape), t.dtype, t.requires_grad)) for k, t in _own(part)]
        parts.append(f"{name}: {type(part).__qualname__} {attributes} {tensors}")
    return "\n".join(parts)


_IGNORED = frozenset(vars(nn.Module())) | {"layer"}
"""Attributes that every module has, and the layer number, which only affects names."""


def _own(module: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [*module._parameters.items(), *module._buffers.items()]


def _places(module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Every weight and buffer: its name, and the dictionary and key that hold it."""
    places = []
    for prefix, part in module.named_modules():
        for holder in (part._parameters, part._buffers):
            places += [(f"{prefix}.{k}" if prefix else k, holder, k) for k, t in holder.items() if t is not None]
    return places


def _compile(sublayer: nn.Module) -> Callable[..., Any]:
    """The sublayer as a compiled function of its weights; gradients are added to their buffers, where given."""
    template = _template(sublayer)
    names = [name for name, _, _ in _places(template)]

    def run(origin: Tensor | None, tensors: Sequence[Tensor], totals: Sequence[Tensor | None], *args: Any) -> Any:
        return functional_call(template, _weights(names, origin, tensors, totals), args)

    return compile_rewritten(with_own_code(run))


def _template(sublayer: nn.Module) -> nn.Module:
    """A copy of the sublayer on the meta device, without hooks: shared code must not run one sublayer's hooks."""
    hooks = [v for part in sublayer.modules() for k, v in vars(part).items() if "_hooks" in k and isinstance(v, dict)]
    return deepcopy(sublayer, {id(v): type(v)() for v in hooks}).to("meta")


def _weights(
    names: Sequence[str], origin: Tensor | None, tensors: Sequence[Tensor], totals: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """The tensors to call a sublayer with, by name; gradients are added to their totals, where given."""
    return {
        name: tensor if total is None else adding_up(origin, tensor, total)
        for name, tensor, total in zip(names, tensors, totals, strict=True)
    }
