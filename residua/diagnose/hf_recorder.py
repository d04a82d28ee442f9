"""Forward hooks that fill an observation while a Hugging Face model runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from residua.diagnose.hf_structure import Layer, main_input
from residua.diagnose.interventions import first
from residua.diagnose.observe import Observation, Site


class Recorder:
    """Finds what each body reads and writes by following tensors through its layer.

    If a body is given the output of a norm, its state is the input of that norm. In a layer that norms after its
    bodies, a body's state is its own input, and its output is that of the norm.
    """

    def __init__(
        self,
        decoder: Sequence[Layer],
        sites: Sequence[Site],
        bodies: Sequence[nn.Module],
        width: int,
        seen: Observation,
    ) -> None:
        self.decoder, self.sites, self.bodies, self.width, self.seen = decoder, sites, bodies, width, seen
        self.carrying: set[int] = set()
        self.normed: dict[int, tuple[Tensor, Tensor]] = {}
        self.handed: dict[int, tuple[Tensor, int]] = {}
        self.state: Tensor | None = None

    def attach(self) -> list[Any]:
        """Attach all hooks; returns their handles."""
        handles: list[Any] = []
        for n, layer in enumerate(self.decoder):
            handles.append(layer.module.register_forward_pre_hook(partial(self._enter, n), with_kwargs=True))
            handles += [norm.register_forward_hook(self._norm) for norm in layer.norms]
            if layer.bodies:
                handles.append(layer.module.register_forward_hook(partial(self._leave, n)))
        for site, body in zip(self.sites, self.bodies, strict=True):
            hook = self._whole_layer if site.kind == "layer" else self._body
            handles.append(body.register_forward_hook(partial(hook, site.index), with_kwargs=True))
        return handles

    def _keeps_width(self, x: Any) -> bool:
        return isinstance(x, Tensor) and tuple(x.shape) == (*self.seen.tokens.shape, self.width)

    def _enter(self, layer: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.normed.clear()
        self.handed.clear()
        self.state = None
        x = main_input(given, named)
        if self._keeps_width(x):
            self.state = x

    def _leave(self, layer: int, module: nn.Module, given: Any, output: Any) -> None:
        y = first(output)
        if self._keeps_width(y):
            self._carried(y)
            self.seen.states[len(self.sites)] = y
        elif isinstance(y, Tensor) and y.dim() == 4 and y.shape[-1] == self.width:
            after = max(s.index for s in self.sites if s.layer == layer) + 1
            self.seen.streams[after] = y

    def _norm(self, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        if not given or not self._keeps_width(given[0]):
            return
        self.state = given[0]
        self.normed[id(output)] = (output, given[0])
        handed = self.handed.get(id(given[0]))
        if handed is not None:
            self.seen.outputs[handed[1]] = output

    def _body(self, site: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        x, y = main_input(given, named), first(output)
        if isinstance(x, Tensor) and id(x) in self.normed:
            self.state = self.normed[id(x)][1]
            self._carried(self.state)
        elif self._keeps_width(x):
            self.state = x
        if self.state is not None:
            self.seen.states[site] = self.state
        if self._keeps_width(y):
            self.seen.outputs[site] = y
            self.handed[id(y)] = (y, site)

    def _carried(self, state: Tensor) -> None:
        """A body whose output is the next state has added the residual itself: record the difference as its output."""
        if (handed := self.handed.get(id(state))) is not None:
            site = handed[1]
            self.seen.outputs[site] = state - self.seen.states[site]
            self.carrying.add(site)

    def _whole_layer(
        self, site: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> None:
        x, y = main_input(given, named), first(output)
        if self._keeps_width(x) and self._keeps_width(y):
            self.seen.states[site], self.seen.outputs[site] = x, y - x
            self.seen.states[len(self.sites)] = y
