"""Forward hooks that fill an observation while a Hugging Face model runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from residua.diagnose.attention import merged
from residua.diagnose.hf_structure import Layer, Watch, as_state, as_streams, main_input
from residua.diagnose.observe import Observation, Site, first


@dataclass
class Recorder:
    """Finds the input and output of each sublayer body by following tensors through its layer.

    If a body reads the output of a norm, its state is the input of that norm. In a layer that norms after its bodies, a
    body's state is its own input, and its output is that of the norm. Tensors are copied, since some layers add to a
    sublayer's output in place. `returning` holds the ids of bodies that return the layer's next state instead of the
    change to it. `ends`, if given, receives the input and output of each layer. If a layer runs several times in one
    pass, the last run is recorded.
    """

    decoder: Sequence[Layer]
    sites: Sequence[Site]
    bodies: Sequence[nn.Module]
    width: int
    observation: Observation
    watch: Watch
    ends: dict[int, tuple[Tensor, Tensor]] | None = None
    returning: Collection[int] = ()
    carrying: set[int] = field(default_factory=set)
    compressed: set[int] = field(default_factory=set)
    normed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    handed: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    layer: int | None = None
    calls: int = 0
    start: Tensor | None = None
    state: Tensor | None = None

    @property
    def whole(self) -> dict[int, int]:
        """By layer that counts as one sublayer, the number of that sublayer."""
        return {site.layer: site.index for site in self.sites if site.kind == "layer"}

    def attach(self) -> list[Any]:
        """Attach all hooks and return their handles."""
        handles: list[Any] = []
        for n, layer in enumerate(self.decoder):
            handles.append(layer.module.register_forward_pre_hook(partial(self._enter, n), with_kwargs=True))
            handles += [
                part.register_forward_hook(partial(self._norm, n), with_kwargs=True)
                for part in (*layer.norms, *layer.inner)
            ]
            handles += ExpertCounter(n, layer.module, self.observation).attach(lambda n: self.layer == n)
        for site, body in zip(self.sites, self.bodies, strict=True):
            if site.kind != "layer":
                handles.append(body.register_forward_hook(partial(self._body, site), with_kwargs=True))
        handles += [layer.module.register_forward_hook(partial(self._leave, n)) for n, layer in enumerate(self.decoder)]
        return handles

    def _state(self, x: Any) -> Tensor | None:
        return as_state(x, self.observation.tokens, self.width)

    def _enter(self, layer: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.normed.clear()
        self.handed.clear()
        self.layer, self.calls, self.start = layer, len(self.watch.calls), None
        self.state = self._state(main_input(args, named, self.width))
        if self.state is not None and (layer in self.whole or self.ends is not None):
            self.start = self.state.clone()

    def _leave(self, layer: int, module: nn.Module, args: Any, output: Any) -> None:
        result, self.layer = first(output), None
        self._keep_attention(layer)
        if (y := self._state(result)) is not None:
            self._carried(result, y)
            self.observation.states[len(self.sites)] = y.clone()
            if self.start is not None:
                if self.ends is not None:
                    self.ends[layer] = (self.start, y.clone())
                if layer in self.whole:
                    self.observation.states[self.whole[layer]] = self.start
                    self.observation.outputs[self.whole[layer]] = y - self.start
        elif (streams := as_streams(result, self.observation.tokens, self.width)) is not None:
            after = max(s.index for s in self.sites if s.layer == layer) + 1
            self.observation.streams[after] = streams.clone()

    def _keep_attention(self, layer: int) -> None:
        """Store the sums of all heads that ran in the layer; of a module called more than once, those of its first
        call."""
        calls = {key: sums for key, sums in reversed(self.watch.calls[self.calls :])}
        known = [sums for sums in reversed(calls.values()) if sums is not None]
        if calls and len(known) < len(calls):
            self.compressed.add(layer)
        elif known:
            self.observation.attention[layer] = merged(known)

    def _norm(self, layer: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Note the input and output of a norm, or of a part that only prepares another part's input."""
        read, y = main_input(args, named, self.width), first(output)
        x, written = self._state(read), self._state(y)
        if self.layer != layer or x is None or written is None:
            return
        self.normed[id(y)] = (y, self._origin(read))
        if (handed := self.handed.get(id(read))) is not None:
            self.observation.outputs[handed[1]] = written.clone()
        elif id(read) not in self.normed:
            self.state = x

    def _origin(self, x: Any) -> Any:
        """Return the input of the norm that returned this tensor, or the tensor itself if no norm did."""
        return self.normed[id(x)][1] if id(x) in self.normed else x

    def _body(self, site: Site, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if self.layer != site.layer:  # the module serves several layers
            return
        read, y = self._origin(main_input(args, named, self.width)), first(output)
        if (state := self._state(read)) is not None:
            self.state = state
            self._carried(read, state)
        if self.state is not None:
            self.observation.states[site.index] = self.state.clone()
        if (written := self._state(y)) is not None:
            self.observation.outputs[site.index] = written.clone()
            self.handed[id(y)] = (y, site.index)
            if id(module) in self.returning:
                self._carried(y, written)

    def _carried(self, tensor: Any, state: Tensor) -> None:
        """A body whose output is the next state has added the residual itself: record the difference as its output."""
        site = self.handed[id(tensor)][1] if id(tensor) in self.handed else None
        if site is not None and site in self.observation.states:
            self.observation.outputs[site] = state - self.observation.states[site]
            self.carrying.add(site)


class ExpertCounter:
    """Counts how often each expert of one layer is chosen.

    transformers calls a mixture's experts with the tokens, the indices of the chosen experts [tokens, k] and their
    weights. The experts are a module with parameters [E, ·, ·], or a list of E modules. For models with other calls
    (Llama 4), we use the router's scores [tokens, E], if they are zero for all experts that are not chosen.
    """

    def __init__(self, layer: int, module: nn.Module, observation: Observation) -> None:
        self.layer, self.observation = layer, observation
        self.mixtures = dict(mixtures(module))
        parts = module.modules() if self.mixtures else ()
        self.routers = [part for part in parts if not isinstance(part, nn.ModuleList)]

    def attach(self, runs: Callable[[int], bool]) -> list[Any]:
        """Attach the hooks. They count only while `runs(layer)` is true, since several layers may share a module."""

        def count(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            chosen = choices([*args, *named.values()], self.observation.tokens.numel())
            if chosen is not None and runs(self.layer):
                self.observation.loads[self.layer] = load(chosen, self.mixtures[module])

        def read(module: nn.Module, args: Any, output: Any) -> None:
            if runs(self.layer) and self.layer not in self.observation.loads and isinstance(output, tuple):
                chosen = scored(output[0], self.observation.tokens.numel(), set(self.mixtures.values()))
                if chosen is not None:
                    self.observation.loads[self.layer] = chosen.double().sum(0) / chosen.sum()

        handles = [module.register_forward_pre_hook(count, with_kwargs=True) for module in self.mixtures]
        return [*handles, *(part.register_forward_hook(read) for part in self.routers)]


def mixtures(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the submodules that hold several experts, with the number of experts."""
    for part in module.modules():
        counts = [p.shape[0] for p in part.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        if isinstance(part, nn.ModuleList):
            counts = [len(part)] if len(part) > 1 and len({type(expert) for expert in part}) == 1 else []
        if counts:
            stated = getattr(part, "num_experts", None)
            yield part, max([*counts, *([stated] if isinstance(stated, int) else [])])


def choices(values: list[Any], tokens: int) -> Tensor | None:
    """Find the indices of the chosen experts among a call's arguments; None if there are none."""
    for x in values:
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32) or x.dim() < 2:
            continue
        if x.numel() == tokens * x.shape[-1]:
            return x
    return None


def scored(scores: Any, tokens: int, experts: set[int]) -> Tensor | None:
    """[tokens, E], true where a router's score is not zero; None unless all tokens have the same number, below E."""
    if (
        not isinstance(scores, Tensor)
        or scores.dim() != 2
        or scores.shape[0] != tokens
        or scores.shape[1] not in experts
    ):
        return None
    chosen = scores != 0
    counts = chosen.sum(1)
    return chosen if bool((counts == counts[0]).all()) and 0 < int(counts[0]) < scores.shape[1] else None


def load(chosen: Tensor, experts: int) -> Tensor:
    """Return the share of the choices that each expert received, [E]."""
    counts = torch.bincount(chosen.flatten().long().clamp(min=0), minlength=experts)[:experts].double()
    return counts / counts.sum().clamp(min=1)
