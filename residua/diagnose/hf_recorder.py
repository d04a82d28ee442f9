"""Forward hooks that fill an observation while a Hugging Face model runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from residua.diagnose.attention import merged
from residua.diagnose.hf_attention import Watch
from residua.diagnose.hf_experts import ExpertCounter
from residua.diagnose.hf_structure import Layer, as_state, as_streams, main_input
from residua.diagnose.interventions import first
from residua.diagnose.observe import Observation, Site


class Recorder:
    """Finds what each body reads and writes by following tensors through its layer.

    If a body is given the output of a norm, its state is the input of that norm. In a layer that norms after its
    bodies, a body's state is its own input, and its output is that of the norm. What is recorded is a copy, since some
    layers add to a sublayer's output in place. `returning` are the ids of bodies that return the layer's next state and
    not what they add to it. `ends` keeps what each layer was given and returned, if it is asked for.
    A layer that runs several times in one pass leaves what it did the last time.
    """

    def __init__(
        self,
        decoder: Sequence[Layer],
        sites: Sequence[Site],
        bodies: Sequence[nn.Module],
        width: int,
        seen: Observation,
        watch: Watch,
        ends: dict[int, tuple[Tensor, Tensor]] | None = None,
        returning: Collection[int] = (),
    ) -> None:
        self.decoder, self.sites, self.bodies, self.width, self.seen = decoder, sites, bodies, width, seen
        self.watch, self.ends, self.returning = watch, ends, returning
        self.carrying: set[int] = set()
        self.compressed: set[int] = set()
        self.normed: dict[int, tuple[Tensor, Tensor]] = {}
        self.handed: dict[int, tuple[Tensor, int]] = {}
        self.whole = {site.layer: site.index for site in sites if site.kind == "layer"}
        self.layer: int | None = None
        self.calls = 0
        self.given: Tensor | None = None
        self.state: Tensor | None = None

    def attach(self) -> list[Any]:
        """Attach all hooks; returns their handles."""
        handles: list[Any] = []
        for n, layer in enumerate(self.decoder):
            handles.append(layer.module.register_forward_pre_hook(partial(self._enter, n), with_kwargs=True))
            handles += [
                part.register_forward_hook(partial(self._norm, n), with_kwargs=True)
                for part in (*layer.norms, *layer.inner)
            ]
            handles += ExpertCounter(n, layer.module, self.seen).attach(lambda n: self.layer == n)
        for site, body in zip(self.sites, self.bodies, strict=True):
            if site.kind != "layer":
                handles.append(body.register_forward_hook(partial(self._body, site), with_kwargs=True))
        handles += [layer.module.register_forward_hook(partial(self._leave, n)) for n, layer in enumerate(self.decoder)]
        return handles

    def _state(self, x: Any) -> Tensor | None:
        return as_state(x, self.seen.tokens, self.width)

    def _enter(self, layer: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.normed.clear()
        self.handed.clear()
        self.layer, self.calls, self.given = layer, len(self.watch.calls), None
        self.state = self._state(main_input(given, named, self.width))
        if self.state is not None and (layer in self.whole or self.ends is not None):
            self.given = self.state.clone()

    def _leave(self, layer: int, module: nn.Module, given: Any, output: Any) -> None:
        result, self.layer = first(output), None
        self._keep_attention(layer)
        if (y := self._state(result)) is not None:
            self._carried(result, y)
            self.seen.states[len(self.sites)] = y.clone()
            if self.given is not None:
                if self.ends is not None:
                    self.ends[layer] = (self.given, y.clone())
                if layer in self.whole:
                    self.seen.states[self.whole[layer]], self.seen.outputs[self.whole[layer]] = (
                        self.given,
                        y - self.given,
                    )
        elif (streams := as_streams(result, self.seen.tokens, self.width)) is not None:
            after = max(s.index for s in self.sites if s.layer == layer) + 1
            self.seen.streams[after] = streams.clone()

    def _keep_attention(self, layer: int) -> None:
        """The sums of all heads that ran in the layer; of a module that was called more than once, the first call's."""
        calls = {key: sums for key, sums in reversed(self.watch.calls[self.calls :])}
        known = [sums for sums in reversed(calls.values()) if sums is not None]
        if calls and len(known) < len(calls):
            self.compressed.add(layer)
        elif known:
            self.seen.attention[layer] = merged(known)

    def _norm(self, layer: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Note what a norm, or a part that only prepares what another reads, was given and returned."""
        read, y = main_input(given, named, self.width), first(output)
        x, written = self._state(read), self._state(y)
        if self.layer != layer or x is None or written is None:
            return
        self.normed[id(y)] = (y, self._origin(read))
        if (handed := self.handed.get(id(read))) is not None:
            self.seen.outputs[handed[1]] = written.clone()
        elif id(read) not in self.normed:
            self.state = x

    def _origin(self, x: Any) -> Any:
        """The tensor itself, or what the norm that returned it was given."""
        return self.normed[id(x)][1] if id(x) in self.normed else x

    def _body(self, site: Site, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if self.layer != site.layer:  # the module serves several layers
            return
        read, y = self._origin(main_input(given, named, self.width)), first(output)
        if (state := self._state(read)) is not None:
            self.state = state
            self._carried(read, state)
        if self.state is not None:
            self.seen.states[site.index] = self.state.clone()
        if (written := self._state(y)) is not None:
            self.seen.outputs[site.index] = written.clone()
            self.handed[id(y)] = (y, site.index)
            if id(module) in self.returning:
                self._carried(y, written)

    def _carried(self, tensor: Any, state: Tensor) -> None:
        """A body whose output is the next state has added the residual itself: record the difference as its output."""
        site = self.handed[id(tensor)][1] if id(tensor) in self.handed else None
        if site is not None and site in self.seen.states:
            self.seen.outputs[site] = state - self.seen.states[site]
            self.carrying.add(site)
